"""One round of federated optimisation, as pure functions over pytrees.

An algorithm is a record of functions; a round is a tuple of exchanges ("phases"); of what the
clients upload, the server sees only the sum. Everything else in this package serves these lines.
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

    seen: Seen  # sums over the clients that counted, in all phases together
    nonfinite: Array  # uploads left out because an entry or the loss was not finite
    skipped: Array  # 1 if the server kept its old state because the sum was unusable, else 0


class _Contribution(NamedTuple):
    """One client's part in a phase, or the sum of several."""

    upload: PyTree
    seen: Seen
    counted: Array
    nonfinite: Array


def _contribute(phase: Phase, task: Task, shared: PyTree, client: PyTree) -> tuple[PyTree, PyTree]:
    """Return one client's contribution and its new memory. That of an absent client is zeros."""
    hp, message, shards, key = shared
    number, memory = client
    shard = shards.shard(number)
    sent, kept, seen = phase.work(hp, task, message, memory, shard, fold_in(key, number))
    present = shard.count > 0
    upload = tree.widen(phase.decoded(sent))  # so that narrow types do not saturate in the sum
    part = _Contribution(upload, seen, counted=present, nonfinite=jnp.asarray(False))
    return tree.where(present, part, tree.zeros_like(part)), tree.where(present, kept, memory)


def _add_up(parts: PyTree, kept: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
    """Return the sum of many clients' parts, and their memories. Skip uploads that are not finite.

    A sum is finite only if all its terms are, for nothing cancels an infinity. So clients are
    looked at one by one only if it is not, and mostly their uploads are read but once.
    """
    _, memory = clients

    def without_nonfinite() -> tuple[PyTree, PyTree]:
        finite = jax.vmap(lambda part: tree.all_finite((part.upload, part.seen)))(parts)
        present = parts.counted
        only_if = jax.vmap(tree.where)
        sound = only_if(finite, parts, tree.zeros_like(parts))._replace(nonfinite=present & ~finite)
        return tree.sum_leading(sound), only_if(present & finite, kept, memory)

    total = tree.sum_leading(parts)
    sound = tree.all_finite((total.upload, total.seen))
    return lax.cond(sound, lambda: (total, kept), without_nonfinite)


def merged(
    phase: Phase, hp: Hyper, before: ServerState, state: ServerState, total: PyTree
) -> ServerState:
    """Return the server's state after a phase, given the sum of the uploads.

    The server computes in single precision at least, and rounds to the types of the state `before`
    the round. Only between phases may a state have other parts than that.
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
        task: What is learnt, and how much local work a client does.
        sum_over_clients: `(work, add_up, shared, clients)` maps `work(shared, client)` over the
            leading axis of `clients`, their ids and memories; `add_up` makes one sum of the first
            results and keeps the second. How that is laid out over chunks and devices is the
            simulator's business.
        hp: The hyper-parameters.
        state: The server's state.
        memory: What clients keep, a row for each client.
        shards: The clients' examples.
        cohort: The ids of this round's clients.
        key: The key of this round. It is folded by phase and client id, never by position.
        slots: The rows of `memory` that belong to the cohort, if they are not the clients' ids.

    Returns:
        The new state, the new memory, and diagnostics.
    """
    before, usable = state, jnp.asarray(True)
    seen, nonfinite = nothing_seen(), jnp.int32(0)
    rows = cohort if slots is None else slots
    # The barrier keeps a GPU's compiler from reading these rows again after they are written, for
    # which it would copy the whole table.
    old = new = lax.optimization_barrier(tree.take(memory, rows))
    for number, phase in enumerate(algorithm.phases):
        shared = (hp, phase.send(hp, state), shards, fold_in(key, number))
        work = partial(_contribute, phase, task)
        total, new = sum_over_clients(work, _add_up, shared, (cohort, new))
        state = merged(phase, hp, before, state, total.upload)
        usable &= (total.counted > 0) & tree.all_finite((total.upload, state))
        seen = _add_seen(seen, total.seen)
        nonfinite += total.nonfinite
    # A round whose sum is unusable never happened: neither for the server nor for its clients.
    state = tree.where(usable, state, before)
    kept = tree.where(usable, new, old)
    memory = jax.tree.map(lambda table, values: table.at[rows].set(values), memory, kept)
    return state, memory, RoundInfo(seen, nonfinite, skipped=(~usable).astype("int32"))


def _add_seen(one: Seen, other: Seen) -> Seen:
    """Add up the statistics of two phases, of which one may have no metrics."""
    both = one.metrics and other.metrics
    metrics = tree.add(one.metrics, other.metrics) if both else one.metrics or other.metrics
    return Seen(one.loss + other.loss, one.examples + other.examples, metrics)


def exchanges(
    algorithm: Algorithm, task: Task, hp: Hyper, params: PyTree, shards: Shards
) -> list[tuple[PyTree, PyTree]]:
    """Return the shapes of the message and of one client's upload, for each phase of a round.

    Nothing is computed.
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
    """Return the bytes that one client receives and sends in a round.

    They are counted from the shapes of the messages themselves.
    """
    messages, uploads = zip(*exchanges(algorithm, task, hp, params, shards), strict=True)
    return tree.nbytes(messages), tree.nbytes(uploads)
