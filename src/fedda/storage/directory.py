"""Run directories: the files of a run, and how to resume it.

A run directory contains

- `config.toml`: the settings of the run, with a checksum;
- `metrics.jsonl`: one line for each evaluation;
- `checkpoints/`: the newest checkpoints, with checksums of the settings and of the lines before;
- `summary.json`: the summary of a finished run.

A run resumes from its newest checkpoint. The lines after the checkpoint are removed and written
again. Times are only in the checkpoints and the summary, so `metrics.jsonl` of a run that was
killed and resumed is the same as that of an uninterrupted run. If a file is damaged, nothing is
changed, and an error says what to do. A lock lets only one process use the directory.
"""

import hashlib
import json
import os
import time
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
from fedda.storage.snapshot import (
    CONFIG,
    LOG,
    SUMMARY,
    Row,
    check_same,
    checkpoints,
    decoded,
    identity,
    log_of,
    read_settings,
)

KEPT = 3  # the number of checkpoints: if the newest is damaged, the run can resume from another
COPIES = 2  # of the arrays in host memory during a checkpoint: one by JAX (of a device), one by us

ADVICE = "Nothing was changed. Use what the run was begun with, or choose another directory."


class RunDirectory:
    """The files of one run, or of several runs that are trained together.

    Attributes:
        path: The directory, or None if everything is kept in memory.
        history: The evaluation rows so far. Infinity and NaN are None, because JSON lacks them.
        notes: The reasons why checkpoints could not be written, if any failed.
        resumed_at: The round from which the run was resumed, or None for a new run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> state = {"w": np.zeros(3)}
        >>> def train(path, rounds):
        ...     with RunDirectory(path, {"rate": 0.1}) as run_directory:
        ...         checkpoint = run_directory.read_back(lambda: state)  # None if the run is new
        ...         start = 0 if checkpoint is None else checkpoint.round
        ...         for number in range(start + 1, rounds + 1):
        ...             run_directory.log({"round": number, "loss": 1 / number})
        ...             run_directory.save(number, state)
        ...         return run_directory.history, run_directory.resumed_at
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory) / "run"
        ...     train(path, rounds=1)
        ...     train(path, rounds=2)
        ([{'round': 1, 'loss': 1.0}], None)
        ([{'round': 1, 'loss': 1.0}, {'round': 2, 'loss': 0.5}], 1)
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        changeable: Container[str] = (),
        log: str = LOG,
    ) -> None:
        """Lock the directory. Call `close` at the end, or use a `with` statement.

        The settings are written with the first row or checkpoint. A run that ends before leaves
        no files.

        Args:
            path: A new or empty directory, or that of a run with the same settings. None keeps
                everything in memory.
            settings: The settings that identify the run: numbers, strings, and lists of them.
                Settings with the value None are left out.
            changeable: The names of settings that may differ when the run is resumed.
            log: The name of the file with the rows.

        Raises:
            InputError: The directory is in use, belongs to a run with other settings, is damaged,
                or contains other files.
        """
        self.path, self.history, self.notes = path, list[Row](), list[str]()
        self.resumed_at: int | None = None
        self._settings = files.toml({k: v for k, v in settings.items() if v is not None})
        self._log_name, self._log_size, self._log_digest = log, 0, hashlib.sha256()
        self._had_finished = False
        self._made: dict[str, Any] | None = None  # provenance, if this process computed nothing
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
        """Wait until the last checkpoint is written, and unlock the directory."""
        self._open.close()

    def read_back(
        self,
        like: Callable[[], PyTree],
        share: Callable[[Callable[[], bytes]], bytes] = lambda function: function(),
    ) -> Checkpoint | None:
        """Return the newest checkpoint, or None, and restore the history up to it.

        Args:
            like: Returns a tree with the structure, types and shapes of the saved arrays. An array
                of length 0 stands for an array of any length.
            share: If several processes train one run, calls a function in the process that holds
                the directory and returns its result in all processes.

        Raises:
            InputError: A file is damaged or belongs to another run.
        """
        saved = checkpoints(self.path)
        content = share(lambda: checkpoint.read(saved[-1]) if saved else b"")
        newest = None
        if content:
            number, arrays, notes = decoded(content, self.path or Path("the run directory"))
            what = f"the checkpoint of round {number} in {self.path or 'the run directory'}"
            newest = Checkpoint(number, checkpoint.restored(arrays, like(), what, ADVICE), notes)
        log_path = (self.path or Path()) / self._log_name
        log = share(
            lambda: b"" if newest is None else log_of(log_path, self._settings, newest.notes)
        )
        if newest is not None:
            self.history = [json.loads(line) for line in log.splitlines()]
            self.resumed_at, self._made = newest.round, newest.notes["made"]
            self._had_finished = newest.progress.get("finished", False)
            seconds = newest.notes["made"]["seconds"]
            total, compiling = self._since
            self._since = total - seconds["total"], compiling - seconds["compile"]
        if self.path is not None:
            self._cut(log_path, log)
        return newest

    def _cut(self, path: Path, log: bytes) -> None:
        """Remove the lines after the checkpoint, which the resumed run writes again."""
        if path.exists() and path.stat().st_size > len(log):
            os.truncate(path, len(log))
        self._log_size, self._log_digest = len(log), hashlib.sha256(log)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append an evaluation row to the history and to the log file."""
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
        """Copy the arrays of a run and write a checkpoint in the background.

        If the disk or the memory is full, the reason is added to `notes` and the run goes on.

        Args:
            number: The number of finished rounds.
            run: A tree of all arrays that the next round needs. NumPy arrays are not copied: do
                not change them before `wait` returns.
            progress: More values that a resumed run needs, as JSON.
        """
        if self.path is None:
            return
        self._write_settings()
        self._made = None
        notes = {
            "settings": identity(self._settings),
            "log_size": self._log_size,
            "log": self._log_digest.hexdigest(),
            "float": str(jnp.result_type(float)),
            "made": self._how_made(),
            "progress": progress,
        }
        # `nbytes` of client memory on the host: taking its leaves would copy it.
        parts = jax.tree.leaves(run, is_leaf=lambda part: hasattr(part, "nbytes"))
        with interrupts.critical():
            self.wait()  # the copies for the previous checkpoint are freed
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
        # All checkpoints use the same temporary file, so an incomplete one is overwritten.
        target, temporary = folder / f"round-{number}", folder / ".part"
        checkpoint.write(target, number, arrays, notes, temporary)
        for path in checkpoints(self.path)[:-KEPT]:
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
        """Write and return the summary of a finished run.

        If the run had already finished, its existing summary is returned instead.

        Args:
            make: Returns the content. The seconds, versions, commit and device are added.
            spec: The specification of an existing summary; see `fedda.storage.schema`.

        Returns:
            The summary.

        Raises:
            InputError: The existing summary is damaged.
        """
        path = None if self.path is None else self.path / SUMMARY
        if path is not None and self._had_finished and path.exists():
            try:
                return dict(files.read_json(path, spec))
            except ValueError as error:
                raise InputError(
                    f"{path} is damaged: {error}. Delete it, and resume the run: the file is then "
                    "written again."
                ) from error
        summary = {**make(), **(self._made or self._how_made())}
        if path is not None:
            files.write_whole(path, json.dumps(summary, indent=2) + "\n")
        return summary
