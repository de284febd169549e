"""Welch's test, Holm's correction and equivalence, against their formulas and worked examples."""

import math

import numpy as np
import pytest
from scipy import stats

from fedda_reproduction.inference import Finding, equivalence, finding, holm, welch

OURS, THEIRS = [0.53, 0.50, 0.56], [0.40, 0.44, 0.41, 0.43]


def by_hand(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the mean, its standard error and the degrees of freedom, by Welch's formulas."""
    squares = [np.var(side, ddof=1) / len(side) for side in (ours, theirs)]
    freedom = sum(squares) ** 2 / sum(
        s**2 / (len(side) - 1) for s, side in zip(squares, (ours, theirs), strict=True)
    )
    return float(np.mean(ours) - np.mean(theirs)), math.sqrt(sum(squares)), float(freedom)


def test_welch_is_its_formula() -> None:
    mean, error, freedom = by_hand(OURS, THEIRS)
    half = stats.t.ppf(0.975, freedom) * error
    expected = (mean, mean - half, mean + half, 2 * stats.t.sf(abs(mean) / error, freedom))
    assert welch(OURS, THEIRS) == pytest.approx(expected)
    assert welch(THEIRS, OURS).mean == pytest.approx(-mean)


def test_an_interval_excludes_zero_exactly_if_p_is_below_the_level() -> None:
    generator = np.random.default_rng(0)
    for shift in np.linspace(0, 3, 40):
        ours, theirs = generator.normal(shift, 1, 3), generator.normal(0, 2, 5)
        found = welch(list(ours), list(theirs))
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [([1.0], [0.0, 0.1], math.nan), ([1.0, 1.0], [0.0, 0.0], 0), ([1.0, 1.0], [1.0, 1.0], 1)],
)
def test_single_and_equal_values(ours: list[float], theirs: list[float], p: float) -> None:
    assert welch(ours, theirs).p == pytest.approx(p, nan_ok=True)


def test_a_failed_run_cannot_be_tested() -> None:
    assert math.isnan(welch([0.1, -math.inf], [0.2, 0.3]).p)


def test_holm_is_the_step_down_rule() -> None:
    # Holm (1979): the smallest of four times 4, the next times 3; never below the one before.
    expected = [0.03, 0.06, 0.06, 0.02]
    assert holm([0.01, 0.03, 0.04, 0.005]) == pytest.approx(expected)
    assert holm([0.9, math.nan, 0.5]) == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert holm([]) == []


def test_equivalence_is_the_ninety_percent_interval_within_the_margin() -> None:
    mean, error, freedom = by_hand(OURS, THEIRS)
    edge = mean + stats.t.ppf(0.95, freedom) * error
    assert equivalence(OURS, THEIRS, edge) == pytest.approx(0.05)
    assert equivalence(OURS, THEIRS, 2 * edge) < 0.05 < equivalence(OURS, THEIRS, edge / 2)
    assert math.isnan(equivalence([1.0], THEIRS, 1.0))
    assert equivalence([1.0, 1.0], [1.0, 1.0], 0.1) == 0


def test_findings() -> None:
    assert finding(0.1, 0.01) == Finding.AHEAD
    assert finding(-0.1, 0.01, 0.01) == Finding.BEHIND
    assert finding(0.1, 0.2, 0.01) == Finding.EQUIVALENT
    assert finding(0.1, 0.2, 0.2) == finding(0.1, math.nan) == Finding.UNDECIDED
