"""Move clients from a store to the device: all of a split, or those of the next rounds."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.data.federation import Ragged, Shards, all_clients
from fedda.data.store import Column, Rows, Split

PROGRAM_BYTES = 64e6  # of the examples that one call of a compiled program gets, about

Columns = tuple[str, str]  # the columns of a store that are the inputs and the labels
XY: Columns = ("x", "y")


def resident(split: Split, most: int | None = None, columns: Columns = XY) -> Shards:
    """Put all clients of a split on the device, each with its first `most` examples."""
    whole = {}
    for name in set(columns):
        field = split.fields[name]
        length = field.length
        whole[name] = _on_device(field.values if length is None else Rows(field.values, length))
    x, y = (whole[name] for name in columns)
    return all_clients(x, y, split.start, _capped(split, most))


def union(split: Split, most: int | None = None, columns: Columns = XY) -> tuple[Any, Any]:
    """Return the examples of all clients as one set, or the first `most` of them.

    Ragged columns are put on the device, others stay on the host.
    """
    most = split.num_examples if most is None else most
    before = np.cumsum(split.count) - split.count

    def column(name: str) -> Any:
        clients = np.flatnonzero(before < most).tolist()
        joined = _joined([split.column(name, each, most - int(before[each])) for each in clients])
        return _on_device(joined) if isinstance(joined, Rows) else joined

    taken = {name: column(name) for name in set(columns)}
    return taken[columns[0]], taken[columns[1]]


class Block(NamedTuple):
    """Some examples of a split."""

    x: Any
    y: Any
    examples: int  # the number of examples; the rows after them are padding


def blocks(split: Split, size: int) -> Iterator[Block]:
    """Yield all examples of a split in the order of the files, in blocks of one size."""
    room = _Room()
    first = dict.fromkeys(XY, 0)
    for begin in range(0, split.num_examples, size):
        taken = {}
        for name in XY:
            field = split.fields[name]
            rows = slice(begin, begin + size)
            column: Column = field.values[rows]
            if field.length is not None:
                end = first[name] + int(field.length[rows].sum(dtype=np.int64))
                column = Rows(field.values[first[name] : end], field.length[rows])
                first[name] = end
            taken[name] = room.on_device(name, column, size)
        yield Block(**taken, examples=min(size, split.num_examples - begin))


class Feed:
    """The clients of a split that stays on disk.

    Args:
        split: The split.
        most: The number of examples that a client has at most: its first ones.
        columns: The inputs and the labels.
    """

    def __init__(self, split: Split, most: int | None = None, columns: Columns = XY) -> None:
        self._split, self._most, self._columns, self._room = split, most, columns, _Room()
        self.count = _capped(split, most)
        self.num_clients = split.num_clients
        self.max_count = int(self.count.max())

    def rounds(self, cohort: int) -> int:
        """Return the number of rounds whose clients one call of a program should get."""
        stored = sum(self._split.fields[name].nbytes for name in self._columns)
        one = stored / self._split.num_examples * float(self.count.mean())
        return max(1, int(PROGRAM_BYTES / (cohort * one)))

    def gather(self, clients: np.ndarray, slots: int) -> Shards:
        """Put clients on the device.

        Args:
            clients: The numbers of the clients, ascending and distinct.
            slots: The number of clients that the result has room for. Unused slots are empty.
        """
        count, held = np.zeros(slots, np.int32), np.full(slots, np.iinfo(np.int32).max, np.int32)
        count[: len(clients)], held[: len(clients)] = self.count[clients], clients
        examples = self._room.at_least("examples", int(count.sum()))
        taken = {}
        for name in set(self._columns):
            parts = [self._split.column(name, each, self._most) for each in clients.tolist()]
            taken[name] = self._room.on_device(name, _joined(parts), examples)
        x, y = (taken[name] for name in self._columns)
        return Shards(
            x=x,
            y=y,
            start=jnp.asarray(np.cumsum(count, dtype=np.int32) - count),
            count=jnp.asarray(count),
            max_count=self.max_count,
            num_clients=self.num_clients,
            held=jnp.asarray(held),
        )


class _Room:
    """Sizes of arrays: powers of two that never shrink, so that a run compiles few programs."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}

    def at_least(self, what: str, size: int) -> int:
        self._largest[what] = max(self._largest.get(what, 1), 1 << max(size - 1, 0).bit_length())
        return self._largest[what]

    def on_device(self, name: str, column: Column, rows: int) -> Any:
        """Return a column on the device, padded with zeros to a number of rows."""
        if not isinstance(column, Rows):
            return jnp.asarray(_filled(column, rows))
        values = self.at_least(f"values of {name}", len(column.values))
        width = self.at_least(f"width of {name}", int(column.length.max(initial=1)))
        return _ragged(column, rows, values, width)


def _on_device(column: Column) -> Any:
    if not isinstance(column, Rows):
        return jnp.asarray(column)
    longest = int(column.length.max(initial=1))
    return _ragged(column, len(column.length), len(column.values), longest)


def _ragged(column: Rows, rows: int, values: int, width: int) -> Ragged:
    length = _filled(column.length, rows).astype(np.int32)
    return Ragged(
        values=jnp.asarray(_filled(column.values, max(values, 1))),
        start=jnp.asarray(np.cumsum(length, dtype=np.int32) - length),
        length=jnp.asarray(length),
        width=width,
    )


def _capped(split: Split, most: int | None) -> np.ndarray:
    count = split.count if most is None else np.minimum(split.count, most)
    return count.astype(np.int32)


def _joined(parts: list[Column]) -> Column:
    if isinstance(parts[0], Rows):
        ragged = [part for part in parts if isinstance(part, Rows)]
        return Rows(*(np.concatenate(arrays) for arrays in zip(*ragged, strict=True)))
    return np.concatenate([part for part in parts if not isinstance(part, Rows)])


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    if len(array) == size:
        return array
    filled = np.zeros((size, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled
