"""Finished runs as curves: the paper's figures, drawn from our cells."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedda.report import figures, statistics
from fedda.report.figures import Line, Panel
from fedda.report.runs import Run
from fedda.report.statistics import Curve
from fedda_reproduction.paper import evidence, experiments, methods
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import Entry

EARLY = 0.05  # of a training: the beginning


class Row(NamedTuple):
    """Panels that belong side by side, and are one figure in files."""

    name: str
    title: str
    panels: list[Panel]


# --------------------------------------------------------------------------------- along a training


def training(name: str, found: Sequence[Cell]) -> list[Row]:
    """A table of methods: metric and training loss by round, and metric by gigabytes sent."""
    entries = experiments.experiments()[name].entries
    ran = {entry.algorithm: own for entry, own in evidence.runs_of(entries, found)}
    if not ran:
        return []
    task = entries[0].task
    content = next(iter(ran.values()))[0].content
    metric, higher = content["metric"], content["higher_is_better"]
    order = list(methods.METHODS)

    def row(kind: str, key: str, heading: str, x_label: str, less: bool) -> Row:
        x = _gigabytes if kind == "gigabytes" else _round
        panels = []
        for optimiser, column in evidence.columns(name).items():
            runs = [
                _as_run(cell, method)
                for method in order
                for algorithm in column
                if algorithm.partition("-")[0] == method
                for cell in ran.get(algorithm, [])
            ]
            if not runs:
                continue
            lines = [
                Line(
                    curve._replace(label=methods.METHODS[curve.label]),
                    order.index(curve.label),
                    thick=curve.label == "fedda",
                )
                for curve in statistics.curves(runs, key, x)
            ]
            panels.append(
                _cropped(
                    Panel(
                        f"{task}-{kind}-{optimiser}",
                        x_label,
                        figures.metric_label(key),
                        lines,
                        title=methods.OPTIMISER_NAMES[optimiser],
                    ),
                    less,
                )
            )
        return Row(f"{task}-{kind}", heading, panels)

    words = figures.sentence_case(figures.metric_label(metric))
    return [
        row("metric", metric, f"{words} by round", "round", not higher),
        row("train_loss", "train_loss", "Training loss by round", "round", True),
        row("gigabytes", metric, f"{words} by gigabytes sent", "gigabytes up and down", not higher),
    ]


def full_batches(found: Sequence[Cell]) -> Row | None:
    """What full-batch rounds do at the end of tuned trainings: a panel for each task.

    Of FedDA's best with them and of the best other, with and without them; the last half of all
    rounds.
    """
    panels = []
    for task, name in experiments.TUNED.items():
        tuned, full = (evidence.runs(each, found) for each in (name, f"recommended-{task}"))
        both = {name: own for name, own in full.items() if name in tuned}
        chosen = [evidence.best(both, ours=True), evidence.best(both, ours=False)]
        lines, optimisers = [], dict[str, None]()
        for algorithm in filter(None, chosen):
            method, _, optimiser = algorithm.partition("-")
            style, label = list(methods.METHODS).index(method), methods.METHODS[method]
            end = f"{label}, full-batch rounds at the end"
            lines.append(Line(_last_half(full[algorithm], end), style, thick=True))
            lines.append(Line(_last_half(tuned[algorithm], label), style))
            optimisers |= {methods.OPTIMISER_NAMES[optimiser]: None} if optimiser else {}
        if None not in chosen:
            metric = figures.metric_label(next(iter(full.values()))[0].content["metric"])
            heading = f"{methods.title(task)}, {' and '.join(optimisers)}"
            panels.append(Panel(f"full-batches-{task}", "round", metric, lines, title=heading))
    title = "Full-batch rounds at the end, all rates tuned"
    return Row("full-batches", title, panels) if panels else None


def _last_half(own: Sequence[Cell], label: str) -> Curve:
    """The metric in the last half of all rounds, over seeds."""
    metric = own[0].content["metric"]
    (curve,) = statistics.curves([_as_run(cell, label) for cell in own], metric, _round)
    first = sum(x < curve.x[-1] / 2 for x in curve.x)
    return Curve(label, *(values[first:] for values in curve[1:]))


def _cropped(panel: Panel, less: bool) -> Panel:
    """With an axis of what methods that learn come to after the beginning, if most do.

    Where that is a small part of all values, the rest would flatten it against an edge: the rest
    leaves the plot, and what does not learn has no band. Where `less` is better, the axis is
    logarithmic if need be.
    """
    learning = _learning(panel.lines, less)
    late = [value for line in learning for value in _values(line, EARLY)]
    every = [value for line in panel.lines for value in _values(line)]
    low, high = min(late, default=0.0), max(late, default=0.0)
    most = 2 * len(learning) >= len(panel.lines)
    if not (most and 0 < high - low < (max(every) - min(every)) / 2):
        return panel._replace(
            log_y=less and figures.needs_log_axis(line.curve for line in panel.lines)
        )
    log = less and 0 < low < high / 10
    room = (high / low) ** 0.05 if log else 0.05 * (high - low)
    lines = [line if line in learning else _without_band(line) for line in panel.lines]
    y_range = (low / room, high * room) if log else (low - room, high + room)
    return panel._replace(lines=lines, log_y=log, y_range=y_range)


def _learning(lines: Sequence[Line], less: bool) -> list[Line]:
    """Those that end at least half as far from where they began as the best ends."""
    sign = -1 if less else 1
    ended = [line for line in lines if np.isfinite(line.curve.mean[-1])]
    best = max((sign * line.curve.mean[-1] for line in ended), default=0.0)
    return [
        line for line in ended if 2 * sign * line.curve.mean[-1] >= best + sign * _finite(line)[0]
    ]


def _values(line: Line, after: float = 0.0) -> list[float]:
    """What a band covers after a share of a training."""
    curve = line.curve
    return [
        value
        for x, *ends in zip(curve.x, curve.low, curve.high, strict=True)
        for value in ends
        if x >= after * curve.x[-1] and np.isfinite(value)
    ]


def _without_band(line: Line) -> Line:
    return line._replace(curve=line.curve._replace(low=line.curve.mean, high=line.curve.mean))


def _finite(line: Line) -> list[float]:
    return [mean for mean in line.curve.mean if np.isfinite(mean)]


def _round(row: dict[str, Any]) -> float:
    return float(row["round"])


def _gigabytes(row: dict[str, Any]) -> float:
    return statistics.megabytes(row) / 1000


def _as_run(cell: Cell, method: str) -> Run:
    """A cell as what `statistics.curves` takes; every round sends as much as any other.

    The many evaluations of the last rounds are for means: a curve has them at equal distances.
    """
    content = cell.content
    sent = {way: content[way] / cell.config.rounds for way in ("bytes_down", "bytes_up")}
    history = content["history"]
    rows = [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]
    evaluations, since = [], list[dict[str, Any]]()
    for row in rows:
        since.append(row)
        if row["round"] % cell.config.eval_every == 0 or row["round"] == cell.config.rounds:
            sums = {way: number * row["round"] for way, number in sent.items()}
            evaluations.append(row | sums | {"train_loss": _loss_of(since)})
            since = [row]
    own = {"algorithm": method, "task": cell.config.task, "seed": cell.config.seed}
    return Run(cell.path, own, evaluations, None, [])


def _loss_of(rows: Sequence[dict[str, Any]]) -> float | None:
    """The mean training loss from the first row to the last; each has that since the one before."""
    if len(rows) == 1:
        return rows[0]["train_loss"]
    known = [
        (after["round"] - before["round"], after["train_loss"]) for before, after in pairwise(rows)
    ]
    if any(loss is None for _, loss in known):
        return None
    return sum(rounds * loss for rounds, loss in known) / sum(rounds for rounds, _ in known)


# ----------------------------------------------------------------------------- against one setting


def varied(
    name: str, found: Sequence[Cell], x_label: str, setting: Callable[[Entry], Any]
) -> Row | None:
    """What FedDA comes to with each value of a setting: a panel for each task with two or more."""
    experiment = experiments.experiments()[name]
    points: dict[str, dict[str, list[tuple[float, list[float]]]]] = {}
    metrics: dict[str, str] = {}
    for entry, own in evidence.runs_of(experiment.entries, found):
        values = [np.nan if (mean := cell.mean(entry.at)) is None else mean for cell in own]
        of_task = points.setdefault(entry.task, {})
        of_task.setdefault(entry.algorithm, []).append((float(setting(entry)), values))
        metrics[entry.task] = figures.metric_label(own[0].content["metric"])
    panels = [
        Panel(
            f"{name}-{task}",
            x_label,
            metrics[task],
            [
                Line(_over_seeds(methods.label(algorithm), sorted(by_algorithm[algorithm])), number)
                for number, algorithm in enumerate(experiments.FEDDA)
                if algorithm in by_algorithm
            ],
            markers=True,
            title=methods.title(task),
        )
        for task, by_algorithm in points.items()
    ]
    panels = [one for one in panels if any(len(_finite(line)) > 1 for line in one.lines)]
    return Row(name, experiment.title, panels) if panels else None


def _over_seeds(label: str, points: Sequence[tuple[float, list[float]]]) -> Curve:
    values = [own for _, own in points]
    return Curve(
        label,
        [x for x, _ in points],
        [float(np.mean(own)) for own in values],
        [float(np.min(own)) for own in values],
        [float(np.max(own)) for own in values],
    )
