"""Files that a killed process must not leave in halves."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from fedda.storage import interrupts
from fedda.storage.schema import NUMBER_OR_NULL, mismatch

# A line of `metrics.jsonl` in a run directory.
EVALUATION = {
    "round": int,
    "bytes_down": int,
    "bytes_up": int,
    "nonfinite_clients": int,
    "skipped_rounds": int,
    ...: NUMBER_OR_NULL,
}


@interrupts.critical()
def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader finds the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # nobody knows the temporary file, so the folder is named
        raise OSError(error.errno, error.strerror, str(path.absolute().parent)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, spec: Any) -> Any:
    """Return the content of a JSON file that matches a specification; see `fedda.storage.schema`.

    Raises:
        ValueError: The file is not JSON, or its content does not match. Says why.
    """
    content = _parsed(path.read_text(encoding="utf-8"))
    if why := mismatch(content, spec):
        raise ValueError(why)
    return content


def _parsed(text: str | bytes) -> Any:
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    # Half of a pair of code units cannot be printed, nor written to another file.
    json.dumps(content, ensure_ascii=False).encode()
    return content


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error that names none, as the system's does when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def append(file: FileIO, line: bytes, sync: bool) -> None:
    """Write a line to an unbuffered file, and to the disk if it is to `sync`."""
    with naming(file.name):
        while line:
            line = line[file.write(line) :]
        if sync:
            os.fsync(file.fileno())


class Rows(NamedTuple):
    """The lines of a file up to the first that is not a whole JSON object of the wanted types."""

    rows: list[dict[str, Any]]
    size: int  # their bytes
    rest: bytes  # what follows them

    @property
    def is_damaged(self) -> bool:
        """Whether more than one line follows: a process that is killed leaves part of one."""
        return self.rest.count(b"\n") > self.rest.endswith(b"\n")


def read_rows(path: Path, spec: Any) -> Rows:
    """Return the JSON objects of a file, one a line, each of which matches a specification.

    A process that is killed while it writes leaves a `rest`.
    """
    content = path.read_bytes() if path.exists() else b""
    rows: list[dict[str, Any]] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            row = _parsed(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or mismatch(row, spec):
            break
        rows.append(row)
        size += len(line)
    return Rows(rows, size, content[size:])


def json_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON has it, which knows no infinity and no NaN: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
