"""Runs that are trained together, kept on disk until they come to their end.

`.work/together-<hash>/` holds `members.json`, the names of their cells in order, and `checkpoints/`
with arrays that are stacked over them. Only a batch of the same members goes on from there.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.simulate.grid import Part
from fedda.storage.files import read_json, write_whole

if TYPE_CHECKING:
    from fedda.storage.checkpoint import Checkpoints  # imported late, for Orbax takes its time

SECONDS = 60.0  # between checkpoints
PACE = 1e8  # bytes a second: what is large is kept more seldom, as writing it takes time


def place(folder: Path, names: Sequence[str]) -> Path:
    """Where the work on these cells is kept."""
    text = json.dumps(list(names))
    return folder / ".work" / f"together-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kept(folder: Path) -> list[list[str]]:
    """The members of every batch of which something is kept."""
    found = []
    for path in sorted(folder.glob(".work/together-*/members.json")):
        # Another process tidies up; or the file is damaged, and its members begin a new one.
        with contextlib.suppress(FileNotFoundError, ValueError):
            found.append(read_json(path, [str]))
    return found


def tidy(folder: Path, done: Iterable[str]) -> None:
    """Deletes what is kept of batches whose members all came to their end in other company."""
    for names in kept(folder):
        if {*names} <= {*done}:
            with contextlib.suppress(FileNotFoundError):  # another process tidies up, too
                shutil.rmtree(place(folder, names))


class Kept:
    """What is kept of one batch."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._names, self._directory = names, place(folder, names)
        self._checkpoints: Checkpoints | None = None
        self._saved = time.monotonic()

    def read(self, shapes: PyTree) -> Part | None:
        """The batch as far as it came, if that is there and of these shapes."""
        if not self._directory.exists():
            return None
        checkpoints = self._opened()
        found, _ = checkpoints.newest_whole(shapes, 0)
        if found is None or tree.types("", found.run) != tree.types("", shapes):
            checkpoints.drop_after(-1)
            return None
        rows = [
            {
                name: np.array(value) if isinstance(value, list) else value
                for name, value in row.items()
            }
            for row in json.loads(found.numbers["rows"])
        ]
        return Part(found.round, found.run, rows, found.numbers["seconds"])

    def is_due(self, part: Part) -> bool:
        return time.monotonic() - self._saved > max(SECONDS, tree.nbytes(part.run) / PACE)

    def save(self, part: Part) -> list[str]:
        """Write a checkpoint; returns notes on checkpoints that could not be written."""
        rows = [
            {name: np.asarray(value).tolist() for name, value in row.items()} for row in part.rows
        ]
        # As one text, since some numbers may not be finite; there is no other file of rows.
        numbers = {"metrics_bytes": 0, "rows": json.dumps(rows), "seconds": part.seconds}
        notes = self._opened().save(part.round, part.run, numbers)
        self._saved = time.monotonic()
        return notes

    def close(self) -> list[str]:
        """Wait until the last checkpoint is written; returns a note if it could not be."""
        if self._checkpoints is None:
            return []
        notes = self._checkpoints.close()
        self._checkpoints = None
        return notes

    def drop(self) -> None:
        """The batch is done."""
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _opened(self) -> "Checkpoints":
        from fedda.storage.checkpoint import Checkpoints

        if self._checkpoints is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._directory / "members.json", json.dumps(list(self._names)))
            self._checkpoints = Checkpoints(self._directory / "checkpoints")
        return self._checkpoints
