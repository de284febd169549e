"""Building blocks of a client's work: local steps, and uploads with their weights."""

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

# How many steps an accelerator's program unrolls, where their number is known: XLA then reads and
# writes the clients' weights less often. More would take long to compile.
UNROLLED = 4


def steps(
    step: Callable[[Carry, Batch], tuple[Carry, Seen]],
    start: Carry,
    batches: Batches,
    maybe_none: bool = False,
) -> tuple[Carry, Seen]:
    """Take local steps, one on each batch.

    Where clients take unequal numbers of steps, `vmap` turns the loop into one that runs as long as
    the longest of them and freezes those that are done. The first step stands before the loop:
    there all clients still have the server's model, so that `vmap` computes with one model instead
    of a copy for each client.

    Args:
        step: `(carry, batch) -> (carry, seen)`, one local step.
        start: The carry before the first step, such as the server's parameters.
        batches: The client's batches, as `Task.batches` gives them.
        maybe_none: Whether there may be no step to take. All steps are then in the loop.

    Returns:
        The carry after the last step, and the sum of what the steps saw.
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
    """A weighted sum and the sum of its weights, so that a lost client is simply absent."""

    sum: PyTree
    weight: PyTree  # a number


class Counter(NamedTuple):
    """A number of an upload that counts work, such as local steps, and holds no gradient.

    Clipping and noise leave it alone: see `fedda.transforms.privacy` for what that reveals.
    """

    value: PyTree


def is_counter(part: Any) -> bool:
    """Tell whether a part of an upload is a `Counter`: an `is_leaf` for `jax.tree.map`."""
    return isinstance(part, Counter)


def is_weighted(part: Any) -> bool:
    """Tell whether a part of an upload is `Weighted`: an `is_leaf` for `jax.tree.map`."""
    return isinstance(part, Weighted)


def weighted(shard: Shard, upload: PyTree) -> Weighted:
    """Return an upload weighted by the client's number of examples."""
    return weighted_by(shard.count.astype(jnp.result_type(float)), upload)


def weighted_by(weight: Array, upload: PyTree) -> Weighted:
    """Return an upload times a weight, together with that weight.

    The product has the default precision at least: in bfloat16 a weight of 257 would become 256.
    """
    return Weighted(tree.scale(weight, tree.widen(upload)), weight)


def mean(total: Weighted) -> PyTree:
    """Return the weighted mean over the clients that took part."""
    return tree.scale(1 / total.weight, total.sum)
