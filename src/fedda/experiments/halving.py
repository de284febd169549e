"""Successive halving: a row of sweeps, each with fewer points and more rounds than the one before.

The sweeps are in `rung-0`, `rung-1`, ... of its directory, so that one that was killed continues.
Beside them are `summary.json`, which is that of the last with those before it as `rungs`, and the
best point as `preset.toml`.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedda.errors import InputError
from fedda.experiments.sweep import Grid, Progress, run, usable, write_preset
from fedda.storage.files import check_empty, locked, write_whole
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
    """Train all points for few rounds, then the best of them for more.

    Each rung trains the best of the one before, one in `factor`, for `factor` times as many rounds,
    from the start; the last trains for all rounds.

    Returns:
        The summary of the last rung, with those of the rungs before it.
    """
    if factor < 2:
        raise InputError(f"--halving must be at least 2, got {factor}.")
    if not (directory / "rung-0").exists():
        check_empty(directory, "Give another --out, or that of a sweep with --halving to finish.")
    left = list(itertools.product(*grid.values()))
    rungs = 1
    while len(left) > factor**rungs and config.rounds // factor**rungs >= 2:
        rungs += 1
    summaries: list[dict[str, Any]] = []
    with locked(directory):
        for rung in range(rungs):
            rounds = config.rounds // factor ** (rungs - 1 - rung)
            shorter = dataclasses.replace(config, rounds=rounds)
            where = directory / f"rung-{rung}"
            summary = run(shorter, grid, seeds, where, by, together, on_progress, left)
            summaries.append(summary)
            good = [point for point in summary["ranking"] if usable(point, by)]
            left = [tuple(point["hyper"].values()) for point in good[: -(-len(left) // factor)]]
            if not left:
                break
        trained = sum(rung["rounds"] * len(rung["ranking"]) for rung in summaries)
        share = trained / (config.rounds * len(summaries[0]["ranking"]))
        summary |= {"rungs": summaries[:-1], "share_of_all_rounds": share}
        write_whole(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_preset(directory, config, summary)
    return summary
