"""Your own algorithm: FedAvg whose clients start ahead, in the direction of the last round."""

from typing import Any, NamedTuple

import fedda
from fedda import tasks
from fedda.core import local, tree
from fedda.core.algorithm import Decay, Positive
from fedda.tasks.config import Config


class Hyper(NamedTuple):
    """Numbers with their domains. A sweep over them does not compile again."""

    client_lr: Positive = 0.1
    ahead: Decay = 0.5


class State(NamedTuple):
    """The state of the server; `params` is the model."""

    params: Any
    move: Any  # of the previous round


def init(hp: Hyper, params: Any) -> State:
    return State(params, tree.zeros_like(params))


def memory(hp: Hyper, params: Any) -> tuple[()]:
    """The initial memory of a client: here nothing."""
    return ()


def send(hp: Hyper, state: State) -> Any:
    return tree.axpy(hp.ahead, state.move, state.params)


def work(hp: Hyper, task: Any, start: Any, memory: Any, shard: Any, key: Any) -> Any:
    """The work of one client: its upload, its memory, and its training loss.

    The client has `shard.count` examples; the federation has `shard.num_clients` clients.
    """

    def step(w: Any, batch: Any) -> Any:
        gradient, seen = task.gradient(w, batch)
        return tree.axpy(-hp.client_lr, gradient, w), seen

    w, seen = local.steps(step, start, task.batches(shard, key))
    return local.weighted(shard, w), memory, seen


def merge(hp: Hyper, state: State, total: Any) -> State:
    """`total` is the sum of the uploads. A mean divides by a weight that was summed with it."""
    new = local.mean(total)
    return State(new, tree.sub(new, state.params))


LookAhead = fedda.Algorithm(Hyper, init, memory, (fedda.Phase(send, work, merge),))

if __name__ == "__main__":
    problem = tasks.load(Config(model="linear"))
    for name, algorithm in (("fedavg", "fedavg"), ("look-ahead", LookAhead)):
        result = fedda.run(algorithm, problem.model, problem.shards, problem.loss, client_lr=0.03)
        print(f"{name}: training loss {result.history[-1]['train_loss']:.4f}")
