"""Client memory on the host, for federations whose memory does not fit on the device.

The table on a device has a row for every client of the population. The table on the host has only
the clients that have taken part, and only those rows of their arrays that differ from the initial
memory. A client of a bag-of-words model, for example, changes only the rows of its words.
"""

from typing import Any

import jax
import numpy as np

from fedda.core.tree import PyTree


@jax.tree_util.register_pytree_node_class
class HostMemory:
    """The memories of all clients that have taken part. A pytree, so a checkpoint can hold it."""

    def __init__(self, blank: PyTree) -> None:
        self._blank = jax.tree.map(np.asarray, jax.device_get(blank))  # the initial memory
        # For each client and leaf: the rows that differ from the initial memory, and their values.
        self._kept: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The size of the stored rows in bytes."""
        return sum(array.nbytes for kept in self._kept.values() for pair in kept for array in pair)

    def take(self, clients: np.ndarray) -> PyTree:
        """Return the memories of these clients, stacked. New clients have the initial memory."""
        leaves, structure = jax.tree.flatten(self._blank)
        stacks = [np.repeat(leaf[None], len(clients), axis=0) for leaf in leaves]
        for slot, client in enumerate(clients.tolist()):
            for stack, (rows, values) in zip(stacks, self._kept.get(client, ()), strict=False):
                np.atleast_1d(stack[slot, ...])[rows] = values
        return jax.tree.unflatten(structure, stacks)

    def put(self, clients: np.ndarray, memories: PyTree) -> None:
        """Store the stacked memories of these clients. More rows in the stack are ignored."""
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
        """Return the client ids and, for each leaf, the row counts, the rows and their values."""
        arrays = [np.array(list(self._kept), np.int32)]
        for number, blank in enumerate(jax.tree.leaves(self._blank)):
            rows = [kept[number][0] for kept in self._kept.values()]
            values = [kept[number][1] for kept in self._kept.values()]
            arrays.append(np.array([len(numbers) for numbers in rows], np.int32))
            arrays.append(np.concatenate([np.zeros(0, np.int32), *rows]))
            arrays.append(np.concatenate([np.atleast_1d(blank)[:0], *values]))
        return arrays, self

    @classmethod
    def tree_unflatten(cls, like: "HostMemory", arrays: list[Any]) -> "HostMemory":
        """Return the memory from the arrays of `tree_flatten`."""
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
