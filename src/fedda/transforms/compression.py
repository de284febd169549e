"""How uploads travel, for any algorithm: few of their numbers, or all of them in few bits.

    top_k      the entries of largest magnitude, with their places
    random_k   entries at random places, which the server draws again from a seed
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
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Phase, Seen, as_sent
from fedda.core.local import Weighted, is_weighted
from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard, from_clients
from fedda.errors import InputError
from fedda.models import Model

SMALL = 256  # numbers: an array of fewer travels as it is
BLOCK = 256  # numbers that have a scale in common
CODING = 0xC0DE  # folded into a client's key; tasks fold in small numbers


class Codec(NamedTuple):
    """How an upload travels: pure functions, and the shapes of a packet depend on shapes alone."""

    init: Callable[[PyTree], PyTree]  # (like) -> what a client keeps: arrays like these, or nothing
    encode: Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    # (key, memory, upload) -> (packet, memory); the packet's arrays are what travels
    decode: Callable[[PyTree], PyTree]  # (packet) -> upload


# -------------------------------------------------------------------------------- around a round


class Memory(NamedTuple):
    own: PyTree  # what the algorithm keeps
    codec: tuple[PyTree, ...]  # what the codec keeps, of each phase


@lru_cache
def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """The algorithm with all of its uploads coded; equal requests give one and the same record."""
    if any(phase.opened is not as_sent for phase in algorithm.phases):
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

        def opened(packet: PyTree) -> PyTree:
            return sums(codec.decode(packet))

        return phase._replace(work=work, opened=opened)

    phases = tuple(coded(number, phase) for number, phase in enumerate(algorithm.phases))
    return algorithm._replace(memory=memory, phases=phases)


def means(upload: PyTree) -> PyTree:
    """The upload with what is weighted divided by its weight.

    What is left out in one round is owed in another, in which the client may have another weight:
    as a part of a mean it is worth the same in both. And rounding then errs by the size of what a
    client has learnt, not of what it has.
    """

    def mean(part: Weighted) -> Weighted:
        divisor = jnp.where(part.weight == 0, jnp.ones_like(part.weight), part.weight)
        return Weighted(tree.scale(1 / divisor, part.sum), part.weight)

    return on_weighted(mean, upload)


def sums(upload: PyTree) -> PyTree:
    """What `means` divided, multiplied again."""
    return on_weighted(
        lambda part: Weighted(tree.scale(part.weight, part.sum), part.weight), upload
    )


def on_weighted(change: Callable[[Weighted], Weighted], upload: PyTree) -> PyTree:
    """The upload with all of its weighted parts changed."""
    return jax.tree.map(
        lambda part: change(part) if is_weighted(part) else part, upload, is_leaf=is_weighted
    )


def _uploads(algorithm: Algorithm, hp: Any, params: PyTree) -> list[PyTree]:
    """The shapes of a client's uploads, phase by phase: they are the model's, whatever its task.

    So a task will do that knows no more than the parameters, and an example of one number.
    """
    model = Model(lambda key: params, lambda params, x: jnp.zeros(x.shape))
    task = Task(model, lambda outputs, y: outputs, Plan(batch=1))

    def upload(phase: Phase, hp: Any, params: PyTree) -> PyTree:
        message = phase.send(hp, algorithm.init(hp, params))
        shard = from_clients([(np.zeros(1), np.zeros(1))]).shard(0)
        own = algorithm.memory(hp, params)
        return phase.work(hp, task, message, own, shard, random.key(0))[0]

    try:
        return [jax.eval_shape(partial(upload, phase), hp, params) for phase in algorithm.phases]
    except Exception as error:  # whatever the work of a user's own algorithm raises
        raise InputError(
            "the shapes of this algorithm's uploads depend on more than its parameters, so it is "
            f"unknown what a codec's clients have to keep: {error}"
        ) from error


# ------------------------------------------------------------------------------------ the codecs


@partial(jax.tree_util.register_dataclass, data_fields=("places", "values"), meta_fields=("shape",))
@dataclass(frozen=True)
class Chosen:
    """Some entries of an array, and where they were; the others are 0."""

    places: Array  # int32
    values: Array
    shape: tuple[int, ...]

    def array(self) -> Array:
        return _scattered(self.places, self.values, self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=("seed", "values"), meta_fields=("shape",))
@dataclass(frozen=True)
class Drawn:
    """Some entries of an array at places that follow from a seed; the others are 0."""

    seed: Array  # uint32
    values: Array
    shape: tuple[int, ...]

    def array(self) -> Array:
        places = drawn_places(jnp.asarray(self.seed), self.values.size, prod(self.shape))
        return _scattered(places, self.values, self.shape)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("bits", "shape", "dtype"),
)
@dataclass(frozen=True)
class Rounded:
    """Whole numbers that stand for those of an array, in units of a scale for each block."""

    codes: Array  # int8; or uint8, each of which holds two numbers of 4 bits
    scales: Array  # the largest magnitude of each block
    bits: int
    shape: tuple[int, ...]
    dtype: Any

    def array(self) -> Array:
        size, scales = prod(self.shape), jnp.asarray(self.scales)
        codes = _blocks(_unpaired(self.codes) if self.bits == 4 else jnp.asarray(self.codes), size)
        values = codes.astype(scales.dtype) * (scales / _most(self.bits))[:, None]
        return values.ravel()[:size].reshape(self.shape).astype(self.dtype)


Part = Chosen | Drawn | Rounded


@lru_cache
def top_k(share: float) -> Codec:
    """Sends this share of an array's entries, the largest, each with its place; error feedback."""
    _check_share(share)

    def encode(key: Array, x: Array) -> Chosen:
        flat = x.ravel()
        _, places = lax.top_k(jnp.abs(flat), _number(share, x))
        return Chosen(places, flat[places], x.shape)

    return _by_array(encode, feedback=True)


@lru_cache
def random_k(share: float) -> Codec:
    """Sends a seed and this share of an array's entries, drawn anew each round; error feedback."""
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
    """Sends each number in 8 or in 4 bits, and a scale for every 256; right on average."""
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
    """The codec that codes an upload array by array."""

    def is_coded(leaf: Any) -> bool:
        return leaf.size >= SMALL and jnp.issubdtype(leaf.dtype, jnp.floating)

    def init(like: PyTree) -> PyTree:
        def owed(leaf: Any) -> PyTree:
            return jnp.zeros(leaf.shape, leaf.dtype) if feedback and is_coded(leaf) else ()

        return jax.tree.map(owed, like)

    def one(key: Array, owed: PyTree, x: Array) -> tuple[Any, PyTree]:
        if not is_coded(x):
            return x, ()
        if not feedback:
            return encode(key, x), ()
        x = x + owed
        part = encode(key, x)
        return part, x - part.array()

    def encode_all(key: Array, memory: PyTree, upload: PyTree) -> tuple[PyTree, PyTree]:
        leaves, structure = jax.tree.flatten(upload)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))

        def numbered(x: Array, owed: PyTree, number: int) -> tuple[Any, PyTree]:
            return one(random.fold_in(key, number), owed, x)

        pairs = jax.tree.map(numbered, upload, memory, numbers)
        packet = jax.tree.map(lambda _, pair: pair[0], upload, pairs)
        return packet, jax.tree.map(lambda _, pair: pair[1], upload, pairs)

    def decode(packet: PyTree) -> PyTree:
        return jax.tree.map(
            lambda part: part.array() if isinstance(part, Part) else part,
            packet,
            is_leaf=lambda node: isinstance(node, Part),
        )

    return Codec(init, encode_all, decode)


def drawn_places(seed: Array, number: int, size: int) -> Array:
    """So many places among `size`: one of each stretch, as the array is cut into so many.

    A hash says which, in plain arithmetic that both ends do alike, whatever their versions of JAX:
    a server that drew other places would notice nothing.
    """
    stretch = jnp.arange(number, dtype="uint32")
    width, longer = divmod(size, number)  # the first are one longer, until all is covered
    first = stretch * jnp.uint32(width) + jnp.minimum(stretch, jnp.uint32(longer))
    widths = jnp.uint32(width) + (stretch < longer).astype("uint32")
    return (first + _mixed(_mixed(stretch) ^ seed) % widths).astype("int32")


def _mixed(x: Array) -> Array:
    """A bijection of 32 bits in which every bit of `x` changes about half of the others."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def _scattered(places: Array, values: Array, shape: tuple[int, ...]) -> Array:
    values = jnp.asarray(values)
    # A stranger may send places that there are not.
    return jnp.zeros(prod(shape), values.dtype).at[places].set(values, mode="drop").reshape(shape)


def _blocks(flat: Array, size: int) -> Array:
    """The first `size` numbers, a block in each row, the last filled up with zeros."""
    return jnp.pad(flat[:size], (0, -size % BLOCK)).reshape(-1, BLOCK)


def _most(bits: int) -> int:
    """The largest code: as many levels above 0 as below."""
    return 2 ** (bits - 1) - 1


def _paired(codes: Array) -> Array:
    """Codes of 4 bits, two to a byte."""
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
