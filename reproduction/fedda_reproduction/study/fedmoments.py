"""FedMoments, an experiment of this project: FedAvgM without the linear part of the clients' drift.

A client uploads two moments of its gradients over local time. FedDA's two uploads, the sum of the
gradients and a momentum, also are two such moments. Here they are used to estimate the gradients
at the start of the round, where all clients still have the server's model:

    client i:  w = W;  S = 0;  F = 0;  for t = 0 .. T-1:
                   g = g_i(w; batch)
                   w <- w - client_lr * g
                   S <- S + g
                   F <- F + (t - (T - 1) / 2) g
               E = 6 F / (T + 1)      upload  N_i S,  N_i E,  N_i |E|²,  N_i²,  N_i
    server:    S, E, q = the means of S_i, E_i, |E_i|² weighted by N_i;  p = sum N_i² / (sum N_i)²
               v = p (q - |E|²) / (1 - p)           the variance of the mean E
               s = max(0, 1 - shrink v / |E|²)      the share of E that is not noise
               m <- beta1 m + (1 - beta1) (S - s E)
               W <- W - server_lr client_lr m

The regression line of a client's gradients over `t` has the slope `12 F / (T (T² - 1))`. At its
start, at `t = 0`, it is `(S - E) / T`. The mean of the lines' starts estimates the gradient of the
federation's loss at `W`, which has no client drift, but it has four times the variance of the mean
gradient `S / T` if the noise of the steps is independent. Hence the shrinkage: `v` is estimated
from the differences between the clients of the cohort, and `s = 0` gives FedAvgM, form=paper. With
`T = 1`, or a single client in the cohort, `s E` is 0. ``shrink=0`` always removes all of `E`.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W` and `m`.
Communication, in models: 1 down, 2 up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, NonNegative, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    beta1: Decay = 0.9
    shrink: NonNegative = 1.0


class State(NamedTuple):
    params: PyTree
    momentum: PyTree  # m


class Upload(NamedTuple):
    gradients: PyTree  # S
    drift: PyTree  # E
    square: Array  # |E|²
    size: local.Counter  # N_i


def squared_length(x: PyTree) -> Array:
    squares = (
        jnp.sum(jnp.square(leaf), dtype=jnp.result_type(float)) for leaf in jax.tree.leaves(x)
    )
    return sum(squares, start=jnp.zeros(()))


def init(hp: Any, params: PyTree) -> State:
    return State(params, tree.zeros_like(params))


def send(hp: Any, state: State) -> PyTree:
    return state.params


def work(
    hp: Hyper, task: Task, params: PyTree, memory: PyTree, shard: Shard, key: Array
) -> tuple[local.Weighted, PyTree, Seen]:
    batches = task.batches(shard, key)
    steps = jnp.asarray(batches.steps, jnp.result_type(float))

    def step(carry: tuple[PyTree, PyTree, Array], batch: Batch) -> tuple[Any, Seen]:
        S, F, t = carry
        g, seen = task.gradient(tree.axpy(-hp.client_lr, S, params), batch)
        return (tree.add(S, g), tree.axpy(t - (steps - 1) / 2, g, F), t + 1), seen

    zero = tree.zeros_like(params)
    (S, F, _), seen = local.steps(step, (zero, zero, jnp.zeros(())), batches)
    E = tree.scale(6 / (steps + 1), F)
    count = shard.count.astype(jnp.result_type(float))
    upload = Upload(S, E, squared_length(E), local.Counter(count))
    return local.weighted(shard, upload), memory, seen


def merge(hp: Hyper, state: State, total: local.Weighted) -> State:
    S, E, square, size = local.mean(total)
    length = squared_length(E)
    share = size.value / total.weight  # p
    variance = share * (square - length) / jnp.where(share < 1, 1 - share, 1)
    kept = 1 - hp.shrink * variance / jnp.where(length > 0, length, 1)
    s = jnp.where(share < 1, jnp.maximum(0, kept), 0)
    m = tree.blend(hp.beta1, state.momentum, tree.axpy(-s, E, S))
    return State(tree.axpy(-hp.server_lr * hp.client_lr, m, state.params), m)


FEDMOMENTS = Algorithm(Hyper=Hyper, init=init, phases=(Phase(send, work, merge),))
VERSION = 1  # raised when a change alters its numbers
