"""Straight lines through logarithms, and how sure a mean over random problems is."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Floats = npt.NDArray[np.float64]


class Lines(NamedTuple):
    """For every row, the least-squares slope and the mean squared residual."""

    slope: Floats
    residual: Floats


def lines(x: Any, y: Any) -> Lines:
    """The fits of a + slope x to each row of y, with one x for all."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    centred = x - x.mean()
    slope = (y - y.mean(-1, keepdims=True)) @ centred / (centred @ centred)
    residual = y - y.mean(-1, keepdims=True) - slope[..., None] * centred
    return Lines(slope, np.square(residual).mean(-1))


def power(x: Any, y: Any) -> Lines:
    """The fits of x^slope to each row of y."""
    return lines(np.log(x), np.log(y))


def exponential(x: Any, y: Any) -> Lines:
    """The fits of exp(slope x) to each row of y."""
    return lines(x, np.log(y))


def mean(values: Any) -> list[float]:
    """The mean and its 95 % confidence interval by Student's t, as problems may be few."""
    values = np.asarray(values, float).ravel()
    half = stdtrit(values.size - 1, 0.975) * values.std(ddof=1) / np.sqrt(values.size)
    return [float(values.mean()), float(values.mean() - half), float(values.mean() + half)]


def share(hits: Any) -> list[float]:
    """The share of hits and its 95 % interval by Wilson, which is right near 0 and 1 too."""
    hits = np.asarray(hits, bool).ravel()
    n, p, z = hits.size, hits.mean(), 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [float(p), float(max(centre - half, 0)), float(min(centre + half, 1))]


def spread(values: Any) -> list[float]:
    """The 5 %, 50 % and 95 % quantiles, each one of the values, which may be infinite."""
    ordered = np.sort(np.asarray(values, float).ravel())
    return [float(ordered[int(q * (ordered.size - 1) + 0.5)]) for q in (0.05, 0.5, 0.95)]


def first_crossing(ours: Floats, theirs: Floats, start: int = 2) -> Floats:
    """For each row, the first t >= `start` at which ours[t] >= theirs[t]; infinity if never."""
    above = (ours >= theirs)[:, start:]
    return np.where(above.any(-1), above.argmax(-1) + start, np.inf)


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers to so many significant digits, in lists and dictionaries too; no infinities."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [rounded(each, digits) for each in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
