"""Parts that several readers share: errors that name the file, images and labels.

A reader is a module with three functions. `layout(name)` describes the expected files of a data set
for an error message. `files(path, name)` returns those that exist. `read(path, name)` reads them.
Readers run in a child process with limits on memory and time (`sandbox.py`), so a file may crash
a parser or unpack without end.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedda.errors import InputError, is_full

Arrays = dict[str, np.ndarray]  # over a client's examples; byte strings as objects


def damaged(problem: str) -> InputError:
    """Return the error for a damaged file."""
    return InputError(f"{problem}. Get the file again.")


@contextmanager
def parsing(file: Path) -> Iterator[None]:
    """Turn errors of a parser into an `InputError` that names the file, but not system errors."""
    try:
        yield
    except (InputError, MemoryError, PermissionError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (is_full(error) or error.errno == errno.ENOMEM):
            raise
        problem = f"{file} is damaged or of another format ({type(error).__name__}: {error})"
        raise damaged(problem) from None


def existing(file: Path, layout: str) -> Path:
    """Return the path of a required file, or raise an `InputError` if it does not exist."""
    if not file.is_file():
        raise InputError(f"{file.parent} has no file {file.name}. Expected {layout}.")
    return file


def begins_with(file: Path, magic: bytes) -> bool:
    """Return whether a file exists and begins with these bytes."""
    if not file.is_file():
        return False
    with open(file, "rb") as content:
        return content.read(len(magic)) == magic


def pixels(values: np.ndarray, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Return images as uint8, or as float32 if they are floats that are not multiples of 1/255."""
    if values.shape[1:] != shape:
        raise damaged(f"{place} has the shape {values.shape}, expected (examples, {str(shape)[1:]}")
    top = 1 if values.dtype.kind == "f" else 255
    if not ((values >= 0) & (values <= top)).all():  # also refuses NaN
        raise damaged(f"{place} has values outside of 0..{top}")
    if values.dtype.kind != "f":
        return values.astype(np.uint8)
    floats = values.astype(np.float32)
    nearest = np.rint(floats * np.float32(255))
    return nearest.astype(np.uint8) if (nearest / np.float32(255) == floats).all() else floats


def labels(values: np.ndarray, classes: int, count: int, place: str) -> np.ndarray:
    """Return class labels as int32, one for each of `count` images."""
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise damaged(
            f"{place} is {values.dtype} of the shape {values.shape}, expected integers of the "
            f"shape ({count},), one for each image"
        )
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise damaged(
            f"{place} is {values[wrong[0]]} in example {wrong[0]}, expected 0 to {classes - 1}"
        )
    return values.astype(np.int32)


def are_bytes(clients: Iterable[tuple[str, Arrays]]) -> bool:
    """Return whether the images of all clients are uint8."""
    return all(columns["x"].dtype == np.uint8 for _, columns in clients)


def stored(clients: Iterable[tuple[str, Arrays]], exact: bool) -> Iterator[tuple[str, Arrays]]:
    """Yield the clients with all images as uint8 if that is `exact`, else as float32."""
    for client, columns in clients:
        x = columns["x"]
        if not exact and x.dtype == np.uint8:
            x = x.astype(np.float32) / np.float32(255)
        yield client, columns | {"x": x}
