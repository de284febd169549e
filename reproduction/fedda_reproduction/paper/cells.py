"""One small file for each finished run: `cells/<task>/<algorithm>-<hash>.json`.

The hash is of everything that decides the run's numbers: its resolved configuration, without what
only says how it is computed, and the data. So a run that two tables need is one file, and a file
can be added by any machine. A file also holds a checksum of itself: what was cut off, changed or
renamed is found, and named.
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

from fedda.errors import InputError
from fedda.report.runs import read_log, read_summary
from fedda.simulate.train import averaged
from fedda.storage.files import read_json, write_whole
from fedda.storage.schema import NUMBER_OR_NULL, mismatch
from fedda.tasks import config as configs
from fedda.tasks.config import Config

# Settings that came later, and what cells from before stand for.
LATER = {"sends": "both", "momentum": "kept", "late_every": 0}
HOW = ("chunk", "devices", "memory_gb", "data_gb", "checkpoint_every")  # computed, not what
DIGITS = 6

# What a cell takes over from a run's summary.
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
FROM_SUMMARY = tuple(name.removesuffix("?") for name in SUMMARY)
CELL = SUMMARY | {
    "checksum": str,
    "config": {"algorithm": str, "task": str},
    "history": {"round": [int], ...: [NUMBER_OR_NULL]},
    "date": str,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A finished run, as read."""

    path: Path
    config: Config
    content: dict[str, Any]

    @functools.cached_property
    def group(self) -> str:
        """That of its configuration, made once: every table asks every cell."""
        return group(self.config)

    @property
    def data(self) -> str | None:
        """The data it was trained on; None stands for what comes with the package."""
        found: str | None = self.content["data"].get("sha256")
        return found

    def final(self, at: int | None = None) -> float | None:
        """The metric after the last round, or after round `at`; None where it was not finite."""
        rows = _columns(self.content["history"])
        last = self.config.rounds if at is None else at
        return next((row[self.content["metric"]] for row in rows if row["round"] == last), None)

    def mean(self, at: int | None = None) -> float | None:
        """The mean of the metric over the evaluations of the last 100 rounds, or those to `at`."""
        rows = _columns(self.content["history"])
        last = self.config.rounds if at is None else at
        return _mean(_late(rows, last), self.content["metric"])


def decisive(config: Config) -> dict[str, Any]:
    """What of a configuration decides the numbers. 1 and 1.0 are one number."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in config.flat().items()
        if name not in HOW and (name, value) not in LATER.items()
    }


def key(config: Config) -> str:
    """One text for all configurations with the same numbers."""
    return json.dumps(decisive(config), sort_keys=True)


def group(config: Config) -> str:
    """One text for the runs that one line of a table sums up, whatever seed and precision."""
    return key(dataclasses.replace(config, seed=0, precision=""))


def name(config: Config, data: str | None) -> str:
    """What the file of this run is called, without the ending."""
    return f"{config.algorithm}-{_hash({'config': decisive(config), 'data': data})[:12]}"


def path(folder: Path, config: Config, data: str | None) -> Path:
    return folder / "cells" / config.task / f"{name(config, data)}.json"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------ writing


def write(
    folder: Path,
    config: Config,
    history: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    date: float | None = None,
) -> Path:
    """Writes the file of a finished run, whole; `date` is now, if it is not given."""
    metric, last = summary["metric"], config.rounds
    measured = ("train_loss", "loss", metric)
    rows = [
        {"round": row["round"]} | {each: _short(row[each]) for each in measured} for row in history
    ]
    if rows[-1]["round"] != last:
        raise InputError(
            f"a run of {last} rounds ended after {rows[-1]['round']}: finish it first."
        )
    values = [row[metric] for row in rows if row["round"] > 0 and row[metric] is not None]
    choose = max if summary["higher_is_better"] else min
    late = _late(rows, last)
    content = {
        "config": decisive(config),
        "final": {each: rows[-1][each] for each in measured},
        "best": choose(values) if values else None,
        "mean_of_last": {
            "rounds": averaged(last),
            "evaluations": len(late),
            "train_loss": _mean(late, "train_loss"),
            "loss": _mean(late, "loss"),
            metric: _mean(late, metric),
        },
        "history": {each: [row[each] for row in rows] for each in ("round", *measured)},
        **{each: summary[each] for each in FROM_SUMMARY if each in summary},
        "seconds": {each: round(value, 2) for each, value in summary["seconds"].items()},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date)),
    }
    content["checksum"] = _hash(content)
    target = path(folder, config, content["data"].get("sha256"))
    if target.is_dir():
        raise InputError(f"{target} is a folder, where the file of a run belongs. Move it away.")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A line for each entry, so that a person can read it and git can compare it.
    lines = (f"{json.dumps(each)}: {json.dumps(value)}" for each, value in content.items())
    write_whole(target, "{\n" + ",\n".join(lines) + "\n}\n")
    return target


def _late(rows: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Return the evaluations after each of the last rounds up to `last`.

    The evaluation before the first of these rounds is not one of them: of every round of the last
    100 there are 100 evaluations, not 101.
    """
    return [row for row in rows if last - averaged(last) < row["round"] <= last]


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows]
    if not values or None in values:
        return None
    return _short(math.fsum(values) / len(values))


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _columns(history: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]


class Finished(NamedTuple):
    """A finished run of `fedda run`."""

    config: Config
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    date: float  # as `time.time` gives it


def finished(directory: Path) -> Finished:
    """What a cell can be made of, out of the directory of a run."""
    values = configs.read(directory / "config.toml")
    config = configs.resolve(values)
    if missing := config.flat().keys() - values.keys():
        raise InputError(
            f"{directory / 'config.toml'} does not say {', '.join(sorted(missing))}, on which its "
            "numbers depend: make the run again with this version."
        )
    path = directory / "summary.json"
    if not path.exists():
        raise InputError(
            f"{directory} has no summary.json: it is not finished. Continue it with fedda run "
            f"--resume {directory}"
        )
    summary = read_summary(path, SUMMARY)
    log = directory / "metrics.jsonl"
    rows, _ = read_log(log)
    if not rows:
        raise InputError(f"{directory} has no metrics.jsonl with evaluations.")
    needed = dict.fromkeys(("train_loss", "loss", summary["metric"]), NUMBER_OR_NULL)
    for row in rows:
        if why := mismatch(row, needed, f"the line of round {row['round']}"):
            raise InputError(f"{log} is damaged: {why}. Make the run again.")
    return Finished(config, rows, summary, path.stat().st_mtime)


# ------------------------------------------------------------------------------------------ reading


class Damaged(NamedTuple):
    """A file that is no cell, or none that this version knows."""

    path: Path
    why: str
    of_other_version: bool = False


class Cells(NamedTuple):
    """All that a results folder holds: finished runs, and files that are none."""

    found: list[Cell]
    damaged: list[Damaged]


def read(path: Path) -> Cell | Damaged:
    """One file, if it is whole and in its place."""
    if path.is_dir():
        return Damaged(path, "is a folder, not the file of a run")
    try:
        content = read_json(path, CELL)
    except (OSError, ValueError) as error:
        return Damaged(path, f"is not whole: {error}")
    rest = {each: value for each, value in content.items() if each != "checksum"}
    if _hash(rest) != content["checksum"]:
        return Damaged(path, "was changed: its checksum is another")
    history = content["history"]
    if not {"train_loss", "loss", content["metric"]} <= history.keys():
        return Damaged(path, f"is not whole: its history lacks {content['metric']} or losses")
    if not history["round"] or len({len(column) for column in history.values()}) > 1:
        return Damaged(path, "is not whole: the columns of its history are empty or not as long")
    if history["round"] != sorted({*history["round"]}):
        return Damaged(path, "is not whole: the rounds of its history do not rise")
    own = content["config"]
    identity = {"config": own, "data": content["data"].get("sha256")}
    named = own.get("task"), f"{own.get('algorithm')}-{_hash(identity)[:12]}"
    if (path.parent.name, path.stem) != named:
        return Damaged(path, "is the result of another configuration than its name says")
    try:
        config = configs.resolve(own)
        if min(content["parameters"], config.rounds, config.cohort, config.eval_every) < 1:
            return Damaged(path, "is of a run without parameters, rounds, clients or evaluations")
        return Cell(path, config, content)
    except InputError as error:
        return Damaged(path, f"is of another version: {error}", of_other_version=True)


def read_all(folder: Path) -> Cells:
    """Every cell of a results folder."""
    each = [read(path) for path in sorted((folder / "cells").glob("*/*.json"))]
    return Cells(
        [cell for cell in each if isinstance(cell, Cell)],
        [cell for cell in each if isinstance(cell, Damaged)],
    )
