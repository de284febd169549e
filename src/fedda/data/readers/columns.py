"""Columns of Parquet, .npz and CSV files as arrays."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.columns import Columns, check_lengths, check_names, find, of
from fedda.data.readers import csv_file
from fedda.data.readers.common import parsing
from fedda.errors import InputError, import_extra

SUFFIXES = (".parquet", ".npz", *csv_file.SUFFIXES)
PANDAS_INDEX = "__index_level_"  # prefix of an index that pandas stores as a column


def names_in(file: Path) -> list[str]:
    """Return the names of the columns of a file, without the index of pandas."""
    if file.suffix in csv_file.SUFFIXES:
        return csv_file.names_in(file)
    with parsing(file):
        if file.suffix == ".npz":
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return list(arrays.files)
        with _pyarrow().ParquetFile(file) as opened:
            names = list(opened.schema_arrow.names)
    check_names(names, str(file))
    return [name for name in names if not name.startswith(PANDAS_INDEX)]


def load(file: Path, names: Sequence[str]) -> Columns:
    """Return columns by name. Nested lists become arrays with several axes."""
    known = dict.fromkeys(names_in(file))
    for name in names:
        find(known, name, str(file))
    if file.suffix in csv_file.SUFFIXES:
        return csv_file.load(file, names)
    with parsing(file):
        columns = _npz(file, names) if file.suffix == ".npz" else _parquet(file, names)
    check_lengths(columns, str(file))
    return columns


def _npz(file: Path, names: Sequence[str]) -> Columns:
    with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return of({name: arrays[name] for name in names})


def _parquet(file: Path, names: Sequence[str]) -> Columns:
    with _pyarrow().ParquetFile(file) as opened:
        table = opened.read(columns=list(names))
    return {name: _array(file, name, table[name].combine_chunks()) for name in names}


def _pyarrow() -> Any:
    return import_extra("pyarrow.parquet", "parquet", "read Parquet files")


def _array(file: Path, name: str, column: Any) -> np.ndarray:
    """Turn an Arrow array into a NumPy array, with an axis for each level of nested lists."""
    import pyarrow as pa
    from pyarrow.compute import list_value_length

    shape = [len(column)]
    while True:  # unpack one level of lists of all rows at once
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if isinstance(column, pa.FixedShapeTensorArray) and not column.null_count:
            array: np.ndarray = column.to_numpy_ndarray()
            return array
        is_list, per_row = hasattr(column.type, "value_type"), math.prod(shape[1:])
        if column.null_count and (is_list or len(shape) > 1):
            row = column.is_null().to_numpy(zero_copy_only=False).argmax() // per_row
            raise _wrong(file, name, "a missing value", row, "lists without missing values")
        if not is_list or not len(column):
            return column.to_numpy(zero_copy_only=False).reshape(shape)
        lengths = list_value_length(column).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != lengths[0])
        if len(wrong):
            row = wrong[0] // per_row
            raise _wrong(file, name, "a list of another length", row, "lists of one length")
        shape.append(int(lengths[0]))
        column = column.flatten()


def _wrong(file: Path, name: str, got: object, row: int, expected: str) -> InputError:
    return InputError(
        f"{file}: column {name!r} has {got} in row {row} (from 0), expected {expected}. Correct "
        "the data, or choose other columns with features or ignore."
    )
