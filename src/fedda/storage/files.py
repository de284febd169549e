"""Write files safely: a crash of the process or the machine leaves no incomplete file.

A file is replaced atomically, and both the file and its directory are flushed to the disk. `locked`
lets only one process write to a directory.
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

# The specification of a line of `metrics.jsonl` in a run directory.
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
    """Flush a file to the disk, or the entries of a directory (new, renamed and deleted files)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> bool:
    """Make a directory and its parents. Return whether the directory is new."""
    if path.is_dir():
        return False
    make_directory(path.absolute().parent)
    with suppress(FileExistsError):  # another process made it, or it is a file (refused later)
        path.mkdir()
        sync(path.absolute().parent)
        return True
    return False


def check_empty(path: Path, advice: str) -> None:
    """Raise an `InputError` if a path is a file or a directory that is not empty.

    Hidden files are ignored: a process that is killed at its start leaves a lock file and perhaps
    a temporary file.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file. {advice}")
    if path.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise InputError(f"{path} is not empty. {advice}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes for the duration of a `with` block.

    A missing directory is created, and deleted again if nothing was written to it. If the process
    is killed, the operating system releases the lock.

    Raises:
        InputError: Another process, or another part of this process, holds the lock.
    """
    is_new, path = make_directory(directory), directory / LOCK
    lock = filelock.FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        holder = ""
        with suppress(OSError):  # the lock may just have been released
            holder = path.read_text(encoding="utf-8")
        holder = holder or "another process"
        raise InputError(
            f"{directory} is in use by {holder}. Wait until it has finished, or stop it; then run "
            "the same command again. Or choose another directory."
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # the directory may have been deleted meanwhile
            os.truncate(path, 0)
            if [entry.name for entry in directory.iterdir()] == [LOCK]:
                path.unlink()
                if is_new:
                    directory.rmdir()
        lock.release()


# ------------------------------------------------------------------------------------------ files


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an `OSError` without one, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Replace a file atomically: a reader sees the old content or the new, never a part.

    Args:
        path: The file.
        temporary: The file to write to before the rename. By default its name contains the
            process id.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.absolute().parent)
    except OSError as error:  # names the folder: the user does not know the temporary file
        raise OSError(error.errno, error.strerror, str(path.absolute().parent)) from error
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, line: bytes) -> None:
    """Append a line to a file."""
    with naming(path), open(path, "ab") as file:
        file.write(line)


@interrupts.critical()
def write_whole(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def sealed(text: str) -> str:
    """Return TOML text with a first line that holds its checksum. `read_sealed` verifies it."""
    return f"# Do not edit. sha256: {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_sealed(path: Path) -> str:
    """Return the text of a file that contains `sealed` TOML text.

    Raises:
        InputError: The checksum does not match, or the text is not TOML.
    """
    content = path.read_bytes()
    text = content.partition(b"\n")[2].decode(errors="replace")
    try:
        tomllib.loads(text)
        whole = sealed(text).encode() == content
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise InputError(
            f"{path} was changed or damaged after it was written, or belongs to another version of "
            "fedda: its checksum does not match. Restore it, or choose another directory."
        )
    return text


def toml(values: Mapping[str, Any]) -> str:
    """Return numbers, strings and lists as TOML. Their notation is the same as in JSON.

    Raises:
        InputError: Reading the text back would give other values.
    """
    try:
        text = "".join(
            f"{name if re.fullmatch('[A-Za-z0-9_-]+', name) else json.dumps(name)} = "
            f"{json.dumps(value, ensure_ascii=False)}\n"
            for name, value in values.items()
        )
        same = tomllib.loads(text) == values
    except (ValueError, TypeError):  # TypeError: of dates
        same = False
    if not same:
        raise InputError(
            "these settings cannot be kept: reading config.toml back would give other values. Use "
            "finite numbers, no dates, and text without control characters."
        )
    return text


def read_json(path: Path, spec: Any) -> Any:
    """Return the content of a JSON file, after a check against a specification.

    Args:
        path: The file.
        spec: The specification; see `fedda.storage.schema`.

    Raises:
        ValueError: The file is not JSON, or its content does not match. The message says why.
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
    # Raises a ValueError for an unpaired surrogate, which could be neither printed nor written.
    json.dumps(content, ensure_ascii=False).encode()
    return content


class Rows(NamedTuple):
    """The valid lines at the start of a file of JSON objects, and the rest of the file."""

    rows: list[dict[str, Any]]
    size: int  # the bytes of the valid lines
    rest: bytes  # the bytes from the first incomplete or invalid line

    @property
    def is_damaged(self) -> bool:
        """Whether the rest has several lines. A killed process leaves only part of one line."""
        return self.rest.count(b"\n") > self.rest.endswith(b"\n")


def read_rows(path: Path, spec: Any) -> Rows:
    """Return the JSON objects of a file with one object in each line.

    Args:
        path: The file. A missing file has no rows.
        spec: The specification of an object; see `fedda.storage.schema`.

    Returns:
        The objects up to the first line that is incomplete or does not match, and the rest of the
        file. A process that is killed while it writes leaves such a rest.
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
    """Return a row for JSON: infinity and NaN, which JSON lacks, become None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
