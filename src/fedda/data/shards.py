"""A federation's examples: one flat array on the device, and where each client's part begins.

Nothing is padded, whatever the clients' sizes; batches are gathered by row number inside the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedda.errors import InputError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "y", "start", "count"),
    meta_fields=("max_count",),
)
@dataclass(frozen=True)
class Shards:
    """All clients' examples, one after the other; a single shard has scalar `start`, `count`."""

    x: Any
    y: Any
    start: Array  # the row of each client's first example
    count: Array
    max_count: int  # of the whole federation: the only size that is known while compiling

    @property
    def num_clients(self) -> int:
        return int(self.count.shape[0])

    def shard(self, client: Array | int) -> "Shards":
        """One client's view; an id past the last is an absent client, with no examples."""
        client = jnp.asarray(client)
        count = jnp.where(client < self.num_clients, self.count[client], 0)
        return replace(self, start=self.start[client], count=count)

    def rows(self, numbers: Array) -> tuple[Any, Any]:
        """One client's examples with these numbers, counted from its first."""
        where = self.start + numbers
        return jax.tree.map(lambda leaf: leaf[where], (self.x, self.y))


Shard = Shards


def from_partition(x: np.ndarray, y: np.ndarray, partition: Sequence[np.ndarray]) -> Shards:
    """Shards from arrays over all examples and, for each client, the rows it owns."""
    return from_clients([(x[rows], y[rows]) for rows in partition])


def from_clients(clients: Sequence[tuple[Any, Any]]) -> Shards:
    """Shards from one pair of arrays `(x, y)` a client, checked: this is the library's boundary."""
    if len(clients) == 0:
        raise InputError("clients must be a list of at least one pair (x, y) of arrays, got none.")
    pairs = [_checked_client(client, number) for number, client in enumerate(clients)]
    first_x, first_y = pairs[0]
    for number, (x, y) in enumerate(pairs):
        for name, got, expected in (("x", x, first_x), ("y", y, first_y)):
            if got.shape[1:] != expected.shape[1:]:
                raise InputError(
                    f"{name} of client {number} has examples of shape {got.shape[1:]}, but those "
                    f"of client 0 have shape {expected.shape[1:]}. All clients need the same "
                    "shape: pad or crop before."
                )
    count = np.array([len(y) for _, y in pairs], np.int32)
    if count.sum() == 0:
        raise InputError(f"all {len(pairs)} clients are empty; at least one example is needed.")
    return Shards(
        x=jnp.asarray(np.concatenate([x for x, _ in pairs])),
        y=jnp.asarray(np.concatenate([y for _, y in pairs])),
        start=jnp.asarray(np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int32)),
        count=jnp.asarray(count),
        max_count=int(count.max()),
    )


def _checked_client(client: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(client, (tuple, list)) or len(client) != 2:
        raise InputError(
            f"client {number} must be a pair (x, y) of arrays, got {type(client).__name__}."
        )
    arrays = {}
    for name, values in zip(("x", "y"), client, strict=True):
        try:
            arrays[name] = np.asarray(values)
        except ValueError:
            arrays[name] = np.asarray(None, dtype=object)
        if arrays[name].dtype == object or arrays[name].ndim == 0:
            raise InputError(
                f"{name} of client {number} is ragged or not numeric; expected one array whose "
                "first axis counts examples. Pad or crop its rows to one length."
            )
        check_finite(arrays[name], f"{name} of client {number}")
    x, y = arrays["x"], arrays["y"]
    if len(x) != len(y):
        raise InputError(f"client {number} has {len(x)} rows in x but {len(y)} in y.")
    return x, y


def check_finite(values: np.ndarray, name: str) -> None:
    """Refuses NaN and infinity, naming the first row that has one."""
    if not np.issubdtype(values.dtype, np.floating):
        return
    finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        raise InputError(
            f"{name} has a non-finite value in row {int(np.argmin(finite))}. "
            "Remove the row or replace the value before training."
        )


def check_labels(shards: Shards, num_classes: int, test: tuple[Any, Any] | None) -> None:
    """Refuses what is no class label in 0..num_classes-1, naming the client and the row."""
    labels, start, count = (np.asarray(each) for each in (shards.y, shards.start, shards.count))
    parts = [("the test set", np.asarray(test[1]))] if test is not None else []
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise InputError(
            "y must hold one whole number an example, the class label, for cross_entropy; got "
            f"{labels.dtype} of shape {labels.shape[1:]} an example."
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
