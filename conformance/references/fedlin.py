"""FedLin (Mitra et al. 2021): local steps along the cohort's gradient, not the client's."""

from collections.abc import Sequence
from typing import Any

from conformance.problem import Array, Visit
from conformance.references.reference import Reference, State, mean


def start(W: Array, clients: int, **settings: Any) -> State:
    return {"params": W, "gradient": 0 * W}


def one_round(
    state: State,
    visits: Sequence[Visit],
    *,
    client_lr: float,
    server_lr: float = 1.0,
    rate: str = "step",
    same_batch: str = "no",
) -> State:
    x, moves = state["params"], []
    g = mean([visit.full.gradient(x) for visit in visits], visits)  # the first exchange
    for visit in visits:  # the second exchange
        y, own = x, visit.full.gradient(x)
        eta = client_lr if rate == "step" else client_lr / len(visit.batches)
        for batch in visit.batches:
            share = visit.share(batch)
            at_y = batch.gradient(y)
            at_x = share * own if same_batch == "no" else batch.gradient(x)
            y = y - eta * (at_y - at_x + share * g)
        moves.append(y - x)
    return {"params": x + server_lr * mean(moves, visits), "gradient": g}


REFERENCES = {"fedlin": Reference(start, one_round)}
