"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are pulled back to the server's model.

    client i:  y = W;  y <- y - client_lr * (g_i(y; batch) + mu (y - W))    for every local step
               upload  N_i (y - W),  N_i
    server:    W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`.
Communication, in models: 1 down, 1 up.
"""

from typing import NamedTuple

from jax import Array

from fedda.algorithms import fedavg
from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, NonNegative, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    mu: NonNegative = 0.01


def work(
    hp: Hyper, task: Task, params: PyTree, memory: PyTree, shard: Shard, key: Array
) -> tuple[local.Weighted, PyTree, Seen]:
    def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
        gradient, seen = task.gradient(y, batch)
        pulled = tree.axpy(hp.mu, tree.sub(y, params), gradient)
        return tree.axpy(-hp.client_lr, pulled, y), seen

    y, seen = local.steps(step, params, task.batches(shard, key))
    return local.weighted(shard, tree.sub(y, params)), memory, seen


def make() -> Algorithm:
    """FedProx (Li et al. 2020): FedAvg with a pull back to the server's point."""
    phases = (Phase(fedavg.send, work, fedavg.merge),)
    return Algorithm(Hyper=Hyper, init=fedavg.init, phases=phases)


variants = {
    "fedprox": Variant(
        make, "FedProx", "Li et al. 2020", "FedAvg with a pull back to the server", down=1, up=1
    )
}
reductions = [Reduction("fedprox", {"mu": 0.0}, "fedavg")]
