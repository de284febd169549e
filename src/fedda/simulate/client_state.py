"""What clients keep between rounds, when it is too much for a table on the device.

The device's table has a row for every client of the population. This one lives on the host, knows
only the clients that were ever visited and, of each, only the rows that differ from the start: a
client of a bag-of-words model touches few words, and the rest of its memory stays blank.
"""

from typing import Any

import jax
import numpy as np

from fedda.core.tree import PyTree

Rows = tuple[np.ndarray, np.ndarray]  # which rows of a leaf, and their values


@jax.tree_util.register_pytree_node_class
class HostMemory:
    """The memories of the visited clients; as a pytree, arrays that a checkpoint can hold."""

    def __init__(self, blank: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(jax.device_get(blank))
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._blank = [_as_rows(np.asarray(leaf)) for leaf in leaves]
        self._kept: dict[int, list[Rows]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(
            rows.nbytes + values.nbytes for kept in self._kept.values() for rows, values in kept
        )

    def take(self, clients: np.ndarray) -> PyTree:
        """The memories of these clients, stacked; blank for those never visited."""
        stacks = [np.repeat(blank[None], len(clients), axis=0) for blank in self._blank]
        for slot, client in enumerate(clients.tolist()):
            for stack, (rows, values) in zip(stacks, self._kept.get(client, ()), strict=False):
                stack[slot, rows] = values
        shaped = [
            stack.reshape(len(clients), *shape)
            for stack, shape in zip(stacks, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._structure, shaped)

    def put(self, clients: np.ndarray, memories: PyTree) -> None:
        """Keeps the stacked memories of these clients; the stack may be longer."""
        stacks = [np.asarray(leaf) for leaf in jax.tree.leaves(memories)]
        for slot, client in enumerate(clients.tolist()):
            kept = []
            for stack, blank in zip(stacks, self._blank, strict=True):
                values = _as_rows(stack[slot])
                rows = np.flatnonzero((values != blank).reshape(len(blank), -1).any(axis=1))
                kept.append((rows.astype(np.int32), values[rows]))
            self._kept[client] = kept

    def tree_flatten(self) -> tuple[list[np.ndarray], Any]:
        """The clients, and for every leaf the number of rows of each, the rows and the values."""
        arrays = [np.array(list(self._kept), np.int32)]
        for number, blank in enumerate(self._blank):
            kept = [each[number] for each in self._kept.values()]
            arrays.append(np.array([len(rows) for rows, _ in kept], np.int32))
            arrays.append(np.concatenate([np.zeros(0, np.int32), *(rows for rows, _ in kept)]))
            arrays.append(np.concatenate([blank[:0], *(values for _, values in kept)]))
        return arrays, self

    @classmethod
    def tree_unflatten(cls, like: "HostMemory", arrays: list[Any]) -> "HostMemory":
        new = object.__new__(cls)
        new._structure, new._shapes, new._blank = like._structure, like._shapes, like._blank
        new._kept = {}
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return new  # JAX unflattens with placeholders while it compares structures
        clients, *rest = arrays
        pieces = []
        for counts, rows, values in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            ends = np.cumsum(counts)[:-1]
            pieces.append(list(zip(np.split(rows, ends), np.split(values, ends), strict=True)))
        for slot, client in enumerate(clients.tolist()):
            new._kept[client] = [piece[slot] for piece in pieces]
        return new


def _as_rows(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(1) if leaf.ndim == 0 else leaf
