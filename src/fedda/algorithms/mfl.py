"""MFL (Liu et al., IEEE TPDS 2020): local momentum, averaged like the model.

    client i:  w = W;  m = M;  v = V;  t = t0;  for every local step, with g = g_i(w; batch):
      sgdm         m <- gamma m + g
                   w <- w - client_lr m
      adam         t <- t + 1
                   m <- beta1 m + (1 - beta1) g
                   v <- beta2 v + (1 - beta2) g²
                   w <- w - client_lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
      adagrad      v <- v + g²
                   w <- w - client_lr g / (sqrt(v) + eps)
    client i:  upload  N_i (w - W),  N_i (m - M),  N_i (v - V),  N_i (t - t0),  N_i
    server:    W, M, V, t0 <- the means of w, m, v, t weighted by N_i;  t0 is rounded
               M, V and t0 start at 0

Only SGDM is in the paper. Adam and AdaGrad treat the whole state of the clients' optimiser in the
same way, as google-research/federated does (optimization/fed_avg_client_opt.py). There `t0`
starts at 1, by an update with a zero gradient; here it starts at 0, so that equal clients are
Adam. Beware: the mean of the `v` is not the `v` of the mean gradient, and the mean of the steps
is not the step of the means. With one full-batch step and all clients, a round is a step of the
centralised optimiser for SGDM, and for Adam and AdaGrad only if all clients have the same
gradient.

Option (sgdm):
    damping   off: as above. on: `m <- gamma m + (1 - gamma) g`, the local SGDM of the FedDA
              paper. This is the same with a ``client_lr`` that is `1 / (1 - gamma)` times as
              large, and so is its default.

JedMills/FedGBO (fl_algs.py) also averages and sends the momentum, with plain means, and does so
for Adam too, without bias correction. The abstract of the paper speaks of gradient descent, not
of mini-batches. From memory of the paper, unchecked: `gamma = 0.5`, `client_lr = 0.002` and the
weights. The defaults are ours: `gamma = 0.9` is the `beta1` of the methods that MFL is compared
with.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`, `M`, `V` and
`t0`.
Communication, in models: 2 down, 2 up (mfl-sgdm, mfl-adagrad); 3 down, 3 up (mfl-adam).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class SGDM(NamedTuple):
    client_lr: Positive = 0.01
    gamma: Decay = 0.9


class DampedSGDM(NamedTuple):
    client_lr: Positive = 0.1
    gamma: Decay = 0.9


class AdaGrad(NamedTuple):
    client_lr: Positive = 0.01
    eps: Positive = 1e-3


class Adam(NamedTuple):
    client_lr: Positive = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Positive = 1e-3


class State(NamedTuple):
    """The model and the state of the clients' optimiser, which are averaged in the same way."""

    params: PyTree
    momentum: PyTree = ()  # m
    second: PyTree = ()  # v
    steps: PyTree = ()  # t, as a floating-point number, because it is an exponent


Step = Callable[[Any, State, PyTree], State]  # (hp, state, gradient) -> state


def send(hp: Any, state: State) -> State:
    return state


def merge(hp: Any, state: State, total: local.Weighted) -> State:
    moved = local.mean(total)
    mean = tree.add(state, moved._replace(steps=moved.steps.value))
    return mean._replace(steps=jax.tree.map(jnp.round, mean.steps))


def averaged(Hyper: type[Any], init: Callable[[Any, PyTree], State], step: Step) -> Algorithm:
    """Return clients that take this step, and a server that averages the whole state."""

    def work(
        hp: Any, task: Task, message: State, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        def one(state: State, batch: Batch) -> tuple[State, Seen]:
            gradient, seen = task.gradient(state.params, batch)
            return step(hp, state, gradient), seen

        end, seen = local.steps(one, message, task.batches(shard, key))
        moved = tree.sub(end, message)
        upload = moved._replace(steps=local.Counter(moved.steps))
        return local.weighted(shard, upload), memory, seen

    return Algorithm(Hyper=Hyper, init=init, phases=(Phase(send, work, merge),))


def sgdm(damping: Literal["off", "on"] = "off") -> Algorithm:
    """MFL (Liu et al. 2020): local SGDM, model and momentum averaged."""
    damped = damping == "on"

    def init(hp: Any, params: PyTree) -> State:
        return State(params, tree.zeros_like(params))

    def step(hp: Any, state: State, gradient: PyTree) -> State:
        move = tree.blend if damped else tree.axpy
        m = move(hp.gamma, state.momentum, gradient)
        return State(tree.axpy(-hp.client_lr, m, state.params), m)

    return averaged(DampedSGDM if damped else SGDM, init, step)


def adagrad() -> Algorithm:
    """MFL with AdaGrad: local AdaGrad, model and sum of squares averaged."""

    def init(hp: AdaGrad, params: PyTree) -> State:
        return State(params, second=tree.zeros_like(params))

    def step(hp: AdaGrad, state: State, gradient: PyTree) -> State:
        v = tree.add(state.second, tree.square(gradient))
        params = tree.axpy(-hp.client_lr, tree.over_root(gradient, v, hp.eps), state.params)
        return State(params, second=v)

    return averaged(AdaGrad, init, step)


def adam() -> Algorithm:
    """MFL with Adam: local Adam, model and both moments averaged."""

    def init(hp: Adam, params: PyTree) -> State:
        return State(params, tree.zeros_like(params), tree.zeros_like(params), jnp.zeros(()))

    def step(hp: Adam, state: State, gradient: PyTree) -> State:
        t = state.steps + 1
        m = tree.blend(hp.beta1, state.momentum, gradient)
        v = tree.blend(hp.beta2, state.second, tree.square(gradient))
        corrected = tree.scale(1 / (1 - hp.beta2**t), v)
        direction = tree.scale(1 / (1 - hp.beta1**t), tree.over_root(m, corrected, hp.eps))
        return State(tree.axpy(-hp.client_lr, direction, state.params), m, v, t)

    return averaged(Adam, init, step)


PAPER = "Liu et al. 2020"
variants = {
    "mfl-sgdm": Variant(sgdm, "MFL", PAPER, "local SGDM, momentum averaged too", down=2, up=2),
    "mfl-adam": Variant(adam, "MFL+Adam", f"after {PAPER}", "local Adam, averaged", down=3, up=3),
    "mfl-adagrad": Variant(
        adagrad, "MFL+AdaGrad", f"after {PAPER}", "local AdaGrad, averaged", down=2, up=2
    ),
}
reductions = [
    Reduction(
        "mfl-sgdm",
        {"gamma": 0.0, "client_lr": 0.1},
        "fedavg",
        {"client_lr": 0.1, "server_lr": 1.0},
    ),
    Reduction("mfl-sgdm", {"gamma": 0.0}, "fedavg", {"server_lr": 1.0}, {"damping": "on"}),
]
