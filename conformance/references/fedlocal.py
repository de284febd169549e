"""FedLocal (Wang et al. 2021): clients run an adaptive optimiser, restarted in every round."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean, plain_start


def client(name: str, W: Array, visit: Visit, hp: dict[str, float]) -> tuple[Array, Array]:
    """Return where a client ends, and A, the total factor applied to its gradients."""
    y, u, v, q, A = W, 0 * W, 0 * W, 0 * W, 0 * W
    for k, batch in enumerate(visit.batches, start=1):
        g = batch.gradient(y)
        if name == "sgdm":
            beta = hp["beta"]
            u = beta * u + g
            y, p = y - hp["client_lr"] * u, 1 + 0 * W
        elif name == "adam":
            beta = hp["beta1"]
            u = beta * u + (1 - beta) * g
            v = hp["beta2"] * v + (1 - hp["beta2"]) * g**2
            u_hat, v_hat = u / (1 - beta**k), v / (1 - hp["beta2"] ** k)
            y = y - hp["client_lr"] * u_hat / (np.sqrt(v_hat) + hp["eps"])
            p = 1 / (np.sqrt(v) + hp["eps"])
        else:
            beta = 0.0
            v = v + g**2
            y = y - hp["client_lr"] * g / (np.sqrt(v) + hp["eps"])
            p = 1 / (np.sqrt(v) + hp["eps"])
        q = beta * q + (1 - beta) * p
        A = A + q
    return y, A


def one_round(
    name: str,
    state: State,
    visits: Sequence[Visit],
    *,
    server_lr: float,
    correction: str = "joint",
    **hp: float,
) -> State:
    W = state["params"]
    ends = [client(name, W, visit, hp) for visit in visits]
    if correction == "none":
        delta = mean([y - W for y, _ in ends], visits)
    else:
        delta = mean([(y - W) / A for y, A in ends], visits)
    if correction == "joint":
        delta = delta / mean([1 / A for _, A in ends], visits)
    return {"params": W + server_lr * delta}


REFERENCES = {
    f"fedlocal-{name}": Reference(plain_start, partial(one_round, name))
    for name in ("sgdm", "adam", "adagrad")
}
