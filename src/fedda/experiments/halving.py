"""Successive halving: a row of sweeps, each with fewer points and more rounds than the one before.

They are in `rung-0`, `rung-1`, ... of its directory, so that one that was killed goes on. Beside
them are `summary.json`, which is the last one's with those before it as `rungs`, and the best point
as `preset.toml`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedda.errors import InputError
from fedda.experiments.sweep import Grid, Progress, check_directory, run, usable, write
from fedda.tasks.config import Config


def halve(
    config: Config,
    grid: Grid,
    seeds: int,
    directory: Path,
    factor: int,
    by: str = "train_loss",
    together: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Trains all points for few rounds, then the best of them for more.

    Each rung trains the best of the one before, one in `factor`, for `factor` times as many rounds,
    from the start; the last trains for all rounds. Its summary is returned, with those before it.
    """
    if factor < 2:
        raise InputError(f"--halving must be at least 2, got {factor}.")
    check_directory(directory, "rung-0", "sweep with --halving")
    left = list(itertools.product(*grid.values()))
    rungs = 1
    while len(left) > factor**rungs and config.rounds // factor**rungs >= 2:
        rungs += 1
    summaries: list[dict[str, Any]] = []
    for rung in range(rungs):
        rounds = config.rounds // factor ** (rungs - 1 - rung)
        shorter = dataclasses.replace(config, rounds=rounds)
        where = directory / f"rung-{rung}"
        found = run(shorter, grid, seeds, where, by, together, on_progress, left)
        summaries.append(found)
        good = [point for point in found["ranking"] if usable(point, by)]
        left = [tuple(point["hyper"].values()) for point in good[: -(-len(left) // factor)]]
        if not left:
            break
    trained = sum(each["rounds"] * len(each["ranking"]) for each in summaries)
    share = trained / (config.rounds * len(summaries[0]["ranking"]))
    summary = summaries[-1] | {"rungs": summaries[:-1], "share_of_all_rounds": share}
    write(directory, config, summary)
    return summary
