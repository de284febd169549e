"""One small file for each finished run: `cells/<task>/<algorithm>-<hash>.json`.

The hash identifies the run: all settings that its numbers depend on, the version of its algorithm
and the data. So a run that two tables need is one file, any machine can add files, and a corrected
algorithm gets new ones. A file also contains its own checksum, so a truncated, changed or renamed
file is detected.
"""

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.algorithms import registry
from fedda.errors import InputError
from fedda.reports.runs import Run
from fedda.simulate.train import averaged
from fedda.storage.files import read_json, write_whole
from fedda.storage.schema import NUMBER_OR_NULL, mismatch
from fedda.tasks import config as configs
from fedda.tasks.config import Config

REPOSITORY = Path(__file__).parents[3]

# Fields of `Config` that always identify a run. Any other field, also one that `Config` gets in
# future, does so only where it differs from its default: new fields leave finished runs alone.
IDENTIFYING = {
    *("algorithm", "task", "model", "precision", "partition", "partition_seed", "clients"),
    *("cohort", "sampling", "rounds", "batch", "local_work", "local_unit", "stabilise"),
    *("eval_every", "seed"),
}
# Fields that say how a run is computed, and change no number.
COMPUTATION = {"chunk", "devices", "memory_gb", "data_gb", "checkpoint_every"}
# Settings that algorithms got later, with the value that the cells from before stand for.
LATER = {
    "sends": "both",
    "momentum": "kept",
    "beta1_per": "step",
    "direction": "momentum",
    "server_momentum": "none",
}

# Settings that algorithms have lost, with the only value that cells have.
RETIRED = {"fedlin": {"server_topk": "off", "client_topk": "off"}}

# The part of a run's summary that its cell holds.
SUMMARY = {
    "metric": str,
    "higher_is_better": bool,
    "parameters": int,
    "bytes_down": int,
    "bytes_up": int,
    "nonfinite_clients": int,
    "skipped_rounds": int,
    "whole_test_set?": {...: NUMBER_OR_NULL},
    "seconds": {"total": float, "compile": float, ...: float},
    "together?": int,
    "device": str,
    "devices?": int,
    "processes?": int,
    "versions": {...: str},
    "commit": str,
    "data": {"sha256?": (str, None), "words?": str},
    "clients?": int,
}
CELL = SUMMARY | {
    "checksum": str,
    "config": {"algorithm": str, "task": str},
    "history": {"round": [int], ...: [NUMBER_OR_NULL]},
    "date": str,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A finished run."""

    path: Path
    config: Config
    content: dict[str, Any]

    @functools.cached_property
    def group(self) -> str:
        """`group` of its configuration, cached because every table asks every cell."""
        return group(self.config)

    @property
    def version(self) -> int:
        """The version of its algorithm."""
        return int(self.content["config"].get("version", 1))

    @property
    def outdated(self) -> bool:
        """Whether its algorithm has been corrected since: the run is to be made again."""
        return self.version < version(self.config)

    @property
    def uncommitted(self) -> bool:
        """Whether the code differed from its commit, so that nobody can repeat the run exactly."""
        return str(self.content["commit"]).endswith("-dirty")

    @property
    def data(self) -> str | None:
        """Hash of the data it was trained on; None for data that come with the package."""
        sha256: str | None = self.content["data"].get("sha256")
        return sha256

    def rows(self) -> list[dict[str, Any]]:
        """The evaluations, as one dictionary each."""
        history = self.content["history"]
        return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]

    def final(self, at: int | None = None) -> float | None:
        """The metric after the last round, or round `at`; None where it was not finite."""
        last, metric = at or self.config.rounds, self.content["metric"]
        return next((row[metric] for row in self.rows() if row["round"] == last), None)

    def mean(self, at: int | None = None) -> float | None:
        """The mean of the metric over the evaluations of the last 100 rounds, or those to `at`."""
        return _mean(_late(self.rows(), at or self.config.rounds), self.content["metric"])


def _optional() -> dict[str, Any]:
    """Return the default of fields that identify a run only if they differ from it."""
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    names = fields.keys() & configs.FIELDS.keys() - IDENTIFYING - COMPUTATION
    return {name: fields[name] for name in names}


def version(config: Config) -> int:
    """Return the version of the algorithm of a run that is made now."""
    return registry.variants()[config.algorithm].version


def identity(config: Config) -> dict[str, Any]:
    """Return what the numbers of a run depend on: settings, and the version of its algorithm.

    1 and 1.0 are the same. The version is left out if it is 1.
    """
    dropped = LATER | _optional() | {"version": 1}
    values = config.flat() | RETIRED.get(config.algorithm, {}) | {"version": version(config)}
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
        if name not in COMPUTATION and (name not in dropped or value != dropped[name])
    }


def key(config: Config) -> str:
    """Return a text that is the same for all configurations with the same numbers."""
    return json.dumps(identity(config), sort_keys=True)


def group(config: Config) -> str:
    """Return a text that is the same for all runs of a row of a table: any seed and precision."""
    return key(dataclasses.replace(config, seed=0, precision=""))


def name(config: Config, data: str | None) -> str:
    """Return the file name of a run, without its ending."""
    return f"{config.algorithm}-{_hash({'config': identity(config), 'data': data})[:12]}"


def path(folder: Path, config: Config, data: str | None) -> Path:
    return folder / "cells" / config.task / f"{name(config, data)}.json"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------ writing


def refuse_uncommitted(folder: Path, commit: str) -> None:
    """Refuse results of uncommitted code in a folder of this repository; others may have them.

    Raises:
        InputError: The commit ends in `-dirty`.
    """
    if commit.endswith("-dirty") and folder.resolve().is_relative_to(REPOSITORY):
        raise InputError(
            f"src or pyproject.toml has changes that are not committed, so nobody could repeat a "
            f"run whose result is in {folder}: expected a clean commit. Commit them first, or give "
            "a folder outside the repository with --results."
        )


def write(
    folder: Path,
    config: Config,
    history: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    date: float | None = None,
) -> Path:
    """Write the cell of a finished run; `date` is now by default. Returns its path."""
    refuse_uncommitted(folder, summary["commit"])
    metric, last = summary["metric"], config.rounds
    measured = ("train_loss", "loss", metric)
    rows = [
        {"round": row["round"]} | {name: _rounded(row[name]) for name in measured}
        for row in history
    ]
    done = rows[-1]["round"] if rows else 0
    if done != last:
        raise InputError(f"a run of {last} rounds ended after {done}: finish it first.")
    taken = [name.removesuffix("?") for name in SUMMARY]
    content = {
        "config": identity(config),
        "final": {name: rows[-1][name] for name in measured},
        "history": {name: [row[name] for row in rows] for name in ("round", *measured)},
        **{name: summary[name] for name in taken if name in summary},
        "seconds": {name: round(value, 2) for name, value in summary["seconds"].items()},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date)),
    }
    content["checksum"] = _hash(content)
    target = path(folder, config, content["data"].get("sha256"))
    target.parent.mkdir(parents=True, exist_ok=True)
    # A line for each entry, so that a person can read it and git can compare it.
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    write_whole(target, "{\n" + ",\n".join(lines) + "\n}\n")
    return target


def _late(rows: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Return the evaluations of the last rounds up to `last`, at most one for each round.

    The evaluation before the first of these rounds is left out.
    """
    return [row for row in rows if last - averaged(last) < row["round"] <= last]


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows]
    if not values or None in values:
        return None
    return _rounded(math.fsum(values) / len(values))


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def add(folder: Path, run: Run) -> Path:
    """Write the cell of a finished run of `fedda run`. Returns its path.

    Raises:
        InputError: The run is not finished, or its files lack something.
    """
    if run.summary is None or run.path is None:
        raise InputError(
            f"{run.path} has no summary.json: it is not finished. Continue it with fedda run "
            f"--resume {run.path}"
        )
    config = configs.resolve(run.config)
    keys = ("train_loss", "loss", run.summary.get("metric", "loss"))
    measured = dict.fromkeys(keys, NUMBER_OR_NULL)
    for name, content, spec in (
        ("config.toml", run.config, dict.fromkeys(config.flat(), Any)),
        ("summary.json", run.summary, SUMMARY),
        *((f"the line of round {row['round']}", row, measured) for row in run.evaluations),
    ):
        if why := mismatch(content, spec, name):
            raise InputError(f"{run.path} cannot be added: {why}. Make the run again.")
    date = (run.path / "summary.json").stat().st_mtime
    return write(folder, config, run.evaluations, run.summary, date)


# ------------------------------------------------------------------------------------------ reading


class Damaged(NamedTuple):
    """A file that is not a cell, or not one that this version can read."""

    path: Path
    why: str
    of_other_version: bool = False


class Cells(NamedTuple):
    """The content of a results folder."""

    finished: list[Cell]
    damaged: list[Damaged]


def read(path: Path) -> Cell | Damaged:
    """Read one file of a results folder."""
    try:
        content = read_json(path, CELL)
    except (OSError, ValueError) as error:
        return Damaged(path, f"is not whole: {error}")
    rest = {name: value for name, value in content.items() if name != "checksum"}
    if _hash(rest) != content["checksum"]:
        return Damaged(path, "was changed: its checksum is another")
    history = content["history"]
    if not {"train_loss", "loss", content["metric"]} <= history.keys():
        return Damaged(path, f"is not whole: its history lacks {content['metric']} or losses")
    if not history["round"] or len({len(column) for column in history.values()}) > 1:
        return Damaged(path, "is not whole: the columns of its history are empty or not as long")
    if history["round"] != sorted({*history["round"]}):
        return Damaged(path, "is not whole: the rounds of its history do not rise")
    settings = content["config"]
    hashed = _hash({"config": settings, "data": content["data"].get("sha256")})[:12]
    if (path.parent.name, path.stem) != (settings["task"], f"{settings['algorithm']}-{hashed}"):
        return Damaged(path, "is the result of another configuration than its name says")
    try:
        retired = RETIRED.get(settings["algorithm"], {})
        known = {name: value for name, value in settings.items() if retired.get(name) != value}
        known.pop("version", None)
        config = configs.resolve(_optional() | known)
        if min(content["parameters"], config.rounds, config.cohort, config.eval_every) < 1:
            return Damaged(path, "is of a run without parameters, rounds, clients or evaluations")
        return Cell(path=path, config=config, content=content)
    except InputError as error:
        return Damaged(path, f"is of another version: {error}", of_other_version=True)


def read_all(folder: Path) -> Cells:
    """Read every cell of a results folder."""
    every = [read(path) for path in sorted((folder / "cells").glob("*/*.json"))]
    return Cells(
        finished=[cell for cell in every if isinstance(cell, Cell)],
        damaged=[cell for cell in every if isinstance(cell, Damaged)],
    )
