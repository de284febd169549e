"""Compare finished runs: means over seeds, differences by Welch's test, rounds to a threshold."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedda_reproduction.inference import Difference, Finding, equivalence, finding, holm, welch
from fedda_reproduction.paper import cells
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import FEDDA, METHOD_TABLES, Entry, experiments
from fedda_reproduction.paper.published import OPTIMISERS

ARRIVED = 0.95  # of its end result: there a run counts as converged
MARGIN = 0.01  # methods are equivalent if their results differ by less than this share
# The values that runs must reach (F5), because the paper's "turning points" are not defined. A
# method that does not reach the lowest of them did not learn.
THRESHOLDS = {
    "table2": (0.30, 0.35, 0.40, 0.45),
    "table3": (0.75, 0.80, 0.82, 0.84),
    "table5": (0.2, 0.4, 0.6),
}


def variants(
    entries: Iterable[Entry], finished: Iterable[Cell], rounds: int | None = None
) -> Iterator[tuple[Entry, list[list[Cell]]]]:
    """Yield each entry with its finished runs, sorted by seed.

    Runs that differ in precision or data are separate lists. Runs of an earlier version of their
    algorithm are left out.
    """
    groups: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    every = (cell for cell in finished if not cell.outdated)
    for cell in sorted(every, key=lambda cell: cell.config.seed):
        kinds = groups.setdefault(cell.group, {})
        kinds.setdefault((cell.config.precision, cell.data or ""), []).append(cell)
    for entry in entries:
        kinds = groups.get(cells.group(entry.resolved(rounds=rounds)), {})
        yield entry, [kinds[key] for key in sorted(kinds)]


def runs(
    name: str,
    finished: Iterable[Cell],
    key: Callable[[Entry], Any] = lambda entry: entry.algorithm,
) -> dict[Any, list[Cell]]:
    """Return the finished runs of an experiment. Of several precisions, the one with most seeds."""
    entries = experiments()[name].entries
    return {
        key(entry): max(lists, key=len) for entry, lists in variants(entries, finished) if lists
    }


def end(cell: Cell, at: int | None = None) -> float:
    """Return the result of a run, or minus infinity if it is not finite."""
    value = cell.mean(at)
    return -math.inf if value is None else value


def mean(seeds: Sequence[Cell], at: int | None = None) -> float:
    """Return the mean result over seeds."""
    return math.fsum(end(cell, at) for cell in seeds) / len(seeds)


def best(results: Mapping[str, list[Cell]], ours: bool) -> str | None:
    """Return the algorithm with the highest result: a FedDA if `ours`, or else another method."""
    names = [name for name in results if (name in FEDDA) == ours]
    return max(names, key=lambda name: mean(results[name]), default=None)


def pairs(ours: Sequence[Cell], theirs: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return the pairs of runs with the same seed and data, so with the same start and cohorts."""
    other = {(cell.config.seed, cell.data): cell for cell in theirs}
    keys = [(cell.config.seed, cell.data) for cell in ours]
    return [(cell, other[key]) for cell, key in zip(ours, keys, strict=True) if key in other]


def margin(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Difference:
    """Return how much higher one method ends than another. A failed run is minus infinity."""
    return welch(list(map(end, ours)), list(map(end, theirs)))


def compared(ours: Sequence[Cell], theirs: Sequence[Cell], p: float | None = None) -> Finding:
    """Return whether one method ends above another; `p` is that of `margin` by default.

    They are equivalent if they differ by less than `MARGIN` of the higher result (TOST). One that
    failed is behind one that did not.
    """
    difference = margin(ours, theirs)
    if math.isinf(difference.mean):
        return finding(difference.mean, 0.0)
    within = MARGIN * max(abs(mean(ours)), abs(mean(theirs)))
    tost = equivalence(list(map(end, ours)), list(map(end, theirs)), within)
    return finding(difference.mean, difference.p if p is None else p, tost)


# ----------------------------------------------------------------------------- columns of a table


class Column(NamedTuple):
    """FedDA with one optimiser in a table of methods, and the best other method that was run."""

    table: str
    optimiser: str
    ours: Sequence[Cell]
    rival: str | None = None  # None: nothing to compare with
    theirs: Sequence[Cell] = ()
    difference: Difference | None = None  # positive: FedDA is better
    p: float = math.nan  # of the difference, by Holm over all columns
    finding: Finding | None = None  # None: not compared, or neither of the two learned
    missing: int = 0  # methods that were not run


def optimiser_columns(name: str) -> dict[str, list[str]]:
    """Return the algorithms of a table of methods, by the paper's columns.

    A method without an optimiser is in every column.
    """
    names = [entry.algorithm for entry in experiments()[name].entries]
    return {
        optimiser: [name for name in names if name.partition("-")[2] in ("", optimiser)]
        for optimiser in OPTIMISERS
    }


def columns(finished: Sequence[Cell]) -> list[Column]:
    """Compare FedDA with the best other method in each column of the tables of methods.

    Holm's correction is over all columns of all tables in which a method learned.
    """
    made = [column for table in METHOD_TABLES for column in _columns(table, finished)]
    adjusted = holm([math.nan if each.difference is None else each.difference.p for each in made])
    return [
        column if column.difference is None else column._replace(p=p, finding=_finding(column, p))
        for column, p in zip(made, adjusted, strict=True)
    ]


def _columns(table: str, finished: Sequence[Cell]) -> Iterator[Column]:
    results = runs(table, finished)
    for optimiser, algorithms in optimiser_columns(table).items():
        fedda = f"fedda-{optimiser}"
        ours = results.get(fedda, [])
        others = [name for name in algorithms if name in results and name != fedda]
        ends = {name: mean(results[name]) for name in others}
        finite = [name for name, value in ends.items() if math.isfinite(value)]
        column = Column(table, optimiser, ours)
        if not ours or not finite:
            yield column
            continue
        sign = _sign(ours)
        rival = max(finite, key=lambda name: sign * ends[name])
        missing = sum(name not in results for name in algorithms)
        column = column._replace(rival=rival, theirs=results[rival], missing=missing)
        learned = max(mean(ours), ends[rival]) >= THRESHOLDS.get(table, (-math.inf,))[0]
        yield column._replace(difference=_better(ours, column.theirs)) if learned else column


def _sign(seeds: Sequence[Cell]) -> int:
    return 1 if seeds[0].content["higher_is_better"] else -1


def _better(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Difference:
    """Return by how much the first method is better. One that failed is worse by infinity."""
    found = margin(ours, theirs)
    if _sign(ours) > 0 or math.isinf(found.mean):
        return found
    return Difference(-found.mean, -found.high, -found.low, found.p)


def _finding(column: Column, p: float) -> Finding:
    assert column.difference is not None
    found = compared(column.ours, column.theirs, p)
    if found in (Finding.AHEAD, Finding.BEHIND):
        return Finding.AHEAD if column.difference.mean > 0 else Finding.BEHIND
    return found


# ------------------------------------------------------------------------------ single measures


def reached(cell: Cell, threshold: float) -> float:
    """Return the round in which a metric reached a threshold, interpolated between evaluations."""
    points = [(row["round"], row[cell.content["metric"]]) for row in cell.rows()]
    points = [(number, value) for number, value in points if value is not None]
    first = next((i for i, (_, value) in enumerate(points) if value >= threshold), None)
    if first is None:
        return math.inf
    (x0, y0), (x1, y1) = points[max(0, first - 1)], points[first]
    return max(1.0, x1 if first == 0 else x0 + (threshold - y0) / (y1 - y0) * (x1 - x0))


def saved(ours: Cell, theirs: Cell, threshold: float | None = None) -> float:
    """Return the share of rounds saved until a threshold, or until 0.95 of each run's own result.

    A run that never reaches it counts with all its rounds.
    """
    rounds = [
        min(reached(run, ARRIVED * end(run) if threshold is None else threshold), run.config.rounds)
        for run in (ours, theirs)
    ]
    return 1 - rounds[0] / rounds[1]


def same_order(paper: Sequence[float], ours: Sequence[float]) -> tuple[int, int]:
    """Count the pairs of numbers with the same order as in the paper, and all ordered pairs.

    If our best number is below half of the paper's, all runs failed, and no pair agrees.
    """
    both = list(zip(paper, ours, strict=True))
    ordered = [(x, y) for x, y in itertools.combinations(both, 2) if x[0] != y[0]]
    agree = sum((x[0] - y[0]) * (x[1] - y[1]) > 0 for x, y in ordered)
    return 0 if max(ours) < max(paper) / 2 else agree, len(ordered)


def late_spread(seeds: Sequence[Cell], rounds: int) -> float:
    """Return the standard deviation of the metric over the last rounds, averaged over runs."""
    spreads = []
    for cell in seeds:
        first = cell.config.rounds - rounds
        late = [row[cell.content["metric"]] for row in cell.rows() if row["round"] > first]
        known = [value for value in late if value is not None]
        spreads.append(float(np.std(known)) if len(known) > 1 else math.nan)
    return float(np.mean(spreads))
