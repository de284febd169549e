"""Statistics of runs over their seeds: intervals, the rows of a table, and curves.

Runs that differ only in their seed are one row, and one curve.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedda.errors import InputError
from fedda.report.runs import Evaluation, Run, settings
from fedda.storage.files import EVALUATION

_NOT_A_METRIC = {*EVALUATION, "train_loss", "loss"}


class Interval(NamedTuple):
    """A mean over seeds; not a number where the result of some seed was not finite."""

    mean: float
    half: float | None  # the half of its 95 % interval; None for a single seed


class Row(NamedTuple):
    """One algorithm and configuration over its seeds; None where nothing was measured."""

    label: str
    metric: str
    higher_is_better: bool
    threshold: float | None  # None where no evaluation was finite
    last: int
    seeds: int
    unfinished: int  # of the seeds
    final: Interval | None
    mean_of_last: Interval | None
    rounds_to_threshold: Interval | None  # over the seeds that reached it
    reached: int  # of the seeds
    train_loss: Interval | None
    megabytes_up: Interval | None
    megabytes_down: Interval | None
    seconds: Interval | None  # without compilation, of the finished seeds
    nonfinite_clients: int  # summed over the seeds
    skipped_rounds: int  # summed over the seeds


class Curve(NamedTuple):
    """The mean over seeds and its range; NaN where some seed was not finite."""

    label: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def interval(values: Sequence[float | None]) -> Interval:
    """The mean over seeds, and how far off it may be: Student's t, 95 %."""
    from scipy.special import stdtrit  # takes long to load, and few commands need it

    known = [math.nan if value is None else value for value in values]
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Interval(mean, None)
    # Of differences, so that seeds which agree exactly deviate by exactly 0.
    deviation = float(np.std(np.subtract(known, known[0]), ddof=1))
    quantile = float(stdtrit(len(known) - 1, 0.975))
    return Interval(mean, quantile * deviation / math.sqrt(len(known)))


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each configuration, under a label that tells it from the others."""
    tasks = sorted({str(run.config["task"]) for run in runs})
    if len(tasks) != 1:
        raise InputError(
            f"got runs of {len(tasks)} tasks ({', '.join(tasks)}), expected one: "
            "make one report for each task"
        )
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(settings(run), []).append(run)
    return {_label(settings, list(groups)): members for settings, members in groups.items()}


def measure(runs: Sequence[Run]) -> tuple[str, bool]:
    """The name of the task's metric, and whether higher is better."""
    for run in runs:
        if run.summary is not None:
            return str(run.summary["metric"]), bool(run.summary["higher_is_better"])
    # Only a finished run knows the direction; metrics usually count successes.
    names = (key for run in runs for row in run.evaluations[:1] for key in row)
    name = next((name for name in names if name not in _NOT_A_METRIC), "loss")
    return name, name != "loss"


def table(runs: Sequence[Run], threshold: float | None = None, last: int = 5) -> list[Row]:
    """One row per algorithm and configuration, over its seeds.

    The threshold is by default 5 % short of the best mean over the `last` evaluations in the
    table, rounded to two decimals: 95 % of the highest, or 105 % of the lowest where lower is
    better.
    """
    if last < 1:
        raise InputError(f"got last={last}, expected at least 1 evaluation to average")
    last = min(last, max([1, *(len(_trained(run)) for run in runs)]))  # short runs have fewer
    metric, higher_is_better = measure(runs)
    groups = group(runs)
    means_of_last = {
        label: _over_seeds(
            float(np.mean([_value(row, metric) for row in _trained(run)[-last:]]))
            for run in members
            if run.evaluations
        )
        for label, members in groups.items()
    }
    if threshold is None:
        threshold = _default_threshold(means_of_last.values(), higher_is_better)
    rows = []
    for label, members in groups.items():
        final = [_trained(run)[-1] for run in members if run.evaluations]
        finished = [run.summary for run in members if run.summary is not None]
        first_rounds = [_first_round(run, metric, threshold, higher_is_better) for run in members]
        reached = [first for first in first_rounds if first is not None]
        rows.append(
            Row(
                label=label,
                metric=metric,
                higher_is_better=higher_is_better,
                threshold=threshold,
                last=last,
                seeds=len(members),
                unfinished=len(members) - len(finished),
                final=_of(metric, final),
                mean_of_last=means_of_last[label],
                rounds_to_threshold=_over_seeds(reached),
                reached=len(reached),
                train_loss=_of("train_loss", final),
                megabytes_up=_of("bytes_up", final, unit=1e6),
                megabytes_down=_of("bytes_down", final, unit=1e6),
                seconds=_over_seeds(
                    summary["seconds"]["total"] - summary["seconds"]["compile"]
                    for summary in finished
                    if "seconds" in summary
                ),
                nonfinite_clients=sum(row["nonfinite_clients"] for row in final),
                skipped_rounds=sum(row["skipped_rounds"] for row in final),
            )
        )
    return rows


def curves(runs: Sequence[Run], key: str, x: Callable[[Evaluation], float]) -> list[Curve]:
    """`key` of the evaluations against their `x`, over the seeds that got as far."""
    result = []
    for label, members in group(runs).items():
        by_round: dict[int, list[Evaluation]] = {}
        for run in members:
            for row in run.evaluations:
                by_round.setdefault(row["round"], []).append(row)
        rounds = sorted(by_round)
        values = [[_value(row, key) for row in by_round[r]] for r in rounds]
        result.append(
            Curve(
                label,
                x=[float(np.mean([x(row) for row in by_round[r]])) for r in rounds],
                mean=[float(np.mean(v)) for v in values],
                low=[float(np.min(v)) for v in values],
                high=[float(np.max(v)) for v in values],
            )
        )
    return result


def megabytes(row: Evaluation) -> float:
    """What was sent in both directions up to this evaluation."""
    return (_value(row, "bytes_up") + _value(row, "bytes_down")) / 1e6


def _label(
    settings: tuple[tuple[str, str], ...], everyone: list[tuple[tuple[str, str], ...]]
) -> str:
    own = dict(settings)
    rivals = [
        rival for other in everyone if (rival := dict(other))["algorithm"] == own["algorithm"]
    ]
    keys = sorted({key for rival in rivals for key in rival})
    varying = [key for key in keys if len({rival.get(key) for rival in rivals}) > 1]
    details = ", ".join(f"{key}={own.get(key, 'unset')}" for key in varying)
    return f"{own['algorithm']} ({details})" if details else own["algorithm"]


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


def _of(key: str, evaluations: list[Evaluation], unit: float = 1.0) -> Interval | None:
    return _over_seeds(_value(row, key) / unit for row in evaluations)


def _default_threshold(
    means_of_last: Iterable[Interval | None], higher_is_better: bool
) -> float | None:
    means = [found.mean for found in means_of_last if found and math.isfinite(found.mean)]
    if not means:
        return None
    best = max(means) if higher_is_better else min(means)
    slack = 0.05 * abs(best)  # the absolute value: a metric such as a log-likelihood is negative
    return round(best - slack if higher_is_better else best + slack, 2)


def _first_round(
    run: Run, metric: str, threshold: float | None, higher_is_better: bool
) -> int | None:
    if threshold is None:
        return None
    for row in run.evaluations:
        value = _value(row, metric)
        if value >= threshold if higher_is_better else value <= threshold:
            return int(row["round"])
    return None
