"""Compressed uploads, for any algorithm: few of their numbers, or all of them in few bits.

    top_k      the entries of largest magnitude, with their positions
    random_k   entries at random positions, which the server draws again from a seed
    quantised  all entries, each rounded at random to one of 2^bits - 1 levels, without bias

The first two come with error feedback: what a packet C(x) leaves out, its client keeps as e, and
adds to its next upload u, so that nothing is lost, only late:

    x = u + e;   send C(x);   e <- x - C(x)

For that, C must leave less than there was. Both do: of |x|² and with k of d numbers sent, top_k
leaves at most the share 1 - k/d, and random_k about that on average. So random_k does not divide by
k/d: unbiased it would be then, but leave more than there was. `quantised` is unbiased, and its
clients keep nothing.

What comes late is old by then: the smaller the share, the lower the learning rates that work, with
random_k more so than with top_k. Each array is coded by itself, and one of fewer than 256 numbers
travels as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Hyper, Phase, Seen
from fedda.core.local import Weighted, is_weighted
from fedda.core.round import exchanges
from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard, from_clients
from fedda.errors import InputError
from fedda.models import Model

SMALL = 256  # numbers: an array of fewer travels as it is
BLOCK = 256  # numbers that have a scale in common
CODING = 0xC0DE  # folded into a client's key; tasks fold in small numbers
STATIC = {"static": True}  # a field that is not an array: a part of the structure of a packet


class Codec(NamedTuple):
    """A way to compress uploads: pure functions. The shapes of a packet depend on shapes alone.

    Attributes:
        init: `(like) -> memory`, what a client keeps for uploads of these shapes, or nothing.
        encode: `(key, memory, upload) -> (packet, memory)`; the packet's arrays are sent.
        decode: `(packet) -> upload`.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    decode: Callable[[PyTree], PyTree]


# -------------------------------------------------------------------------------- around a round


class Memory(NamedTuple):
    """What a client keeps between rounds."""

    own: PyTree  # for the algorithm
    codec: tuple[PyTree, ...]  # for the codec, one for each phase


@lru_cache
def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """Return the algorithm with compressed uploads. Equal requests return the same record.

    Args:
        algorithm: The algorithm, whose uploads must travel as they are.
        codec: `top_k(share)`, `random_k(share)`, `quantised(bits)`, or a `Codec` of your own.

    Raises:
        InputError: The uploads are compressed, bounded or centrally private already.
    """
    if any(phase.decode or phase.sum_only for phase in algorithm.phases):
        raise InputError(
            "compressed takes uploads that travel as they are, got some that are compressed, "
            "bounded or private in their sum alone. Compress first and bound then; and with "
            "compression, let each client add all of its noise: private(..., where='local')."
        )

    def memory(hp: Any, params: PyTree) -> Memory:
        kept = tuple(codec.init(like) for like in _uploads(algorithm, hp, params))
        return Memory(algorithm.memory(hp, params), kept)

    def coded(number: int, phase: Phase) -> Phase:
        def work(
            hp: Any, task: Task, message: PyTree, memory: Memory, shard: Shard, key: Array
        ) -> tuple[PyTree, Memory, Seen]:
            upload, own, seen = phase.work(hp, task, message, memory.own, shard, key)
            kept = list(memory.codec)
            coding_key = random.fold_in(key, CODING)
            packet, kept[number] = codec.encode(coding_key, kept[number], means(upload))
            return packet, Memory(own, tuple(kept)), seen

        return phase._replace(work=work, decode=lambda packet: sums(codec.decode(packet)))

    phases = tuple(coded(number, phase) for number, phase in enumerate(algorithm.phases))
    return algorithm._replace(memory=memory, phases=phases)


def means(upload: PyTree) -> PyTree:
    """Return an upload whose weighted sums are divided by their weights.

    What is left out in one round is sent in another, in which the client may have another weight:
    as a part of a mean it is worth the same in both. And rounding then errs by the size of what a
    client has learnt, not of its data.
    """

    def mean(part: Weighted) -> Weighted:
        divisor = jnp.where(part.weight == 0, jnp.ones_like(part.weight), part.weight)
        return part._replace(sum=tree.scale(1 / divisor, part.sum))

    return on_weighted(mean, upload)


def sums(upload: PyTree) -> PyTree:
    """Undo `means`: multiply by the weights again."""
    return on_weighted(lambda part: part._replace(sum=tree.scale(part.weight, part.sum)), upload)


def on_weighted(change: Callable[[Weighted], Weighted], upload: PyTree) -> PyTree:
    """Apply `change` to all weighted parts of an upload."""
    return jax.tree.map(
        lambda part: change(part) if is_weighted(part) else part, upload, is_leaf=is_weighted
    )


def _uploads(algorithm: Algorithm, hp: Hyper, params: PyTree) -> list[PyTree]:
    """Return the shapes of a client's uploads, phase by phase, given its parameters alone.

    They are the same whatever the task, so one with an example of a single number will do.
    """
    model = Model(lambda key: params, lambda params, x: jnp.zeros(x.shape))
    task = Task(model, lambda outputs, y: outputs, Plan(batch=1))
    shards = from_clients([(np.zeros(1), np.zeros(1))])
    try:
        return [upload for _, upload in exchanges(algorithm, task, hp, params, shards)]
    except Exception as error:  # whatever the work of a user's own algorithm raises
        raise InputError(
            "the shapes of this algorithm's uploads depend on more than its parameters, so it is "
            f"unknown what a codec's clients have to keep: {error}"
        ) from error


# ------------------------------------------------------------------------------------ the codecs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Some entries of an array, with their positions; the others are 0."""

    places: Array  # int32
    values: Array
    shape: tuple[int, ...] = field(metadata=STATIC)

    def array(self) -> Array:
        return _scattered(self.places, self.values, self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Some entries of an array at positions that follow from a seed; the others are 0."""

    seed: Array  # uint32
    values: Array
    shape: tuple[int, ...] = field(metadata=STATIC)

    def array(self) -> Array:
        places = drawn_places(jnp.asarray(self.seed), self.values.size, prod(self.shape))
        return _scattered(places, self.values, self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """The entries of an array as whole numbers, in units of a scale for each block."""

    codes: Array  # int8; or uint8, each of which holds two numbers of 4 bits
    scales: Array  # the largest magnitude of each block
    bits: int = field(metadata=STATIC)
    shape: tuple[int, ...] = field(metadata=STATIC)
    dtype: Any = field(metadata=STATIC)

    def array(self) -> Array:
        size, scales = prod(self.shape), jnp.asarray(self.scales)
        codes = _blocks(_unpaired(self.codes) if self.bits == 4 else jnp.asarray(self.codes), size)
        values = codes.astype(scales.dtype) * (scales / _most(self.bits))[:, None]
        return values.ravel()[:size].reshape(self.shape).astype(self.dtype)


Part = Chosen | Drawn | Rounded


@lru_cache
def top_k(share: float) -> Codec:
    """Return the codec that sends the largest entries of an array, this share of all of them."""
    _check_share(share)

    def encode(key: Array, x: Array) -> Chosen:
        flat = x.ravel()
        _, places = lax.top_k(jnp.abs(flat), _number(share, x))
        return Chosen(places, flat[places], x.shape)

    return _by_array(encode, feedback=True)


@lru_cache
def random_k(share: float) -> Codec:
    """Return the codec that sends random entries of an array, this share of all of them."""
    _check_share(share)

    def encode(key: Array, x: Array) -> Drawn:
        seed = random.bits(key, (), "uint32")
        values = x.ravel()[drawn_places(seed, _number(share, x), x.size)]
        # Left out, a number that is not finite would stay with the client unnoticed.
        sound = jnp.isfinite(x).all()
        return Drawn(seed, jnp.where(sound, values, jnp.nan), x.shape)

    return _by_array(encode, feedback=True)


@lru_cache
def quantised(bits: int = 8) -> Codec:
    """Return the codec that sends numbers in 8 or 4 bits and a scale for every 256, unbiased."""
    if bits not in (4, 8):
        raise InputError(f"bits must be 8 or 4, got {bits!r}.")

    def encode(key: Array, x: Array) -> Rounded:
        exact = x if x.dtype.itemsize >= 4 else x.astype("float32")
        blocks = _blocks(exact.ravel(), x.size)
        scales = jnp.max(jnp.abs(blocks), axis=1)
        steps = blocks / jnp.where(scales > 0, scales, jnp.ones_like(scales))[:, None] * _most(bits)
        below = jnp.floor(steps)
        up = random.uniform(key, steps.shape, steps.dtype) < steps - below
        codes = (below + up.astype(below.dtype)).astype("int8").ravel()[: x.size]
        return Rounded(_paired(codes) if bits == 4 else codes, scales, bits, x.shape, x.dtype)

    return _by_array(encode, feedback=False)


def _by_array(encode: Callable[[Array, Array], Part], feedback: bool) -> Codec:
    """Return the codec that compresses an upload array by array."""

    def is_coded(leaf: Any) -> bool:
        return leaf.size >= SMALL and jnp.issubdtype(leaf.dtype, jnp.floating)

    def init(like: PyTree) -> PyTree:
        def unsent(leaf: Any) -> PyTree:
            return jnp.zeros(leaf.shape, leaf.dtype) if feedback and is_coded(leaf) else ()

        return jax.tree.map(unsent, like)

    def encode_one(key: Array, unsent: PyTree, x: Array) -> tuple[Any, PyTree]:
        if not is_coded(x):
            return x, ()
        if not feedback:
            return encode(key, x), ()
        x = x + unsent
        part = encode(key, x)
        return part, x - part.array()

    def encode_all(key: Array, memory: PyTree, upload: PyTree) -> tuple[PyTree, PyTree]:
        structure: Any = jax.tree.structure(upload)
        keys = [random.fold_in(key, number) for number in range(structure.num_leaves)]
        pairs = [*map(encode_one, keys, structure.flatten_up_to(memory), jax.tree.leaves(upload))]
        packet = structure.unflatten([part for part, _ in pairs])
        return packet, structure.unflatten([unsent for _, unsent in pairs])

    def decode(packet: PyTree) -> PyTree:
        def is_part(node: Any) -> bool:
            return isinstance(node, Part)

        return jax.tree.map(
            lambda node: node.array() if is_part(node) else node, packet, is_leaf=is_part
        )

    return Codec(init=init, encode=encode_all, decode=decode)


def drawn_places(seed: Array, number: int, size: int) -> Array:
    """Return `number` positions in an array of this size: one in each of as many stretches.

    A hash says which, in plain arithmetic that both ends do alike, whatever their versions of JAX:
    a server that drew other positions would notice nothing.
    """
    stretch = jnp.arange(number, dtype="uint32")
    width, longer = divmod(size, number)  # the first are one longer, until all is covered
    first = stretch * jnp.uint32(width) + jnp.minimum(stretch, jnp.uint32(longer))
    widths = jnp.uint32(width) + (stretch < longer).astype("uint32")
    return (first + _mixed(_mixed(stretch) ^ seed) % widths).astype("int32")


def _mixed(x: Array) -> Array:
    """Hash 32 bits, one to one: every bit of `x` changes about half of the others."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def _scattered(places: Array, values: Array, shape: tuple[int, ...]) -> Array:
    values = jnp.asarray(values)
    # A stranger may send positions outside of the array.
    return jnp.zeros(prod(shape), values.dtype).at[places].set(values, mode="drop").reshape(shape)


def _blocks(flat: Array, size: int) -> Array:
    """Return the first `size` numbers, a block in each row; zeros fill the last one."""
    return jnp.pad(flat[:size], (0, -size % BLOCK)).reshape(-1, BLOCK)


def _most(bits: int) -> int:
    """Return the largest code: as many levels above 0 as below."""
    return 2 ** (bits - 1) - 1


def _paired(codes: Array) -> Array:
    """Pack codes of 4 bits, two to a byte."""
    even = jnp.pad(codes + jnp.int8(8), (0, codes.size % 2)).astype("uint8")
    return even[::2] | (even[1::2] << jnp.uint8(4))


def _unpaired(pairs: Array) -> Array:
    both = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], axis=1)
    return both.astype("int8").ravel() - jnp.int8(8)


def _number(share: float, x: Array) -> int:
    return max(1, round(share * x.size))


def _check_share(share: float) -> None:
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise InputError(f"share must be a number in (0, 1], such as 0.1, got {share!r}.")
