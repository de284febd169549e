"""FedDA (Jin et al. 2022) with SGDM, Adam and AdaGrad.

P and P_i are computed as printed, as sums of the momenta of every local step. Whether the server
sends its momentum (`sends`) changes only the messages.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(W: Array, clients: int, *, bias: str = "rounds", **settings: Any) -> State:
    state: State = {"params": W, "momentum": 0 * W}
    if "eps" in settings:
        state["second"] = 0 * W
    if "beta2" in settings:
        state["rounds"] = 0
    if bias == "steps":
        state["ones"] = 0.0  # the momentum if all gradients had been 1
    return state


def client(W: Array, m: Array, visit: Visit, eta: float, beta1: float, mu: float) -> Any:
    """Return P, m and the sum of the gradients after the local steps of one client."""
    w, P, S = W, 0 * W, 0 * W
    for batch in visit.batches:
        g = batch.gradient(w) + mu * (w - W)
        w = w - eta * g
        m = beta1 * m + (1 - beta1) * g
        P = P + m
        S = S + g
    return P, m, S


def momenta_of_ones(one: float, steps: int, beta1: float) -> tuple[float, float]:
    """Return the sum and the last of the momenta of this number of gradients that are all 1."""
    total = 0.0
    for _ in range(steps):
        one = beta1 * one + (1 - beta1) * 1
        total = total + one
    return total, one


def one_round(
    step: Callable[..., State],
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    beta1: float,
    mu: float = 0.0,
    sends: str = "both",
    beta1_per: str = "step",
    momentum: str = "kept",
    **settings: Any,
) -> State:
    W, M, ones = state["params"], state["momentum"], state.get("ones", 0.0)
    steps = [len(visit.batches) for visit in visits]
    betas = [beta1 if beta1_per == "step" else beta1 ** (1 / T) for T in steps]
    work = [
        client(W, M, visit, client_lr, beta, mu) for visit, beta in zip(visits, betas, strict=True)
    ]
    P, m, S = (mean(parts, visits) for parts in zip(*work, strict=True))
    of_ones = [momenta_of_ones(ones, T, beta) for T, beta in zip(steps, betas, strict=True)]
    P_ones, m_ones = (mean(parts, visits) for parts in zip(*of_ones, strict=True))
    T, beta = mean(steps, visits), beta1
    if beta1_per == "round":  # the server computes P from S and m, with the mean T
        beta = beta1 ** (1 / T)
        P = S + beta / (1 - beta) * (M - m)
        P_ones = T + beta / (1 - beta) * (ones - m_ones)
    per_step = P_ones / T  # the value per step of P if all gradients had been 1
    new = step(state, P, S, per_step, beta, client_lr=client_lr, beta1=beta1, **settings)
    if momentum == "restarted":
        m, m_ones = 0 * m, 0.0
    new["momentum"] = m
    if "ones" in state:
        new["ones"] = m_ones
    return new


def sgdm(
    state: State,
    P: Array,
    S: Array,
    per_step: float,
    beta: float,
    *,
    client_lr: float,
    server_lr: float,
    beta1: float,
) -> State:
    return {"params": state["params"] - server_lr * client_lr * P}


def equivalent_gradient(P: Array, S: Array, M: Array, beta: float, gradient: str) -> Array:
    return (P - beta * M) / (1 - beta) if gradient == "momentum" else S


def rate_and_eps(units: str, client_lr: float, server_lr: float, eps: float) -> tuple[float, float]:
    if units == "grad":
        return server_lr * client_lr, eps
    return server_lr, eps / client_lr


def adagrad(
    state: State,
    P: Array,
    S: Array,
    per_step: float,
    beta: float,
    *,
    client_lr: float,
    server_lr: float,
    beta1: float,
    eps: float,
    units: str = "grad",
    gradient: str = "momentum",
) -> State:
    G = equivalent_gradient(P, S, state["momentum"], beta, gradient)
    V = state["second"] + G**2
    s, e = rate_and_eps(units, client_lr, server_lr, eps)
    return {"params": state["params"] - s * G / (np.sqrt(V) + e), "second": V}


def adam(
    state: State,
    P: Array,
    S: Array,
    per_step: float,
    beta: float,
    *,
    client_lr: float,
    server_lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    units: str = "grad",
    gradient: str = "momentum",
    bias: str = "rounds",
) -> State:
    G = equivalent_gradient(P, S, state["momentum"], beta, gradient)
    V = beta2 * state["second"] + (1 - beta2) * G**2
    r = state["rounds"]
    m_hat = P / (1 - beta1 ** (r + 1)) if bias == "rounds" else P / per_step
    V_hat = V / (1 - beta2 ** (r + 1))
    s, e = rate_and_eps(units, client_lr, server_lr, eps)
    W = state["params"] - s * m_hat / (np.sqrt(V_hat) + e)
    return {"params": W, "second": V, "rounds": r + 1}


REFERENCES = {
    "fedda-sgdm": Reference(start, partial(one_round, sgdm)),
    "fedda-adam": Reference(start, partial(one_round, adam)),
    "fedda-adagrad": Reference(start, partial(one_round, adagrad)),
}
