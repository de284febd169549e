"""Compare the uploads of a phase with each other, to limit what a single client can do.

All limits are multiples of a median over the replies of this round and the accepted replies before,
which a single client hardly changes. The norms are taken for each part of an upload. A part is a
copy of the model, such as FedDA's sum of gradients or its momentum. It has two norms:

- The norm of the mean, after division by the client's weight: how far this client wants to move. A
  reply far above the median is refused.
- The norm of the sum, as it is uploaded: how much the client adds to the total. If it is too large,
  the weight of the client is lowered: its mean stays the same, but counts for less.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedda.core.local import is_counter, is_weighted
from fedda.core.tree import PyTree
from fedda.flower.settings import Settings

FEWEST = 3  # the fewest replies whose median a single malicious client cannot choose
RECENT = 20  # the number of earlier replies to compare with


class Size(NamedTuple):
    """The size of an upload.

    Attributes:
        norm: The norm of all entries except counters, after division by the weights.
        means: The norm of each part, after division by its weight.
        sums: The norm of each part that has a weight, as it is uploaded.
        rest: The norm of all numbers that are neither part nor counter, such as losses.
        counters: The counters, after division by the weights.
        weights: The weights, and the number of processed examples.
    """

    norm: float
    means: list[float]
    sums: list[float]
    rest: float
    counters: list[float]
    weights: list[float]


class Comparison:
    """The limits of one phase. They follow the replies that were accepted."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.accepted = deque[Size](maxlen=RECENT)

    def faults(self, sizes: Mapping[int, Size], model_norm: float) -> dict[int, str]:
        """Return why replies are refused, by client.

        Losses may be as large as the norm of the model, because large ratios are usual for them. A
        counter is a number of local steps, or at most 1.
        """
        norm_ratio, ratio = self.settings.most_norm_ratio, self.settings.most_weight_ratio
        known = [*self.accepted, *sizes.values()]
        if not known:
            return {}
        means = _limits([size.means for size in known], norm_ratio)
        (rest,) = np.maximum(model_norm, _limits([[size.rest] for size in known], norm_ratio))
        counters = np.maximum(1.0, _limits([size.counters for size in known], ratio))
        found = {}
        for client, size in sizes.items():
            possible = np.less_equal(0, size.counters) & np.less_equal(size.counters, counters)
            if np.greater(size.means, means).any():
                found[client] = f"the norms of its parts are {size.means}, limits {means.tolist()}"
            elif size.rest > rest:
                found[client] = f"the norm of its other numbers is {size.rest:g}, limit {rest:g}"
            elif not possible.all():
                limits = f"limits 0 to {counters.tolist()}"
                found[client] = f"its counters are {size.counters}, {limits}"
        return found

    def lowered(self, sizes: Mapping[int, Size]) -> dict[int, list[float]]:
        """Return the weights with which the replies count, by client."""
        settings, known = self.settings, [*self.accepted, *sizes.values()]
        ratio = settings.most_weight_ratio if settings.most_weight is None else None
        weights = _limits([size.weights for size in known], ratio)
        sums = _limits([size.sums for size in known], settings.most_sum_ratio)
        found = {}
        for client, size in sizes.items():
            excess = np.divide(size.sums, sums).max(initial=1.0)
            found[client] = np.minimum(np.divide(size.weights, excess), weights).tolist()
        return found


def _limits(rows: Sequence[Sequence[float]], ratio: float | None) -> Any:
    """Return `ratio` times the median of each column, or infinity if it has too few values.

    Zeros are left out: a client without a gradient says nothing about the size of the others.
    """
    table = np.asarray(rows, np.float64)
    limits = np.full(table.shape[1:], np.inf)
    for column, values in enumerate(table.T):
        positive = values[values > 0]
        if ratio is not None and len(positive) >= FEWEST:
            limits[column] = ratio * np.median(positive)
    return limits


def measure(upload: PyTree, params: PyTree) -> Size:
    """Return the size of an upload, of an algorithm whose model has these parameters."""
    model, weights = _form(params), list[float]()
    means, sums, counters, rest = list[float](), list[float](), list[float](), [0.0]

    def walk(part: PyTree, weight: float | None) -> None:
        if is_counter(part):
            counters.extend(float(count) / (weight or 1.0) for count in jax.tree.leaves(part))
        elif _form(part) == model:
            means.append(norm_of(part) / (weight or 1.0))
            if weight is not None:
                sums.append(norm_of(part))
        elif is_weighted(part):
            weights.append(float(part.weight))
            walk(part.sum, weights[-1])
        elif jax.tree_util.treedef_is_leaf(jax.tree.structure(part)):
            rest.append(norm_of(part) / (weight or 1.0))
        else:
            for child in jax.tree.leaves(part, is_leaf=lambda x: x is not part):
                walk(child, weight)

    walk(upload, None)
    whole = float(np.linalg.norm([*means, *rest]))
    return Size(whole, means, sums, float(np.linalg.norm(rest)), counters, weights)


def _form(part: PyTree) -> Any:
    return jax.tree.structure(part), [np.shape(leaf) for leaf in jax.tree.leaves(part)]


def norm_of(part: PyTree) -> float:
    """Return the norm of all entries of the arrays, in double precision."""
    with np.errstate(over="ignore"):  # an infinite norm exceeds every limit
        squares = [np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(part)]
    return float(np.sqrt(sum(squares)))
