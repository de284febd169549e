"""Statistics of a federation: the sizes of clients, and how their labels differ."""

from typing import NamedTuple

import numpy as np

from fedda.data.federation import Ragged, Shards


class Statistics(NamedTuple):
    """Sizes of clients, and entropies of their labels in bits (None without labels).

    Means over clients leave out clients without labels.
    """

    clients: int
    examples: int
    fewest: int  # examples of a client
    median: float  # examples of a client
    most: int  # examples of a client
    client_entropy: float | None = None  # of a client's labels, mean over clients
    label_entropy: float | None = None  # of all labels together
    distinct_labels: float | None = None  # of a client, mean over clients


def describe(count: np.ndarray, histogram: np.ndarray | None) -> Statistics:
    """Return statistics of clients.

    Args:
        count: The number of examples of each client.
        histogram: The number of examples with each label: `[clients, labels]`. It need not add up
            to `count`, because an example may have no label or several.
    """
    sizes = Statistics(
        clients=len(count),
        examples=int(count.sum(dtype=np.int64)),
        fewest=int(count.min()),
        median=float(np.median(count)),
        most=int(count.max()),
    )
    if histogram is None:
        return sizes
    holders = max(int(histogram.any(axis=1).sum()), 1)
    return sizes._replace(
        client_entropy=float(_entropy(histogram).sum()) / holders,
        label_entropy=float(_entropy(histogram.sum(axis=0, keepdims=True, dtype=np.int64))[0]),
        distinct_labels=int(np.count_nonzero(histogram)) / holders,
    )


def _entropy(histogram: np.ndarray) -> np.ndarray:
    """The entropy of each row, in bits; 0 for an empty row."""
    share = histogram / np.maximum(histogram.sum(axis=1, keepdims=True), 1)
    logarithm = np.log2(share, out=np.zeros(share.shape), where=share > 0)
    entropy: np.ndarray = np.abs((share * logarithm).sum(axis=1))  # the sum is never above 0
    return entropy


def label_histogram(shards: Shards, labels: int) -> np.ndarray:
    """Count the examples of each label of each client: [clients, labels]."""
    start, count = np.asarray(shards.start), np.asarray(shards.count)
    owner, rows = _spread(start, count)
    if isinstance(shards.y, Ragged):  # an example may have any number of labels
        first, length = np.asarray(shards.y.start)[rows], np.asarray(shards.y.length)[rows]
        example, places = _spread(first, length)
        owner, values = owner[example], np.asarray(shards.y.values)[places]
    else:
        values = np.asarray(shards.y)[rows]
    kept = values < labels
    flat = owner[kept] * labels + values[kept].astype(np.int64)
    return np.bincount(flat, minlength=len(count) * labels).reshape(len(count), labels)


def _spread(start: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers start[i] ... start[i] + count[i] - 1 for all i, and the i of each."""
    owner = np.repeat(np.arange(len(count)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return owner, start[owner] + offset
