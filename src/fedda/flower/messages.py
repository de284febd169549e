"""Messages between server and clients: orders, and pytrees as named arrays.

A message may come from a malicious sender. Its names, types, shapes and sizes are checked before it
is used. A `MessageError` says what is wrong with it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from jax import random
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path

from fedda.core.tree import PyTree

MAX_HEADER = 1024  # the most bytes of a serialised array, besides its numbers
CUSTOM = "custom"  # stands for an algorithm of the user, which has no name
MAX_REASON = 500  # the most characters of a reason in the log
SAME_VERSION = "Server and clients need the same model and the same version of fedda."
NOT_FINITE = "Look for NaN in that client's data, or lower client_lr."


class MessageError(Exception):
    """A message is not valid. The reason is written to the log.

    The reason may contain text of a malicious sender, so it is shortened to one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(reason[:MAX_REASON].split()))


class NotFiniteError(MessageError):
    """A reply contains a number that is not finite."""


class Order(NamedTuple):
    """The server's order to a client to do the work of one phase.

    The server numbers all its orders; `serial` is the number of this order. The client resumes
    from the memory that it saved with the order `resume_from`, and may delete the memories that it
    saved before the order `keep_from`. 0 stands for the initial memory.
    """

    algorithm: str
    options: str  # the options of the algorithm, as JSON
    seed: int
    round: int
    phase: int
    full: bool  # whether to take one step with the gradient of all examples
    clients: int  # the number of clients in the federation
    serial: int
    resume_from: int
    keep_from: int
    hyper: Mapping[str, float] = {}

    def records(self) -> dict[str, ConfigRecord]:
        """Return the order as the records of a message."""
        fields = self._asdict()
        return {"hyper": ConfigRecord(fields.pop("hyper")), "fedda": ConfigRecord(fields)}

    @classmethod
    def read(cls, content: RecordDict) -> "Order":
        """Return the order in the records of a message."""
        types = {name: kind for name, kind in cls.__annotations__.items() if name != "hyper"}
        hyper: Any = content.config_records.get("hyper", {})
        return cls(**read_config(content, "fedda", **types), hyper=dict(hyper))

    def key(self) -> jax.Array:
        """Return the random key of this phase, the same as in a simulation.

        A client folds its number into the key.
        """
        run = random.fold_in(random.key(self.seed), 1)
        return random.fold_in(random.fold_in(run, self.round), self.phase)

    def reply(self, partition: int) -> ConfigRecord:
        """Return the record of a reply that names the order and the client."""
        return ConfigRecord({"serial": self.serial, "partition": partition})

    def check_reply(self, partition: int, content: RecordDict) -> None:
        """Raise a `MessageError` if a reply names another order or another client."""
        if content.config_records.get("fedda") != self.reply(partition):
            raise MessageError(f"it does not answer the order {self.serial}")


def pack(tree: PyTree) -> ArrayRecord:
    """Return the leaves of a pytree as arrays named by their paths, such as `params/w`."""
    record = ArrayRecord()
    for path, leaf in tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        # Flower cannot send bfloat16, so its bits are sent as integers.
        plain = array.view(np.uint16) if array.dtype == jnp.bfloat16 else array
        record[leaf_name(path)] = Array(plain)
    return record


def unpack(record: ArrayRecord, like: PyTree) -> PyTree:
    """Return the pytree of a record.

    Raises:
        MessageError: The arrays differ from `like` in names, shapes or types.
    """
    leaves, structure = tree_flatten_with_path(like)
    names = [leaf_name(path) for path, _ in leaves]
    if odd := sorted(set(record) ^ set(names)):
        fault = "not expected" if odd[0] in record else "missing"
        raise MessageError(f"the array {odd[0]} is {fault}. {SAME_VERSION}")
    arrays = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        narrow = leaf.dtype == jnp.bfloat16
        dtype = np.dtype(np.uint16 if narrow else leaf.dtype)
        array = read_array(record[name], name, dtype, tuple(leaf.shape))
        arrays.append(array.view(jnp.bfloat16) if narrow else array)
    return jax.tree.unflatten(structure, arrays)


def leaf_name(path: Any) -> str:
    """Return the name of a leaf in an `ArrayRecord`, from its path in the pytree."""
    return keystr(path, simple=True, separator="/")


def read_array(array: Array, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Deserialise an array, after checks of its type, shape and size.

    An array with another declared type or shape, or with too many bytes, is not deserialised. The
    result is checked again, because the declaration may be false (NumPy also reads zip files).

    Raises:
        MessageError: A check fails.
    """
    expected, declared = f"{dtype}{shape}", f"{array.dtype}{tuple(array.shape)}"
    if declared != expected:
        raise MessageError(f"{name} must be {expected}, got {declared}. {SAME_VERSION}")
    limit = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + MAX_HEADER
    if len(array.data) > limit:
        raise MessageError(f"{name} has {len(array.data)} bytes, expected at most {limit}")
    try:
        value: Any = array.numpy()
    except Exception as error:  # malformed data may raise errors of many types
        raise MessageError(f"{name} cannot be read: {error}") from error
    actual = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else "no array"
    if actual != expected:
        raise MessageError(f"{name} contains {actual}, although it declares {declared}")
    return value


def nbytes(content: RecordDict) -> int:
    """Return the total size of the serialised arrays and of the entries that are bytes."""
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    entries = [value for record in content.config_records.values() for value in record.values()]
    values = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
    return sum(len(value) for value in [*arrays, *values] if isinstance(value, bytes))


def read_content(reply: Message) -> RecordDict:
    """Return the content of a reply. Raise a `MessageError` if the reply reports an error."""
    if reply.has_error():
        raise MessageError(f"an error: {reply.error.reason}")
    return reply.content


def read_config(content: RecordDict, name: str, **types: type) -> dict[str, Any]:
    """Return entries of a configuration record. Raise a `MessageError` if a type is wrong."""
    record = content.config_records.get(name, ConfigRecord())
    for key, kind in types.items():
        if type(value := record.get(key)) is not kind:
            expected = f"{name}.{key} must be {kind.__name__}"
            raise MessageError(f"{expected}, got {value!r}. {SAME_VERSION}")
    return {key: record[key] for key in types}
