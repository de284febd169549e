"""The claims and the page, from hand-written templates and the numbers of the record."""

import tomllib
from collections.abc import Iterable
from typing import Any

from fedda.reports.html import render
from fedda_reproduction.theory import verdicts
from fedda_reproduction.theory.adam_ratios import NEAR
from fedda_reproduction.theory.deviation import LATE
from fedda_reproduction.theory.verdicts import NEARER, Row, average, fedda_nearer, select


def claims(record: Row) -> list[dict[str, str]]:
    """Return every claim of `claims.toml` with its measured numbers and its verdict."""
    judged = verdicts.verdicts(record)
    written = tomllib.loads(_filled("claims.toml", record))["claims"]
    return [claim | {"verdict": judged[claim["key"]]} for claim in written]


def markdown(record: Row) -> str:
    """Return the page about a record with its claims."""
    return _filled("page.md", record)


def _filled(template: str, record: Row) -> str:
    functions = (average, by_steps, fedda_nearer, interval, listed, percent, select, span)
    values: Row = {function.__name__: function for function in functions}
    constants = {"late": LATE, "near": f"[{NEAR[0]:g}, {NEAR[1]:g}]", "network": None, "f": format}
    values |= constants | record | verdicts.numbers(record)
    return render(template, package="fedda_reproduction.theory", **values)


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.3g} %"


def interval(values: Iterable[float], digits: int = 2) -> str:
    """Format a mean and its confidence interval."""
    return "{} [{}, {}]".format(*(f"{value:.{digits}f}" for value in values))


def span(values: Iterable[float], pattern: str = "{:.2g}") -> str:
    """Format the smallest and the largest of the values."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(pattern.format(end) for end in known[:1] + known[-1:]))


def listed(pattern: str, rows: Iterable[Any]) -> str:
    """Format rows or tuples, separated by commas."""
    return ", ".join(
        pattern.format(**row) if isinstance(row, dict) else pattern.format(*row) for row in rows
    )


def by_steps(rows: list[Row]) -> str:
    """Format how often local momentum is closer for every T, averaged over settings."""
    shares = [(T, *(100 * end for end in average(rows, key))) for T, key in NEARER.items()]
    return listed("{1:.3g} % [{2:.3g}, {3:.3g}] (T = {0})", shares)
