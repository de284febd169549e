"""Runs that are trained together, kept on disk until they come to their end.

`.work/together-<hash>/` is a run directory: its settings are the names of their cells in order, and
its checkpoints have arrays that are stacked over them. Only a batch of the same members goes on
from there.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.simulate.grid import Part
from fedda.storage.directory import RunDirectory, read_settings

SECONDS = 60.0  # between checkpoints
PACE = 1e8  # bytes a second: what is large is kept more seldom, as writing it takes time


def place(folder: Path, names: Sequence[str], size: int) -> Path:
    """Where the work on these cells is kept, in a program for so many runs."""
    text = json.dumps([*names, size])
    return folder / ".work" / f"together-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kept(folder: Path) -> dict[Path, list[str]]:
    """The members of every batch of which something is kept, by its place."""
    found = {}
    for path in sorted(folder.glob(".work/together-*/config.toml")):
        # Another process tidies up; or the file is damaged, which whoever continues it is told.
        with contextlib.suppress(FileNotFoundError, InputError):
            found[path.parent] = read_settings(path.parent)["members"]
    return found


def tidy(folder: Path, done: Iterable[str]) -> None:
    """Deletes what is kept of batches whose members all came to their end in other company."""
    for path, names in kept(folder).items():
        if {*names} <= {*done}:
            with contextlib.suppress(FileNotFoundError):  # another process tidies up, too
                shutil.rmtree(path)


class Kept:
    """What is kept of one batch."""

    def __init__(self, folder: Path, names: Sequence[str], size: int) -> None:
        self._names, self._path = names, place(folder, names, size)
        self._directory: RunDirectory | None = None
        self._saved = time.monotonic()

    def read(self, shapes: PyTree) -> Part | None:
        """The batch as far as it came, if any of it was kept."""
        if not self._path.exists():
            return None
        found = self._opened().read_back(lambda: shapes)
        if found is None:
            return None
        rows = [
            {
                name: np.array(value) if isinstance(value, list) else value
                for name, value in row.items()
            }
            for row in found.progress["rows"]
        ]
        return Part(found.round, found.run, rows, found.progress["seconds"])

    def is_due(self, part: Part) -> bool:
        return time.monotonic() - self._saved > max(SECONDS, tree.nbytes(part.run) / PACE)

    def save(self, part: Part) -> list[str]:
        """Write a checkpoint; returns notes on checkpoints that could not be written."""
        rows = [
            {name: np.asarray(value).tolist() for name, value in row.items()} for row in part.rows
        ]
        directory = self._opened()
        directory.save(part.round, part.run, {"rows": rows, "seconds": part.seconds})
        self._saved = time.monotonic()
        return _taken(directory.notes)

    def close(self) -> list[str]:
        """Wait until the last checkpoint is written; returns a note if it could not be."""
        if self._directory is None:
            return []
        self._directory.close()
        notes, self._directory = _taken(self._directory.notes), None
        return notes

    def drop(self) -> None:
        """The batch is done."""
        self.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def _opened(self) -> RunDirectory:
        if self._directory is None:
            self._directory = RunDirectory(self._path, {"members": list(self._names)})
        return self._directory


def _taken(notes: list[str]) -> list[str]:
    taken = list(notes)
    notes.clear()
    return taken
