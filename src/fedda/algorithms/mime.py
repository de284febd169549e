"""Mime and MimeLite (Karimireddy et al., NeurIPS 2021): local steps with the server's statistics.

A base optimiser has statistics `s`, which start at 0, a direction `U(d; s)` and an update
`s <- V(d; s)`:

      sgdm     s = m
               U(d; s) = beta m + (1 - beta) d
               V(d; s):  m <- beta m + (1 - beta) d
      adam     s = (m, v)
               U(d; s) = (beta1 m + (1 - beta1) d) / (sqrt(v) + eps)
               V(d; s):  m <- beta1 m + (1 - beta1) d;  v <- beta2 v + (1 - beta2) d²
      adagrad  s = v
               U(d; s) = d / (sqrt(v) + eps)
               V(d; s):  v <- v + d²

Clients do not change `s`. The server alone updates it, with gradients at its own model:

    client i:  c_i = the mean gradient of all its examples at W;  y = W;  for every local step:
      mimelite     d = g_i(y; batch)
      mime         d = g_i(y; batch) - g_i(W; batch) + c    on the same batch, with the same noise
    client i:      y <- y - client_lr * U(d; s)
               upload  N_i (y - W),  N_i c_i,  N_i
    server:    c = sum_i N_i c_i / sum_i N_i
               W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i
               s <- V(c; s)

With ``reduction="sum"``, `g_i(y; batch)` is `b` times a mean for a batch of `b` examples. Then
`c_i` and `c` are those of a whole mini-batch, `B` times a mean, and a step takes `b / B` of `c`.

Mime needs `c` before the local steps, so a round has two exchanges: `W` down and `c_i` up, then
`W`, `s`, `c` down and `y - W` up. A client keeps nothing in between, so `W` is sent twice.

Option (adam, adagrad):
    denominator  fresh: `U` takes `v` after `V(d; s)`, which is then thrown away, as in FedJAX and
                 TensorFlow Federated. A local step is then one step of the usual optimiser; Adam
                 has the bias correction of `r + 1` steps after `r` rounds. frozen: `U` as above,
                 the reading of the paper, without bias correction. In the first round `v = 0` and
                 `d / eps` explodes, so `U(d; s) = d` there. A coordinate that had no gradient
                 before is still divided by `eps` alone.

JedMills/FedGBO (optimizers.py, fl_algs.py) reads the paper in the same way: `U` and `V` of SGDM
and Adam (frozen), ``server_lr`` of 1 and plain means of the `c_i` and the `y_i`; but its `v`
starts at 1. All its runs of Adam have `beta2 = 0.99` and `eps = 1e-3`. From memory of the paper,
unchecked: the same values of `beta2` and `eps`, `beta` and `beta1` of 0.9, and AdaGrad, instead of
which FedGBO has RMSProp.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W` and `s`.
Communication, in models: 2 down, 2 up (mimelite-sgdm, mimelite-adagrad); 3 down, 2 up
(mimelite-adam); 4 down, 2 up (mime-sgdm, mime-adagrad); 5 down, 2 up (mime-adam).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.algorithms import fedavg, fedlin
from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class SGDM(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    beta: Decay = 0.9


class Adam(NamedTuple):
    client_lr: Positive = 0.01
    server_lr: Positive = 1.0
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Positive = 1e-3


class AdaGrad(NamedTuple):
    client_lr: Positive = 0.01
    server_lr: Positive = 1.0
    eps: Positive = 1e-3


class Statistics(NamedTuple):
    momentum: PyTree = ()
    second: PyTree = ()
    rounds: PyTree = ()  # r, if U needs it; a floating-point number, because it is an exponent


class Base(NamedTuple):
    """A base optimiser."""

    Hyper: type[Any]
    start: Callable[[PyTree], Statistics]
    direction: Callable[[Any, PyTree, Statistics], PyTree]  # U
    track: Callable[[Any, PyTree, Statistics], Statistics]  # V


class State(NamedTuple):
    params: PyTree
    statistics: Statistics
    gradient: PyTree = ()  # c, from the first exchange of a round of Mime to the second


class Upload(NamedTuple):
    moved: PyTree  # y - W
    gradient: PyTree  # c_i


def send(hp: Any, state: State) -> State:
    return state


def mimelite(base: Base) -> Algorithm:
    def init(hp: Any, params: PyTree) -> State:
        return State(params, base.start(params))

    def work(
        hp: Any, task: Task, message: State, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
            gradient, seen = task.gradient(y, batch)
            direction = base.direction(hp, gradient, message.statistics)
            return tree.axpy(-hp.client_lr, direction, y), seen

        W = message.params
        y, seen = local.steps(step, W, task.batches(shard, key))
        upload = Upload(tree.sub(y, W), task.full_gradient(W, shard, key))
        return local.weighted(shard, upload), memory, seen

    def merge(hp: Any, state: State, total: local.Weighted) -> State:
        upload = local.mean(total)
        params = tree.axpy(hp.server_lr, upload.moved, state.params)
        return State(params, base.track(hp, upload.gradient, state.statistics))

    return Algorithm(Hyper=base.Hyper, init=init, phases=(Phase(send, work, merge),))


def mime(base: Base) -> Algorithm:
    def init(hp: Any, params: PyTree) -> State:
        return State(params, base.start(params), tree.zeros_like(params))

    def keep(hp: Any, state: State, total: local.Weighted) -> State:
        return state._replace(gradient=local.mean(total))

    def work(
        hp: Any, task: Task, message: State, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
            gradient, seen = task.gradient(y, batch)
            initial, _ = task.gradient(message.params, batch)
            wanted = tree.scale(task.batch_share(batch), message.gradient)
            corrected = tree.add(tree.sub(gradient, initial), wanted)
            direction = base.direction(hp, corrected, message.statistics)
            return tree.axpy(-hp.client_lr, direction, y), seen

        y, seen = local.steps(step, message.params, task.batches(shard, key))
        return local.weighted(shard, tree.sub(y, message.params)), memory, seen

    def merge(hp: Any, state: State, total: local.Weighted) -> State:
        params = tree.axpy(hp.server_lr, local.mean(total), state.params)
        statistics = base.track(hp, state.gradient, state.statistics)
        return State(params, statistics, state.gradient)

    phases = (Phase(fedavg.send, fedlin.measure, keep), Phase(send, work, merge))
    return Algorithm(Hyper=base.Hyper, init=init, phases=phases)


Denominator = Literal["fresh", "frozen"]


def sgdm() -> Base:
    def start(params: PyTree) -> Statistics:
        return Statistics(momentum=tree.zeros_like(params))

    def direction(hp: SGDM, d: PyTree, s: Statistics) -> PyTree:
        return tree.blend(hp.beta, s.momentum, d)

    def track(hp: SGDM, d: PyTree, s: Statistics) -> Statistics:
        return Statistics(momentum=tree.blend(hp.beta, s.momentum, d))

    return Base(SGDM, start, direction, track)


def adam(denominator: Denominator) -> Base:
    def start(params: PyTree) -> Statistics:
        zeros = tree.zeros_like(params)
        return Statistics(zeros, zeros, rounds=jnp.zeros(()))

    def direction(hp: Adam, d: PyTree, s: Statistics) -> PyTree:
        after = track(hp, d, s)
        if denominator == "frozen":
            return tree.where(s.rounds == 0, d, tree.over_root(after.momentum, s.second, hp.eps))
        momentum = tree.scale(1 / (1 - hp.beta1**after.rounds), after.momentum)
        second = tree.scale(1 / (1 - hp.beta2**after.rounds), after.second)
        return tree.over_root(momentum, second, hp.eps)

    def track(hp: Adam, d: PyTree, s: Statistics) -> Statistics:
        return Statistics(
            momentum=tree.blend(hp.beta1, s.momentum, d),
            second=tree.blend(hp.beta2, s.second, tree.square(d)),
            rounds=s.rounds + 1,
        )

    return Base(Adam, start, direction, track)


def adagrad(denominator: Denominator) -> Base:
    def start(params: PyTree) -> Statistics:
        rounds = jnp.zeros(()) if denominator == "frozen" else ()
        return Statistics(second=tree.zeros_like(params), rounds=rounds)

    def direction(hp: AdaGrad, d: PyTree, s: Statistics) -> PyTree:
        if denominator == "frozen":
            return tree.where(s.rounds == 0, d, tree.over_root(d, s.second, hp.eps))
        return tree.over_root(d, track(hp, d, s).second, hp.eps)

    def track(hp: AdaGrad, d: PyTree, s: Statistics) -> Statistics:
        rounds = s.rounds + 1 if denominator == "frozen" else ()
        return Statistics(second=tree.add(s.second, tree.square(d)), rounds=rounds)

    return Base(AdaGrad, start, direction, track)


def mimelite_sgdm() -> Algorithm:
    """MimeLite+SGDM (Karimireddy et al. 2021): local steps with the server's frozen momentum."""
    return mimelite(sgdm())


def mimelite_adam(denominator: Denominator = "fresh") -> Algorithm:
    """MimeLite+Adam (Karimireddy et al. 2021): local steps with the server's frozen moments."""
    return mimelite(adam(denominator))


def mimelite_adagrad(denominator: Denominator = "fresh") -> Algorithm:
    """MimeLite+AdaGrad (Karimireddy et al. 2021): local steps with the server's frozen scales."""
    return mimelite(adagrad(denominator))


def mime_sgdm() -> Algorithm:
    """Mime+SGDM (Karimireddy et al. 2021): MimeLite+SGDM on gradients corrected for drift."""
    return mime(sgdm())


def mime_adam(denominator: Denominator = "fresh") -> Algorithm:
    """Mime+Adam (Karimireddy et al. 2021): MimeLite+Adam on gradients corrected for drift."""
    return mime(adam(denominator))


def mime_adagrad(denominator: Denominator = "fresh") -> Algorithm:
    """Mime+AdaGrad (Karimireddy et al. 2021): MimeLite+AdaGrad on gradients corrected for drift."""
    return mime(adagrad(denominator))


PAPER = "Karimireddy et al. 2021"
LITE, FULL = "server's frozen state in local steps", "MimeLite on gradients corrected for drift"
variants = {
    "mimelite-sgdm": Variant(mimelite_sgdm, "MimeLite+SGDM", PAPER, LITE, down=2, up=2),
    "mimelite-adam": Variant(mimelite_adam, "MimeLite+Adam", PAPER, LITE, down=3, up=2),
    "mimelite-adagrad": Variant(mimelite_adagrad, "MimeLite+AdaGrad", PAPER, LITE, down=2, up=2),
    "mime-sgdm": Variant(mime_sgdm, "Mime+SGDM", PAPER, FULL, down=4, up=2, unbiased=True),
    "mime-adam": Variant(mime_adam, "Mime+Adam", PAPER, FULL, down=5, up=2, unbiased=True),
    "mime-adagrad": Variant(mime_adagrad, "Mime+AdaGrad", PAPER, FULL, down=4, up=2, unbiased=True),
}
reductions = [Reduction("mimelite-sgdm", {"beta": 0.0}, "fedavg")]
