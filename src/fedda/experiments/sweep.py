"""A sweep: train all points of an algorithm's grid together, and rank them.

The directory of a sweep is a run directory with `points.jsonl` instead of `metrics.jsonl`. It has
a line for each point and seed, with the hyper-parameters, the last evaluation and the number of
failures. A killed sweep continues after the last finished batch of points. `config.toml` has the
settings that all points share. `preset.toml` has the best point as a configuration for `fedda run`.

The `train_loss` of a line is the mean over the last 100 rounds, or over half of the rounds if there
are fewer than 200. The papers of FedDA and FedOpt choose by this number. The code of FedOpt chooses
by training accuracy: `train_accuracy`, over the same rounds. Both are measured on the examples of
the local steps, before each step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda import algorithms, api
from fedda.errors import InputError, unknown
from fedda.experiments import run as experiment
from fedda.reports import statistics
from fedda.simulate.grid import Part
from fedda.simulate.progress import GridProgress
from fedda.simulate.train import TOTALS, Row, averaged
from fedda.storage.directory import RunDirectory
from fedda.storage.files import json_numbers, write_whole
from fedda.tasks import config as configs
from fedda.tasks.config import Config

Grid = Mapping[str, Sequence[float]]


class Point(NamedTuple):
    """One run of a sweep: a value for each name of the grid, and a seed."""

    values: tuple[float, ...]
    seed: int


def run(
    config: Config,
    grid: Grid,
    seeds: int,
    directory: Path,
    *,
    by: str = "train_loss",
    together: int | None = None,
    on_progress: Callable[[GridProgress | None], None] | None = None,
) -> dict[str, Any]:
    """Train the points of a sweep that its directory does not contain yet.

    Args:
        config: The settings that all points share.
        grid: The values of each hyper-parameter.
        seeds: The number of seeds. The first is the seed of the configuration.
        directory: A new directory, or that of a sweep with the same configuration.
        by: The metric to rank the points by.
        together: The number of runs to train at a time. None uses as many as fit in memory.
        on_progress: Called with None before programs are compiled, then after every evaluation.

    Returns:
        The summary.
    """
    sparse = dataclasses.replace(config, eval_every=evaluate_every(config.rounds), late_every=0)
    wanted = _points(sparse, grid, seeds)
    problem, setup, _ = experiment.prepare(sparse)  # before anything is written
    metric = problem.metrics[0]
    setup = setup._replace(task=setup.task._replace(train_metrics=(metric,)))
    rules = {"train_loss": False, "loss": False}  # whether more is better
    rules |= dict.fromkeys((f"train_{metric.__name__}", metric.__name__), problem.higher_is_better)
    if by not in rules:
        raise unknown("rule to choose by", by, rules)
    shared = {name: value for name, value in sparse.flat().items() if name not in grid}
    settings = {"grid": list(grid), **shared}
    with RunDirectory(directory, settings, api.CHANGEABLE, "points.jsonl") as kept:
        found = kept.read_back(lambda: ())
        new: dict[str, Any] = {"runs": 0, "together": [], "training": 0.0}
        done = new if found is None else found.progress
        lines = {_point(line): line for line in kept.history}
        left = [point for point in wanted if point not in lines]

        def tell(members: range, part: Part) -> None:
            if on_progress is not None:
                finished = len(wanted) - len(left) + members.start
                counts = (len(wanted), len(members), part.round, sparse.rounds)
                on_progress(GridProgress(finished, *counts))

        if left and on_progress is not None:
            on_progress(None)
        hypers, left_seeds = [wanted[point] for point in left], [point.seed for point in left]
        for batch in api.train_grid(setup, hypers, left_seeds, together, tell) if left else ():
            for i, history in zip(batch.members, batch.histories, strict=True):
                kept.log(_line(grid, left[i], history[-1]))
                lines[left[i]] = kept.history[-1]
            done = {
                "runs": done["runs"] + len(batch.members),
                "together": [*done["together"], batch.size],
                "training": done["training"] + batch.seconds,
            }
            kept.save(len(lines), (), done)
            kept.wait()
        ranking = rank([lines[point] for point in wanted], grid, by, rules[by])
        summary = kept.finish(
            lambda: {
                "algorithm": config.algorithm,
                "task": config.task,
                "rounds": config.rounds,
                "grid": {name: list(values) for name, values in grid.items()},
                "seeds": list(range(config.seed, config.seed + seeds)),
                "by": by,
                "higher_is_better": rules[by],
                "averaged_rounds": averaged(config.rounds),
                "best": ranking[0] if usable(ranking[0], by) else None,
                "ranking": ranking,
                "runs": done["runs"],
                "together": done["together"],
                "runs_x_rounds_per_second": done["runs"] * config.rounds / done["training"],
                "data": dict(problem.data),
                "precision": config.precision,
            }
        )
        write_preset(directory, config, summary)
    return summary


def write_preset(directory: Path, config: Config, summary: Mapping[str, Any]) -> None:
    """Write the best point of a sweep as a configuration, if there is one."""
    if summary["best"] is None:
        return
    chosen = {**config.chosen, **summary["best"]["hyper"]}
    points = math.prod(map(len, summary["grid"].values()))
    seeds = ", ".join(map(str, summary["seeds"]))
    how = f"# fedda sweep chose it by {summary['by']}. Points: {points}. Seeds: {seeds}.\n"
    best = configs.dump(dataclasses.replace(config, chosen=chosen))
    write_whole(directory / "preset.toml", how + best)


def evaluate_every(rounds: int) -> int:
    """Return the interval of evaluations such that the last row averages the last rounds.

    At most ten evaluations come before it.
    """
    last = averaged(rounds)
    before = rounds - last
    few = range(max(last, -(-rounds // 10)), before)
    return next((every for every in few if before % every == 0), max(1, before))


def _points(config: Config, grid: Grid, seeds: int) -> dict[Point, Any]:
    """Return the checked hyper-parameters of every point of the grid with every seed."""
    record, base = algorithms.configure(config.method, config.chosen)
    wanted = range(config.seed, config.seed + seeds)
    planned = api.grid_points(config.algorithm, record, base._asdict(), grid, wanted)
    points = {
        Point(tuple(getattr(hyper, name) for name in grid), seed): hyper for hyper, seed in planned
    }
    if len(points) < len(planned):
        raise InputError("the grid has a value twice. Remove one of the two.")
    if len(points) < 2:
        raise InputError(
            "a sweep trains at least two runs, got 1. Give several values, as in "
            "--grid client_lr=0.01,0.1,1, or --seeds 3. Use fedda run for one."
        )
    return points


def _line(grid: Grid, point: Point, row: Row) -> Row:
    """Return the line of a run for `points.jsonl`."""
    return {
        "hyper": dict(zip(grid, point.values, strict=True)),
        "seed": point.seed,
        **json_numbers(row),
        "failures": row["nonfinite_clients"] + row["skipped_rounds"],
    }


def _point(line: Row) -> Point:
    return Point(tuple(line["hyper"].values()), line["seed"])


def rank(lines: Iterable[Row], grid: Grid, by: str, higher_is_better: bool) -> list[dict[str, Any]]:
    """Return the means of each point over its seeds, the best first. Failed points come last."""
    found: dict[tuple[float, ...], list[Row]] = {}
    for line in lines:
        found.setdefault(tuple(line["hyper"].values()), []).append(line)
    ranking = []
    for own in found.values():
        hyper = own[0]["hyper"]
        names = [name for name in own[0] if name not in ("hyper", "seed", "round", *TOTALS)]
        ends = [
            name
            for name, values in grid.items()
            if len(values) > 2
            and hyper[name] in (min(values), max(values))  # of two values, both are ends
        ]
        means = {name: _mean([line[name] for line in own]) for name in names}
        values = [line[by] for line in own]
        half = None if None in values else statistics.interval(values).half
        failures = sum(line["failures"] for line in own)
        ranking.append(
            {"hyper": hyper, **means, "spread": half, "failures": failures, "at_the_end": ends}
        )

    def place(point: dict[str, Any]) -> tuple[bool, int, float]:
        if not usable(point, by):
            return True, point["failures"], 0.0
        return False, 0, -point[by] if higher_is_better else point[by]

    return sorted(ranking, key=place)


def usable(point: Mapping[str, Any], by: str) -> bool:
    """Return whether a point has no failures and a finite result."""
    return point["failures"] == 0 and point[by] is not None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None
