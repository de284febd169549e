"""A small federation for checks: unequal clients, one without examples, and gaps between them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from fedda import api
from fedda.core.algorithm import Algorithm
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards
from fedda.models import Model
from fedda.simulate.cohort import Layout
from fedda.simulate.train import Run, Span, Tally, begin, initial, segment

COUNTS = (5, 3, 0, 4, 2, 6, 3, 4)  # examples of the clients
CLIENTS = range(len(COUNTS))
GAP = 2  # rows that belong to nobody, before each client and after the last
COHORTS = np.array([[0, 2, 1, 5], [4, 3, 2, 0], [2, 6, 1, 3]], np.int32)
ROUNDS, COHORT = COHORTS.shape
STARTS = np.cumsum([GAP, *(count + GAP for count in COUNTS)])[:-1]


def examples(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of a client: a linear map of its own, and noise."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=(COUNTS[client], 3))
    return x, x @ rng.normal(size=(3, 2)) + 0.1 * rng.normal(size=(COUNTS[client], 2))


def federation(
    junk: float = 0.0,
    data: Callable[[int], tuple[Any, Any]] = examples,
    counts: tuple[int, ...] = COUNTS,
) -> Shards:
    """Return the clients' examples, with gaps full of `junk` between them.

    Args:
        junk: What the rows hold that belong to no client.
        data: `(client) -> (x, y)`.
        counts: How many examples of each client count.
    """
    rows = sum(COUNTS) + GAP * (len(COUNTS) + 1)
    x, y = np.full((rows, 3), junk), np.full((rows, 2), junk)
    for client, start in enumerate(STARTS):
        own = slice(start, start + COUNTS[client])
        x[own], y[own] = data(client)
    start, count = (jnp.asarray(np.array(each, np.int32)) for each in (STARTS, counts))
    return Shards(jnp.asarray(x), jnp.asarray(y), start, count, max(COUNTS), len(COUNTS))


def with_huge(*clients: int) -> Shards:
    """Return finite examples of these clients, so large that their gradients are not finite."""

    def data(client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = examples(client)
        return (np.full_like(x, 1e200) if client in clients else x), y

    return federation(data=data)


def init(key: Array) -> PyTree:
    return {"hidden": {"kernel": random.normal(key, (3, 2))}, "bias": jnp.zeros(2)}


def apply(params: PyTree, x: Array) -> Array:
    return x @ params["hidden"]["kernel"] + params["bias"][None]


MODEL = Model(init, apply)
# Unequal clients take 2 to 4 local steps a visit; some batches are short, some span two epochs.
TASK = Task(MODEL, squared_error, Plan(3, 2, "epochs"))
PLAIN = Layout()


def played(
    algorithm: Algorithm,
    hp: Any = None,
    *,
    task: Task = TASK,
    shards: Shards | None = None,
    cohorts: np.ndarray = COHORTS,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> tuple[Run, Tally]:
    """Return a run after some rounds with these cohorts, and its training statistics."""
    shards = federation() if shards is None else shards
    hp = api.traced(algorithm.Hyper() if hp is None else hp, task.model)
    params = initial(task.model, False)(random.key(seed))
    run = begin(algorithm, False, shards.num_clients)(hp, params)
    span = Span(first=0, last=rounds, cohorts=cohorts, shards=shards)
    return segment(algorithm, task, PLAIN, False)(hp, run, random.key(seed), span)
