"""Statistics of runs over their seeds: intervals, the rows of a table, and curves.

Runs that differ only in their seed share a row and a curve. Rows are sorted, the best first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedda.errors import InputError
from fedda.reports.runs import Evaluation, Run
from fedda.storage.files import EVALUATION

LAST = 5  # evaluations at the end of a run that are averaged
BEST, TIE = "best", "tie"
_NOT_A_METRIC = {*EVALUATION, "train_loss", "loss"}


class Interval(NamedTuple):
    """A mean over seeds; NaN if the result of some seed is not finite."""

    mean: float
    half: float | None  # half the width of its 95 % interval; None for a single seed


class Row(NamedTuple):
    """One algorithm and configuration over its seeds; None where nothing was measured."""

    label: str
    standing: str  # BEST, TIE, or nothing; see `table`
    metric: str
    higher_is_better: bool
    threshold: float | None  # None if no evaluation is finite
    last: int  # the number of evaluations in `mean_of_last`
    seeds: int
    unfinished: int  # the number of seeds whose run has not finished
    final: Interval | None
    mean_of_last: Interval | None
    rounds_to_threshold: Interval | None  # over the seeds that reached it
    megabytes_to_threshold: Interval | None  # up and down, over the seeds that reached it
    reached: int  # the number of seeds that reached the threshold
    train_loss: Interval | None
    megabytes_up: Interval | None
    megabytes_down: Interval | None
    seconds: Interval | None  # without compilation, over the finished seeds
    nonfinite_clients: int  # summed over the seeds
    skipped_rounds: int  # summed over the seeds


class Curve(NamedTuple):
    """Means over seeds with their ranges; NaN where some seed is not finite."""

    label: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def interval(values: Iterable[float | None]) -> Interval:
    """Return the mean of some values and its 95 % interval by Student's t. None counts as NaN."""
    from scipy.special import stdtrit  # slow to load, and few commands need it

    known = [math.nan if value is None else value for value in values]
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Interval(mean, None)
    # Computed from differences, so that equal values have a deviation of exactly 0.
    deviation = float(np.std(np.subtract(known, known[0]), ddof=1))
    quantile = float(stdtrit(len(known) - 1, 0.975))
    return Interval(mean, quantile * deviation / math.sqrt(len(known)))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the difference of two means and its 95 % interval, by Welch's test.

    The interval is None if either side has a single value. Variances may differ.
    """
    from scipy.special import stdtrit

    mean = math.fsum(ours) / len(ours) - math.fsum(theirs) / len(theirs)
    sides = (ours, theirs)
    if min(map(len, sides)) == 1:
        return Interval(mean, None)
    # The squared standard error of each mean, from differences as in `interval`.
    squares = [float(np.var(np.subtract(side, side[0]), ddof=1)) / len(side) for side in sides]
    total = sum(squares)
    if not total > 0:
        return Interval(mean, total)
    spread = sum(s**2 / (len(side) - 1) for s, side in zip(squares, sides, strict=True))
    return Interval(mean, float(stdtrit(total**2 / spread, 0.975)) * math.sqrt(total))


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by their configuration. The label of a group has the settings that differ.

    A run with a label belongs to the group of that label.
    """
    tasks = sorted({run.task for run in runs})
    if len(tasks) > 1:
        raise InputError(
            f"got runs of {len(tasks)} tasks ({', '.join(tasks)}), expected one: "
            "make one report for each task"
        )
    varying = {}
    for name in {run.algorithm for run in runs}:
        every = [set(run.settings.items()) for run in runs if run.algorithm == name]
        varying[name] = sorted(dict(every[0].union(*every) - every[0].intersection(*every)))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        values = ((key, run.settings.get(key, "unset")) for key in varying[run.algorithm])
        details = ", ".join(f"{key}={value}" for key, value in values)
        label = f"{run.algorithm} ({details})" if details else run.algorithm
        groups.setdefault(run.label or label, []).append(run)
    return groups


def measure(runs: Sequence[Run]) -> tuple[str, bool]:
    """Return the name of the task's metric, and whether higher is better."""
    for run in runs:
        if run.summary is not None and {"metric", "higher_is_better"} <= run.summary.keys():
            return str(run.summary["metric"]), bool(run.summary["higher_is_better"])
    # Unfinished runs and runs of `fedda.run` do not say. Metrics are usually better if higher.
    names = list(dict.fromkeys(key for run in runs for row in run.evaluations[:1] for key in row))
    if metrics := [name for name in names if name not in _NOT_A_METRIC]:
        return metrics[0], True
    return "loss" if "loss" in names else "train_loss", False


def table(runs: Sequence[Run], threshold: float | None = None) -> list[Row]:
    """Return one row for each algorithm and configuration, the best first.

    The standing of the first row is BEST. That of another row is TIE if the 95 % interval of its
    difference to the first includes 0. Where one of the two has a single seed, there is no
    interval, and a tie only if both are equal.

    Args:
        runs: Runs of one task.
        threshold: Value of the metric to count the rounds and megabytes to. By default 5 % short of
            the best mean over the last evaluations, rounded to two decimals: 95 % of the highest,
            or 105 % of the lowest if lower is better.
    """
    metric, higher_is_better = measure(runs)
    sign = 1 if higher_is_better else -1
    last = min(LAST, max([1, *(len(_trained(run)) for run in runs)]))  # short runs have fewer
    groups = group(runs)
    means = {
        label: _over_seeds(
            float(np.mean([_value(row, metric) for row in _trained(run)[-last:]]))
            for run in members
            if run.evaluations
        )
        for label, members in groups.items()
    }
    finite = [sign * found.mean for found in means.values() if found and math.isfinite(found.mean)]
    if threshold is None and finite:  # the absolute value: log-likelihoods are negative
        threshold = round(sign * (max(finite) - 0.05 * abs(max(finite))), 2)
    goal = math.inf if threshold is None else sign * threshold
    ends = {
        label: [_trained(run)[-1] for run in members if run.evaluations]
        for label, members in groups.items()
    }
    finals = {label: [_value(row, metric) for row in final] for label, final in ends.items()}
    standings = _standings(finals, sign)
    rows = []
    for label, standing in standings.items():
        members, final = groups[label], ends[label]
        summaries = [run.summary for run in members if run.summary is not None]
        reached = [
            next((row for row in run.evaluations if sign * _value(row, metric) >= goal), None)
            for run in members
        ]
        at_goal = [row for row in reached if row is not None]
        rows.append(
            Row(
                label=label,
                standing=standing,
                metric=metric,
                higher_is_better=higher_is_better,
                threshold=threshold,
                last=last,
                seeds=len(members),
                unfinished=len(members) - len(summaries),
                final=_over_seeds(finals[label]),
                mean_of_last=means[label],
                rounds_to_threshold=_over_seeds(row["round"] for row in at_goal),
                megabytes_to_threshold=_over_seeds(map(megabytes, at_goal)),
                reached=len(at_goal),
                train_loss=_over_seeds(_value(row, "train_loss") for row in final),
                megabytes_up=_over_seeds(row["bytes_up"] / 1e6 for row in final),
                megabytes_down=_over_seeds(row["bytes_down"] / 1e6 for row in final),
                seconds=_over_seeds(
                    seconds for run in members if (seconds := training_seconds(run)) is not None
                ),
                nonfinite_clients=sum(row["nonfinite_clients"] for row in final),
                skipped_rounds=sum(row["skipped_rounds"] for row in final),
            )
        )
    return rows


def _standings(finals: dict[str, list[float]], sign: int) -> dict[str, str]:
    """Return the labels, the best first, and the standing of each."""

    def badness(label: str) -> tuple[bool, float]:
        mean = np.mean(finals[label]) if finals[label] else math.nan
        return (False, -sign * float(mean)) if math.isfinite(mean) else (True, 0.0)

    order = sorted(finals, key=badness)
    best = order[0]
    if badness(best)[0]:
        return dict.fromkeys(order, "")
    standings = {best: BEST}
    for label in order[1:]:
        standings[label] = ""
        if not badness(label)[0]:
            mean, half = difference(finals[best], finals[label])
            standings[label] = TIE if mean == 0 or (half is not None and abs(mean) <= half) else ""
    return standings


def curves(runs: Sequence[Run], key: str, x: Callable[[Run, Evaluation], float]) -> list[Curve]:
    """Return a curve for each algorithm and configuration. A point averages the seeds that have it.

    Args:
        runs: Runs of one task.
        key: The value of an evaluation on the vertical axis.
        x: Returns the horizontal position of an evaluation of a run.
    """
    result = []
    for label, members in group(runs).items():
        by_round: dict[int, list[tuple[float, float]]] = {}
        for run in members:
            for row in run.evaluations:
                by_round.setdefault(row["round"], []).append((x(run, row), _value(row, key)))
        points = []
        for _, pairs in sorted(by_round.items()):
            places, values = zip(*pairs, strict=True)
            points.append((np.mean(places), np.mean(values), np.min(values), np.max(values)))
        columns: list[list[float]] = np.reshape(points, (-1, 4)).T.tolist()
        result.append(Curve(label, *columns))
    return result


def megabytes(row: Evaluation) -> float:
    """Return the megabytes sent up and down until an evaluation."""
    return (row["bytes_up"] + row["bytes_down"]) / 1e6


def training_seconds(run: Run) -> float | None:
    """Return the seconds of a finished run without compilation, if they were measured."""
    seconds = (run.summary or {}).get("seconds")
    return None if seconds is None else float(seconds["total"] - seconds["compile"])


def _value(row: Evaluation, key: str) -> float:
    # Null and infinity become NaN, so that the mean over seeds shows a diverged seed.
    value = row.get(key)
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _trained(run: Run) -> list[Evaluation]:
    # Round 0 measures the initial parameters. It is used only if there is no other evaluation.
    return [row for row in run.evaluations if row["round"] > 0] or run.evaluations


def _over_seeds(values: Iterable[float]) -> Interval | None:
    known = list(values)
    return interval(known) if known else None
