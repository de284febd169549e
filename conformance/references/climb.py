"""CLIMB (Shen et al. 2022): clients whose loss exceeds the mean weigh more.

The reference keeps the table of all multipliers in one place.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State


def start(W: Array, clients: int, **settings: Any) -> State:
    return {"params": W, "multipliers": np.zeros(clients), "mean_multiplier": 0.0, "mean_loss": 0.0}


def one_round(
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    server_lr: float,
    dual_lr: float,
    eps: float,
    weighting: str = "examples",
) -> State:
    W, multipliers = state["params"], state["multipliers"].copy()
    moves, total = 0 * W, 0.0
    losses = [visit.whole.mean_loss(W) for visit in visits]
    for visit in visits:
        y = W
        for batch in visit.batches:
            y = y - client_lr * batch.gradient(y)
        p = visit.examples if weighting == "examples" else 1
        w = max(0.0, 1 + multipliers[visit.client] - state["mean_multiplier"])
        moves, total = moves + p * w * (y - W), total + p
    mean_loss = sum(losses) / len(losses)
    for visit, loss in zip(visits, losses, strict=True):
        ascent = dual_lr / len(multipliers) * (loss - mean_loss - eps)
        multipliers[visit.client] = np.clip(multipliers[visit.client] + ascent, 0, 100)
    return {
        "params": W + server_lr * moves / total,
        "multipliers": multipliers,
        "mean_multiplier": float(multipliers.mean()),
        "mean_loss": mean_loss,
    }


REFERENCES = {"climb": Reference(start, one_round)}
