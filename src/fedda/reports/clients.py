"""The metric of each client: its mean, its spread, and the worst clients of each algorithm."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedda.reports.runs import Run
from fedda.reports.statistics import Curve, Interval, interval

_POINTS = 101  # of a curve; more points could not be distinguished


class ClientRow(NamedTuple):
    """The clients of one algorithm. Intervals are over its seeds."""

    label: str
    clients: int
    mean: Interval  # over the clients, all with the same weight
    spread: Interval  # the standard deviation over the clients
    worst: Interval  # the mean of the worst tenth of the clients


class Clients(NamedTuple):
    """The clients of the algorithms that were evaluated on every client."""

    metric: str
    on: str  # "test" or "train": the examples that were evaluated
    rows: list[ClientRow]
    curves: list[Curve]  # the metric by the share of clients, in percent, the worst first


def evaluated_clients(
    groups: dict[str, list[Run]], metric: str, higher_is_better: bool
) -> Clients | None:
    """Return the metrics of the clients, or None if no run was evaluated on every client.

    Args:
        groups: The runs of each label.
        metric: The metric. Runs without it are left out.
        higher_is_better: Whether higher values of the metric are better.
    """
    rows, curves, on = list[ClientRow](), list[Curve](), ""
    for label, runs in groups.items():
        found = [each for run in runs if (each := (run.summary or {}).get("per_client"))]
        seeds = [values for each in found if (values := _values(each, metric))]
        if not seeds:
            continue
        on = found[0]["on"]
        ordered = [sorted(seed, reverse=not higher_is_better) for seed in seeds]
        rows.append(
            ClientRow(
                label=label,
                clients=len(ordered[0]),
                mean=interval(float(np.mean(seed)) for seed in ordered),
                spread=interval(float(np.std(seed)) for seed in ordered),
                worst=interval(
                    float(np.mean(seed[: math.ceil(len(seed) / 10)])) for seed in ordered
                ),
            )
        )
        places = np.linspace(0, 1, min(_POINTS, len(ordered[0])))
        over = np.array([np.interp(places, np.linspace(0, 1, len(seed)), seed) for seed in ordered])
        columns = (100 * places, over.mean(0), over.min(0), over.max(0))
        curves.append(Curve(label, *(column.tolist() for column in columns)))
    return Clients(metric, on, rows, curves) if rows else None


def _values(per_client: Mapping[str, Any], metric: str) -> list[float]:
    """Return the metric of each client that has examples."""
    values = per_client["metrics"].get(metric, ())
    return [
        math.nan if value is None else float(value)
        for value, count in zip(values, per_client["examples"], strict=False)
        if count
    ]
