"""Fill a results folder: make all missing runs of experiments, with a file for each run.

A finished run is never made again. An interrupted run resumes from its last checkpoint in
`<results>/.work/`. Several processes can share the folder: each takes runs that no other process
has locked, and the system releases the locks of a killed process. Runs that differ only in rates or
seed are trained together if the model is small.
"""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from fedda import tasks
from fedda.errors import InputError, unknown
from fedda.models import PRECISIONS
from fedda.storage import interrupts
from fedda.storage.provenance import commit
from fedda.tasks.config import Config
from fedda_reproduction.paper import cells, training
from fedda_reproduction.paper.cells import Cell, Damaged
from fedda_reproduction.paper.experiments import Entry, Experiment
from fedda_reproduction.paper.training import Over, Report

MOST_TOGETHER = 16  # runs that one process locks to train together


class Filled(NamedTuple):
    """What happened to the runs that were asked for."""

    made: list[str]  # names of cells
    busy: list[str]  # that other processes are working on
    stopped: list[str]  # when the time was over; the next call continues them
    failed: dict[str, str]  # why, by task or name
    late: int = 0  # runs that were not begun when the time was over


class Job(NamedTuple):
    """A run to make, and the name and path of its cell."""

    config: Config
    name: str
    path: Path


def wanted(
    chosen: Sequence[Experiment],
    seeds: int,
    rounds: int | None,
    precision: str | None,
    finished: Iterable[Cell] = (),
) -> list[Config]:
    """Return the runs of these experiments, without duplicates, first all runs of the first seed.

    If no precision is given, a run has the precision of most of its finished runs, or the default.
    """
    if precision not in (None, *PRECISIONS):  # before any data are looked for
        raise unknown("precision", precision, PRECISIONS)
    usual: dict[str, Counter[str]] = {}
    for cell in finished:
        usual.setdefault(cell.group, Counter())[cell.config.precision] += 1

    def config(entry: Entry, seed: int) -> Config:
        plain = entry.resolved(rounds=rounds, seed=seed)
        made = usual.get(cells.group(plain), Counter([plain.precision]))
        return dataclasses.replace(plain, precision=precision or made.most_common(1)[0][0])

    entries = [entry for experiment in chosen for entry in experiment.entries]
    runs = (config(entry, seed) for seed in range(seeds) for entry in entries)
    return list({cells.key(run): run for run in runs}.values())


def missing(runs: Iterable[Config], finished: Iterable[Cell]) -> int:
    """Return how many runs have no cell, with any data."""
    keys = {cells.key(cell.config) for cell in finished if not cell.outdated}
    return sum(cells.key(config) not in keys for config in runs)


def fill(
    runs: Sequence[Config],
    folder: Path,
    seconds: float | None = None,
    report: Report = lambda line: None,
    warn: Report = print,
) -> Filled:
    """Make the cells that are missing.

    Args:
        runs: The runs to make.
        folder: The results folder.
        seconds: After this time, no run begins, and the current run stops at its next evaluation.
            The next call resumes it.
        report: Called with a line for each evaluation and each cell.
        warn: Called with warnings.
    """
    cells.refuse_uncommitted(folder, commit())  # at once, not after hours
    until = None if seconds is None else time.monotonic() + seconds
    work = folder / ".work"
    work.mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    _set_damaged_aside(folder, warn)
    filled, tried = Filled(made=[], busy=[], stopped=[], failed={}), set[str]()

    def over() -> bool:
        return until is not None and time.monotonic() >= until

    jobs = [] if over() else _jobs(runs, folder, filled.failed, warn)
    for job in jobs:
        interrupts.check()
        if over():
            break
        if job.name in tried or job.path.exists():
            continue
        tried.add(job.name)
        try:
            with _locked(_batch(job, jobs, tried, folder)) as mine:
                tried.update(other.name for other in mine)
                if mine:
                    _train(mine, folder, report, over, may_stop=until is not None)
                for other in mine:
                    (filled.made if other.path.exists() else filled.stopped).append(other.name)
                if not mine and not job.path.exists():
                    filled.busy.append(job.name)
        except InputError as error:
            warn(f"{job.name}: {error}")  # at once, as the others may take hours
            filled.failed[job.name] = str(error)
    training.tidy(folder)
    left = [job.config for job in jobs if job.name not in tried] if jobs else runs
    late = missing(left, cells.read_all(folder).finished) if over() else 0
    return filled._replace(late=late)


def _set_damaged_aside(folder: Path, warn: Report) -> None:
    """Rename files that are not cells, so that their runs are made again."""
    for path, why, of_other_version in cells.read_all(folder).damaged:
        message = f"{path} {why}"
        # Another process may be about to replace the file, hence the lock.
        with suppress(Timeout), _lock(folder, path.stem):
            if not of_other_version and path.exists() and isinstance(cells.read(path), Damaged):
                aside = f"{path.name}.damaged-{time.time_ns()}"
                os.replace(path, path.with_name(aside))
                message += f"; it is set aside as {aside}, and the run is made again"
        warn(message)


def _jobs(runs: Iterable[Config], folder: Path, failed: dict[str, str], warn: Report) -> list[Job]:
    """Return the runs whose data are on this machine. The other tasks count as failed."""
    data: dict[str, str | None] = {}
    jobs = []
    for config in runs:
        key = f"{config.task} {config.model} {sorted(config.options.items())}"
        if key not in data and config.task not in failed:
            try:
                data[key] = tasks.load(config).data.get("sha256")
            except InputError as error:
                warn(f"{config.task}: {error}")
                failed[config.task] = str(error)
        if key in data:
            path = cells.path(folder, config, data[key])
            jobs.append(Job(config=config, name=path.stem, path=path))
    return jobs


def _lock(folder: Path, name: str) -> FileLock:
    return FileLock(folder / ".work" / f"{name}.lock", timeout=0)


@contextmanager
def _locked(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Lock the jobs that no other process has locked or finished.

    If the first is locked, no job is: so one process gets all runs that were stopped together.
    """
    mine: list[Job] = []
    with ExitStack() as stack:
        for job in jobs:
            with suppress(Timeout):
                stack.enter_context(_lock(job.path.parents[2], job.name))
                if not job.path.exists():
                    mine.append(job)
            if not mine:
                break
        yield mine


def _batch(job: Job, jobs: Sequence[Job], tried: set[str], folder: Path) -> list[Job]:
    """Return the jobs to train together with this one, including it.

    Runs that were stopped together are resumed together. Otherwise these are all missing runs of
    the program, if training them together is faster.
    """
    if (folder / ".work" / job.name).exists():
        return [job]
    program = training.program(job.config)
    alike = {
        other.name: other
        for other in jobs
        if other.config.task == job.config.task
        and training.program(other.config) == program
        and not other.path.exists()
        and not (folder / ".work" / other.name).exists()
    }
    begun = training.begun_together(folder).values()
    stopped = [names for names in begun if {*names} <= alike.keys()]
    for names in stopped:
        if job.name in names:
            return [alike[name] for name in names]
    taken = tried.union(*stopped)
    others = [other for name, other in alike.items() if name not in taken]
    pays = others and training.pays_together(job.config)
    return [job, *others[: MOST_TOGETHER - 1]] if pays else [job]


def _train(jobs: Sequence[Job], folder: Path, report: Report, over: Over, may_stop: bool) -> None:
    """Train runs to their end, or until the time is over, and write their cells."""
    runs, names = [job.config for job in jobs], [job.name for job in jobs]
    # A batch may be of one run, where no more fitted in memory.
    together = training.directory_together(folder, names, size=1).exists()
    with suppress(training.Stopped):
        if len(jobs) == 1 and not together:
            config = runs[0]
            if may_stop:  # so that no evaluation is made again
                config = dataclasses.replace(config, checkpoint_every=1)
            training.train_one(config, folder, names[0], report, over)
        else:
            # They are saved at their next evaluation. The device is done with the rounds before it
            # when Python hears a signal, as a rule: to wait for it takes little longer than to
            # throw those rounds away.
            with interrupts.held_back() as interrupted:
                training.train_together(
                    runs, folder, names, report, lambda: interrupted() or over()
                )
    for job in jobs:
        if isinstance(cell := cells.read(job.path), Cell):
            final, seconds = cell.final(), cell.content["seconds"]["total"]
            value = "not finite" if final is None else f"{final:.4g}"
            after = f"after {job.config.rounds} rounds, {seconds:.0f} s"
            report(f"{training.title(job.config)}: {cell.content['metric']} {value} {after}")
