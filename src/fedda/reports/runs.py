"""Run directories, read for a report.

A run directory holds `config.toml`, `metrics.jsonl` and, once the run has finished, `summary.json`.
"""

import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import InputError
from fedda.simulate import client_metrics
from fedda.storage import snapshot
from fedda.storage.files import EVALUATION, read_json, read_rows
from fedda.storage.schema import mismatch

Evaluation = dict[str, Any]

# The values that are read from a run's files, which contain more.
CONFIG = {"algorithm": str, "task?": str, "seed": int}
SUMMARY = {
    "metric?": str,
    "higher_is_better?": bool,
    "seconds?": {"total": float, "compile": float, ...: float},
    "versions?": {...: str},
    "warnings?": [str],
    "per_client?": (client_metrics.SCHEMA, None),
}


class Run(NamedTuple):
    """The content of one run directory, or a result in memory."""

    path: Path | None  # None in memory
    config: dict[str, Any]
    evaluations: list[Evaluation]
    summary: dict[str, Any] | None  # None until the run has finished
    notes: list[str]
    label: str = ""  # shown instead of the algorithm and its settings

    @property
    def algorithm(self) -> str:
        return str(self.config["algorithm"])

    @property
    def task(self) -> str:
        """The name of the task; empty for a run of `fedda.run`."""
        return str(self.config.get("task", ""))

    @property
    def settings(self) -> dict[str, str]:
        """All settings but the seed, as text."""
        return {key: str(value) for key, value in self.config.items() if key != "seed"}


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run directory at or below `paths`, once each, in the order of their algorithms.

    Raises:
        InputError: There is no run, or one of them is damaged.
    """
    directories: dict[Path, Path] = {}
    for path in map(Path, paths):
        logs = sorted(path.rglob(snapshot.LOG))
        if not logs:
            raise InputError(
                f"got {path}, which contains no metrics.jsonl; expected a run directory or a "
                "folder of run directories; give the directory that a run wrote to"
            )
        for log in logs:
            directories.setdefault(log.parent.resolve(), log.parent)
    runs: dict[object, Run] = {}
    for run in sorted(
        map(_read_run, directories.values()),
        key=lambda run: (run.algorithm, run.config["seed"], str(run.path)),
    ):
        first = runs.setdefault((frozenset(run.settings.items()), run.config["seed"]), run)
        if first is not run:
            first.notes.append(f"{run.path}: left out, a copy of {first.path}")
    return list(runs.values())


def _read_run(directory: Path) -> Run:
    with _refusing_damage(directory / snapshot.CONFIG) as path:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        if why := mismatch(config, CONFIG):
            raise ValueError(why)
    evaluations, notes = read_log(directory / snapshot.LOG)
    finished = (directory / snapshot.SUMMARY).exists()
    summary = read_summary(directory / snapshot.SUMMARY) if finished else None
    if not finished:
        last = evaluations[-1]["round"] if evaluations else "-"
        of = f" of {config['rounds']}" if "rounds" in config else ""
        notes.append(f"{directory}: unfinished, evaluated up to round {last}{of}")
    return Run(directory, config, evaluations, summary, notes)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a finished run. A damaged summary is an error."""
    with _refusing_damage(path):
        return dict(read_json(path, SUMMARY))


@contextmanager
def _refusing_damage(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"got {path}, which cannot be read ({error}); expected the file that a run writes; "
            "leave this directory out or run it again"
        ) from error


def read_log(path: Path) -> tuple[list[Evaluation], list[str]]:
    """Return the evaluations of a run, and notes about them. A damaged line is an error."""
    found = read_rows(path, EVALUATION)
    if found.is_damaged:
        raise InputError(
            f"got an invalid line at {path}:{len(found.rows) + 1}; expected one JSON object "
            "with a round and numbers for each evaluation; correct or delete the line"
        )
    cut = [f"{path.parent}: ignored the truncated last line of {path.name}"] if found.rest else []
    return found.rows, cut
