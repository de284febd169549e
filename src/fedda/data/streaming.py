"""From a store to the device: all of a split, or only the clients that the next rounds ask."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.data.federation import Ragged, Shards
from fedda.data.store import Column, Field, Rows, Split

PROGRAM_BYTES = 64e6  # about what the rounds of one program are given at once


Columns = tuple[str, str]  # which of a store's columns are the inputs and the labels
XY: Columns = ("x", "y")


def resident(split: Split, most: int | None = None, columns: Columns = XY) -> Shards:
    """All clients of a split on the device, each with its first `most` examples."""
    count = _capped(split, most)
    whole = {name: _on_device(_whole(split.fields[name])) for name in set(columns)}
    x, y = (whole[name] for name in columns)
    return Shards(
        x=x,
        y=y,
        start=jnp.asarray(split.start.astype(np.int32)),
        count=jnp.asarray(count),
        max_count=int(count.max()),
        num_clients=split.num_clients,
        even=bool(count.min() == count.max()),
    )


def union(split: Split, most: int | None = None, columns: Columns = XY) -> tuple[Any, Any]:
    """The examples of all clients as one set, or the first `most` of one client after another."""
    most = split.num_examples if most is None else min(most, split.num_examples)
    last = int(np.searchsorted(np.cumsum(split.count), most)) + 1

    def column(name: str) -> Any:
        joined = _cut(_joined([split.column(name, client) for client in range(last)]), most)
        return _on_device(joined) if isinstance(joined, Rows) else joined

    taken = {name: column(name) for name in set(columns)}
    return taken[columns[0]], taken[columns[1]]


class Block(NamedTuple):
    x: Any
    y: Any
    examples: int  # that count; the rows after them fill the block


def blocks(split: Split, size: int) -> Iterator[Block]:
    """All examples of a split, as they lie on disk, in blocks of one size."""
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
            taken[name] = _on_device(column, room.of(name, column, size))
        yield Block(**taken, examples=min(size, split.num_examples - begin))


class Feed:
    """The clients of a split that stays on disk; each has its first `most` examples."""

    def __init__(self, split: Split, most: int | None = None, columns: Columns = XY) -> None:
        self._split, self._most, self._columns, self._room = split, most, columns, _Room()
        self.count = _capped(split, most)
        self.num_clients = split.num_clients
        self.max_count = int(self.count.max())

    def rounds(self, cohort: int) -> int:
        """For how many rounds a program should be given its clients at once."""
        stored = sum(self._split.fields[name].nbytes for name in self._columns)
        one = stored / self._split.num_examples * float(self.count.mean())
        return max(1, int(PROGRAM_BYTES / (cohort * one)))

    def gather(self, clients: np.ndarray, slots: int) -> Shards:
        """These clients, ascending and distinct, and nothing in the rest of the slots."""
        count, held = np.zeros(slots, np.int32), np.full(slots, np.iinfo(np.int32).max, np.int32)
        count[: len(clients)], held[: len(clients)] = self.count[clients], clients
        examples = self._room.at_least("examples", int(count.sum()))
        taken = {}
        for name in set(self._columns):
            parts = [self._split.column(name, each, self._most) for each in clients.tolist()]
            column = _joined(parts)
            taken[name] = _on_device(column, self._room.of(name, column, examples))
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


class _Size(NamedTuple):
    """The size of a column on the device."""

    rows: int
    values: int = 0  # and these two, if it is ragged
    width: int = 0


class _Room:
    """Sizes as powers of two that never shrink, so that a run compiles a few programs at most."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}

    def at_least(self, what: str, size: int) -> int:
        self._largest[what] = max(self._largest.get(what, 1), 1 << max(size - 1, 0).bit_length())
        return self._largest[what]

    def of(self, name: str, column: Column, rows: int) -> _Size:
        if not isinstance(column, Rows):
            return _Size(rows)
        return _Size(
            rows,
            self.at_least(f"values of {name}", len(column.values)),
            self.at_least(f"width of {name}", int(column.length.max(initial=1))),
        )


def _capped(split: Split, most: int | None) -> np.ndarray:
    count = split.count if most is None else np.minimum(split.count, most)
    return count.astype(np.int32)


def _whole(field: Field) -> Column:
    return field.values if field.length is None else Rows(field.values, field.length)


def _joined(parts: list[Column]) -> Column:
    if isinstance(parts[0], Rows):
        ragged = [part for part in parts if isinstance(part, Rows)]
        return Rows(*(np.concatenate(each) for each in zip(*ragged, strict=True)))
    return np.concatenate([part for part in parts if not isinstance(part, Rows)])


def _cut(column: Column, rows: int) -> Column:
    if not isinstance(column, Rows):
        return column[:rows]
    length = column.length[:rows]
    return Rows(column.values[: int(length.sum(dtype=np.int64))], length)


def _on_device(column: Column, size: _Size | None = None) -> Any:
    """A column as it is or, filled up with zeros, of a given size."""
    if not isinstance(column, Rows):
        return jnp.asarray(column if size is None else _filled(column, size.rows))
    longest = int(column.length.max(initial=1))
    size = size or _Size(len(column.length), len(column.values), longest)
    length = _filled(column.length, size.rows).astype(np.int32)
    start = np.cumsum(length, dtype=np.int32) - length
    values = _filled(column.values, max(size.values, 1))
    return Ragged(jnp.asarray(values), jnp.asarray(start), jnp.asarray(length), size.width)


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    if len(array) == size:
        return array
    filled = np.zeros((size, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled
