"""One round of federated optimisation, as pure functions over pytrees.

A round runs the phases of an algorithm in order. In each phase the server receives only the sum of
the clients' uploads. The rest of the package is built around `one_round`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.random import fold_in

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Hyper, Phase, Seen, ServerState, nothing_seen
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards


class RoundInfo(NamedTuple):
    """Diagnostics of a round (not part of the optimiser state)."""

    seen: Seen  # statistics, summed over all phases and the clients whose uploads were used
    nonfinite: Array  # the number of uploads dropped because an entry or the loss was not finite
    skipped: Array  # 1 if the server kept its old state because the sum was unusable, else 0


class _Contribution(NamedTuple):
    """One client's contribution to a phase, or the sum of several contributions."""

    upload: PyTree
    seen: Seen
    counted: Array
    nonfinite: Array


def _contribute(
    phase: Phase, task: Task, shared: PyTree, client: PyTree, most: int | None
) -> tuple[PyTree, PyTree]:
    """Return one client's contribution and its new memory.

    A client without examples contributes zeros and keeps its memory. `most` is a number of examples
    that the client does not exceed, if one is known.
    """
    hp, message, shards, key = shared
    number, memory = client
    shard = shards.shard(number, most)
    sent, kept, seen = phase.work(hp, task, message, memory, shard, fold_in(key, number))
    present = shard.count > 0
    upload = tree.widen(phase.decoded(sent))  # so that narrow types do not saturate in the sum
    part = _Contribution(upload, seen, counted=present, nonfinite=jnp.asarray(False))
    return tree.where(present, part, tree.zeros_like(part)), tree.where(present, kept, memory)


def _finite(part: _Contribution) -> Array:
    """Return whether the upload and the statistics of a client, or of a sum, are finite."""
    return tree.all_finite((part.upload, part.seen))


def _dropped(part: _Contribution) -> _Contribution:
    """Return the contribution of a client that was not finite: only the count of such clients."""
    nonfinite = jnp.asarray(part.counted, part.nonfinite.dtype)
    return tree.zeros_like(part)._replace(nonfinite=nonfinite)


def merged(
    phase: Phase, hp: Hyper, before: ServerState, state: ServerState, total: PyTree
) -> ServerState:
    """Return the server's state after a phase, given the sum of the uploads.

    The server computes in single precision or higher. If the new state has the structure of the
    state `before` the round, it is rounded to the types of that state. The structure may differ
    only between two phases.
    """
    after = phase.merge(tree.widen(hp), tree.widen(state), total)
    structure: Any = jax.tree.structure(before)
    return tree.as_types_of(before, after) if structure == jax.tree.structure(after) else after


def one_round(
    algorithm: Algorithm,
    task: Task,
    sum_over_clients: Callable[..., tuple[PyTree, PyTree]],
    *,
    hp: Hyper,
    state: ServerState,
    memory: PyTree,
    shards: Shards,
    cohort: Array,
    key: Array,
    slots: Array | None = None,
) -> tuple[ServerState, PyTree, RoundInfo]:
    """Run every phase of one round.

    Args:
        algorithm: The algorithm.
        task: The model, the loss and the local work of a client.
        sum_over_clients: `(work, finite, dropped, shared, clients, sizes) -> (total, memories)`. It
            maps `work(shared, client, most)` over the leading axis of `clients` (their ids and
            memories) and adds up the results, or `dropped(result)` where one is not `finite`.
            `sizes` are the clients' numbers of examples. The simulator decides how this is split
            into chunks, by size, and over devices.
        hp: The hyper-parameters.
        state: The server's state.
        memory: The clients' memories, one row for each client.
        shards: The clients' examples.
        cohort: The ids of this round's clients.
        key: The random key of this round. It is folded with the phase and the client id, never
            with a position in the cohort.
        slots: The rows of `memory` that belong to the cohort, if they differ from the client ids.

    Returns:
        The new state, the new memory, and diagnostics of the round.
    """
    before, usable = state, jnp.asarray(True)
    sizes = jax.vmap(lambda client: shards.shard(client).count)(cohort)
    seen, nonfinite = nothing_seen(), jnp.int32(0)
    rows = cohort if slots is None else slots
    # Without the barrier, the compiler for GPUs reads these rows again after they are overwritten,
    # and copies the whole table for that.
    old = new = lax.optimization_barrier(tree.take(memory, rows))
    for number, phase in enumerate(algorithm.phases):
        shared = (hp, phase.send(hp, state), shards, fold_in(key, number))
        work = partial(_contribute, phase, task)
        total, new = sum_over_clients(work, _finite, _dropped, shared, (cohort, new), sizes)
        state = merged(phase, hp, before, state, total.upload)
        usable &= (total.counted > 0) & tree.all_finite((total.upload, state))
        seen = _add_seen(seen, total.seen)
        nonfinite += total.nonfinite
    # If the sum is unusable, the round changes neither the server's state nor the memories.
    state = tree.where(usable, state, before)
    kept = tree.where(usable, new, old)
    memory = jax.tree.map(lambda table, values: table.at[rows].set(values), memory, kept)
    return state, memory, RoundInfo(seen, nonfinite, skipped=(~usable).astype("int32"))


def _add_seen(one: Seen, other: Seen) -> Seen:
    """Add the statistics of two phases. A phase without local training has no metrics."""
    both = one.metrics and other.metrics
    metrics = tree.add(one.metrics, other.metrics) if both else one.metrics or other.metrics
    return Seen(one.loss + other.loss, one.examples + other.examples, metrics)


def exchanges(
    algorithm: Algorithm, task: Task, hp: Hyper, params: PyTree, shards: Shards
) -> list[tuple[PyTree, PyTree]]:
    """Return the shapes of the message and of one client's upload for each phase of a round.

    Only shapes are evaluated; nothing is computed.
    """

    def exchange(phase: Phase, hp: Hyper, params: PyTree, shards: Shards) -> tuple[PyTree, PyTree]:
        message = phase.send(hp, algorithm.init(hp, params))
        memory, key = algorithm.memory(hp, params), jax.random.key(0)
        return message, phase.work(hp, task, message, memory, shards.shard(0), key)[0]

    return [
        jax.eval_shape(partial(exchange, phase), hp, params, shards) for phase in algorithm.phases
    ]


def traffic(
    algorithm: Algorithm, task: Task, hp: Hyper, params: PyTree, shards: Shards
) -> tuple[int, int]:
    """Return how many bytes one client receives and sends in a round.

    The numbers follow from the shapes and types of the messages and uploads.
    """
    messages, uploads = zip(*exchanges(algorithm, task, hp, params, shards), strict=True)
    return tree.nbytes(messages), tree.nbytes(uploads)
