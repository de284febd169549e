"""Mime and MimeLite (Karimireddy et al. 2021) with SGDM, Adam and AdaGrad."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(base: str, W: Array, clients: int, **settings: Any) -> State:
    names = {"sgdm": ["momentum"], "adam": ["momentum", "second"], "adagrad": ["second"]}[base]
    return {"params": W, "gradient": 0 * W, **dict.fromkeys(names, 0 * W), "rounds": 0}


def direction(base: str, hp: dict[str, float], d: Array, s: State, denominator: str) -> Array:
    """Return U(d; s), the direction of a local step."""
    new, r = statistics(base, hp, d, s), s["rounds"]
    if base == "sgdm":
        return new["momentum"]
    if denominator == "frozen":
        if r == 0:
            return d
        return (new["momentum"] if base == "adam" else d) / (np.sqrt(s["second"]) + hp["eps"])
    if base == "adam":
        m_hat = new["momentum"] / (1 - hp["beta1"] ** (r + 1))
        v_hat = new["second"] / (1 - hp["beta2"] ** (r + 1))
        return m_hat / (np.sqrt(v_hat) + hp["eps"])
    return d / (np.sqrt(new["second"]) + hp["eps"])


def statistics(base: str, hp: dict[str, float], d: Array, s: State) -> State:
    """Return the statistics after V(d; s)."""
    if base == "sgdm":
        return {"momentum": hp["beta"] * s["momentum"] + (1 - hp["beta"]) * d}
    if base == "adam":
        return {
            "momentum": hp["beta1"] * s["momentum"] + (1 - hp["beta1"]) * d,
            "second": hp["beta2"] * s["second"] + (1 - hp["beta2"]) * d**2,
        }
    return {"second": s["second"] + d**2}


def one_round(
    method: str,
    base: str,
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    server_lr: float,
    denominator: str = "fresh",
    **hp: float,
) -> State:
    W = state["params"]
    c = mean([visit.full.gradient(W) for visit in visits], visits)
    moves = []
    for visit in visits:
        y = W
        for batch in visit.batches:
            d = batch.gradient(y)
            if method == "mime":
                d = d - batch.gradient(W) + visit.share(batch) * c
            y = y - client_lr * direction(base, hp, d, state, denominator)
        moves.append(y - W)
    new = {"params": W + server_lr * mean(moves, visits), "gradient": c}
    return {**new, **statistics(base, hp, c, state), "rounds": state["rounds"] + 1}


REFERENCES = {
    f"{method}-{base}": Reference(partial(start, base), partial(one_round, method, base))
    for method in ("mimelite", "mime")
    for base in ("sgdm", "adam", "adagrad")
}
