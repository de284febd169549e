"""Trains the runs of cells: one with checkpoints, or several that are one program together."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from fedda import algorithms, api, tasks
from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.experiments import run as experiment
from fedda.simulate import grid, train
from fedda.simulate.grid import Part
from fedda.storage.provenance import compile_seconds, provenance
from fedda.tasks.config import Config
from fedda_reproduction.paper import batches, cells

SMALL = 2_000_000  # parameters: a larger model keeps a device busy alone

Tell = Callable[[str], None]
Over = Callable[[], bool]  # whether to stop: the time is over, or Ctrl-C came


def program(config: Config) -> str:
    """One text for runs that one compiled program serves: those that differ in numbers it takes."""
    options = algorithms.options(config.algorithm)
    traced = {name for name in config.chosen if name not in options} | {"seed", "rounds"}
    kept = {name: value for name, value in cells.decisive(config).items() if name not in traced}
    return str(sorted(kept.items()))


def words(config: Config) -> str:
    """A run as a person is told of it."""
    return f"{config.task} {config.algorithm} seed {config.seed}"


def words_together(runs: Sequence[Config]) -> str:
    """Runs of one program as a person is told of them: by what they differ in."""
    if len(runs) == 1:
        return words(runs[0])
    each = [config.flat() for config in runs]
    values = {name: list(dict.fromkeys(own[name] for own in each)) for name in each[0]}
    varied = "; ".join(
        f"{name} {', '.join(map(str, own))}" for name, own in values.items() if len(own) > 1
    )
    return f"{runs[0].task} {runs[0].algorithm}, {len(runs)} together ({varied})"


def pays_together(config: Config) -> bool:
    """Whether runs of this program are faster together, and need nothing that batches lack."""
    problem, setup, _ = experiment.prepare(config)
    parameters = tree.size(problem.model.shapes())
    return parameters <= SMALL and setup.host_rounds is None and problem.final is None


def place(folder: Path, name: str) -> Path:
    """Where the work on one cell is kept."""
    return folder / ".work" / name


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """They were told to stop, and are not at their end."""


def alone(config: Config, folder: Path, name: str, tell: Tell, over: Over) -> None:
    """Trains one run, from its last checkpoint if it was interrupted, and writes its cell.

    It is stopped at an evaluation after the time is over.
    """
    directory = place(folder, name)

    def told(progress: experiment.Progress) -> None:
        value = progress.row[progress.metric]
        shown = "-" if value is None else f"{value:.3g}"
        done = f"round {progress.row['round']}/{progress.rounds}"
        tell(f"{words(config)}: {done} {progress.metric} {shown}")
        if progress.row["round"] < progress.rounds and over():
            raise Stopped

    if (directory / "config.toml").exists():
        now = {"checkpoint_every": config.checkpoint_every}  # it may have begun with another
        outcome = experiment.resume(directory, now, told)
    else:
        outcome = experiment.run(with_memory(config), directory, told)
    for note in outcome.notes:
        tell(f"{words(config)}: {note}")
    clients = tasks.load(config).shards.num_clients
    cells.write(folder, config, outcome.result.history, outcome.summary | {"clients": clients})
    shutil.rmtree(directory)


def with_memory(config: Config) -> Config:
    """Lets client memory have its share of an accelerator, which changes no number.

    Only if all of it then fits: a part that is fetched from the host needs room twice, and more of
    it makes nothing faster.
    """
    free = free_memory.of_devices(jax.devices()[:1])
    if jax.devices()[0].platform == "cpu" or math.isinf(free):
        return config
    room = max(config.memory_gb, math.floor(grid.SHARE * free / 1e9))
    roomy = dataclasses.replace(config, memory_gb=room)
    return roomy if experiment.prepare(roomy)[1].host_rounds is None else config


def several(
    runs: Sequence[Config], folder: Path, names: Sequence[str], tell: Tell, over: Over
) -> None:
    """Trains runs of one program together, in batches, and writes the cells of one when it is done.

    A batch goes on from its last checkpoint, and is stopped and kept at the first evaluation at
    which it is `over`.
    """
    compiled = compile_seconds()
    problem, setup, _ = experiment.prepare(runs[0])
    hypers = [algorithms.configure(each.algorithm, each.chosen)[1] for each in runs]
    kept: dict[range, batches.Kept] = {}
    # What was stopped together goes on so, though the device may have less room by now.
    size = len(runs) if batches.place(folder, names, len(names)).exists() else None

    def told(members: range, what: str) -> None:
        tell(f"{words_together(runs[members.start : members.stop])}: {what}")

    def begun(members: range, shapes: PyTree) -> Part | None:
        size = (*shapes.nonfinite.shape, 1)[0]
        kept[members] = batches.Kept(folder, names[members.start : members.stop], size)
        part = kept[members].read(shapes)
        if part is not None:
            told(members, f"continued from round {part.round}")
        return part

    def reached(members: range, part: Part) -> None:
        told(members, f"round {part.round}/{runs[0].rounds}")
        if part.round == runs[0].rounds:
            return
        stop = over()
        if stop or kept[members].is_due(part):
            for note in kept[members].save(part):
                told(members, note)
        if stop:
            raise Stopped

    try:
        for done in api.train_grid(
            setup, hypers, [each.seed for each in runs], size, reached, begun
        ):
            compiling = compile_seconds() - compiled
            compiled += compiling
            share = {"total": done.seconds + compiling, "compile": compiling}
            count = len(done.members)
            mesh = setup.layout.mesh
            state = done.states()[0]
            for i, history in zip(done.members, done.histories, strict=True):
                summary = {
                    "metric": problem.metrics[0].__name__,
                    "higher_is_better": problem.higher_is_better,
                    "parameters": tree.size(state.params),
                    **{name: history[-1][name] for name in train.TOTALS},
                    "seconds": {name: value / count for name, value in share.items()},
                    "together": done.size,
                    **provenance(),
                    "devices": 1 if mesh is None else mesh.size,
                    "data": dict(problem.data),
                    "clients": problem.shards.num_clients,
                }
                cells.write(folder, runs[i], history, summary)
            kept[done.members].drop()
    finally:  # interrupted or not, the last checkpoints are written to their end
        for members, batch in kept.items():
            for note in batch.close():
                told(members, note)
