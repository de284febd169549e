"""Run directories: everything that is kept of a run, and how it continues after an interruption.

A run directory holds

- `config.toml`: the settings of the run, with a checksum;
- `metrics.jsonl`: one line for each evaluation;
- `checkpoints/`: the newest few, each of which says which settings and which lines it belongs to;
- `summary.json`: once the run has finished.

Times are only in the checkpoints and the summary, so that a run that was killed and resumed ends
with exactly the lines of one that was not. A run continues from its newest checkpoint, and the
lines after that are written again. If a file is damaged, nothing is changed, and an error says what
to do. One process at a time has the directory.
"""

import hashlib
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.errors import InputError
from fedda.storage import checkpoint, files, interrupts
from fedda.storage.checkpoint import Checkpoint
from fedda.storage.provenance import compile_seconds, provenance

CONFIG = "config.toml"
SUMMARY = "summary.json"
KEPT = 3  # checkpoints: more than one, so that a damaged file costs some rounds and not the run
COPIES = 2  # on the host while a checkpoint is made: of JAX, if it is on a device, and ours

ADVICE = "Nothing was changed. Use what the run was begun with, or choose another directory."

Row = dict[str, Any]


class RunDirectory:
    """The files of one run, or of several runs that are trained together.

    Attributes:
        path: The directory, or None if everything is kept in memory.
        history: The rows of the run so far. Numbers that JSON lacks are None.
        notes: Why checkpoints could not be written, if any could not.
        resumed_at: The round that the run was continued from, if it was.

    Example:
        with RunDirectory(path, settings) as kept:
            found = kept.read_back(lambda: state)  # None if the run is new
            for ...:
                kept.log({"round": number, "loss": loss})
                kept.save(number, state, {"anything": "that is JSON"})
            kept.finish(lambda: {"rounds": number})
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        changeable: Container[str] = (),
        log: str = "metrics.jsonl",
    ) -> None:
        """Lock a directory for this run; `close` it, or use it as a context manager.

        The settings are written with the first row or checkpoint. Until then, nothing is left if
        the run ends.

        Args:
            path: The directory: a new or empty one, or that of a run with the same settings.
            settings: What identifies the run: numbers, texts and lists of them. None is left out.
            changeable: The names of settings that may differ from those the run was begun with.
            log: The name of the file that rows are written to.

        Raises:
            InputError: The directory is in use, is of a run with other settings, was damaged, or
                holds something else.
        """
        self.path, self.history, self.notes = path, list[Row](), list[str]()
        self.resumed_at: int | None = None
        self._settings = files.toml({k: v for k, v in settings.items() if v is not None})
        self._log_name, self._log_size, self._log_digest = log, 0, hashlib.sha256()
        self._had_finished = False
        self._made: dict[str, Any] | None = None  # how, if only earlier processes did anything
        self._since = time.perf_counter(), compile_seconds()
        self._saving: tuple[int, Future[None]] | None = None
        self._open = ExitStack()
        if path is None:
            return
        with ExitStack() as opened:
            if not (path / CONFIG).exists():
                files.check_empty(path, "Choose another directory.")
            opened.enter_context(files.locked(path))
            if (path / CONFIG).exists():
                check_same(path, read_settings(path), settings, changeable)
                self._settings = files.read_sealed(path / CONFIG)
            self._writer = opened.enter_context(ThreadPoolExecutor(1, "checkpoint"))
            interrupts.finish_first.append(self.wait)
            opened.callback(interrupts.finish_first.remove, self.wait)
            opened.callback(self.wait)
            self._open = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and let other processes have the directory."""
        self._open.close()

    def read_back(
        self,
        like: Callable[[], PyTree],
        share: Callable[[Callable[[], bytes]], bytes] = lambda function: function(),
    ) -> Checkpoint | None:
        """Return the newest checkpoint, and continue the history from there.

        Args:
            like: Gives a tree with the structure, types and shapes of what is saved. Where its
                arrays have length 0, those of the checkpoint may have any length.
            share: Calls a function in the process that has the directory, and returns what it gives
                in all of them; for several processes that train one run.

        Raises:
            InputError: A file is damaged, or belongs to another run.
        """
        content = share(lambda: checkpoint.read(path[-1]) if (path := self._checkpoints()) else b"")
        found = None
        if content:
            number, arrays, notes = checkpoint.decode(content)
            what = f"the checkpoint of round {number} in {self.path or 'the run directory'}"
            found = Checkpoint(number, checkpoint.restored(arrays, like(), what, ADVICE), notes)
        log = share(lambda: b"" if found is None else self._log_of(found))
        if found is not None:
            self.history = [json.loads(line) for line in log.splitlines()]
            self.resumed_at, self._made = found.round, found.notes["made"]
            self._had_finished = found.progress.get("finished", False)
            seconds = found.notes["made"]["seconds"]
            total, compiling = self._since
            self._since = total - seconds["total"], compiling - seconds["compile"]
        if self.path is not None:
            self._cut(self.path / self._log_name, log)
        return found

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        folder = (self.path or Path()) / "checkpoints"
        paths = folder.iterdir() if self.path is not None and folder.exists() else ()
        whole = [path for path in paths if re.fullmatch(r"round-\d+", path.name)]
        return sorted(whole, key=lambda path: int(path.name.removeprefix("round-")))

    def _log_of(self, found: Checkpoint) -> bytes:
        """Return the lines before a checkpoint, after a check that all files belong together."""
        assert self.path is not None
        path, newest = self.path / self._log_name, self._checkpoints()[-1]
        if found.notes["settings"] != _sha256(self._settings.encode()):
            raise InputError(
                f"{newest} belongs to a run with another {CONFIG} than that of {self.path}. "
                "Nothing was changed. Restore the files, or choose another directory."
            )
        if found.notes["float"] != (here := str(jnp.result_type(float))):
            raise InputError(
                f"{self.path} is a run with {found.notes['float']} as JAX's default type, here it "
                f"is {here}. Nothing was changed. Set JAX_ENABLE_X64 as it was."
            )
        log = path.read_bytes()[: found.notes["log_size"]] if path.exists() else b""
        if found.notes["log"] != _sha256(log):
            raise InputError(
                f"{path} is damaged: {newest} was written after other lines. Nothing was changed. "
                f"Restore {path.name}, or delete {newest} to continue from the checkpoint before "
                "it, if there is one, or else from the beginning."
            )
        return log

    def _cut(self, path: Path, log: bytes) -> None:
        """Cut off the lines that will be written again."""
        if path.exists() and path.stat().st_size > len(log):
            os.truncate(path, len(log))
        self._log_size, self._log_digest = len(log), hashlib.sha256(log)

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a row to the history and to the file that is read back."""
        if self.path is None:
            self.history.append(dict(row))
            return
        self._write_settings()
        line = json.dumps(files.json_numbers(row), allow_nan=False).encode() + b"\n"
        files.append(self.path / self._log_name, line)
        self.history.append(json.loads(line))
        self._log_size += len(line)
        self._log_digest.update(line)

    def _write_settings(self) -> None:
        if self.path is not None and not (self.path / CONFIG).exists():
            files.write_whole(self.path / CONFIG, files.sealed(self._settings))

    def save(self, number: int, run: PyTree, progress: Mapping[str, Any] = {}) -> None:
        """Copy a run, and write a checkpoint of it in the background; `wait` waits for it.

        A full disk or too little memory leaves a note in `notes`, and does not end the run.

        Args:
            number: The rounds that were done.
            run: A tree of arrays: all that the next round needs. Do not change NumPy arrays before
                the checkpoint is written.
            progress: What else a resumed run must know; JSON.
        """
        if self.path is None:
            return
        self._write_settings()
        self._made = None
        notes = {
            "settings": _sha256(self._settings.encode()),
            "log_size": self._log_size,
            "log": self._log_digest.hexdigest(),
            "float": str(jnp.result_type(float)),
            "made": self._how_made(),
            "progress": progress,
        }
        # Client memory on the host is asked whole: its leaves would be a copy already.
        parts = jax.tree.leaves(run, is_leaf=lambda part: hasattr(part, "nbytes"))
        with interrupts.critical():
            self.wait()  # then the copies of the checkpoint before are gone
            needed, free = COPIES * sum(part.nbytes for part in parts), free_memory.of_host()
            if needed > free:
                lack = f"it takes {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
                self.notes.append(f"no checkpoint of round {number}: {lack}")
                return
            arrays = checkpoint.on_host(run)
            self._saving = number, self._writer.submit(self._write, number, arrays, notes)

    def _write(self, number: int, arrays: Mapping[str, np.ndarray], notes: Any) -> None:
        assert self.path is not None
        folder = self.path / "checkpoints"
        files.make_directory(folder)
        for path in (self.path / self._log_name, self.path):
            if path.exists():
                files.sync(path)
        checkpoint.write(folder / f"round-{number}", number, arrays, notes)
        for path in self._checkpoints()[:-KEPT]:
            path.unlink()
        files.sync(folder)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if (saving := self._saving) is None:
            return
        number, written = saving
        try:
            written.result()
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self.notes.append(
                f"no checkpoint of round {number}: cannot write to {self.path} ({why})"
            )
        finally:
            self._saving = None

    def _how_made(self) -> dict[str, Any]:
        started, compiled = self._since
        total, compiling = time.perf_counter() - started, compile_seconds() - compiled
        return {"seconds": {"total": total, "compile": compiling}, **provenance()}

    def finish(self, make: Callable[[], Mapping[str, Any]], spec: Any = Any) -> dict[str, Any]:
        """Write the summary, unless the run had finished before and has one.

        Args:
            make: Gives the content; seconds, versions, commit and device are added to it.
            spec: What is expected of a summary that is there; see `fedda.storage.schema`.

        Returns:
            The summary.

        Raises:
            InputError: The summary that is there is damaged.
        """
        path = None if self.path is None else self.path / SUMMARY
        if path is not None and self._had_finished and path.exists():
            try:
                return dict(files.read_json(path, spec))
            except ValueError as error:
                raise InputError(
                    f"{path} is damaged: {error}. Delete it, and resume the run once more: it is "
                    "written again."
                ) from error
        summary = {**make(), **(self._made or self._how_made())}
        if path is not None:
            files.write_whole(path, json.dumps(summary, indent=2) + "\n")
        return summary


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the run in a directory.

    Raises:
        InputError: There is none, or its settings were changed.
    """
    if not (path / CONFIG).exists():
        raise InputError(f"{path} is not a run directory: it has no {CONFIG}.")
    return tomllib.loads(files.read_sealed(path / CONFIG))


def check_same(
    path: Path,
    written: Mapping[str, Any],
    given: Mapping[str, Any],
    changeable: Container[str] = (),
) -> None:
    """Refuse to continue a run with other settings, and name the first that differs."""
    for name in {**given, **written}:
        if name not in changeable and written.get(name) != given.get(name):
            raise InputError(
                f"{path} is a run with {name} = {written.get(name)!r}, got {given.get(name)!r}. "
                "A resumed run keeps its settings: start a new one in another directory."
            )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
