"""The examples of all clients: one flat array on the device, and the first row of each client.

Clients are not padded to one size; batches are gathered by row number inside the compiled loop. If
a federation is too large for the device, it stays on disk, and the device holds a `Shards` with the
clients of the next rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda.data.columns import is_frame
from fedda.errors import InputError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "start", "length"),
    meta_fields=("width",),
)
@dataclass(frozen=True, repr=False)
class Ragged:
    """Examples of unequal lengths, one after the other. An index returns padded examples."""

    values: Array  # of an unsigned type; its largest number is the padding
    start: Array
    length: Array
    width: int  # at least the longest length

    @property
    def shape(self) -> tuple[int, int]:
        return self.start.shape[0], self.width

    def __repr__(self) -> str:
        rows, width = self.shape
        return f"Ragged({rows:,} examples of up to {width:,} values)"

    def __getitem__(self, rows: Array) -> Array:
        shape = (*rows.shape, self.width)
        columns = lax.broadcasted_iota(self.start.dtype, shape, rows.ndim)
        inside = columns < self.length[rows][..., None]
        where = jnp.where(inside, self.start[rows][..., None] + columns, 0)
        return jnp.where(inside, self.values[where], np.iinfo(self.values.dtype).max)


def take_rows(columns: Any, rows: Array) -> Any:
    """Return these rows of every column."""
    return jax.tree.map(lambda column: column[rows], columns, is_leaf=_is_ragged)


def num_rows(columns: Any) -> int:
    """Return the number of examples."""
    return jax.tree.leaves(columns, is_leaf=_is_ragged)[0].shape[0]


def _is_ragged(column: Any) -> bool:
    return isinstance(column, Ragged)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "y", "start", "count", "held"),
    meta_fields=("max_count", "num_clients", "even"),
)
@dataclass(frozen=True, repr=False)
class Shards:
    """The examples of all clients, one after the other.

    `shard` returns the view of one client, in which `start` and `count` are scalars.
    """

    x: Any
    y: Any
    start: Array  # the row of each client's first example
    count: Array
    max_count: int  # an upper bound of `count`: the only size that is known while compiling
    num_clients: int  # of the whole federation, also in the view of one client
    held: Array | None = None  # the ascending ids of the clients on the device; None: all clients
    even: bool = False  # whether every client is known to have `max_count` examples

    def __repr__(self) -> str:
        return f"Shards({self.num_clients:,} clients with up to {self.max_count:,} examples)"

    def shard(self, client: Array | int, most: int | None = None) -> "Shards":
        """Return the view of one client. A client that is not on the device has no examples.

        Args:
            client: The number of the client.
            most: A number of examples that the client is known not to exceed. `None` if nothing is
                known but the largest client of the federation.
        """
        client = place = jnp.asarray(client)
        here = client < self.num_clients
        if self.held is not None:
            place = jnp.minimum(jnp.searchsorted(self.held, client), len(self.held) - 1)
            here &= self.held[place] == client
        count = jnp.where(here, self.count[place], 0)
        most = self.max_count if most is None else most
        return replace(self, start=self.start[place], count=count, max_count=most)

    def rows(self, numbers: Array) -> tuple[Any, Any]:
        """Return examples of one client by their numbers, counted from its first example."""
        return take_rows((self.x, self.y), self.start + numbers)


Shard = Shards


def from_partition(x: np.ndarray, y: np.ndarray, partition: Sequence[np.ndarray]) -> Shards:
    """Return the shards of arrays over all examples, given the rows of each client."""
    return from_clients([(x[rows], y[rows]) for rows in partition])


def from_clients(
    clients: Iterable[tuple[Any, Any]] | Mapping[Any, tuple[Any, Any]], owner: str = "client"
) -> Shards:
    """Return the shards of clients, given as a list or by name as pairs of arrays `(x, y)`.

    Args:
        clients: The pairs.
        owner: What to call a client in errors, before its name or number.

    Raises:
        InputError: The arrays of a client cannot be used; the message names the client.
    """
    if isinstance(clients, Mapping):
        owners = [f"{owner} {name!r}" for name in clients]
        clients = clients.values()
    elif is_dataset(clients):
        raise InputError(
            "clients must be a list with the data of each client, got one "
            f"{type(clients).__name__}. Split it, for example by torch.utils.data.random_split; "
            "the list of a single client is [data]."
        )
    elif isinstance(clients, Iterable) and not (isinstance(clients, str) or is_frame(clients)):
        clients = list(clients)
        owners = [f"{owner} {number}" for number in range(len(clients))]
    else:
        raise InputError(
            "clients must be a list of pairs (x, y) of arrays, or a dictionary of them, got "
            f"{type(clients).__name__}. fedda.federation makes clients of a table."
        )
    pairs = [checked_pair(pair, name) for pair, name in zip(clients, owners, strict=True)]
    filled = [pair for pair in pairs if len(pair[0])]
    if not filled:
        raise InputError(
            f"clients must hold at least one example, got {len(pairs)} clients with none."
        )
    for pair, name in zip(pairs, owners, strict=True):
        check_shapes(pair, filled[0], name)
    count = np.array([len(x) for x, _ in pairs])
    x, y = (jnp.asarray(np.concatenate(arrays)) for arrays in zip(*filled, strict=True))
    return all_clients(x, y, np.cumsum(count) - count, count)


def all_clients(x: Any, y: Any, start: np.ndarray, count: np.ndarray) -> Shards:
    """Return the shards of examples on the device, given each client's first row and its count."""
    return Shards(
        x=x,
        y=y,
        start=jnp.asarray(start.astype(np.int32)),
        count=jnp.asarray(count.astype(np.int32)),
        max_count=int(count.max()),
        num_clients=len(count),
        even=bool(count.min() == count.max()),
    )


def checked_pair(pair: Any, owner: str) -> tuple[Any, Any]:
    """Return the arrays of a pair `(x, y)` in the types that they will have on the device.

    Raises:
        InputError: They are no arrays of finite numbers, or differ in length.
    """
    if is_dataset(pair):
        pair = _columns(pair, owner)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InputError(f"{owner} must be a pair (x, y) of arrays, got {type(pair).__name__}.")
    x, y = (
        column if _is_ragged(column) else _checked(column, f"{name} of {owner}")
        for name, column in zip("xy", pair, strict=True)
    )
    if num_rows(x) != num_rows(y):
        raise InputError(f"{owner} has {num_rows(x)} rows in x but {num_rows(y)} in y.")
    return x, y


def is_dataset(data: Any) -> bool:
    """Return whether data are a `Dataset` or `DataLoader` of PyTorch, or a class like them."""
    return hasattr(data, "dataset") or (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (Sequence, Mapping))
        and not hasattr(data, "shape")
    )


def _columns(data: Any, owner: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples `(x, y)` of a dataset as two arrays. A loader's batches do not matter."""
    data = data if hasattr(data, "__getitem__") else data.dataset
    if not hasattr(data, "__len__"):
        raise InputError(
            f"{owner} must be a dataset with a length, got {type(data).__name__}. Give a list of "
            "its examples' x, and one of their y."
        )
    rows = [data[number] for number in range(len(data))]
    for row in rows or [None]:
        if not isinstance(row, (tuple, list)) or len(row) != 2:
            got = f"an example that is a {type(row).__name__}" if rows else "none"
            raise InputError(
                f"{owner} must be a dataset of pairs (x, y) with at least one example, got {got}."
            )
    x, y = zip(*rows, strict=True)
    try:
        return np.stack(list(map(_array, x))), np.stack(list(map(_array, y)))
    except ValueError as error:
        raise InputError(
            f"the examples of {owner} must be arrays of one shape: {error}. Pad or crop them."
        ) from None


def _array(values: Any) -> np.ndarray:
    """Return an array of any values, also of a tensor on a GPU or with a gradient."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _checked(values: Any, name: str) -> np.ndarray:
    try:
        array = _array(values)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype == object and all(isinstance(each, Real | np.bool_) for each in array.flat):
        # From a table with columns of numbers and of booleans.
        array = np.array(array.tolist()).reshape(array.shape)
    if isinstance(next(array.flat, None), (str, bytes)):
        raise InputError(
            f"{name} is text; expected numbers. For labels: np.searchsorted(classes, labels), with "
            "the sorted classes of all clients."
        )
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise InputError(
            f"{name} is ragged or not numeric; expected one array whose first axis counts "
            "examples. Pad or crop its rows to one length."
        )
    given = array
    with np.errstate(over="ignore"):  # numbers that overflow are refused below
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and not np.array_equal(array, given):
        raise InputError(
            f"{name} has whole numbers that do not fit into {array.dtype}, the largest type that "
            "JAX uses by default. Scale them, or set jax_enable_x64."
        )
    if array.dtype.kind == "f":
        finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if not finite.all():
            raise InputError(
                f"{name} has a non-finite value in row {int(np.argmin(finite))}. "
                "Remove the row or replace the value before training."
            )
    return array


def check_shapes(pair: tuple[Any, Any], like: tuple[Any, Any], owner: str) -> None:
    """Refuse examples whose shape differs from that of others. Empty arrays may have any shape."""
    for name, got, expected in zip("xy", pair, like, strict=True):
        if _is_ragged(got) and _is_ragged(expected):
            continue
        if num_rows(got) and got.shape[1:] != expected.shape[1:]:
            raise InputError(
                f"{name} of {owner} has examples of shape {got.shape[1:]}, but others have shape "
                f"{expected.shape[1:]}. All need the same shape: pad or crop before."
            )


def check_labels(shards: Shards, num_classes: int, test: tuple[Any, Any] | None) -> None:
    """Refuse labels that are not classes 0..num_classes-1, with the client and the row."""
    labels, start, count = (np.asarray(each) for each in (shards.y, shards.start, shards.count))
    parts = [("the test set", np.asarray(test[1]))] if test is not None else []
    for owner, own in (("the clients", labels), *parts):
        if not np.issubdtype(own.dtype, np.integer) or own.ndim != 1:
            raise InputError(
                f"y of {owner} must hold the class of each example, a whole number, for "
                f"cross_entropy; got {own.dtype} of shape {own.shape[1:]} for each example."
            )
    if labels.min() < 0 or labels.max() >= num_classes:
        parts += [
            (f"client {client}", labels[first : first + size])
            for client, (first, size) in enumerate(zip(start, count, strict=True))
        ]
    for owner, own in parts:
        wrong = (own < 0) | (own >= num_classes)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"y of {owner} has label {own[row]} in row {row}, but the model has outputs for "
                f"0..{num_classes - 1}. Relabel, or give the model more outputs."
            )
