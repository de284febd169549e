"""Compressed uploads, for any algorithm.

    top_k      the entries of largest magnitude, with their positions
    random_k   entries at random positions; the server recomputes the positions from a seed
    quantised  all entries, each rounded at random to one of 2^bits - 1 levels, without bias

`top_k` and `random_k` use error feedback. The client keeps the error e, the part of x that the
packet C(x) leaves out, and adds it to its next upload u. So nothing is lost, only delayed:

    x = u + e;   send C(x);   e <- x - C(x)

Error feedback requires that the error |x - C(x)|² is smaller than |x|². If k of d numbers are
sent, it is at most (1 - k/d) |x|² with top_k, and about that on average with random_k. For this
reason random_k does not divide its entries by k/d: it would be unbiased, but the error could be
larger than |x|². `quantised` is unbiased, and its clients keep no error.

Delayed entries belong to an old model. The smaller the share of entries, the lower the learning
rates that work, for random_k more than for top_k. Each array is compressed separately. Arrays of
fewer than 256 numbers are sent uncompressed.
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
from fedda.core.shuffle import mixed
from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard, from_clients
from fedda.errors import InputError
from fedda.models import Model

SMALL = 256  # arrays of fewer numbers are sent uncompressed
BLOCK = 256  # the number of entries that share a scale
CODING = 0xC0DE  # folded into a client's key; tasks fold in small numbers
STATIC = {"static": True}  # marks a field that is not an array, but part of a packet's structure


class Codec(NamedTuple):
    """A way to compress uploads, as a record of pure functions.

    The shapes of a packet may depend only on the shapes of the upload.

    Attributes:
        init: `(like) -> memory`, a client's memory for uploads with the shapes of `like`.
        encode: `(key, memory, upload) -> (packet, memory)`. The packet's arrays are sent.
        decode: `(packet) -> upload`, on the server.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    decode: Callable[[PyTree], PyTree]


# -------------------------------------------------------------------------------- around a round


class Memory(NamedTuple):
    """A client's memory between rounds."""

    own: PyTree  # the memory of the algorithm
    codec: tuple[PyTree, ...]  # the memory of the codec, for each phase


@lru_cache
def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """Return the algorithm with compressed uploads.

    Equal arguments return the same record, so JAX compiles it once.

    Args:
        algorithm: The algorithm. Its uploads must not be compressed or bounded already.
        codec: `top_k(share)`, `random_k(share)`, `quantised(bits)`, or another `Codec`.

    Returns:
        An algorithm for `fedda.run` or Flower, with the same hyper-parameters.

    Raises:
        InputError: The uploads are already compressed, bounded or centrally private.

    Example:
        >>> import numpy as np
        >>> import fedda
        >>> from fedda import algorithms
        >>> from fedda.transforms.compression import compressed, top_k
        >>> clients = [(np.ones((n, 1000)), np.full((n, 1), 3.0)) for n in (1, 5)]
        >>> algorithm = compressed(algorithms.get("fedavg"), top_k(0.1))
        >>> model, loss = fedda.models.linear(features=1000, classes=1), fedda.losses.squared_error
        >>> result = fedda.run(algorithm, model, clients, loss, rounds=1, cohort=2)
        >>> result.history[-1]["bytes_up"]  # 8016 without compression
        1616
    """
    if any(phase.decode or phase.sum_only for phase in algorithm.phases):
        raise InputError(
            "compressed takes an algorithm with plain uploads, got one whose uploads are "
            "compressed, bounded or centrally private. Use compressed first and bounded second. "
            "Combine compression only with local noise: private(..., where='local')."
        )

    def memory(hp: Any, params: PyTree) -> Memory:
        kept = tuple(codec.init(like) for like in _uploads(algorithm, hp, params))
        return Memory(algorithm.memory(hp, params), kept)

    def coded(number: int, phase: Phase) -> Phase:
        def work(
            hp: Any, task: Task, message: PyTree, memory: Memory, shard: Shard, key: Array
        ) -> tuple[PyTree, Memory, Seen]:
            upload, plain, seen = phase.work(hp, task, message, memory.own, shard, key)
            errors = list(memory.codec)
            coding_key = random.fold_in(key, CODING)
            packet, errors[number] = codec.encode(coding_key, errors[number], means(upload))
            return packet, Memory(plain, tuple(errors)), seen

        return phase._replace(work=work, decode=lambda packet: sums(codec.decode(packet)))

    phases = tuple(coded(number, phase) for number, phase in enumerate(algorithm.phases))
    return algorithm._replace(memory=memory, phases=phases)


def means(upload: PyTree) -> PyTree:
    """Return an upload with its weighted sums divided by their weights.

    An entry that is left out in one round is sent in a later one, when the client may have another
    weight. As part of a mean, it has the same meaning in both rounds. Also, rounding errors then
    depend on the size of the update, not on the client's number of examples.
    """

    def mean(part: Weighted) -> Weighted:
        divisor = jnp.where(part.weight == 0, jnp.ones_like(part.weight), part.weight)
        return part._replace(sum=tree.scale(1 / divisor, part.sum))

    return on_weighted(mean, upload)


def sums(upload: PyTree) -> PyTree:
    """Return an upload with its means multiplied by their weights, the inverse of `means`."""
    return on_weighted(lambda part: part._replace(sum=tree.scale(part.weight, part.sum)), upload)


def on_weighted(change: Callable[[Weighted], Weighted], upload: PyTree) -> PyTree:
    """Apply `change` to all weighted parts of an upload."""
    return jax.tree.map(
        lambda part: change(part) if is_weighted(part) else part, upload, is_leaf=is_weighted
    )


def _uploads(algorithm: Algorithm, hp: Hyper, params: PyTree) -> list[PyTree]:
    """Return the shapes of a client's uploads in each phase, from the model's parameters alone.

    The shapes do not depend on the task, so a task with one example of one number is used.
    """
    model = Model(lambda key: params, lambda params, x: jnp.zeros(x.shape))
    task = Task(model, lambda outputs, y: outputs, Plan(batch=1))
    shards = from_clients([(np.zeros(1), np.zeros(1))])
    try:
        return [upload for _, upload in exchanges(algorithm, task, hp, params, shards)]
    except Exception as error:  # a user's algorithm may raise anything
        raise InputError(
            "compressed needs an algorithm whose uploads have shapes that depend only on the "
            f"model's parameters. Evaluating the shapes with another task failed: {error}"
        ) from error


# ------------------------------------------------------------------------------------ the codecs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Some entries of an array, with their positions. The other entries are 0."""

    places: Array  # int32
    values: Array
    shape: tuple[int, ...] = field(metadata=STATIC)

    def array(self) -> Array:
        return _scattered(self.places, self.values, self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Some entries of an array, at positions computed from a seed. The other entries are 0."""

    seed: Array  # uint32
    values: Array
    shape: tuple[int, ...] = field(metadata=STATIC)

    def array(self) -> Array:
        places = drawn_places(jnp.asarray(self.seed), self.values.size, prod(self.shape))
        return _scattered(places, self.values, self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """The entries of an array as integer codes, with a scale for each block of entries."""

    codes: Array  # int8, or with 4 bits uint8, where a byte holds two codes
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
    """Return a codec that sends the entries of largest magnitude, with error feedback.

    Args:
        share: The share of entries to send, in (0, 1].

    Raises:
        InputError: The share is not in (0, 1].
    """
    _check_share(share)

    def encode(key: Array, x: Array) -> Chosen:
        flat = x.ravel()
        _, places = lax.top_k(jnp.abs(flat), _number(share, x))
        return Chosen(places, flat[places], x.shape)

    return _by_array(encode, feedback=True)


@lru_cache
def random_k(share: float) -> Codec:
    """Return a codec that sends entries at random positions, with error feedback.

    Args:
        share: The share of entries to send, in (0, 1].

    Raises:
        InputError: The share is not in (0, 1].
    """
    _check_share(share)

    def encode(key: Array, x: Array) -> Drawn:
        seed = random.bits(key, (), "uint32")
        values = x.ravel()[drawn_places(seed, _number(share, x), x.size)]
        # A non-finite number that is not sent would stay in the client's memory unnoticed.
        finite = jnp.isfinite(x).all()
        return Drawn(seed, jnp.where(finite, values, jnp.nan), x.shape)

    return _by_array(encode, feedback=True)


@lru_cache
def quantised(bits: int = 8) -> Codec:
    """Return a codec that rounds every entry to 8 or 4 bits at random, without bias.

    Every block of 256 entries has a scale, the largest magnitude of the block.

    Args:
        bits: 8 or 4.

    Raises:
        InputError: Another number of bits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedda.transforms.compression import quantised
        >>> codec, upload = quantised(bits=8), jnp.linspace(-1.0, 1.0, 256)
        >>> packet, _ = codec.encode(jax.random.key(0), codec.init(upload), upload)
        >>> bool(jnp.abs(codec.decode(packet) - upload).max() <= 1 / 127)
        True
    """
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
    """Return a codec for uploads from an encoder for one array."""

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
    """Return `number` pseudo-random positions in an array of this size.

    The array is divided into `number` intervals, and a hash of the seed chooses one position in
    each. The hash is plain integer arithmetic, which is the same in every version of JAX. A server
    that computed other positions would not notice.
    """
    interval = jnp.arange(number, dtype="uint32")
    width, longer = divmod(size, number)  # the first `longer` intervals have one position more
    first = interval * jnp.uint32(width) + jnp.minimum(interval, jnp.uint32(longer))
    widths = jnp.uint32(width) + (interval < longer).astype("uint32")
    return (first + mixed(mixed(interval) ^ seed) % widths).astype("int32")


def _scattered(places: Array, values: Array, shape: tuple[int, ...]) -> Array:
    values = jnp.asarray(values)
    # A malicious client may send positions outside of the array: they are dropped.
    return jnp.zeros(prod(shape), values.dtype).at[places].set(values, mode="drop").reshape(shape)


def _blocks(flat: Array, size: int) -> Array:
    """Return the first `size` numbers with one block in each row, padded with zeros."""
    return jnp.pad(flat[:size], (0, -size % BLOCK)).reshape(-1, BLOCK)


def _most(bits: int) -> int:
    """Return the largest code. The codes are symmetric around 0."""
    return 2 ** (bits - 1) - 1


def _paired(codes: Array) -> Array:
    """Pack two codes of 4 bits into each byte."""
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
