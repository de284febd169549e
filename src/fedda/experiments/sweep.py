"""A sweep: every point of one algorithm's grid, trained together, and the best by a stated rule.

A sweep's directory holds `config.toml` (what all points share), `points.jsonl` (a line for each
point and seed: its values, its last row and its failures) and, at the end, `summary.json` and the
best point as `preset.toml`, a configuration that `fedda run` takes. The lines of a batch are there
or not, never a part of them, so a sweep that was killed goes on where it was. The `train_loss` of a
line is the mean over the last rounds, which is what the FedDA paper and FedOpt's choose by: over
100 of them, or half of all where there are fewer than 200. What is published with FedOpt's code
says training accuracy instead: `train_accuracy`, over the same rounds. Both are of the examples
that clients visit, before each of their steps.
"""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda import algorithms, api
from fedda.errors import InputError, unknown
from fedda.experiments import run as experiment
from fedda.report import statistics
from fedda.simulate.grid import Part
from fedda.simulate.train import TOTALS, Row, averaged
from fedda.storage.files import json_numbers, read_json, read_rows, write_whole
from fedda.storage.schema import NUMBER_OR_NULL
from fedda.tasks import config as configs
from fedda.tasks.config import Config

Grid = Mapping[str, Sequence[float]]

# A line of `points.jsonl`.
POINT = {
    "hyper": {...: float},
    "seed": int,
    "round": int,
    "train_loss": NUMBER_OR_NULL,
    "loss": NUMBER_OR_NULL,
    "failures": int,
    ...: NUMBER_OR_NULL,
}
# What `summary.json` says of how a sweep was made.
HOW = {
    "runs": int,
    "together": [int],
    "runs_x_rounds_per_second": NUMBER_OR_NULL,
    "seconds": {...: float},
    "data": dict,
    "precision": str,
    "device": str,
    "versions": {...: str},
    "commit": str,
}


class Point(NamedTuple):
    """One run of a sweep: a value for each name of the grid, and a seed."""

    values: tuple[float, ...]
    seed: int


class Progress(NamedTuple):
    """What a person watching a sweep wants to know, given after every evaluation."""

    finished: int  # runs, also those of earlier processes
    runs: int
    training: int  # runs that are trained together now
    round: int
    rounds: int


def run(
    config: Config,
    grid: Grid,
    seeds: int,
    directory: Path,
    by: str = "train_loss",
    together: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    only: Iterable[tuple[float, ...]] | None = None,
) -> dict[str, Any]:
    """Trains what its directory does not hold yet of a sweep, and returns the summary.

    `only` are the points of the grid that are wanted, if not all are.
    """
    started, compiled = time.perf_counter(), experiment.compile_seconds()
    asked = config
    config = dataclasses.replace(config, eval_every=evaluate_every(config.rounds), late_every=0)
    wanted = _points(config, grid, seeds)
    if only is not None:
        wanted = {point: hyper for point, hyper in wanted.items() if point.values in set(only)}
    problem, setup, _ = experiment.prepare(config)  # before anything is written
    api.check_on_device(setup)
    metric = problem.metrics[0]
    setup = setup._replace(task=setup.task._replace(train_metrics=(metric,)))
    rules = {"train_loss": False, "loss": False}  # whether more is better
    trained = f"train_{metric.__name__}"
    rules |= dict.fromkeys((trained, metric.__name__), problem.higher_is_better)
    if by not in rules:
        raise unknown("rule to choose by", by, rules)
    lines = _opened(directory, config, grid, (trained, metric.__name__))
    left = [point for point in wanted if point not in lines]

    def tell(members: range, part: Part) -> None:
        if on_progress is not None:
            done = len(wanted) - len(left) + members.start
            on_progress(Progress(done, len(wanted), len(members), part.round, config.rounds))

    sizes, seconds = [], 0.0
    hypers, left_seeds = [wanted[point] for point in left], [point.seed for point in left]
    for batch in api.train_grid(setup, hypers, left_seeds, together, tell) if left else ():
        for i, history in zip(batch.members, batch.histories, strict=True):
            lines[left[i]] = _line(grid, left[i], history[-1])
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines.values())
        write_whole(directory / "points.jsonl", text)
        sizes.append(batch.size)
        seconds += batch.seconds
    ranking = rank([lines[point] for point in wanted], grid, by, rules[by])
    summary: dict[str, Any] = {
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
    }
    how: dict[str, Any] = {
        "runs": len(left),  # of this process; a sweep that was continued had others before
        "together": sizes,
        "runs_x_rounds_per_second": len(left) * config.rounds / seconds if left else None,
        "seconds": {
            "total": time.perf_counter() - started,
            "compile": experiment.compile_seconds() - compiled,
            "training": seconds,
        },
        "data": dict(problem.data),
        "precision": config.precision,
        "device": experiment.device(),
        "versions": experiment.versions(),
        "commit": experiment.commit(),
    }
    path = directory / "summary.json"
    if not left and path.exists():
        try:
            old = read_json(path, HOW)
        except ValueError as error:
            raise InputError(
                f"{path} is damaged: {error}. Delete it, and the same command writes it again."
            ) from error
        how = {name: old[name] for name in how}  # it names the versions that did the work
    write(directory, asked, summary | how)
    return summary | how


def write(directory: Path, config: Config, summary: Mapping[str, Any]) -> None:
    """Writes what came out of a sweep, and its best point as a configuration, if there is one."""
    write_whole(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    if summary["best"] is not None:
        chosen = {**config.chosen, **summary["best"]["hyper"]}
        points = math.prod(map(len, summary["grid"].values()))
        seeds = ", ".join(map(str, summary["seeds"]))
        told = f"# fedda sweep chose it by {summary['by']}. Points: {points}. Seeds: {seeds}.\n"
        best = configs.dump(dataclasses.replace(config, chosen=chosen))
        write_whole(directory / "preset.toml", told + best)


def evaluate_every(rounds: int) -> int:
    """So that the last row is about just the averaged rounds, with at most ten rows before it."""
    last = averaged(rounds)
    before = rounds - last
    few = range(max(last, -(-rounds // 10)), before)
    return next((every for every in few if before % every == 0), max(1, before))


def _points(config: Config, grid: Grid, seeds: int) -> dict[Point, Any]:
    """Every point of the grid with every seed, and its `Hyper`, checked."""
    if "seed" in grid:
        raise InputError("seed is no hyper-parameter. Say --seeds 3, and seed=0 for the first.")
    options = algorithms.options(config.algorithm)
    api.check_traced(grid, (*configs.FIELDS, *config.options, *options))
    api.check_seed(config.seed + seeds - 1)
    chosen = {name: value for name, value in config.chosen.items() if name in options}
    record = algorithms.get(config.algorithm, **chosen)
    base = {name: value for name, value in config.chosen.items() if name not in options}
    hypers = [
        algorithms.hyper(config.algorithm, record, base | dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
    ]
    points = {
        Point(tuple(getattr(hyper, name) for name in grid), seed): hyper
        for hyper in hypers
        for seed in range(config.seed, config.seed + seeds)
    }
    if len(points) < len(hypers) * seeds:
        raise InputError("the grid must not hold a value twice: leave one of the two out.")
    if len(points) < 2:
        raise InputError(
            "a sweep trains at least two runs, got 1. Give several values, as in "
            "--grid client_lr=0.01,0.1,1, or --seeds 3. Use fedda run for one."
        )
    return points


def _line(grid: Grid, point: Point, row: Row) -> Row:
    """What is written about a run."""
    return {
        "hyper": dict(zip(grid, point.values, strict=True)),
        "seed": point.seed,
        **json_numbers(row),
        "failures": row["nonfinite_clients"] + row["skipped_rounds"],
    }


def _opened(
    directory: Path, config: Config, grid: Grid, measured: Sequence[str]
) -> dict[Point, Row]:
    """What earlier processes wrote in this directory; one that is new is started."""
    path = directory / "config.toml"
    check_directory(directory, path.name)
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, configs.dump(config))
        return {}
    if (directory / "metrics.jsonl").exists():
        raise InputError(f"{directory} holds a run and no sweep. Give another --out.")
    ours = config.flat()
    for name, value in configs.resolve(configs.read(path)).flat().items():
        if name not in grid and ours.get(name) != value:
            raise InputError(
                f"{directory} is a sweep with {name} = {value!r}, got {ours.get(name)!r}. "
                "A sweep may get more points but keeps its configuration: give another --out."
            )
    lines = {}
    found = read_rows(directory / "points.jsonl", POINT)
    if found.is_damaged:
        raise InputError(
            f"line {len(found.rows) + 1} of {directory / 'points.jsonl'} is damaged. Delete it, "
            "and the same command trains that point again."
        )
    for line in found.rows:
        if line["hyper"].keys() != grid.keys():
            raise InputError(
                f"{directory} is a sweep over {', '.join(line['hyper']) or 'seeds'}, got a grid "
                f"over {', '.join(grid) or 'seeds'}. Give another --out."
            )
        if missing := [name for name in measured if name not in line]:
            raise InputError(
                f"{directory} is a sweep of a version that did not measure {missing[0]}. Give "
                "another --out."
            )
        lines[Point(tuple(line["hyper"][name] for name in grid), line["seed"])] = line
    return lines


def check_directory(directory: Path, first: str, kind: str = "sweep") -> None:
    """Refuses what is neither empty nor has what such a sweep writes there first."""
    if not (directory / first).exists():
        experiment.check_new(directory, f"that of a {kind} to finish.")


def rank(lines: Iterable[Row], grid: Grid, by: str, higher_is_better: bool) -> list[dict[str, Any]]:
    """The points, the best first: means over their seeds. Those that failed come last."""
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
            if len(values) > 2 and hyper[name] in (min(values), max(values))  # of two, both are
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
    return point["failures"] == 0 and point[by] is not None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None
