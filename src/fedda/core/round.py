"""One round of federated optimisation, as pure functions over pytrees.

An algorithm is a record of functions; a round is a tuple of exchanges ("phases"); of what the
clients upload, the server sees only the sum. Everything else in this package serves these lines.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.random import fold_in

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Phase, Seen, nothing_seen
from fedda.core.tree import PyTree


class RoundInfo(NamedTuple):
    """What a person wants to see of a round; the next round needs none of it."""

    seen: Seen  # over the clients that counted, all phases together
    nonfinite: Array  # uploads given weight 0 because an entry, or the loss, was not finite
    skipped: Array  # whether the server kept its state, because the sum was unusable


class _Contribution(NamedTuple):
    """One client's part of a phase, or the sum of several."""

    upload: PyTree
    seen: Seen
    counted: Array
    nonfinite: Array


def _contribute(phase: Phase, task: Any, shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
    """One client's part of a phase. An absent client's is exact zeros."""
    hp, message, shards, key = shared
    client, memory = own
    shard = shards.shard(client)
    sent, kept, seen = phase.work(hp, task, message, memory, shard, fold_in(key, client))
    present = shard.count > 0
    upload = tree.widen(phase.opened(sent))  # so that narrow types do not saturate in the sum
    part = _Contribution(upload, seen, present, jnp.asarray(False))
    return _only_if(present, part), tree.where(present, kept, memory)


def _only_if(allowed: Array, part: _Contribution) -> _Contribution:
    return tree.where(allowed, part, tree.zeros_like(part))


def _add_up(parts: PyTree, kept: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
    """The sum of many clients' parts, and what they keep. Non-finite uploads become exact zeros.

    A sum is finite only if all its terms are, for nothing cancels an infinity. So clients are
    looked at one by one only if it is not, and mostly their uploads are read but once.
    """
    _, memory = own

    def without_nonfinite() -> tuple[PyTree, PyTree]:
        finite = jax.vmap(lambda part: tree.all_finite((part.upload, part.seen)))(parts)
        present = parts.counted
        sound = jax.vmap(_only_if)(finite, parts)._replace(nonfinite=present & ~finite)
        return tree.sum_leading(sound), jax.vmap(tree.where)(present & finite, kept, memory)

    total = tree.sum_leading(parts)
    sound = tree.all_finite((total.upload, total.seen))
    return lax.cond(sound, lambda: (total, kept), without_nonfinite)


def merged(phase: Phase, hp: Any, before: Any, state: Any, total: PyTree) -> Any:
    """Return the server's state after a phase, given the sum of the uploads.

    The server computes in single precision at least, and rounds to the types of the state `before`
    the round. Only between phases may a state have other parts than that.
    """
    after = phase.merge(tree.widen(hp), tree.widen(state), total)
    structure: Any = jax.tree.structure(before)
    return tree.as_types_of(before, after) if structure == jax.tree.structure(after) else after


def one_round(
    algorithm: Algorithm,
    task: Any,
    sum_over_clients: Callable[..., tuple[PyTree, PyTree]],
    hp: Any,
    state: Any,
    memory: PyTree,
    shards: Any,
    cohort: Array,
    key: Array,
    slots: Array | None = None,
) -> tuple[Any, PyTree, RoundInfo]:
    """Runs every phase of one round.

    `sum_over_clients(work, add_up, shared, own)` maps `work(shared, one client's own)` over the
    leading axis of `own`, and `add_up` makes one sum of the first results and keeps the second: how
    that is laid out over chunks and devices is the simulator's business. Keys are folded by phase
    and client id, never by position. `slots` are the rows of `memory` that belong to the cohort, if
    they are not simply the clients' ids.
    """
    before, usable = state, jnp.asarray(True)
    seen, nonfinite = nothing_seen(), jnp.int32(0)
    visits = []
    for number, phase in enumerate(algorithm.phases):
        clients = jnp.arange(shards.num_clients) if phase.everyone else cohort
        shared = (hp, phase.send(hp, state), shards, fold_in(key, number))
        rows = clients if slots is None or phase.everyone else slots
        # The barrier keeps a GPU's compiler from reading these rows again after they are written,
        # for which it would copy the whole table.
        old = lax.optimization_barrier(tree.take(memory, rows))
        work = partial(_contribute, phase, task)
        total, new = sum_over_clients(work, _add_up, shared, (clients, old))
        memory = tree.put(memory, rows, new)
        visits.append((rows, old))
        state = merged(phase, hp, before, state, total.upload)
        usable &= (total.counted > 0) & tree.all_finite((total.upload, state))
        seen = _seen_in_both(seen, total.seen)
        nonfinite += total.nonfinite
    # A round whose sum is unusable never happened: neither for the server nor for its clients.
    state = tree.where(usable, state, before)
    for rows, old in reversed(visits):
        nowhere = np.iinfo(rows.dtype).max  # what is put outside of a table is dropped
        memory = tree.put(memory, jnp.where(usable, nowhere, rows), old)
    return state, memory, RoundInfo(seen, nonfinite, (~usable).astype("int32"))


def _seen_in_both(one: Seen, other: Seen) -> Seen:
    """Of two phases, where one may have no metrics to tell of."""
    metrics = one.metrics or other.metrics
    if one.metrics and other.metrics:
        metrics = tree.add(one.metrics, other.metrics)
    return Seen(one.loss + other.loss, one.examples + other.examples, metrics)


class Traffic(NamedTuple):
    """Bytes of one round for one cohort, counted from the messages themselves."""

    down: int
    up: int


def traffic(
    algorithm: Algorithm, task: Any, hp: Any, params: PyTree, shards: Any, cohort: int
) -> Traffic:
    """What one round sends: nothing is run, the shapes of the messages say it."""
    down = up = 0

    def exchange(phase: Phase, hp: Any, params: PyTree, shards: Any) -> tuple[PyTree, PyTree]:
        message = phase.send(hp, algorithm.init(hp, params))
        own = algorithm.memory(hp, params)
        upload, _, _ = phase.work(hp, task, message, own, shards.shard(0), jax.random.key(0))
        return message, upload

    for phase in algorithm.phases:
        message, upload = jax.eval_shape(partial(exchange, phase), hp, params, shards)
        asked = shards.num_clients if phase.everyone else cohort
        down += asked * tree.nbytes(message)
        up += asked * tree.nbytes(upload)
    return Traffic(down, up)
