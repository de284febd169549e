"""Tests of differences between methods: Welch, Holm's correction and equivalence (TOST).

Each seed is one value of a method. Seeds of different methods are not paired: they share their
cohorts, but their results hardly correlate, and an interval of so few pairs depends on chance.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.05


class Finding(enum.StrEnum):
    """What a comparison of two methods says."""

    AHEAD = "ahead"
    BEHIND = "behind"
    EQUIVALENT = "equivalent"
    UNDECIDED = "undecided"


class Difference(NamedTuple):
    """A difference of means, ours minus theirs, by Welch's test; NaN where it cannot be tested."""

    mean: float
    low: float  # the ends of its 95 % interval
    high: float
    p: float  # two-sided, for no difference


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Compare two means by Welch's test, in which the variances may differ.

    A method with a single value has no interval. Values that do not vary at all differ for certain,
    or not at all.
    """
    mean = math.fsum(ours) / len(ours) - math.fsum(theirs) / len(theirs)
    if min(len(ours), len(theirs)) < 2 or not math.isfinite(mean):
        return Difference(mean, math.nan, math.nan, math.nan)
    if np.ptp(ours) == 0 == np.ptp(theirs):
        return Difference(mean, mean, mean, float(mean == 0))
    test = _test(ours, theirs)
    low, high = test.confidence_interval(1 - LEVEL)
    return Difference(mean, float(low), float(high), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests by Holm. NaN is not counted as a test."""
    tested = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, highest = [math.nan] * len(p_values), 0.0
    for before, (p, place) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - before) * p))
        adjusted[place] = highest
    return adjusted


def equivalence(ours: Sequence[float], theirs: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided tests (TOST) that the means differ by the margin or more.

    If it is small, the methods are equivalent: they differ by less than the margin.
    """
    mean, low, _, _ = welch(ours, theirs)
    if math.isnan(low):
        return math.nan
    if np.ptp(ours) == 0 == np.ptp(theirs):
        return float(abs(mean) >= margin)
    above = _test(np.add(ours, margin), theirs, alternative="greater")
    below = _test(np.subtract(ours, margin), theirs, alternative="less")
    return float(max(above.pvalue, below.pvalue))


def finding(mean: float, p: float, p_equivalent: float = math.nan) -> Finding:
    """Return what a difference, higher being better, says, given its (adjusted) p-values.

    A difference that is significant is not called equivalent, however small it is.
    """
    if p < LEVEL:
        return Finding.AHEAD if mean > 0 else Finding.BEHIND
    return Finding.EQUIVALENT if p_equivalent < LEVEL else Finding.UNDECIDED


def _test(ours: Any, theirs: Any, alternative: str = "two-sided") -> Any:
    from scipy import stats  # slow to load, and few commands need it

    return stats.ttest_ind(ours, theirs, equal_var=False, alternative=alternative)
