"""Columns of Parquet and .npz files as arrays, and what features, labels and clients may be."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers.common import parsing
from fedda.errors import InputError, import_extra

Columns = dict[str, np.ndarray]
PANDAS_INDEX = "__index_level_"  # how pandas names an index that it stores as a column


def names_in(file: Path) -> list[str]:
    """Return the names of all columns of a file."""
    with parsing(file):
        if file.suffix == ".npz":
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return list(arrays.files)
        with _pyarrow().ParquetFile(file) as opened:
            return list(opened.schema_arrow.names)


def load(file: Path, names: Sequence[str]) -> Columns:
    """Return the columns of these names, of one length. Lists of lists become axes of arrays."""
    known = names_in(file)
    for name in names:
        if known.count(name) != 1:
            raise InputError(
                f"{file} has {'no' if name not in known else 'more than one'} column {name!r}. It "
                f"has: {', '.join(known)}. Name those to use with --client, --label and --feature."
            )
    with parsing(file):
        columns = _npz(file, names) if file.suffix == ".npz" else _parquet(file, names)
    for name, column in columns.items():
        expected = len(columns[names[0]])
        if len(column) != expected:
            raise InputError(
                f"{file}: {name!r} has {len(column)} rows, but {names[0]!r} has {expected}."
            )
    return columns


def parquet_numbers(file: Path) -> list[str]:
    """Return the names of the columns of single numbers, in the order of the file."""
    with parsing(file), _pyarrow().ParquetFile(file) as opened:
        from pyarrow.types import is_boolean, is_floating, is_integer  # it is here by now

        return [
            field.name
            for field in opened.schema_arrow
            if (is_boolean(field.type) or is_floating(field.type) or is_integer(field.type))
            and not field.name.startswith(PANDAS_INDEX)
        ]


def numbers(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    """Return a column as finite numbers of a type that the device has."""
    if column.dtype.kind not in "biuf":
        text = isinstance(next(column.flat, None), str | bytes)
        raise InputError(
            f"{file}: column {name!r} holds {'text' if text else column.dtype}, expected numbers. "
            "Turn it into numbers, or name other columns with --feature."
        )
    if not column[:1].size and len(column):
        raise InputError(f"{file}: column {name!r} has the shape {column.shape}: nothing in a row.")
    column = narrowed(column)
    finite = np.isfinite(column)
    if not finite.all():
        row, *_ = place = tuple(np.argwhere(~finite)[0])
        raise _wrong(file, name, column[place], row, "finite numbers of float32")
    return column.astype(column.dtype.newbyteorder("="), copy=False)


def narrowed(column: np.ndarray) -> np.ndarray:
    """Return numbers of at most 4 bytes: longer integers would wrap on the device."""
    if column.dtype.kind != "b" and column.dtype.itemsize <= 4:
        return column
    with np.errstate(over="ignore"):  # becomes infinite, which is refused
        return column.astype(np.float32)


def labels(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    """Return labels: whole numbers are classes, other numbers are for regression, or text.

    Only labels for regression may be several numbers an example.
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
            expected = "classes numbered from 0 (or text; or fractions, for regression)"
            raise _wrong(file, name, column[wrong[0]], wrong[0], expected)
        return column.astype(np.int32)
    if column.dtype.kind == "f":
        return numbers(file, name, column).astype(np.float32)
    return _texts(file, name, column)


def clients(file: Path, name: str, column: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the ids of the clients of a file, and for each row the place of its client there."""
    if not len(column):
        return [], np.zeros(0, np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iuO":
        raise InputError(
            f"{file}: the client {name!r} holds {column.dtype} of the shape {column.shape}, "
            "expected text or a whole number for each row. Name another column with --client."
        )
    values = column if column.dtype.kind in "iu" else _texts(file, name, column)
    ids, owner = np.unique(values, return_inverse=True)
    return [str(value) for value in ids.tolist()], owner


def _texts(file: Path, name: str, column: np.ndarray) -> np.ndarray:
    values = column.tolist()
    for row, value in enumerate(values):
        try:
            values[row] = value.decode() if isinstance(value, bytes) else value
            values[row].encode()
        except (AttributeError, UnicodeError):
            raise _wrong(file, name, repr(value), row, "text or numbers") from None
    return np.array(values, object)


def _npz(file: Path, names: Sequence[str]) -> Columns:
    with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        columns = {name: np.atleast_1d(arrays[name]) for name in names}
    # Text of any length, as from Parquet files.
    return {
        name: column.astype(object) if column.dtype.kind in "SU" else column
        for name, column in columns.items()
    }


def _parquet(file: Path, names: Sequence[str]) -> Columns:
    with _pyarrow().ParquetFile(file) as opened:
        table = opened.read(columns=list(names))
    return {name: _array(file, name, table[name].combine_chunks()) for name in names}


def _pyarrow() -> Any:
    return import_extra("pyarrow.parquet", "parquet", "read Parquet files")


def _wrong(file: Path, name: str, got: object, row: int, expected: str) -> InputError:
    return InputError(
        f"{file}: column {name!r} has {got} in row {row} (from 0), expected {expected}. Correct "
        "the data, or name other columns with --client, --label and --feature."
    )


def _array(file: Path, name: str, column: Any) -> np.ndarray:
    """Turn an Arrow array into a NumPy array, with an axis for each level of nested lists."""
    import pyarrow as pa
    from pyarrow.compute import list_value_length

    shape = [len(column)]
    while True:  # from lists to what is in them, for all rows at once
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        per_row = math.prod(shape[1:])
        if column.null_count:
            row = column.is_null().to_numpy(zero_copy_only=False).argmax() // per_row
            raise _wrong(file, name, "no value", row, "one in every row")
        if isinstance(column, pa.FixedShapeTensorArray):
            array: np.ndarray = column.to_numpy_ndarray()
            return array
        if not hasattr(column.type, "value_type") or not len(column):  # no lists, or no more
            return column.to_numpy(zero_copy_only=False).reshape(shape)
        lengths = list_value_length(column).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != lengths[0])
        if len(wrong):
            row = wrong[0] // per_row
            raise _wrong(file, name, "a list", row, "one as long as those before")
        shape.append(int(lengths[0]))
        column = column.flatten()
