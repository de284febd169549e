"""Fills a results folder: every run of an experiment that is not there yet, each as one cell.

A finished run is a file that nobody makes twice. A run that was interrupted, or stopped for lack of
time, goes on from its last checkpoint, in `<results>/.work/`. Several processes share the folder:
each takes what no other has claimed. Runs of one program, which differ in rates or seed alone, are
trained together where the model is small.
"""

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedda import tasks
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.storage import interrupts
from fedda.tasks.config import Config
from fedda_reproduction.paper import batches, cells, tables, training
from fedda_reproduction.paper.cells import Cell, Damaged
from fedda_reproduction.paper.experiments import Entry, Experiment
from fedda_reproduction.paper.locks import Claims
from fedda_reproduction.paper.training import Tell

MOST = 16  # runs that one process claims to train together


class Filled(NamedTuple):
    """What became of the runs that were asked for."""

    made: list[str]  # names of cells
    busy: list[str]  # that other processes are at work on
    stopped: list[str]  # when the time was over, to be continued
    failed: dict[str, str]  # why, by task or name
    late: int = 0  # how many were left when the time was over, besides those that were stopped


def wanted(
    chosen: Sequence[Experiment],
    seeds: int,
    rounds: int | None,
    precision: str | None,
    found: Iterable[Cell] = (),
) -> list[Config]:
    """The runs of these experiments, each once: all of them with one seed before the next seed.

    If no precision is asked for, each has that of what was found of it, and else the usual one.
    """
    if precision is not None:
        experiment.check_precision(precision)
    usual: dict[str, Counter[str]] = {}
    for cell in found:
        usual.setdefault(cell.group, Counter())[cell.config.precision] += 1

    def config(entry: Entry, seed: int) -> Config:
        plain = tables.resolved(entry, rounds, seed=seed)
        there = usual.get(cells.group(plain), Counter([plain.precision]))
        return dataclasses.replace(plain, precision=precision or there.most_common(1)[0][0])

    each = (config(entry, seed) for seed in range(seeds) for one in chosen for entry in one.entries)
    return list({cells.key(config): config for config in each}.values())


def missing(runs: Iterable[Config], found: Iterable[Cell]) -> int:
    """How many runs have no cell, on whatever data."""
    keys = {cells.key(cell.config) for cell in found}
    return sum(cells.key(config) not in keys for config in runs)


def fill(
    runs: Sequence[Config],
    folder: Path,
    seconds: float | None = None,
    tell: Tell = lambda line: None,
    warn: Tell = print,
) -> Filled:
    """Makes the cells that are missing, and begins none after so many `seconds`.

    What is then under way is stopped at its next evaluation, and goes on from there the next time.
    `tell` is given a line for each evaluation and cell, `warn` what a person should look into.
    """
    work = folder / ".work"
    work.mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    with Claims(work) as claims:
        filler = _Filler(runs, folder, claims, seconds, tell, warn)
        for config in runs:
            interrupts.check()
            if filler.is_over():
                break
            filler.do(config)
    there = {path.stem for path in (folder / "cells").glob("*/*.json")}
    batches.tidy(folder, there)
    busy = [name for name in filler.filled.busy if name not in there]
    return filler.filled._replace(busy=busy, late=missing(filler.left(), filler.found))


def add(folder: Path, directory: Path) -> Path:
    """Makes a cell of the directory of a finished run."""
    run = cells.finished(directory)
    summary = dict(run.summary)
    try:
        problem = tasks.load(run.config)
    except InputError:
        pass  # its data are not on this machine
    else:
        if problem.data.get("sha256") == summary["data"].get("sha256"):
            summary["clients"] = problem.shards.num_clients
    return cells.write(folder, run.config, run.history, summary, run.date)


class _Filler:
    """One process at work in a results folder."""

    def __init__(
        self,
        runs: Sequence[Config],
        folder: Path,
        claims: Claims,
        seconds: float | None,
        tell: Tell,
        warn: Tell,
    ) -> None:
        self.runs, self.folder, self.claims = runs, folder, claims
        self.tell, self.warn = tell, warn
        self.until = None if seconds is None else time.monotonic() + seconds
        self.filled = Filled([], [], [], {})
        self.found = self._read()
        self.done = {(cells.key(cell.config), cell.data) for cell in self.found}
        self.tried: set[str] = set()  # runs, by key
        self.data: dict[str, str | None] = {}  # by what decides it

    def _read(self) -> list[Cell]:
        """The cells of the folder; files that are none are set aside."""
        results = cells.read_all(self.folder)
        for each in results.damaged:
            told = f"{each.path} {each.why}"
            # Another process may be about to replace it: it is set aside under a claim.
            if not each.of_other_version and self.claims.take(each.path.stem):
                if isinstance(cells.read(each.path), Damaged) and each.path.exists():
                    aside = _free(each.path.with_suffix(".json.damaged"))
                    os.replace(each.path, aside)
                    told += f"; it is set aside as {aside.name}, and the run is made again"
                self.claims.drop(each.path.stem)
            self.warn(told)
        return results.found

    def left(self) -> list[Config]:
        return [each for each in self.runs if cells.key(each) not in self.tried]

    def do(self, config: Config) -> None:
        """Makes a run, and those that are best trained with it, unless that was done or tried.

        A run that cannot be made is put down as failed; the others go on.
        """
        key, what = cells.key(config), config.task  # whose data may not be on this machine
        if key in self.tried:
            return
        self.tried.add(key)
        if what in self.filled.failed:
            return
        try:
            what = self._name(config)
            if self._is_done(config):
                return
            first, *others = self._batch(config)
            # The first decides, so that one process has all of what was stopped together.
            if not self._claimed(first):
                self.filled.busy.append(what)
                return
            mine = [first, *(each for each in others if self._claimed(each))]
            self._train(mine)
            self.tried.update(map(cells.key, mine))
        except InputError as error:
            self.warn(f"{what}: {error}")  # at once, as the others may take hours
            self.filled.failed[what] = str(error)

    def _data(self, config: Config) -> str | None:
        """The hash of the data; a task whose data are not here cannot be done."""
        key = f"{config.task} {config.model} {sorted(config.options.items())}"
        if key not in self.data:
            self.data[key] = tasks.load(config).data.get("sha256")
        return self.data[key]

    def _name(self, config: Config) -> str:
        return cells.name(config, self._data(config))

    def _is_done(self, config: Config) -> bool:
        return (cells.key(config), self._data(config)) in self.done

    def _claimed(self, config: Config) -> bool:
        """Whether it is ours to make: nobody is at it, and nobody has finished it meanwhile."""
        name = self._name(config)
        if not self.claims.take(name):
            return False
        there = cells.read(cells.path(self.folder, config, self._data(config)))
        if isinstance(there, Cell):
            self._remember(there)
            self.claims.drop(name)
        return not isinstance(there, Cell)

    def _remember(self, cell: Cell) -> None:
        self.found.append(cell)
        self.done.add((cells.key(cell.config), cell.data))

    def _batch(self, config: Config) -> list[Config]:
        """What to train with a run, itself included: what it was stopped with, as it was then.

        Or else what is left of its program, if it pays to train them together.
        """
        if self._is_begun(config):
            return [config]
        program = training.program(config)
        alike = {
            self._name(each): each
            for each in self.runs
            if (each.task, each.algorithm, each.rounds)
            == (config.task, config.algorithm, config.rounds)
            and training.program(each) == program
            and not self._is_done(each)
            and not self._is_begun(each)
        }
        stopped = [
            names for names in batches.kept(self.folder).values() if {*names} <= alike.keys()
        ]
        for names in stopped:
            if self._name(config) in names:
                return [alike[name] for name in names]
        others = [
            each
            for name, each in alike.items()
            if cells.key(each) not in self.tried and not any(name in names for names in stopped)
        ]
        pays = others and training.pays_together(config)
        return [config, *others[: MOST - 1]] if pays else [config]

    def _is_begun(self, config: Config) -> bool:
        """Whether there is a checkpoint to continue from, or at least a place for it."""
        return training.place(self.folder, self._name(config)).exists()

    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def _train(self, runs: Sequence[Config]) -> None:
        names = [self._name(config) for config in runs]
        try:
            with contextlib.suppress(training.Stopped):
                # A batch may be of one, where no more fitted in memory.
                if len(runs) == 1 and not batches.place(self.folder, names, 1).exists():
                    config = runs[0]
                    if self.until is not None:  # so that no evaluation is made again
                        config = dataclasses.replace(config, checkpoint_every=1)
                    training.alone(config, self.folder, names[0], self.tell, self.is_over)
                else:
                    # They are kept at their next evaluation. The device is done with the rounds
                    # before it when Python hears a signal, as a rule: to wait for it takes little
                    # longer than to throw those rounds away.
                    with interrupts.held_back() as interrupted:
                        training.several(
                            runs,
                            self.folder,
                            names,
                            self.tell,
                            over=lambda: interrupted() or self.is_over(),
                        )
            for config, name in zip(runs, names, strict=True):
                made = cells.read(cells.path(self.folder, config, self._data(config)))
                if isinstance(made, Cell):
                    self._remember(made)
                    self.filled.made.append(name)
                    self.tell(f"{training.words(config)}: {_result(made)}")
                else:
                    self.filled.stopped.append(name)
        finally:
            for name in names:
                self.claims.drop(name)


def _free(path: Path) -> Path:
    """The path or, if something is there, one with a number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())


def _result(cell: Cell) -> str:
    final, seconds = cell.final(), cell.content["seconds"]["total"]
    value = "not finite" if final is None else f"{final:.4g}"
    return f"{cell.content['metric']} {value} after {cell.config.rounds} rounds, {seconds:.0f} s"
