"""What the cells hold of each experiment, as the verdicts need it."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedda.report.statistics import Interval, interval
from fedda_reproduction.paper import cells as stored
from fedda_reproduction.paper import experiments, tables
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import Entry
from fedda_reproduction.paper.published import OPTIMISERS
from fedda_reproduction.paper.tables import Line

OWN = 0.95  # of what a run itself came to: then it has arrived
SAME = 0.01  # of what runs came to: single ones that are no further apart may be in any order


def lines_of(name: str, found: Sequence[Cell]) -> dict[str, Line]:
    """The lines of an experiment by label; of several for one run, that of the most seeds."""
    lines: dict[str, Line] = {}
    for line in tables.lines(experiments.experiments()[name], found):
        if line.label not in lines or line.seeds > lines[line.label].seeds:
            lines[line.label] = line
    return lines


def mean(line: Line | None) -> float:
    """What a run came to; not a number where it was not run, or did not stay finite."""
    return math.nan if line is None or line.ours is None else line.ours.mean


def columns(name: str) -> dict[str, list[str]]:
    """The algorithms of a table of methods, in the columns that the paper has."""
    cells = experiments.experiments()[name].entries
    plain = [cell.algorithm for cell in cells if "-" not in cell.algorithm]
    return {
        optimiser: plain + [one.algorithm for one in cells if one.algorithm.endswith(optimiser)]
        for optimiser in OPTIMISERS
    }


def reached(cell: Cell, threshold: float) -> float:
    """When a threshold was crossed, on straight lines between evaluations."""
    history = cell.content["history"]
    before: tuple[float, float] | None = None
    for number, value in zip(history["round"], history[cell.content["metric"]], strict=True):
        if value is None:
            continue
        if value >= threshold:
            if before is None:
                return float(max(1, number))
            share = (threshold - before[1]) / (value - before[1])
            return max(1.0, before[0] + share * (number - before[0]))
        before = (number, value)
    return math.inf


def saved(ours: Cell, theirs: Cell, threshold: float | None = None) -> float:
    """The share of rounds saved to a threshold, or to most of what each run itself came to.

    Who never arrives is counted as arriving at the end.
    """
    at = [
        min(reached(each, OWN * end(each) if threshold is None else threshold), each.config.rounds)
        for each in (ours, theirs)
    ]
    return 1 - at[0] / at[1]


def runs_of(entries: Iterable[Entry], found: Iterable[Cell]) -> list[tuple[Entry, list[Cell]]]:
    """Each entry with its finished runs, by seed; those without any are left out.

    Of runs that differ in precision or data, those of the most seeds.
    """
    by_group: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    for cell in sorted(found, key=lambda one: one.config.seed):
        variants = by_group.setdefault(cell.group, {})
        variants.setdefault((cell.config.precision, cell.data or ""), []).append(cell)
    made = []
    for entry in entries:
        if variants := by_group.get(stored.group(tables.resolved(entry, None)), {}):
            made.append((entry, max((variants[key] for key in sorted(variants)), key=len)))
    return made


def runs(
    name: str,
    found: Sequence[Cell],
    key: Callable[[Entry], Any] = lambda entry: entry.algorithm,
) -> dict[Any, list[Cell]]:
    """The runs of an experiment's entries, as `runs_of` chooses them."""
    entries = experiments.experiments()[name].entries
    return {key(entry): own for entry, own in runs_of(entries, found)}


def first_runs(name: str, found: Sequence[Cell]) -> dict[str, Cell]:
    """For each algorithm of an experiment, the run of the lowest seed, if there is one."""
    return {algorithm: own[0] for algorithm, own in runs(name, found).items()}


def end(cell: Cell) -> float:
    """What a run came to; minus infinity where it did not stay finite."""
    value = cell.mean()
    return -math.inf if value is None else value


def over_seeds(own: Sequence[Cell]) -> float:
    """The mean of what runs came to."""
    return math.fsum(map(end, own)) / len(own)


def best(runs: Mapping[str, list[Cell]], ours: bool) -> str | None:
    """The algorithm with the highest end: of FedDA's, if `ours`, or else of the others."""
    names = [name for name in runs if (name in experiments.FEDDA) == ours]
    return max(names, key=lambda name: over_seeds(runs[name]), default=None)


def pairs(ours: Sequence[Cell], theirs: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """The runs of shared seeds and data: a seed stands for a start and for cohorts."""
    other = {(cell.config.seed, cell.data): cell for cell in theirs}
    keys = [(cell.config.seed, cell.data) for cell in ours]
    return [(cell, other[key]) for cell, key in zip(ours, keys, strict=True) if key in other]


def margin(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Interval:
    """By how much one method ends above another, over the seeds that both were run with."""
    return interval([end(own) - end(other) for own, other in pairs(ours, theirs)])


def order(ours: Sequence[Cell], theirs: Sequence[Cell]) -> int:
    """1 where one method ends above another, -1 where below, 0 where they cannot be told apart.

    Of several shared seeds by the interval of 95 %; of one, by a hundredth of what they come to.
    """
    if not pairs(ours, theirs):
        return 0
    mean, half = margin(ours, theirs)
    if math.isinf(mean):  # one of them failed
        half = 0.0
    elif half is None:
        half = SAME * max(abs(over_seeds(ours)), abs(over_seeds(theirs)))
    return 0 if math.isnan(mean) or abs(mean) <= half else int(math.copysign(1, mean))


def signed(margin: Interval) -> str:
    half = "" if margin.half is None else f" ± {margin.half:.2g}"
    return f"{margin.mean:+.2g}{half}"


def series(
    name: str, found: Sequence[Cell], setting: Callable[[Entry], Any]
) -> dict[tuple[str, str], list[tuple[Any, float]]]:
    """By task and algorithm, what was run of an experiment that varies one setting.

    Runs for which the setting is None are left out.
    """
    lines = lines_of(name, found)
    series: dict[tuple[str, str], list[tuple[Any, float]]] = {}
    for cell in experiments.experiments()[name].entries:
        if (at := setting(cell)) is None or not lines[cell.label].seeds:
            continue
        if not math.isnan(value := mean(lines[cell.label])):
            series.setdefault((cell.task, cell.algorithm), []).append((at, value))
    return {key: sorted(points) for key, points in series.items()}


def alike(paper: Sequence[float], ours: Sequence[float]) -> tuple[int, int]:
    """In how many pairs ours are in the paper's order, of those that are not equal in the paper.

    In none where our best is under half of the paper's: then all runs failed, and have no order.
    """
    both = list(zip(paper, ours, strict=True))
    pairs = [(x, y) for x, y in itertools.combinations(both, 2) if x[0] != y[0]]
    agree = sum((x[0] - y[0]) * (x[1] - y[1]) > 0 for x, y in pairs)
    return 0 if max(ours) < max(paper) / 2 else agree, len(pairs)


def late_spread(cell: Cell, rounds: int) -> float:
    """The standard deviation of the metric over the last rounds."""
    history = cell.content["history"]
    late = [
        value
        for number, value in zip(history["round"], history[cell.content["metric"]], strict=True)
        if number > cell.config.rounds - rounds and value is not None
    ]
    return float(np.std(late)) if len(late) > 1 else math.nan
