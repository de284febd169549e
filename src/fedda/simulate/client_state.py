"""Client memory on the host, when a table of all clients is too large for the device.

The device's table has a row for every client of the population. This one lives on the host, has
only the clients that were ever visited and, of each, only the rows that differ from the start: a
client of a bag-of-words model touches few words, and the rest of its memory stays blank.
"""

from typing import Any

import jax
import numpy as np

from fedda.core.tree import PyTree


@jax.tree_util.register_pytree_node_class
class HostMemory:
    """The memories of the visited clients; as a pytree, arrays that a checkpoint can hold."""

    def __init__(self, blank: PyTree) -> None:
        self._blank = jax.tree.map(np.asarray, jax.device_get(blank))  # before a first visit
        # For each leaf: which of its rows differ from the blank ones, and their values.
        self._kept: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept."""
        return sum(array.nbytes for kept in self._kept.values() for pair in kept for array in pair)

    def take(self, clients: np.ndarray) -> PyTree:
        """Return the memories of these clients, stacked; blank for those never visited."""
        leaves, structure = jax.tree.flatten(self._blank)
        stacks = [np.repeat(leaf[None], len(clients), axis=0) for leaf in leaves]
        for slot, client in enumerate(clients.tolist()):
            for stack, (rows, values) in zip(stacks, self._kept.get(client, ()), strict=False):
                np.atleast_1d(stack[slot, ...])[rows] = values
        return jax.tree.unflatten(structure, stacks)

    def put(self, clients: np.ndarray, memories: PyTree) -> None:
        """Keep the stacked memories of these clients; the stack may be longer."""
        pairs = list(zip(jax.tree.leaves(memories), jax.tree.leaves(self._blank), strict=True))
        for slot, client in enumerate(clients.tolist()):
            kept = []
            for stack, blank in pairs:
                values = np.atleast_1d(np.asarray(stack)[slot])
                changed = (values != np.atleast_1d(blank)).reshape(len(values), -1).any(axis=1)
                rows = np.flatnonzero(changed).astype(np.int32)
                kept.append((rows, values[rows]))
            self._kept[client] = kept

    def tree_flatten(self) -> tuple[list[np.ndarray], "HostMemory"]:
        """Return the clients and, for each leaf, the numbers of rows, the rows and the values."""
        arrays = [np.array(list(self._kept), np.int32)]
        for number, blank in enumerate(jax.tree.leaves(self._blank)):
            rows = [kept[number][0] for kept in self._kept.values()]
            values = [kept[number][1] for kept in self._kept.values()]
            arrays.append(np.array([len(some) for some in rows], np.int32))
            arrays.append(np.concatenate([np.zeros(0, np.int32), *rows]))
            arrays.append(np.concatenate([np.atleast_1d(blank)[:0], *values]))
        return arrays, self

    @classmethod
    def tree_unflatten(cls, like: "HostMemory", arrays: list[Any]) -> "HostMemory":
        """Undo `tree_flatten`."""
        new = cls(like._blank)
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
