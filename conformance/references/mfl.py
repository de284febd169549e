"""MFL (Liu et al. 2020): local momentum, averaged like the model; also with Adam and AdaGrad."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(names: Sequence[str], W: Array, clients: int, **settings: Any) -> State:
    return {"params": W, **{name: 0.0 if name == "steps" else 0 * W for name in names}}


# One local step each: (state of the client, gradient, client_lr, ...) -> state


def sgdm(own: State, g: Array, eta: float, *, gamma: float, damping: str = "off") -> State:
    m = gamma * own["momentum"] + (g if damping == "off" else (1 - gamma) * g)
    return {"params": own["params"] - eta * m, "momentum": m}


def adam(own: State, g: Array, eta: float, *, beta1: float, beta2: float, eps: float) -> State:
    t = own["steps"] + 1
    m = beta1 * own["momentum"] + (1 - beta1) * g
    v = beta2 * own["second"] + (1 - beta2) * g**2
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    w = own["params"] - eta * m_hat / (np.sqrt(v_hat) + eps)
    return {"params": w, "momentum": m, "second": v, "steps": t}


def adagrad(own: State, g: Array, eta: float, *, eps: float) -> State:
    v = own["second"] + g**2
    return {"params": own["params"] - eta * g / (np.sqrt(v) + eps), "second": v}


def one_round(
    step: Callable[..., State],
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    **settings: Any,
) -> State:
    ends = []
    for visit in visits:
        own = state
        for batch in visit.batches:
            own = step(own, batch.gradient(own["params"]), client_lr, **settings)
        ends.append(own)
    new = {name: mean([end[name] for end in ends], visits) for name in state}
    if "steps" in new:
        # To the nearest whole number. Near a tie, rounding errors would decide.
        assert abs(new["steps"] % 1 - 0.5) > 1e-6
        new["steps"] = float(np.round(new["steps"]))
    return new


REFERENCES = {
    "mfl-sgdm": Reference(partial(start, ["momentum"]), partial(one_round, sgdm)),
    "mfl-adam": Reference(
        partial(start, ["momentum", "second", "steps"]), partial(one_round, adam)
    ),
    "mfl-adagrad": Reference(partial(start, ["second"]), partial(one_round, adagrad)),
}
