"""What travels: orders, pytrees as named arrays, and the checks of what comes from elsewhere."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from jax import random
from jax.tree_util import keystr

from fedda.core.tree import PyTree

HEADER = 1024  # bytes that a serialised array may have besides its numbers
SAME = "Server and clients need the same model and the same version of fedda."
REMEDY = "Look for NaN in that client's data, or lower client_lr."
LONGEST_REASON = 500  # characters of what is logged about a message


class Refused(Exception):  # noqa: N818  # as one says it
    """A message that is not what was agreed: why, in words for the log.

    They may be a stranger's own words, and so are cut to one line that cannot fill the disk.
    """

    def __init__(self, why: str) -> None:
        super().__init__(" ".join(why[:LONGEST_REASON].split()))


class Order(NamedTuple):
    """What a client is asked to do.

    Messages to all clients are numbered; `serial` is the number of this one. The client goes on
    from what it kept after the message `counted`, and may forget what it kept before `settled`; 0
    stands for the beginning.
    """

    algorithm: str
    options: str  # of the algorithm, as JSON
    seed: int
    round: int
    phase: int
    full: bool  # whether to take one step with the gradient of all examples
    clients: int  # that the federation has
    serial: int
    counted: int
    settled: int
    hyper: Mapping[str, float] = {}

    def records(self) -> dict[str, ConfigRecord]:
        own = self._asdict()
        return {"hyper": ConfigRecord(own.pop("hyper")), "fedda": ConfigRecord(own)}

    @classmethod
    def read(cls, content: RecordDict) -> "Order":
        kinds = {name: kind for name, kind in cls.__annotations__.items() if name != "hyper"}
        hyper = dict.fromkeys(content.config_records.get("hyper", {}), float)
        return cls(**read(content, "fedda", **kinds), hyper=read(content, "hyper", **hyper))

    def key(self) -> jax.Array:
        """The key of this phase, as in a simulation; each client folds its own number in."""
        run = random.fold_in(random.key(self.seed), 1)
        return random.fold_in(random.fold_in(run, self.round), self.phase)

    def reply(self, partition: int) -> ConfigRecord:
        """What says to which order a reply belongs, and whose it is."""
        return ConfigRecord(
            {"algorithm": self.algorithm, "serial": self.serial, "partition": partition}
        )


def pack(tree: PyTree) -> ArrayRecord:
    """The leaves of a pytree by their paths, such as `params/dense/kernel`."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return ArrayRecord({name_of(path): Array(_plain(np.asarray(leaf))) for path, leaf in named})


def unpack(record: ArrayRecord, like: PyTree) -> PyTree:
    """The pytree with the names, shapes and types of `like`, or a refusal.

    What a record says of its arrays is believed only after it was compared with `like`, and nothing
    is deserialised that could be larger.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [name_of(path) for path, _ in named]
    if set(record) != set(names):
        odd = sorted(set(record) ^ set(names))
        fault = "not expected" if odd[0] in record else "missing"
        raise Refused(f"among the arrays {odd[0]} is {fault}. {SAME}")
    leaves = [
        _array(record[name], name, leaf) for name, (_, leaf) in zip(names, named, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def nbytes(content: RecordDict) -> int:
    """The bytes of all arrays, as they are sent, and of what is sent as bytes."""
    arrays = [a.data for record in content.array_records.values() for a in record.values()]
    for value in (each for record in content.config_records.values() for each in record.values()):
        each = value if isinstance(value, list) else [value]
        arrays += [one for one in each if isinstance(one, bytes)]
    return sum(map(len, arrays))


def content(reply: Message) -> RecordDict:
    """What a reply holds, or a refusal if it tells of an error."""
    if reply.has_error():
        raise Refused(f"an error: {reply.error.reason}")
    return reply.content


def read(content: RecordDict, name: str, **types: type) -> dict[str, Any]:
    """The entries of a configuration, each of the type that is named for it, or a refusal."""
    record = content.config_records.get(name, ConfigRecord())
    for key, kind in types.items():
        if type(record.get(key)) is not kind:
            raise Refused(f"{name}.{key} must be {kind.__name__}, got {record.get(key)!r}. {SAME}")
    return {key: record[key] for key in types}


def check_array(found: Any, dtype: np.dtype, shape: tuple[int, ...], name: str) -> None:
    """Refuses what was read as an array and is none: of a zip file NumPy makes an archive."""
    if not isinstance(found, np.ndarray):
        raise Refused(f"{name} is in truth no array")
    if (found.dtype, found.shape) != (dtype, shape):
        raise Refused(f"{name} is in truth {found.dtype}{found.shape}")


def name_of(path: Any) -> str:
    """A leaf's place in its tree, as records name it."""
    return keystr(path, simple=True, separator="/")


def _plain(array: np.ndarray) -> np.ndarray:
    """NumPy has no bfloat16 of its own: it travels as the integers of its bits."""
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def _array(sent: Array, name: str, like: Any) -> np.ndarray:
    dtype = np.dtype(np.uint16) if like.dtype == jnp.bfloat16 else np.dtype(like.dtype)
    said = (sent.dtype, tuple(sent.shape))
    if said != (str(dtype), tuple(like.shape)):
        expected = f"{dtype}{tuple(like.shape)}"
        raise Refused(f"{name} must be {expected}, got {said[0]}{said[1]}. {SAME}")
    most = int(np.prod(like.shape, dtype=np.int64)) * dtype.itemsize + HEADER
    if len(sent.data) > most:
        raise Refused(f"{name} has {len(sent.data)} bytes, more than the {most} it may have")
    try:
        found = sent.numpy()
    except Exception as error:  # NumPy raises many kinds, and all mean that it cannot be read
        raise Refused(f"{name} cannot be read: {error}") from error
    check_array(found, dtype, tuple(like.shape), name)
    return found.view(jnp.bfloat16) if like.dtype == jnp.bfloat16 else found
