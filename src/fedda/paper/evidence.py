"""What the cells hold of each experiment, as the verdicts need it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedda.paper import cells as stored
from fedda.paper import experiments, tables
from fedda.paper.cells import Cell
from fedda.paper.experiments import Entry
from fedda.paper.published import OPTIMISERS
from fedda.paper.tables import Line
from fedda.results import Interval, interval

OWN = 0.95  # of what a run itself came to: then it has arrived


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
    history = cell.content["history"]
    for number, value in zip(history["round"], history[cell.content["metric"]], strict=True):
        if value is not None and value >= threshold:
            return float(max(1, number))
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


def runs(
    name: str,
    found: Sequence[Cell],
    key: Callable[[Entry], Any] = lambda entry: entry.algorithm,
) -> dict[Any, list[Cell]]:
    """The runs of an experiment's entries, each entry's lowest seed first, if there are some."""
    by_group: dict[str, list[Cell]] = {}
    for cell in sorted(found, key=lambda cell: cell.config.seed):
        by_group.setdefault(stored.group(cell.config), []).append(cell)
    own = {
        key(entry): by_group.get(stored.group(tables.resolved(entry, None)), [])
        for entry in experiments.experiments()[name].entries
    }
    return {entry: cells for entry, cells in own.items() if cells}


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


def pairs(ours: Sequence[Cell], theirs: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """The runs of shared seeds: a seed stands for a start and for cohorts, which both share."""
    other = {cell.config.seed: cell for cell in theirs}
    return [(cell, other[cell.config.seed]) for cell in ours if cell.config.seed in other]


def margin(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Interval:
    """By how much one method ends above another, over the seeds that both were run with."""
    return interval([end(own) - end(other) for own, other in pairs(ours, theirs)])


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


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, equal values sharing the mean of theirs."""
    array = np.asarray(values)
    return np.array([(array < one).sum() + ((array == one).sum() + 1) / 2 for one in array])


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; not a number where one side is constant."""
    a, b = (ranks - ranks.mean() for ranks in (_ranks(x), _ranks(y)))
    below = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / below if below else math.nan


def late_spread(cell: Cell, rounds: int) -> float:
    """The standard deviation of the metric over the last rounds."""
    history = cell.content["history"]
    late = [
        value
        for number, value in zip(history["round"], history[cell.content["metric"]], strict=True)
        if number > cell.config.rounds - rounds and value is not None
    ]
    return float(np.std(late)) if len(late) > 1 else math.nan
