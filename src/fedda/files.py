"""Files that a killed process must not leave in halves."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple


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


class Rows(NamedTuple):
    """The lines of a file up to the first that is not a whole JSON object."""

    rows: list[dict[str, Any]]
    size: int  # their bytes
    rest: bytes  # what follows them


def read_rows(path: Path) -> Rows:
    """The JSON objects of a file, one a line; a process killed while writing leaves a `rest`."""
    content = path.read_bytes() if path.exists() else b""
    rows: list[dict[str, Any]] = []
    size = 0
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not (
            line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("round"), int)
        ):
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
