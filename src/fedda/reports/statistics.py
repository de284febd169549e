"""Statistics of runs over their seeds: intervals, the rows of a table, and curves.

Runs that differ only in their seed share a row and a curve.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedda.errors import InputError
from fedda.reports.runs import Evaluation, Run
from fedda.storage.files import EVALUATION

LAST = 5  # evaluations at the end of a run that are averaged
_NOT_A_METRIC = {*EVALUATION, "train_loss", "loss"}


class Interval(NamedTuple):
    """A mean over seeds; NaN if the result of some seed is not finite."""

    mean: float
    half: float | None  # half the width of its 95 % interval; None for a single seed


class Row(NamedTuple):
    """One algorithm and configuration over its seeds; None where nothing was measured."""

    label: str
    metric: str
    higher_is_better: bool
    threshold: float | None  # None if no evaluation is finite
    last: int  # evaluations that `mean_of_last` averages
    seeds: int
    unfinished: int  # seeds
    final: Interval | None
    mean_of_last: Interval | None
    rounds_to_threshold: Interval | None  # over the seeds that reached it
    reached: int  # seeds
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
    # Of differences, so that seeds which agree exactly deviate by exactly 0.
    deviation = float(np.std(np.subtract(known, known[0]), ddof=1))
    quantile = float(stdtrit(len(known) - 1, 0.975))
    return Interval(mean, quantile * deviation / math.sqrt(len(known)))


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by their configuration, under labels with the settings that tell them apart."""
    tasks = sorted({str(run.config["task"]) for run in runs})
    if len(tasks) != 1:
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
        groups.setdefault(label, []).append(run)
    return groups


def measure(runs: Sequence[Run]) -> tuple[str, bool]:
    """Return the name of the task's metric, and whether higher is better."""
    for run in runs:
        if run.summary is not None:
            return str(run.summary["metric"]), bool(run.summary["higher_is_better"])
    # Only a finished run knows the direction; metrics usually count successes.
    names = (key for run in runs for row in run.evaluations[:1] for key in row)
    name = next((name for name in names if name not in _NOT_A_METRIC), "loss")
    return name, name != "loss"


def table(runs: Sequence[Run], threshold: float | None = None) -> list[Row]:
    """Return one row for each algorithm and configuration.

    Args:
        runs: Runs of one task.
        threshold: Value of the metric to count the rounds to. By default 5 % short of the best mean
            over the last evaluations, rounded to two decimals: 95 % of the highest, or 105 % of the
            lowest if lower is better.
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
    rows = []
    for label, members in groups.items():
        final = [_trained(run)[-1] for run in members if run.evaluations]
        summaries = [run.summary for run in members if run.summary is not None]
        at_goal = [
            [row["round"] for row in run.evaluations if sign * _value(row, metric) >= goal]
            for run in members
        ]
        reached = [rounds[0] for rounds in at_goal if rounds]
        rows.append(
            Row(
                label=label,
                metric=metric,
                higher_is_better=higher_is_better,
                threshold=threshold,
                last=last,
                seeds=len(members),
                unfinished=len(members) - len(summaries),
                final=_over_seeds(_value(row, metric) for row in final),
                mean_of_last=means[label],
                rounds_to_threshold=_over_seeds(reached),
                reached=len(reached),
                train_loss=_over_seeds(_value(row, "train_loss") for row in final),
                megabytes_up=_over_seeds(row["bytes_up"] / 1e6 for row in final),
                megabytes_down=_over_seeds(row["bytes_down"] / 1e6 for row in final),
                seconds=_over_seeds(
                    summary["seconds"]["total"] - summary["seconds"]["compile"]
                    for summary in summaries
                    if "seconds" in summary
                ),
                nonfinite_clients=sum(row["nonfinite_clients"] for row in final),
                skipped_rounds=sum(row["skipped_rounds"] for row in final),
            )
        )
    return rows


def curves(runs: Sequence[Run], key: str, x: Callable[[Evaluation], float]) -> list[Curve]:
    """Return a curve for each algorithm and configuration, over the seeds that got as far.

    Args:
        runs: Runs of one task.
        key: The value of an evaluation on the vertical axis.
        x: Returns the place of an evaluation on the horizontal axis.
    """
    result = []
    for label, members in group(runs).items():
        by_round: dict[int, list[Evaluation]] = {}
        for run in members:
            for row in run.evaluations:
                by_round.setdefault(row["round"], []).append(row)
        points = []
        for _, rows in sorted(by_round.items()):
            values = [_value(row, key) for row in rows]
            place = np.mean([x(row) for row in rows])
            points.append((place, np.mean(values), np.min(values), np.max(values)))
        columns: list[list[float]] = np.reshape(points, (-1, 4)).T.tolist()
        result.append(Curve(label, *columns))
    return result


def megabytes(row: Evaluation) -> float:
    """Return the megabytes sent up and down until an evaluation."""
    return (row["bytes_up"] + row["bytes_down"]) / 1e6


def _value(row: Evaluation, key: str) -> float:
    # A mean over seeds must show that one of them diverged: null and infinity become NaN.
    value = row.get(key)
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _trained(run: Run) -> list[Evaluation]:
    # Round 0 measures the initial parameters: it counts only where there is nothing else.
    return [row for row in run.evaluations if row["round"] > 0] or run.evaluations


def _over_seeds(values: Iterable[float]) -> Interval | None:
    known = list(values)
    return interval(known) if known else None
