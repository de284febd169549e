"""Power laws and exponential rates fitted to curves, and intervals over random problems."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedda.reports.statistics import interval

Floats = npt.NDArray[np.float64]


class Lines(NamedTuple):
    """Least-squares slope and mean squared residual of every row."""

    slope: Floats
    residual: Floats


def lines(x: Any, y: Any) -> Lines:
    """Fit a + slope x to each row of y, with one x for all rows."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    x, y = x - x.mean(), y - y.mean(-1, keepdims=True)
    slope = y @ x / (x @ x)
    return Lines(slope=slope, residual=np.square(y - slope[..., None] * x).mean(-1))


def power(x: Any, y: Any) -> Lines:
    """Fit a x^slope to each row of y."""
    return lines(np.log(x), np.log(y))


def exponential(x: Any, y: Any) -> Lines:
    """Fit a exp(slope x) to each row of y."""
    return lines(x, np.log(y))


def mean(values: Sequence[float] | Floats) -> list[float]:
    """Return the mean of the values and its 95 % interval by Student's t: [mean, low, high]."""
    centre, half = interval([float(value) for value in values])
    return [centre, centre - (half or 0.0), centre + (half or 0.0)]


def share(hits: Any) -> list[float]:
    """Return the share of hits and its 95 % interval by Wilson: [share, low, high].

    Wilson's interval is right near 0 and 1 too.
    """
    hits = np.asarray(hits, bool).ravel()
    n, p, z = hits.size, hits.mean(), 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [float(p), float(max(centre - half, 0)), float(min(centre + half, 1))]


def quantiles(values: Any) -> list[float]:
    """Return the 5 %, 50 % and 95 % quantiles, each one of the values, which may be infinite."""
    ordered = np.sort(np.asarray(values, float).ravel())
    return [float(ordered[int(q * (ordered.size - 1) + 0.5)]) for q in (0.05, 0.5, 0.95)]


def first_crossing(ours: Floats, theirs: Floats, start: int = 2) -> Floats:
    """Return for each row the first t >= `start` with ours[t] >= theirs[t], or infinity."""
    above = (ours >= theirs)[:, start:]
    return np.where(above.any(-1), above.argmax(-1) + start, np.inf)
