"""The experiments of the paper, and a few of our own, as lists of runs: `experiments.toml`.

The rates of the methods are in `settings/<task>.toml`, each with its source. Other methods have the
rates of our presets.
"""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fedda import algorithms
from fedda.errors import InputError, unknown
from fedda.tasks import config as configs
from fedda.tasks.config import Config
from fedda_reproduction.paper import methods, published

FILE = Path(__file__).with_name("experiments.toml")
FEDDA = ("fedda-sgdm", "fedda-adam", "fedda-adagrad")
# The experiments in which all methods of the paper were tuned by the same rule.
TUNED = {"emnist": "tuned-emnist", "cifar100": "tuned-cifar100", "stackexchange": "table5"}
METHOD_TABLES = ("table2", "table3", "table4", "table5")


class Entry(NamedTuple):
    """One run of an experiment, and the published numbers it is compared with."""

    label: str
    values: Mapping[str, Any]  # for `config.resolve`, without the seed
    paper: float | None = None
    elsewhere: float | None = None  # reported by the authors of the method for the same task
    at: int | None = None  # the round to look at, if it is not the last

    @property
    def task(self) -> str:
        return str(self.values["task"])

    @property
    def algorithm(self) -> str:
        return str(self.values["algorithm"])

    def resolved(self, **changes: object) -> Config:
        """Return the configuration of the run, with other settings where they are not None."""
        given = {name: value for name, value in changes.items() if value is not None}
        return configs.resolve({**self.values, **given})


class Experiment(NamedTuple):
    name: str
    title: str
    entries: tuple[Entry, ...]
    note: str = ""

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(entry.task for entry in self.entries))


@lru_cache
def experiments() -> dict[str, Experiment]:
    """Return all experiments by name."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: _experiment(name, table, content) for name, table in content["experiments"].items()
    }


def _experiment(name: str, table: Mapping[str, Any], content: Mapping[str, Any]) -> Experiment:
    several = len({task for runs in table["runs"] for task in runs.get("tasks", ())}) > 1
    lists = (
        _pairs(runs["pairs"], content["run"])
        if "pairs" in runs
        else _entries(runs, content, several)
        for runs in table["runs"]
    )
    entries, note = tuple(itertools.chain(*lists)), table.get("note", "")
    return Experiment(name=name, title=table["title"], entries=entries, note=note)


def _entries(
    runs: Mapping[str, Any], content: Mapping[str, Any], several_tasks: bool
) -> Iterable[Entry]:
    """Return an entry for each task, algorithm and value of a table of runs."""
    names = runs["algorithms"]
    if isinstance(names, str):
        every = methods.ordered(algorithms.names())
        names = every if names == "all" else content["algorithms"][names]
    varied = runs.get("vary", {})
    points = [
        dict(zip(varied, values, strict=True)) for values in zip(*varied.values(), strict=True)
    ]
    at = runs.get("at", [None])
    for task, name, point, number in itertools.product(runs["tasks"], names, points or [{}], at):
        tuned = runs.get("rates") == "tuned"
        values = _values(task, name, content["run"], tuned) | runs.get("set", {}) | point
        parts = [methods.TASKS[task]] if several_tasks else []
        parts += [methods.label(name), *(f"{key} {value:g}" for key, value in point.items())]
        parts += [f"after {number} rounds"] if number else []
        parts += [runs["suffix"]] if "suffix" in runs else []
        paper = elsewhere = None
        if "paper" in runs:
            method, _, optimiser = name.partition("-")
            column = methods.METHODS[method], optimiser or published.OPTIMISERS[0]
            paper = published.finals(runs["paper"])[column]
            elsewhere = None if "set" in runs else published.fedopt().get((task, name))
        entry = Entry(label=", ".join(parts), values=values, at=number)
        yield entry._replace(paper=paper, elsewhere=elsewhere)


def _pairs(number: int, base: Mapping[str, Any]) -> Iterable[Entry]:
    """Return the entries of a table of pairs of rates. EMNIST is first, with the shortest runs."""
    lines = published.lines(f"table{number:02}")
    for line in sorted(lines, key=lambda line: line["dataset"] != "EMNIST"):
        task = published.TASKS[line["dataset"]]
        rates = {name: float(line[name]) for name in ("client_lr", "server_lr")}
        parts = [methods.TASKS[task], *(f"{key} {value:g}" for key, value in rates.items())]
        values = _values(task, f"fedda-{line['optimizer']}", base, tuned=False)
        paper = float(line["accuracy"])
        yield Entry(label=", ".join(parts), values=values | rates, paper=paper)


def _values(task: str, algorithm: str, base: Mapping[str, Any], tuned: bool) -> dict[str, Any]:
    """Return the settings of a run. With published rates, our presets are not used."""
    rates = {} if tuned else methods.settings(task).get(algorithm, {})
    if rates:
        rates = algorithms.defaults(algorithm) | rates
    return {"task": task, "algorithm": algorithm, **base[task], **rates}


def chosen(names: Iterable[str], only: Sequence[str] = ()) -> list[Experiment]:
    """Return experiments by name, restricted to `only`. The name `all` means all experiments.

    Args:
        names: Names of experiments.
        only: Names of algorithms and tasks to keep. By default all are kept.

    Raises:
        InputError: A name is unknown, or no run has all that `only` names.
    """
    every = experiments()
    wanted: dict[str, Experiment] = {}
    for name in names:
        if name != "all" and name not in every:
            raise unknown("experiment", name, (*every, "all"))
        wanted |= every if name == "all" else {name: every[name]}
    entries = [entry for experiment in wanted.values() for entry in experiment.entries]
    known = {name for entry in entries for name in (entry.algorithm, entry.task)}
    for name in only:
        if name not in known:
            raise unknown("algorithm or task of these experiments", name, known)
    kept = [_only(experiment, only) for experiment in wanted.values()]
    if not any(experiment.entries for experiment in kept):
        raise InputError(f"no run is of all of {', '.join(only)}: name fewer with --only.")
    return kept


def _only(experiment: Experiment, names: Sequence[str]) -> Experiment:
    known = algorithms.names()
    wanted = [name for name in names if name in known] or known
    tasks = [name for name in names if name not in known] or experiment.tasks
    kept = [entry for entry in experiment.entries if entry.task in tasks]
    return experiment._replace(entries=tuple(e for e in kept if e.algorithm in wanted))
