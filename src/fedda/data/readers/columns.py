"""Columns of Parquet and .npz files as arrays, and what features, labels and clients may be."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedda.errors import InputError

Columns = dict[str, np.ndarray]
PANDAS_INDEX = "__index_level_"  # how pandas names an index that it stores as a column


def names_in(file: Path) -> list[str]:
    with _parsing(file):
        if file.suffix == ".npz":
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return list(arrays.files)
        with _pyarrow().ParquetFile(file) as opened:
            return list(opened.schema_arrow.names)


def load(file: Path, names: Sequence[str]) -> Columns:
    """The columns of those names, of one length. Lists of lists become axes of arrays."""
    own = names_in(file)
    for name in names:
        if own.count(name) != 1:
            raise InputError(
                f"{file} has {'no' if name not in own else 'more than one'} column {name!r}. It "
                f"has: {', '.join(own)}. Name those to use with --client, --label and --feature."
            )
    with _parsing(file):
        found = _npz(file, names) if file.suffix == ".npz" else _parquet(file, names)
    for name, column in found.items():
        if len(column) != len(found[names[0]]):
            raise InputError(
                f"{file}: {name!r} has {len(column)} rows, but {names[0]!r} has "
                f"{len(found[names[0]])}."
            )
    return found


def parquet_numbers(file: Path) -> list[str]:
    """The columns of single numbers, in the order of the file."""
    with _parsing(file), _pyarrow().ParquetFile(file) as opened:
        from pyarrow.types import is_boolean, is_floating, is_integer  # it is here by now

        return [
            field.name
            for field in opened.schema_arrow
            if (is_boolean(field.type) or is_floating(field.type) or is_integer(field.type))
            and not field.name.startswith(PANDAS_INDEX)
        ]


def numbers(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    """Numbers of a type that the device has."""
    if column.dtype.kind not in "biuf":
        text = all(isinstance(value, str | bytes) for value in column.ravel()[:1].tolist())
        raise InputError(
            f"{file}: column {name!r} holds {'text' if text else column.dtype}, expected numbers. "
            "Turn it into numbers, or name other columns with --feature."
        )
    if not column[:1].size and len(column):
        raise InputError(f"{file}: column {name!r} has the shape {column.shape}: nothing in a row.")
    column = narrowed(column)
    if column.dtype.kind == "f":
        wrong = np.argwhere(~np.isfinite(column))
        if len(wrong):
            raise InputError(
                f"{file}: column {name!r} has {column[tuple(wrong[0])]} in row {wrong[0, 0]} (from "
                "0), expected finite numbers of float32."
            )
    return column.astype(column.dtype.newbyteorder("="), copy=False)


def narrowed(column: np.ndarray) -> np.ndarray:
    """The same in at most 4 bytes: longer integers would wrap on the device. Bits become floats."""
    if column.dtype.kind != "b" and column.dtype.itemsize <= 4:
        return column
    with np.errstate(over="ignore"):  # becomes infinite, which is refused
        return column.astype(np.float32)


def labels(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    """Whole numbers are classes, other numbers are for regression, text is told apart later.

    Only what is for regression may be several numbers an example.
    """
    if column.ndim != 1 and (column.ndim, column.dtype.kind) != (2, "f"):
        raise InputError(
            f"{file}: the label {name!r} is {column.dtype} of the shape {column.shape}, expected "
            "one label for each row (or some fractions, for regression). Name another column with "
            "--label."
        )
    if column.dtype.kind in "biu":
        wrong = np.flatnonzero((column < 0) | (column >= 2**31))
        if len(wrong):
            raise InputError(
                f"{file}: the label {name!r} is {column[wrong[0]]} in row {wrong[0]} (from 0), "
                "expected classes from 0 (or text; or fractions, for regression). Name another "
                "column with --label, or number the classes anew."
            )
        return column.astype(np.int32)
    if column.dtype.kind == "f":
        return numbers(file, name, column).astype(np.float32)
    return _texts(file, name, column)


def clients(file: Path, name: str, column: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The clients of a file, and the number of the client of each row."""
    if column.ndim != 1 or column.dtype.kind not in "iuO":
        if len(column):
            raise InputError(
                f"{file}: the client {name!r} holds {column.dtype} of the shape {column.shape}, "
                "expected text or a whole number for each row. Name another column with --client."
            )
        return [], np.zeros(0, np.int64)
    ids, owner = np.unique(
        column if column.dtype.kind in "iu" else _texts(file, name, column), return_inverse=True
    )
    names = [str(each) for each in ids.tolist()]
    for place, each in enumerate(names):
        if not each or "\0" in each:
            row = np.flatnonzero(owner == place)[0]
            what = f"has {each!r}, with the character NUL," if each else "is empty text"
            raise InputError(
                f"{file}: the client {name!r} {what} in row {row} (from 0), expected an id for "
                "every row. Correct the data, or name another column with --client."
            )
    return names, owner


def _texts(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    values = column.tolist()
    for row, value in enumerate(values):
        try:
            values[row] = value.decode() if isinstance(value, bytes) else value
            values[row].encode()
        except (AttributeError, UnicodeError):
            raise InputError(
                f"{file}: column {name!r} has {value!r} in row {row} (from 0), expected text or "
                "numbers. Correct the data, or name other columns with --client and --label."
            ) from None
    return np.array(values, object)


def _npz(file: Path, names: Sequence[str]) -> Columns:
    with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        found = {name: np.atleast_1d(arrays[name]) for name in names}
    # Text of any length, as from Parquet files.
    return {
        name: column.astype(object) if column.dtype.kind in "SU" else column
        for name, column in found.items()
    }


def _parquet(file: Path, names: Sequence[str]) -> Columns:
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    with _pyarrow().ParquetFile(file) as opened:
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group, columns=list(names))
            for name, own in parts.items():
                for chunk in table[name].chunks:
                    if len(chunk):
                        own.append(_chunk(file, name, chunk, sum(map(len, own))))
    return {name: _joined(file, name, own) for name, own in parts.items()}


@contextmanager
def _parsing(file: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # parsers raise many: whatever they trip over, it is the file
        raise InputError(f"{file} cannot be read: {error}") from None


def _pyarrow() -> ModuleType:
    try:
        import pyarrow.parquet  # large, and needed by those alone who have such files
    except ImportError:
        raise InputError(
            "Parquet files are read with pyarrow, which is not installed. Install it with: "
            "pip install 'fedda[parquet]'"
        ) from None
    module: ModuleType = pyarrow.parquet
    return module


def _joined(file: Path, name: str, parts: list[np.ndarray]) -> np.ndarray:
    row = 0
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise _ragged(file, name, row)
        row += len(part)
    return np.concatenate(parts) if parts else np.zeros(0)


def _chunk(file: Path, name: str, chunk: Any, first_row: int) -> np.ndarray:
    import pyarrow as pa
    from pyarrow.compute import list_value_length

    shape = [len(chunk)]
    while True:  # from lists to what is in them, for all rows at once
        if pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        each = math.prod(shape[1:])  # so many of them belong to one row
        if chunk.null_count:
            empty = np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0]
            row = first_row + empty // each
            raise InputError(f"{file}: column {name!r} has no value in row {row} (from 0).")
        if isinstance(chunk, pa.FixedShapeTensorArray):
            array: np.ndarray = chunk.to_numpy_ndarray()
            return array
        if not hasattr(chunk.type, "value_type"):  # no lists, or no more
            return chunk.to_numpy(zero_copy_only=False).reshape(shape)
        lengths = list_value_length(chunk).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != lengths[0])
        if len(wrong):
            raise _ragged(file, name, first_row + wrong[0] // each)
        shape.append(int(lengths[0]))
        chunk = chunk.flatten()


def _ragged(file: Path, name: str, row: int) -> InputError:
    return InputError(
        f"{file}: column {name!r} has a list in row {row} (from 0) that is not as long as those "
        "before it. All examples need one shape."
    )
