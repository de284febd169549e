"""Chooses the digits preset by the FedDA paper's rule, with one budget for every algorithm.

    python benchmarks/tune_digits.py

The rule: of every grid the point with the lowest training loss, averaged over the last 100 rounds
and over the seeds. The test set is not looked at. Every algorithm has 36 points, taken from the
paper's grids, and the same seeds, which are not those of `fedda compare`. A choice at the end of a
grid is marked as such. Writes src/fedda/presets/digits-mlp.toml.
"""

import math
import time
from pathlib import Path

import numpy as np

import fedda
from fedda import algorithms, tasks
from fedda.config import Config

ROUNDS, AVERAGED, SEEDS = 200, 100, (100, 101)

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


def tune(name: str, grid: dict[str, list[float]]) -> tuple[dict[str, float], float]:
    """The point with the lowest mean training loss, and that loss."""
    config = Config()
    problem = tasks.load(config)
    points = fedda.run_grid(
        name,
        problem.model,
        problem.shards,
        problem.loss,
        grid=grid,
        seeds=SEEDS,
        rounds=ROUNDS,
        eval_every=AVERAGED,
        cohort=config.cohort,
        batch=config.batch,
        local_work=config.local_work,
    )
    losses: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for point in points:
        last = point.result.history[-1]
        failed = last["skipped_rounds"] + last["nonfinite_clients"] > 0
        loss = math.inf if failed else last["train_loss"]
        losses.setdefault(tuple(point.hyper.items()), []).append(loss)
    means = {values: float(np.mean(found)) for values, found in losses.items()}
    best = min(means, key=lambda values: means[values])
    return dict(best), means[best]


def main() -> None:
    path = Path(fedda.__file__).parent / "presets" / "digits-mlp.toml"
    lines = [
        "# Written by benchmarks/tune_digits.py: of 36 points for every algorithm, the one with",
        f"# the lowest training loss over the last {AVERAGED} of {ROUNDS} rounds, mean of seeds",
        f"# {SEEDS}.",
    ]
    for name in algorithms.names():
        grid = grid_of(name)
        start = time.perf_counter()
        values, loss = tune(name, grid)
        seconds = time.perf_counter() - start
        runs = math.prod(map(len, grid.values())) * len(SEEDS)
        print(
            f"{name}: {values}, training loss {loss:.4f}; {runs} runs in {seconds:.0f} s",
            flush=True,
        )
        lines += ["", f"[{name}]  # training loss {loss:.4f}"]
        for key, value in values.items():
            end = value in (min(grid[key]), max(grid[key]))
            lines.append(f"{key} = {value}" + ("  # the end of the grid" if end else ""))
    path.write_text("\n".join(lines) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
