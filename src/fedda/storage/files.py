"""Files and directories that stay whole if the process is killed or the machine loses power.

A file is replaced in one step. Files and the directories that name them are flushed to the disk.
`locked` lets one process at a time write to a directory.
"""

import hashlib
import json
import math
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import filelock

from fedda.errors import InputError
from fedda.storage import interrupts
from fedda.storage.schema import NUMBER_OR_NULL, mismatch

LOCK = ".lock"

# A line of `metrics.jsonl` in a run directory.
EVALUATION = {
    "round": int,
    "bytes_down": int,
    "bytes_up": int,
    "nonfinite_clients": int,
    "skipped_rounds": int,
    ...: NUMBER_OR_NULL,
}

# ------------------------------------------------------------------------------------ directories


def sync(path: Path) -> None:
    """Flush a file to the disk; of a directory, its entries: made, renamed and deleted files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> bool:
    """Make a directory and its parents. Returns whether it is new."""
    if path.is_dir():
        return False
    make_directory(path.absolute().parent)
    with suppress(FileExistsError):  # another process made it; or it is a file, which is refused
        path.mkdir()
        sync(path.absolute().parent)
        return True
    return False


def check_empty(path: Path, advice: str) -> None:
    """Refuse a directory that holds anything.

    Hidden files do not count: a process that is killed in its first moment leaves a lock, and a
    part of a file.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file. {advice}")
    if path.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise InputError(f"{path} is not empty. {advice}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory until the end of the block.

    A directory that is missing is made, and deleted again if nothing was written to it. The system
    gives up the lock of a process that is killed.

    Raises:
        InputError: Another process, or another part of this one, holds the lock.
    """
    is_new, path = make_directory(directory), directory / LOCK
    lock = filelock.FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        holder = ""
        with suppress(OSError):  # it may have been given up this moment
            holder = path.read_text(encoding="utf-8")
        holder = holder or "another process"
        raise InputError(
            f"{directory} is in use by {holder}. Wait until that has finished, or stop it; then "
            "run the same command again. Or choose another directory."
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # as when the directory was deleted meanwhile
            os.truncate(path, 0)
            if [entry.name for entry in directory.iterdir()] == [LOCK]:
                path.unlink()
                if is_new:
                    directory.rmdir()
        lock.release()


# ------------------------------------------------------------------------------------------ files


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error that names none, as the system's does when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Args:
        path: The file.
        temporary: Where to write before the file is whole; else a name of this process alone.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.absolute().parent)
    except OSError as error:  # nobody knows the temporary file, so the folder is named
        raise OSError(error.errno, error.strerror, str(path.absolute().parent)) from error
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, line: bytes) -> None:
    """Add a line to a file."""
    with naming(path), open(path, "ab") as file:
        file.write(line)


@interrupts.critical()
def write_whole(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as file:
        file.write(text.encode())


def sealed(text: str) -> str:
    """Return a TOML text with its checksum in the first line, which `read_sealed` verifies."""
    return f"# Do not edit. sha256: {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_sealed(path: Path) -> str:
    """Return the text of a file that was written as `sealed` text.

    Raises:
        InputError: The file was changed since.
    """
    content = path.read_bytes()
    text = content.partition(b"\n")[2].decode(errors="replace")
    if sealed(text).encode() != content:
        raise InputError(
            f"{path} was changed or damaged after it was written, or is of another version of "
            "fedda: its checksum does not match. Restore it, or choose another directory."
        )
    return text


def toml(values: Mapping[str, Any]) -> str:
    """Return numbers, texts and lists as TOML, which writes them as JSON does.

    Raises:
        InputError: The text would not read back as the same values.
    """
    text = "".join(
        f"{name if re.fullmatch('[A-Za-z0-9_-]+', name) else json.dumps(name)} = "
        f"{json.dumps(value, ensure_ascii=False)}\n"
        for name, value in values.items()
    )
    try:
        same = tomllib.loads(text) == values
    except ValueError:
        same = False
    if not same:
        raise InputError(
            "this configuration cannot be kept: config.toml would not read back as it is. Give "
            "finite numbers, and text without control characters."
        )
    return text


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


def json_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row as JSON has it, which knows no infinity and no NaN: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
