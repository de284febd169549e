"""STEM (Khanduri et al. 2021): local steps along STORM's momentum, averaged with it.

The server keeps three things: the point `point` of the last gradients, their mean `direction`, and
`params`, where a step of the server leads from there.
"""

from collections.abc import Sequence
from typing import Any

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(W: Array, clients: int, **settings: Any) -> State:
    return {"params": W, "point": W, "direction": 0 * W, "time": 0.0}


def step_size(t: float, hp: dict[str, float], schedule: str) -> float:
    """Return eta_t."""
    if schedule == "constant":
        return hp["client_lr"]
    return float(hp["kappa"] / (hp["w"] + hp["sigma2"] * t) ** (1 / 3))


def forgetting(eta: float, hp: dict[str, float], schedule: str) -> float:
    """Return a_{t+1}: c eta_t², at most 1."""
    return hp["a"] if schedule == "constant" else min(1.0, hp["c"] * eta**2)


def one_round(
    state: State, visits: Sequence[Visit], *, schedule: str = "constant", **hp: float
) -> State:
    ends = []
    for visit in visits:
        before, x = state["point"], state["params"]
        d, t = state["direction"], state["time"]
        if t == 0:  # the first round: a full-batch gradient
            ends.append((before, visit.whole.gradient(before), 1.0))
            continue
        for number, batch in enumerate(visit.batches):
            if number > 0:
                before, x = x, x - step_size(t, hp, schedule) * d
            a = forgetting(step_size(t, hp, schedule), hp, schedule)
            d = batch.gradient(x) + (1 - a) * (d - batch.gradient(before))
            t = t + 1
        ends.append((x, d, t))
    x, d, t = (mean(parts, visits) for parts in zip(*ends, strict=True))
    params = x - step_size(t, hp, schedule) * d
    return {"params": params, "point": x, "direction": d, "time": t}


REFERENCES = {"stem": Reference(start, one_round)}
