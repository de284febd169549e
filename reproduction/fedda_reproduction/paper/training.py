"""Train the missing runs: one run, or several runs of one program together.

Unfinished runs are in `.work` of the results folder: `<cell>/` is the run directory of one run, and
`together-<hash>/` that of several. The settings of the latter are the names of the cells, and its
checkpoints have stacked arrays. Only the same runs, in the same order, can resume from it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from fedda import algorithms, api, tasks
from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate import grid, train
from fedda.simulate.grid import Part
from fedda.simulate.progress import Progress
from fedda.storage.directory import RunDirectory
from fedda.storage.provenance import compile_seconds, provenance
from fedda.storage.snapshot import read_settings
from fedda.tasks.config import Config
from fedda_reproduction.paper import cells

SMALL = 2_000_000  # parameters: a larger model keeps a device busy alone
SECONDS = 60.0  # between checkpoints of runs that are trained together
BYTES_PER_SECOND = 1e8  # large checkpoints are written less often, as they take time

Report = Callable[[str], None]
Over = Callable[[], bool]  # whether to stop: the time is over, or Ctrl-C came


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """The training was asked to stop, and is not at its end."""


def program(config: Config) -> str:
    """Return a text that is the same for all runs that one program can train together."""
    options = algorithms.options(config.algorithm)
    traced = {name for name in config.chosen if name not in options} | {"seed"}
    fixed = {name: value for name, value in cells.identity(config).items() if name not in traced}
    return str(sorted(fixed.items()))


def title(*runs: Config) -> str:
    """Return a name for runs of one program, by the settings in which they differ."""
    name = f"{runs[0].task} {runs[0].algorithm}"
    if len(runs) == 1:
        return f"{name} seed {runs[0].seed}"
    flat = [config.flat() for config in runs]
    values = {key: list(dict.fromkeys(settings[key] for settings in flat)) for key in flat[0]}
    varied = (f"{key} {', '.join(map(str, v))}" for key, v in values.items() if len(v) > 1)
    return f"{name}, {len(runs)} together ({'; '.join(varied)})"


def pays_together(config: Config) -> bool:
    """Return whether runs of this program can be trained together, and are then faster."""
    problem, setup, _ = experiment.prepare(config)
    parameters = tree.size(problem.model.shapes())
    return parameters <= SMALL and setup.host_rounds is None and problem.final is None


def directory_together(folder: Path, names: Sequence[str], size: int) -> Path:
    """Return the run directory of several cells, trained in a program for `size` runs."""
    text = json.dumps([*names, size])
    return folder / ".work" / f"together-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def begun_together(folder: Path) -> dict[Path, list[str]]:
    """Return the names of the cells in each directory of runs that are trained together."""
    directories = {}
    for path in sorted(folder.glob(".work/together-*/config.toml")):
        # Another process deletes it; or it is damaged, which is reported when it is continued.
        with contextlib.suppress(FileNotFoundError, InputError):
            directories[path.parent] = read_settings(path.parent)["members"]
    return directories


def tidy(folder: Path) -> None:
    """Delete the directories of finished runs in `.work`."""
    done = {path.stem for path in (folder / "cells").glob("*/*.json")}
    for path, names in begun_together(folder).items():
        if {*names} <= done:  # all of them have finished, in other batches
            shutil.rmtree(path, ignore_errors=True)  # another process may tidy up, too
    for path in folder.glob(".work/*.lock"):
        if path.stem in done:
            path.unlink(missing_ok=True)


def with_memory(config: Config) -> Config:
    """Raise `memory_gb` on an accelerator if all client memory then fits. Results do not change.

    Client memory on the host would need space on the device twice, without being faster.
    """
    free = free_memory.of_devices(jax.devices()[:1])
    if jax.devices()[0].platform == "cpu" or math.isinf(free):
        return config
    room = max(config.memory_gb, math.floor(grid.SHARE * free / 1e9))
    roomy = dataclasses.replace(config, memory_gb=room)
    return roomy if experiment.prepare(roomy)[1].host_rounds is None else config


def train_one(config: Config, folder: Path, name: str, report: Report, over: Over) -> None:
    """Train one run, from its last checkpoint if it has one, and write its cell.

    Raises:
        Stopped: The time was over at an evaluation.
    """
    directory = folder / ".work" / name

    def on_progress(progress: Progress | None) -> None:
        if progress is None:
            return
        assert progress.metric is not None  # every task has a metric
        value = progress.row[progress.metric]
        shown = "-" if value is None else f"{value:.3g}"
        done = f"round {progress.row['round']}/{progress.rounds}"
        report(f"{title(config)}: {done} {progress.metric} {shown}")
        if progress.row["round"] < progress.rounds and over():
            raise Stopped

    if (directory / "config.toml").exists():
        now = {"checkpoint_every": config.checkpoint_every}  # it may have begun with another
        outcome = experiment.resume(directory, now, on_progress)
    else:
        outcome = experiment.run(with_memory(config), directory, on_progress)
    for note in outcome.notes:
        report(f"{title(config)}: {note}")
    clients = tasks.load(config).shards.num_clients
    cells.write(folder, config, outcome.result.history, outcome.summary | {"clients": clients})
    shutil.rmtree(directory)


def train_together(
    runs: Sequence[Config], folder: Path, names: Sequence[str], report: Report, over: Over
) -> None:
    """Train runs of one program in batches, and write the cells of a batch when it is done.

    A batch continues from its last checkpoint.

    Raises:
        Stopped: The time was over at an evaluation. There is a checkpoint of it.
    """
    compiled = compile_seconds()
    problem, setup, _ = experiment.prepare(runs[0])
    hypers = [algorithms.configure(run.algorithm, run.chosen)[1] for run in runs]
    directories: dict[range, RunDirectory] = {}
    saved = time.monotonic()
    # Runs that were stopped together go on so, though the device may have less room by now.
    whole = directory_together(folder, names, len(names)).exists()
    seeds, together = [run.seed for run in runs], len(runs) if whole else None

    def announce(members: range, message: str) -> None:
        report(f"{title(*runs[members.start : members.stop])}: {message}")

    def begin(members: range, shapes: PyTree) -> Part | None:
        part, size = list(names[members.start : members.stop]), (*shapes.nonfinite.shape, 1)[0]
        directory = RunDirectory(directory_together(folder, part, size), {"members": part})
        directories[members] = directory
        checkpoint = directory.read_back(lambda: shapes)
        if checkpoint is None:
            return None
        announce(members, f"continued from round {checkpoint.round}")
        rows = [
            {
                key: np.array(value) if isinstance(value, list) else value
                for key, value in row.items()
            }
            for row in checkpoint.progress["rows"]
        ]
        seconds = checkpoint.progress["seconds"]
        return Part(round=checkpoint.round, run=checkpoint.run, rows=rows, seconds=seconds)

    def on_evaluation(members: range, part: Part) -> None:
        nonlocal saved
        announce(members, f"round {part.round}/{runs[0].rounds}")
        if part.round == runs[0].rounds:
            return
        stop, waited = over(), time.monotonic() - saved
        if stop or waited > max(SECONDS, tree.nbytes(part.run) / BYTES_PER_SECOND):
            rows = [{k: np.asarray(v).tolist() for k, v in row.items()} for row in part.rows]
            progress = {"rows": rows, "seconds": part.seconds}
            directories[members].save(part.round, part.run, progress)
            saved = time.monotonic()
        if stop:
            raise Stopped

    try:
        for batch in api.train_grid(
            setup, hypers, seeds, together, on_evaluation=on_evaluation, begun=begin
        ):
            compiling = compile_seconds() - compiled
            compiled += compiling
            seconds = {"total": batch.seconds + compiling, "compile": compiling}
            for i, history in zip(batch.members, batch.histories, strict=True):
                summary = {
                    "metric": problem.metrics[0].__name__,
                    "higher_is_better": problem.higher_is_better,
                    "parameters": tree.size(problem.model.shapes()),
                    **{name: history[-1][name] for name in train.TOTALS},
                    "seconds": {name: of / len(batch.members) for name, of in seconds.items()},
                    "together": batch.size,
                    **provenance(),
                    "devices": 1 if setup.layout.mesh is None else setup.layout.mesh.size,
                    "data": dict(problem.data),
                    "clients": problem.shards.num_clients,
                }
                cells.write(folder, runs[i], history, summary)
            directory = directories.pop(batch.members)
            directory.close()
            assert directory.path is not None
            shutil.rmtree(directory.path, ignore_errors=True)
    finally:  # interrupted or not, the last checkpoints are written to their end
        for members, directory in directories.items():
            directory.close()
            for note in directory.notes:
                announce(members, note)
