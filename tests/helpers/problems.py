"""Three small problems with very unequal clients, and what was drawn in a run on one of them.

References learn from here which rows a client was given; all mathematics is theirs.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random

import fedda
from conformance.problem import Batch, losses, visit
from fedda.core.losses import cross_entropy, squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.cohort import draw_cohort
from helpers.batches import most_of, read

SIZES = (13, 1, 0, 6, 9, 4, 2)  # many, one and no examples; two epochs of most end in a short batch
BATCH = 4

_rng = np.random.default_rng(2022)
_features = [_rng.normal(0.3 * i - 1, 1, (size, 3)) for i, size in enumerate(SIZES)]

# Softmax regression. Its parameters are one matrix W, whose last row is the biases.
W0 = _rng.normal(0, 0.5, (4, 3))
CLASSIFIED = [(x, _rng.integers(0, 3, len(x)).astype(np.int32)) for x in _features]
softmax = fedda.Model(
    lambda key: {"b": jnp.asarray(W0[-1]), "w": jnp.asarray(W0[:-1])},
    lambda params, x: x @ params["w"] + params["b"][None],
)


def matrix(tree):
    """A tree like the parameters of `softmax`, as one matrix."""
    return np.vstack([tree["w"], tree["b"][None]])


# Regression by a network with one hidden layer of tanh: nothing about it is linear.
FITTED = [(x, np.stack([np.sin(x.sum(1)), x[:, 0] * x[:, 1]], 1)) for x in _features]
_shapes = {"A": (3, 4), "B": (4, 2), "a": (4,), "b": (2,)}
_layers = {name: _rng.normal(0, 0.7, shape) for name, shape in _shapes.items()}
network = fedda.Model(
    lambda key: jax.tree.map(jnp.asarray, _layers),
    lambda p, x: jnp.tanh(x @ p["A"] + p["a"][None]) @ p["B"] + p["b"][None],
)


def centralised(optimiser, rounds):
    """The parameters of `network` on all clients' data in one place, after every step."""
    x, y = (jnp.asarray(np.concatenate(part)) for part in zip(*FITTED, strict=True))

    def loss(params):
        return jnp.mean(squared_error(network.apply(params, x), y))

    @jax.jit
    def step(params, state):
        updates, state = optimiser.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        params = network.init(jax.random.key(0))
        state = optimiser.init(params)
        found = [params]
        for _ in range(rounds):
            params, state = step(params, state)
            found.append(params)
    return found


def optax_adagrad(rate, eps):
    """The step -rate g / (sqrt(V) + eps), with the V of Optax, whose own eps is inside the root.

    Without any eps Optax gives g / sqrt(V); divided by 1 + eps / sqrt(V), that is the above.
    """
    plain = optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0)

    def update(gradient, state, params=None):
        step, state = plain.update(gradient, state)
        damped = jax.tree.map(lambda u, v: -rate * u / (1 + eps / jnp.sqrt(v)), step, state[0])
        return damped, state

    return optax.GradientTransformation(plain.init, update)


# A loss that is linear in the parameters: where every x is SLOPE, so is every gradient.
SLOPE = np.array([0.5, -2.0, 0.03])
slope = fedda.Model(lambda key: jnp.zeros(3), lambda w, x: x @ w)


def height(outputs, y):
    return outputs


class Recorded(Batch):
    """A batch that keeps the losses of its examples where its gradient was first computed."""

    seen = None

    def gradient(self, W):
        if self.seen is None:
            self.seen = losses(W, self.x, self.y)
        return super().gradient(W)


def drawn(
    *, seed, rounds, cohort, local_work, local_unit, stabilise=0, reduction="mean", phase=0
):  # fmt: skip
    """The visits of every round, with the batches that the library draws in this phase."""
    plan = Plan(BATCH, local_work, local_unit)
    result = []
    for r in range(rounds):
        visits = []
        for i in draw_cohort(seed, r, len(SIZES), cohort).tolist():
            full = r >= rounds - stabilise and SIZES[i] > 0
            rows = [range(SIZES[i])] if full else _drawn_rows(plan, seed, r, phase, i)
            visits.append(visit(i, *CLASSIFIED[i], rows, BATCH, reduction, Recorded))
        result.append(visits)
    return result


def train_losses(rounds):
    """The mean loss that the clients saw in each round, after a reference has run on the visits."""
    found = []
    for visits in rounds:
        batches = [batch for one in visits for batch in (*one.batches, one.whole)]
        seen = [batch.seen for batch in batches if batch.seen is not None]
        found.append(np.concatenate(seen).mean() if seen else np.nan)
    return found


@lru_cache
def _drawn_rows(plan, seed, r, phase, i):
    """The row numbers of each batch of a client."""
    if SIZES[i] == 0:
        return []
    steps, rows, mask = jax.device_get(_batches(plan, from_clients(CLASSIFIED), seed, r, phase, i))
    return [rows[t, 0][mask[t, 0]] for t in range(steps)]


@partial(jax.jit, static_argnames=("plan", "seed"))
def _batches(plan, shards, seed, r, phase, i):
    key = random.key(seed)
    for number in (1, r, phase, i):  # 1 is training (0: initial parameters); round, phase, client
        key = random.fold_in(key, number)
    shard = shards.shard(i)
    batches = Task(softmax, cross_entropy, plan).batches(shard, key)
    return read(batches, most_of(plan, shard))
