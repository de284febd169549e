"""FedAvg (McMahan et al. 2017) and, with mu > 0, FedProx (Li et al. 2020)."""

from collections.abc import Sequence

from conformance.problem import Visit
from conformance.references.reference import Reference, State, mean, plain_start


def one_round(
    state: State, visits: Sequence[Visit], *, client_lr: float, server_lr: float, mu: float = 0.0
) -> State:
    W, moves = state["params"], []
    for visit in visits:
        y = W
        for batch in visit.batches:
            y = y - client_lr * (batch.gradient(y) + mu * (y - W))
        moves.append(y - W)
    return {"params": W + server_lr * mean(moves, visits)}


fedavg = Reference(plain_start, one_round)
REFERENCES = {"fedavg": fedavg, "fedprox": fedavg}
