"""Other readings of the equations, and mistakes, in NumPy: small changes of the references."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references import fedopt, mime
from conformance.references.reference import Reference, State, mean

# ---- weights of the clients


def weighted(reference: Reference, weight: Callable[[Visit], int]) -> Reference:
    """Return an algorithm with other weights of the clients."""

    def one_round(state: State, visits: Sequence[Visit], **settings: Any) -> State:
        changed = [visit._replace(examples=weight(visit)) for visit in visits]
        return reference.one_round(state, changed, **settings)

    return Reference(reference.start, one_round)


def uniform(reference: Reference) -> Reference:
    """Return an algorithm that takes the plain mean over the clients of the cohort."""
    return weighted(reference, lambda visit: 1)


def by_steps(reference: Reference) -> Reference:
    """Return an algorithm that weights each client by its number of local steps."""
    return weighted(reference, lambda visit: len(visit.batches))


# ---- FedOpt


def server_step(step: Callable[..., State], start: Callable[[Array], State]) -> Reference:
    """Return FedAvg's clients with a step of the server, `(state, D, **hyper) -> state`."""

    def one_round(state: State, visits: Sequence[Visit], **settings: Any) -> State:
        def with_rate(state: State, D: Array, alpha: float, **rest: Any) -> State:
            return step(state, D, alpha=alpha, **rest)

        return fedopt.one_round(with_rate, state, visits, **settings)

    return Reference(lambda W, clients, **settings: {"params": W, **start(W)}, one_round)


def zeros(*names: str) -> Callable[[Array], State]:
    """Return a start at zero of the statistics with these names."""
    return lambda W: dict.fromkeys(names, 0 * W)


def v_from_zero(name: str) -> Reference:
    """Return FedOpt in the form of the paper, but `v` starts at 0."""
    step = partial(fedopt.STEPS[name], form="paper")
    return server_step(step, zeros("momentum", "second"))


def rate_twice(name: str) -> Reference:
    """Return FedOpt with `v` from 0, where `server_lr` also scales the mean move."""

    def step(state: State, D: Array, *, alpha: float, **settings: Any) -> State:
        return fedopt.STEPS[name](state, alpha * D, alpha, form="paper", **settings)

    return server_step(step, zeros("momentum", "second"))


def corrected_adam(
    state: State, D: Array, *, alpha: float, beta1: float, beta2: float, tau: float
) -> State:
    """Adam of Kingma and Ba (2015): the bias of `m` and of `v` is corrected."""
    r = state["rounds"] + 1
    m = beta1 * state["momentum"] + (1 - beta1) * D
    v = fedopt.adam_second(state["second"], D, beta2)
    move = alpha * m / (1 - beta1**r) / (np.sqrt(v / (1 - beta2**r)) + tau)
    return {"params": state["params"] + move, "momentum": m, "second": v, "rounds": r}


def optax_yogi(
    state: State, D: Array, *, alpha: float, beta1: float, beta2: float, tau: float
) -> State:
    """Yogi as in Optax, with the sign of a gradient, -D; the bias is corrected."""
    r = state["rounds"] + 1
    m = beta1 * state["momentum"] - (1 - beta1) * D
    v = fedopt.yogi_second(state["second"], D, beta2)
    move = alpha * m / (1 - beta1**r) / (np.sqrt(v / (1 - beta2**r)) + tau)
    return {"params": state["params"] - move, "momentum": m, "second": v, "rounds": r}


def inside_adagrad(state: State, D: Array, *, alpha: float, tau: float) -> State:
    """AdaGrad with `tau` inside the root."""
    v = state["second"] + D**2
    return {"params": state["params"] + alpha * D / np.sqrt(v + tau), "second": v}


def first_round_lost(state: State, D: Array, *, alpha: float, beta1: float) -> State:
    """FedAvgM whose first round changes neither the model nor the momentum."""
    if state["rounds"] == 0:
        return {**state, "rounds": 1}
    m = beta1 * state["momentum"] + alpha * D
    return {"params": state["params"] + m, "momentum": m, "rounds": state["rounds"] + 1}


def squared_start(hyper: str) -> Callable[..., State]:
    """Return a start of `v` at the square of a hyper-parameter."""
    return lambda W, clients, **settings: {"params": W, "second": 0 * W + settings[hyper] ** 2}


KINGMA_BA = server_step(corrected_adam, lambda W: {**zeros("momentum", "second")(W), "rounds": 0})
OPTAX_YOGI = server_step(
    optax_yogi, lambda W: {"momentum": 0 * W + 1e-6, "second": 0 * W + 1e-6, "rounds": 0}
)
INSIDE_ADAGRAD = Reference(
    squared_start("tau"), server_step(inside_adagrad, zeros("second")).one_round
)
FIRST_ROUND_LOST = server_step(first_round_lost, lambda W: {"momentum": 0 * W, "rounds": 0})


# ---- Mime


def undamped(method: str) -> Reference:
    """Return Mime with m <- beta m + d, without 1 - beta: the damped one with a longer step."""

    def one_round(state: State, visits: Sequence[Visit], **settings: Any) -> State:
        longer = settings["client_lr"] / (1 - settings["beta"])
        changed = {**settings, "client_lr": longer}
        return mime.one_round(method, "sgdm", state, visits, **changed)

    return Reference(partial(mime.start, "sgdm"), one_round)


def mime_inside(method: str) -> Reference:
    """Return Mime with AdaGrad whose `eps` is inside the root, and whose `v` includes `d`."""

    def one_round(
        state: State, visits: Sequence[Visit], *, client_lr: float, server_lr: float, eps: float
    ) -> State:
        W, v = state["params"], state["second"]
        c = mean([visit.full.gradient(W) for visit in visits], visits)
        moves = []
        for visit in visits:
            y = W
            for batch in visit.batches:
                d = batch.gradient(y)
                if method == "mime":
                    d = d - batch.gradient(W) + c
                y = y - client_lr * d / np.sqrt(v + d**2 + eps)
            moves.append(y - W)
        return {"params": W + server_lr * mean(moves, visits), "second": v + c**2}

    return Reference(partial(mime.start, "adagrad"), one_round)


# ---- SCAFFOLD


def scaffold(
    *,
    sign: float = 1.0,
    per: str = "population",
    move: str = "step",
    weight: Callable[[Visit], int] = lambda visit: 1,
    early: bool = False,
) -> Reference:
    """Return SCAFFOLD as printed, with one or more changes.

    Args:
        sign: That of the control variates when they are formed.
        per: `population`: c moves by the sum of the changes over the number of all clients.
            `cohort`: by their mean over the cohort, with the same weights as the moves.
        move: `step`: W moves by server_lr times the mean move. `scaled`: W becomes server_lr times
            the mean of the local models.
        weight: The weight of a client in the means.
        early: Whether a client that returns has its new c_i before its local steps. With option I.
    """

    def start(W: Array, clients: int, **settings: Any) -> State:
        return {"params": W, "control": 0 * W, "client_controls": [0 * W] * clients, "seen": set()}

    def one_round(
        state: State,
        visits: Sequence[Visit],
        *,
        client_lr: float,
        server_lr: float,
        control: str = "II",
    ) -> State:
        x, c, controls = state["params"], state["control"], [*state["client_controls"]]
        ends, changes = [], []
        for visit in visits:
            c_i, y = controls[visit.client], x
            if early and visit.client in state["seen"]:
                c_i = sign * visit.full.gradient(x)
            for batch in visit.batches:
                y = y - client_lr * (batch.gradient(y) + c - c_i)
            if control == "I":
                new = sign * visit.full.gradient(x)
            else:
                new = c_i - c + sign * (x - y) / (len(visit.batches) * client_lr)
            controls[visit.client] = new
            ends.append(y)
            changes.append(new - c_i)
        weights = [visit._replace(examples=weight(visit)) for visit in visits]
        average = mean(ends, weights)
        all_clients = per == "population"
        return {
            "params": x + server_lr * (average - x) if move == "step" else server_lr * average,
            "control": c
            + (sum(changes) / len(controls) if all_clients else mean(changes, weights)),
            "client_controls": controls,
            "seen": state["seen"] | {visit.client for visit in visits},
        }

    return Reference(start, one_round)
