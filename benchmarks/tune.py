"""Chooses a task's presets by the FedDA paper's rule, with one budget for every algorithm.

    python benchmarks/tune.py digits
    python benchmarks/tune.py stackexchange

The rule: of every grid the point with the lowest training loss, averaged over the last rounds and
over the seeds. The test set is not looked at. Every algorithm has as many points, taken from the
paper's grids, and the same seeds, which are not those of `fedda compare`. A choice at the end of a
grid is marked as such. Writes src/fedda/presets/<task>-<model>.toml.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedda
from fedda import algorithms, tasks
from fedda.config import PRESETS, resolve

# Rates of the paper's grid. Families of algorithms with the same settings share a grid.
RATES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.3]
PLAIN = {"client_lr": RATES, "server_lr": [0.1, 0.3, 1.0, 3.3, 10.0, 33.0]}
CLIENT_ONLY = [0.001, 0.003, *RATES, 10.0, 33.0, 100.0, 333.0]
SMALL = [1e-3, 1e-2, 1e-1]


def grid_of(name: str) -> dict[str, list[float]]:
    """36 points: the rates, and one more setting where there is one to adapt."""
    fields = algorithms.get(name).Hyper._fields
    if "server_lr" not in fields:  # stem, mfl
        third = {"a": [0.03, 0.1, 0.3], "gamma": [0.5, 0.8, 0.9], "eps": SMALL}
        return {"client_lr": CLIENT_ONLY} | {k: v for k, v in third.items() if k in fields}
    if name == "fedprox":
        return {"client_lr": RATES[1:5], "server_lr": [1.0, 3.3, 10.0], "mu": SMALL}
    if name.startswith("fedda") and "eps" in fields:
        return {"client_lr": RATES[1:5], "server_lr": [0.1, 1.0, 10.0], "eps": SMALL}
    if "tau" in fields:  # fedopt
        return {"client_lr": RATES[1:5], "server_lr": [0.01, 0.1, 1.0], "tau": SMALL}
    if "eps" in fields and name != "climb":  # adaptive on the client
        return {"client_lr": [0.003, *RATES[:3]], "server_lr": [0.3, 1.0, 3.3], "eps": SMALL}
    return PLAIN


def text_grid_of(name: str) -> dict[str, list[float]]:
    """12 points: losses summed over a batch and divided by 500 tags want other rates."""
    fields = algorithms.get(name).Hyper._fields
    adaptive = "eps" in fields or "tau" in fields
    return {
        "client_lr": [10.0, 33.0, 100.0, 333.0],
        "server_lr": [0.1, 1.0, 10.0] if adaptive else [1.0, 3.3, 10.0],
    }


class Study(NamedTuple):
    rounds: int
    averaged: int  # of the last rounds
    seeds: tuple[int, ...]
    grid_of: Callable[[str], dict[str, list[float]]]
    algorithms: tuple[str, ...] = ()  # all, if none is named
    fixed: Mapping[str, Any] = {}  # for those that have it


STUDIES = {
    "digits": Study(200, 100, (100, 101), grid_of),
    "stackexchange": Study(
        200,
        50,
        (100,),
        text_grid_of,
        ("fedavg", "fedda-sgdm", "fedda-adam", "fedda-adagrad", "fedopt-adam", "fedopt-adagrad"),
        {"units": "delta", "eps": 1e-3, "tau": 1e-3},
    ),
}


def tune(task: str, name: str) -> tuple[dict[str, Any], float, float]:
    """The point with the lowest mean training loss, that loss, and its metric on the test set."""
    study, config = STUDIES[task], resolve({"task": task})
    fixed = {k: v for k, v in study.fixed.items() if k in algorithms.settings(name, {})}
    problem = tasks.load(config)
    points = fedda.run_grid(
        name,
        problem.model,
        problem.shards,
        problem.loss,
        grid=study.grid_of(name),
        seeds=study.seeds,
        test=problem.test,
        metrics=problem.metrics,
        reduction=problem.reduction,
        rounds=study.rounds,
        eval_every=study.averaged,
        cohort=config.cohort,
        batch=config.batch,
        local_work=config.local_work,
        local_unit=config.local_unit,
        chunk=config.chunk or None,
        **fixed,
    )
    metric = problem.metrics[0].__name__
    found: dict[tuple[tuple[str, float], ...], list[tuple[float, float]]] = {}
    for point in points:
        last = point.result.history[-1]
        failed = last["skipped_rounds"] + last["nonfinite_clients"] > 0
        loss = math.inf if failed else last["train_loss"]
        found.setdefault(tuple(point.hyper.items()), []).append((loss, last[metric]))
    means = {values: np.mean(each, axis=0) for values, each in found.items()}
    best = min(means, key=lambda values: means[values][0])
    loss, reached = means[best]
    return dict(best) | fixed, float(loss), float(reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--out", type=Path, help="another file than the preset")
    arguments = parser.parse_args()
    task, study = arguments.task, STUDIES[arguments.task]
    config = resolve({"task": task})
    path = arguments.out or PRESETS / f"{task}-{config.model}.toml"
    lines = [
        f"# Written by benchmarks/tune.py {task}: of as many points for every algorithm the one",
        f"# with the lowest training loss over the last {study.averaged} of {study.rounds} rounds,",
        f"# mean of seeds {study.seeds}.",
    ]
    for name in study.algorithms or algorithms.names():
        grid = study.grid_of(name)
        start = time.perf_counter()
        values, loss, reached = tune(task, name)
        seconds = time.perf_counter() - start
        runs = math.prod(map(len, grid.values())) * len(study.seeds)
        print(
            f"{name}: {values}, training loss {loss:.4f}, on the test set {reached:.4f}; "
            f"{runs} runs in {seconds:.0f} s",
            flush=True,
        )
        lines += ["", f"[{name}]  # training loss {loss:.4f}"]
        for key, value in values.items():
            end = key in grid and value in (min(grid[key]), max(grid[key]))
            written = json.dumps(value)
            lines.append(f"{key} = {written}" + ("  # the end of the grid" if end else ""))
        path.write_text("\n".join(lines) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
