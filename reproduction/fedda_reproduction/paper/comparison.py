"""Compare finished runs: means over seeds, differences over shared seeds, rounds to a threshold."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedda.reports.statistics import Interval, interval
from fedda_reproduction.paper import cells
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import FEDDA, Entry, experiments
from fedda_reproduction.paper.published import OPTIMISERS

ARRIVED = 0.95  # of its end result: there a run counts as converged
TIE = 0.01  # two single runs tie if their results differ by at most this share


def variants(
    entries: Iterable[Entry], finished: Iterable[Cell], rounds: int | None = None
) -> Iterator[tuple[Entry, list[list[Cell]]]]:
    """Yield each entry with its finished runs, sorted by seed.

    Runs that differ in precision or data are separate lists.
    """
    groups: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    for cell in sorted(finished, key=lambda cell: cell.config.seed):
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


def margin(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Interval:
    """Return how much higher one method ends than another, over shared seeds."""
    return interval([end(one) - end(other) for one, other in pairs(ours, theirs)])


def order(ours: Sequence[Cell], theirs: Sequence[Cell]) -> int:
    """Return 1 if one method ends above another, -1 if below, 0 for a tie.

    Several shared seeds tie if the 95 % interval of their difference includes 0.
    """
    if not pairs(ours, theirs):
        return 0
    difference, half = margin(ours, theirs)
    if math.isinf(difference):  # one of them failed
        half = 0.0
    elif half is None:
        half = TIE * max(abs(mean(ours)), abs(mean(theirs)))
    tied = math.isnan(difference) or abs(difference) <= half
    return 0 if tied else int(math.copysign(1, difference))


# ----------------------------------------------------------------------------- columns of a table


class Column(NamedTuple):
    """FedDA with one optimiser in a table of methods, and the best other method that was run."""

    optimiser: str
    ours: Sequence[Cell]
    rival: str | None = None  # None: nothing to compare with
    theirs: Sequence[Cell] = ()
    order: int | None = None  # 1: FedDA is ahead, 0: a tie, -1: behind
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


def columns(table: str, finished: Sequence[Cell]) -> list[Column]:
    """Compare FedDA with the best other method in each column of a table of methods."""
    results, made = runs(table, finished), []
    for optimiser, algorithms in optimiser_columns(table).items():
        fedda = f"fedda-{optimiser}"
        ours = results.get(fedda, [])
        others = [name for name in algorithms if name in results and name != fedda]
        ends = {name: mean(results[name]) for name in others}
        finite = [name for name, value in ends.items() if math.isfinite(value)]
        if not ours or not finite:
            made.append(Column(optimiser=optimiser, ours=ours))
            continue
        sign = 1 if ours[0].content["higher_is_better"] else -1
        rival = max(finite, key=lambda name: sign * ends[name])
        # A failed run is behind, also where lower is better.
        failed = not math.isfinite(mean(ours))
        place = -1 if failed else sign * order(ours, results[rival])
        missing = sum(name not in results for name in algorithms)
        column = Column(optimiser=optimiser, ours=ours, rival=rival, theirs=results[rival])
        made.append(column._replace(order=place, missing=missing))
    return made


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
