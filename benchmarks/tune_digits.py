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
from fedda import tasks
from fedda.config import Config

ROUNDS, AVERAGED, SEEDS = 200, 100, (100, 101)

COARSE, FINE = [0.03, 0.1, 0.3, 1.0], [0.01, 0.03, 0.1, 0.3, 1.0, 3.3]
GRIDS = {
    "fedavg": {"client_lr": FINE, "server_lr": [0.1, 0.3, 1.0, 3.3, 10.0, 33.0]},
    "fedprox": {"client_lr": COARSE, "server_lr": [1.0, 3.3, 10.0], "mu": [0.001, 0.01, 0.1]},
    "fedda-sgdm": {"client_lr": FINE, "server_lr": [0.1, 0.3, 1.0, 3.3, 10.0, 33.0]},
    "fedda-adam": {"client_lr": COARSE, "server_lr": [0.1, 1.0, 10.0], "eps": [1e-3, 1e-2, 1e-1]},
    "fedda-adagrad": {
        "client_lr": COARSE,
        "server_lr": [0.1, 1.0, 10.0],
        "eps": [1e-3, 1e-2, 1e-1],
    },
}


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
    for name, grid in GRIDS.items():
        start = time.perf_counter()
        values, loss = tune(name, grid)
        seconds = time.perf_counter() - start
        runs = math.prod(map(len, grid.values())) * len(SEEDS)
        print(f"{name}: {values}, training loss {loss:.4f}; {runs} runs in {seconds:.0f} s")
        lines += ["", f"[{name}]  # training loss {loss:.4f}"]
        for key, value in values.items():
            end = value in (min(grid[key]), max(grid[key]))
            lines.append(f"{key} = {value}" + ("  # the end of the grid" if end else ""))
    path.write_text("\n".join(lines) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
