"""FedAvg (McMahan et al., AISTATS 2017): clients run SGD, and the server averages their models.

    client i:  y = W;  y <- y - client_lr * g_i(y; batch)    for every local step
               upload  N_i (y - W),  N_i
    server:    W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`.
Communication, in models: 1 down, 1 up.
"""

from typing import Any, NamedTuple

from jax import Array

from fedda.algorithms.registry import Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0


class State(NamedTuple):
    params: PyTree


def init(hp: Any, params: PyTree) -> State:
    return State(params)


def send(hp: Any, state: State) -> PyTree:
    return state.params


def work(
    hp: Hyper, task: Task, params: PyTree, memory: PyTree, shard: Shard, key: Array
) -> tuple[local.Weighted, PyTree, Seen]:
    def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
        gradient, seen = task.gradient(y, batch)
        return tree.axpy(-hp.client_lr, gradient, y), seen

    y, seen = local.steps(step, params, task.batches(shard, key))
    return local.weighted(shard, tree.sub(y, params)), memory, seen


def merge(hp: Any, state: State, total: local.Weighted) -> State:
    return State(tree.axpy(hp.server_lr, local.mean(total), state.params))


def make() -> Algorithm:
    """FedAvg (McMahan et al. 2017): local SGD, averaged."""
    return Algorithm(Hyper=Hyper, init=init, phases=(Phase(send, work, merge),))


variants = {
    "fedavg": Variant(make, "FedAvg", "McMahan et al. 2017", "local SGD, averaged", down=1, up=1)
}
