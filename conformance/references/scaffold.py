"""SCAFFOLD (Karimireddy et al. 2020): local steps corrected for the client's drift.

Option II is computed in its printed form.
"""

from collections.abc import Sequence
from typing import Any

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State


def start(W: Array, clients: int, **settings: Any) -> State:
    return {
        "params": W,
        "mean_control": 0 * W,  # C, the mean of w_i c_i over all clients
        "control": 0 * W,  # c, what the next round sends
        "client_controls": [0 * W] * clients,
        "weight": 0.0,  # of all uploads so far
        "uploads": 0,
    }


def one_round(
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    server_lr: float,
    control: str = "II",
    weighting: str = "examples",
) -> State:
    x, c, controls = state["params"], state["control"], [*state["client_controls"]]
    dx, dC, total = 0 * x, 0 * x, 0.0
    for visit in visits:
        w = float(visit.examples) if weighting == "examples" else 1.0
        c_i, y = controls[visit.client], x
        for batch in visit.batches:
            y = y - client_lr * (batch.gradient(y) + visit.share(batch) * (c - c_i))
        if control == "I":
            c_new = visit.full.gradient(x)
        else:
            steps = sum(visit.share(batch) for batch in visit.batches)
            c_new = c_i - c + (x - y) / (steps * client_lr)
        dx = dx + w * (y - x)
        dC = dC + w * (c_new - c_i) / len(controls)
        total = total + w
        controls[visit.client] = c_new
    C = state["mean_control"] + dC
    weight, uploads = state["weight"] + total, state["uploads"] + len(visits)
    return {
        "params": x + server_lr * dx / total,
        "mean_control": C,
        "control": C / (weight / uploads),
        "client_controls": controls,
        "weight": weight,
        "uploads": uploads,
    }


REFERENCES = {"scaffold": Reference(start, one_round)}
