"""FedOpt (Reddi et al. 2021): FedAvg's clients and an optimiser at the server.

FedOpt with SGDM is FedAvgM (Hsu et al. 2019).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(name: str, W: Array, clients: int, *, form: str, **settings: Any) -> State:
    state: State = {"params": W}
    if name != "adagrad" or settings.get("server_momentum", "none") != "none":
        state["momentum"] = 0 * W
    if name != "sgdm":
        state["second"] = 0 * W + (settings["tau"] ** 2 if form == "paper" else 0)
    if name in ("adam", "yogi") and form == "keras":
        state["rounds"] = 0
    return state


def one_round(
    step: Callable[..., State],
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    server_lr: float,
    **settings: Any,
) -> State:
    moves = []
    for visit in visits:
        y = state["params"]
        for batch in visit.batches:
            y = y - client_lr * batch.gradient(y)
        moves.append(y - state["params"])
    return step(state, mean(moves, visits), server_lr, **settings)


def sgdm(
    state: State,
    D: Array,
    alpha: float,
    *,
    form: str,
    beta1: float,
    direction: str = "momentum",
    nu: float = 1.0,
) -> State:
    if form == "keras":
        m = beta1 * state["momentum"] + alpha * D
        moves = {
            "momentum": m,
            "nesterov": beta1 * m + alpha * D,
            # (1 - beta1) m / alpha is the damped momentum, and alpha / (1 - beta1) its rate.
            "quasi-hyperbolic": nu * m + (1 - nu) * alpha / (1 - beta1) * D,
        }
    else:
        m = beta1 * state["momentum"] + (1 - beta1) * D
        moves = {
            "momentum": alpha * m,
            "nesterov": alpha * (beta1 * m + (1 - beta1) * D),
            "quasi-hyperbolic": alpha * (nu * m + (1 - nu) * D),
        }
    return {"params": state["params"] + moves[direction], "momentum": m}


def adagrad(
    state: State,
    D: Array,
    alpha: float,
    *,
    form: str,
    tau: float,
    server_momentum: str = "none",
    beta1: float = 0.0,
) -> State:
    if server_momentum == "none":
        v = state["second"] + D**2
        return {"params": state["params"] + alpha * D / (np.sqrt(v) + tau), "second": v}
    m = beta1 * state["momentum"] + (1 - beta1) * D
    v = state["second"] + (D if server_momentum == "step" else m) ** 2
    W = state["params"] + alpha * m / (np.sqrt(v) + tau)
    return {"params": W, "momentum": m, "second": v}


def adam_second(v: Array, D: Array, beta2: float) -> Array:
    return beta2 * v + (1 - beta2) * D**2


def yogi_second(v: Array, D: Array, beta2: float) -> Array:
    return v - (1 - beta2) * D**2 * np.sign(v - D**2)


def adam_like(
    second: Callable[..., Array],
    state: State,
    D: Array,
    alpha: float,
    *,
    form: str,
    beta1: float,
    beta2: float,
    tau: float,
) -> State:
    m = beta1 * state["momentum"] + (1 - beta1) * D
    v = second(state["second"], D, beta2)
    rest = {}
    if form == "keras":
        # Keras also counts the update with a zero gradient that creates its state.
        t = state["rounds"] + 2
        alpha = alpha * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        rest = {"rounds": state["rounds"] + 1}
    W = state["params"] + alpha * m / (np.sqrt(v) + tau)
    return {"params": W, "momentum": m, "second": v, **rest}


STEPS: dict[str, Callable[..., State]] = {
    "sgdm": sgdm,
    "adagrad": adagrad,
    "adam": partial(adam_like, adam_second),
    "yogi": partial(adam_like, yogi_second),
}
REFERENCES = {
    f"fedopt-{name}": Reference(partial(start, name), partial(one_round, step))
    for name, step in STEPS.items()
}
