"""Building blocks of a client's work: local steps and weighted uploads."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedda.core import tree
from fedda.core.algorithm import Seen
from fedda.core.task import Batch, Batches
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

Carry = TypeVar("Carry")

# The number of local steps that are unrolled on an accelerator, if the number of steps is static.
# XLA then reads and writes the clients' weights less often. Unrolling more takes long to compile.
UNROLLED = 4


def steps(
    step: Callable[[Carry, Batch], tuple[Carry, Seen]],
    start: Carry,
    batches: Batches,
    maybe_none: bool = False,
) -> tuple[Carry, Seen]:
    """Take one local step on each batch.

    If clients take different numbers of steps, `vmap` runs the loop until the last client has
    finished and leaves the finished clients unchanged. The first step is outside the loop: all
    clients still have the server's model there, so `vmap` needs no copy of it for each client.

    Args:
        step: `(carry, batch) -> (carry, seen)`, one local step.
        start: The carry before the first step, such as the server's parameters.
        batches: The client's batches, from `Task.batches`.
        maybe_none: Whether the number of steps may be 0. All steps are then inside the loop.

    Returns:
        The carry after the last step, and the summed statistics of the steps.
    """

    def body(number: Array, loop: tuple[Carry, Seen]) -> tuple[Carry, Seen]:
        carry, seen = loop
        carry, more = step(carry, batches.at(number))
        return carry, tree.add(seen, more)

    if maybe_none:
        _, seen = jax.eval_shape(step, start, batches.at(jnp.int32(0)))
        return lax.fori_loop(0, batches.steps, body, (start, tree.zeros_like(seen)))
    known = isinstance(batches.steps, int) and jax.default_backend() != "cpu"
    first = step(start, batches.at(jnp.int32(0)))
    return lax.fori_loop(1, batches.steps, body, first, unroll=UNROLLED if known else None)


class Weighted(NamedTuple):
    """A weighted sum and the sum of its weights. A client that is lost is missing from both."""

    sum: PyTree
    weight: PyTree  # a number


class Counter(NamedTuple):
    """A number in an upload that counts work, such as the local steps, and holds no gradient.

    It is neither clipped nor noised. `fedda.transforms.privacy` describes what that reveals.
    """

    value: PyTree


def is_counter(part: Any) -> bool:
    """Return whether a part of an upload is a `Counter`; an `is_leaf` for `jax.tree.map`."""
    return isinstance(part, Counter)


def is_weighted(part: Any) -> bool:
    """Return whether a part of an upload is `Weighted`; an `is_leaf` for `jax.tree.map`."""
    return isinstance(part, Weighted)


def weighted(shard: Shard, upload: PyTree) -> Weighted:
    """Return an upload weighted by the client's number of examples."""
    return weighted_by(shard.count.astype(jnp.result_type(float)), upload)


def weighted_by(weight: Array, upload: PyTree) -> Weighted:
    """Return an upload times a weight, together with the weight.

    The product has at least the default precision. In bfloat16, a weight of 257 would become 256.
    """
    return Weighted(tree.scale(weight, tree.widen(upload)), weight)


def mean(total: Weighted) -> PyTree:
    """Return the weighted mean over the clients that took part."""
    return tree.scale(1 / total.weight, total.sum)
