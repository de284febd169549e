"""Columns of a table as arrays: numbers, text or, for each row, an array.

A column comes from a DataFrame, a dictionary, a list or a file. `plain` turns it into one of three
forms: an array of booleans, whole numbers or floats, in which NaN is a missing value; an array of
`str` and None; or an array of numbers with more than one axis.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np

from fedda.errors import InputError, unknown

Columns = dict[str, np.ndarray]
At = Callable[[int], str]  # from the number of a row to its place, such as "visits.csv, row 7"

MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null"))  # in a CSV
OPTIONS = "Correct the data, or choose other columns with client, label, features or ignore."
DATES = (  # advice
    "Turn them into numbers, such as the days since a date or the month, or leave the column out "
    "with ignore."
)


def of(rows: Any, names: Sequence[str] = ()) -> Columns:
    """Return the columns of a table in memory, by name.

    Args:
        rows: A pandas or Polars DataFrame, a dictionary of columns, a list of dictionaries (one a
            row), or a list of rows or an array with the columns `names`.
        names: The names of the columns if `rows` has none.
    """
    if isinstance(rows, Mapping):
        return {str(name): np.atleast_1d(_array(column)) for name, column in rows.items()}
    if is_frame(rows):
        check_names([str(name) for name in rows.columns], "the table")
        return {str(name): _array(rows[name]) for name in rows.columns}
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        raise InputError(
            f"got {type(rows).__name__}, expected a DataFrame, a dictionary of columns or a list "
            "of rows."
        )
    listed = list(rows)
    if listed and all(isinstance(row, Mapping) for row in listed):
        names = list(dict.fromkeys(name for row in listed for name in row))
        return {name: _objects([row.get(name) for row in listed]) for name in names}
    for number, row in enumerate(listed):
        if not isinstance(row, Sequence | np.ndarray) or len(row) != len(names):
            raise InputError(
                f"row {number} (from 0) must have {len(names)} values: {', '.join(names)}."
            )
    return {name: _objects([row[place] for row in listed]) for place, name in enumerate(names)}


def is_frame(rows: Any) -> bool:
    """Return whether an object is a DataFrame of pandas, Polars or a similar library."""
    return hasattr(rows, "shape") and hasattr(rows, "columns")


def check_names(names: Sequence[str], place: str) -> None:
    """Refuse a table in which two columns have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{place} has more than one column {name!r}. Rename one.")


def check_lengths(columns: Columns, place: str) -> None:
    """Refuse columns of different lengths."""
    first = next(iter(columns), "")
    for name, column in columns.items():
        if len(column) != len(columns[first]):
            raise InputError(
                f"{place}: {name!r} has {len(column)} rows, but {first!r} has "
                f"{len(columns[first])}. Every row needs a value in each column."
            )


def find(columns: Mapping[str, Any], name: str, place: str) -> Any:
    """Return a column by its name."""
    if name not in columns:
        raise InputError(f"{place}: {unknown('column', name, columns)}")
    return columns[name]


def _array(column: Any) -> np.ndarray:
    if str(getattr(column, "dtype", "")) == "category":  # of pandas; numbers are names here
        return _objects([value if is_missing(value) else as_text(value) for value in column])
    array = column.to_numpy() if hasattr(column, "to_numpy") else column
    if isinstance(array, np.ndarray):
        return array.astype(object) if array.dtype.kind in "SU" else array
    if isinstance(array, str | bytes) or not isinstance(array, Iterable):
        return _objects([array])
    return _objects(list(array))


def _objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, or the missing value of pandas."""
    if value is None or (isinstance(value, float | np.floating) and value != value):
        return True
    return type(value).__name__ in ("NAType", "NaTType")


def as_text(value: Any) -> str:
    """Return a category or the name of a client as text. 1 and 1.0 have the same text."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def plain(name: str, column: np.ndarray, at: At) -> np.ndarray:
    """Return a column in one of the three forms of this module.

    Args:
        name: The name of the column, for messages.
        column: The column as it was read.
        at: Describes a row, for messages.
    """
    if column.dtype.kind in "mM":
        raise InputError(f"column {name!r} holds dates or times in {at(0)}. {DATES}")
    if column.dtype.kind == "O":
        column = _plain_objects(name, column, at)
    elif column.dtype.kind not in "biuf":
        raise InputError(
            f"column {name!r} holds {column.dtype} in {at(0)}, expected numbers or text. {OPTIONS}"
        )
    if column.ndim > 1 and not column[:1].size and len(column):
        raise InputError(
            f"column {name!r} has the shape {column.shape} in {at(0)}: no values. {OPTIONS}"
        )
    return column.astype(column.dtype.newbyteorder("="), copy=False)


def _plain_objects(name: str, column: np.ndarray, at: At) -> np.ndarray:
    values = column.tolist()
    kinds = {*map(type, values)}
    if kinds <= {str, type(None)}:  # the most frequent case, and the fastest
        return _in_utf8(name, column, at)
    absent = np.fromiter(map(is_missing, values), bool, len(values))
    present = [value for value in values if not is_missing(value)]
    kinds = {*map(type, present)}
    if all(issubclass(kind, str | bytes) for kind in kinds):
        return _in_utf8(name, _objects([_decoded(value) for value in values]), at)
    if all(issubclass(kind, bool | np.bool_) for kind in kinds):
        if not absent.any():
            return np.array(values, bool)
        return _objects([None if is_missing(value) else str(value) for value in values])
    if all(issubclass(kind, Real | Decimal | np.bool_) for kind in kinds):
        whole = all(issubclass(kind, Integral) for kind in kinds) and not absent.any()
        if whole and all(-(2**63) <= value < 2**63 for value in values):
            return np.array(values, np.int64)
        return np.array([np.nan if is_missing(value) else float(value) for value in values])
    if all(issubclass(kind, date | time | datetime | timedelta) for kind in kinds):
        raise InputError(f"column {name!r} holds dates or times in {at(0)}. {DATES}")
    if all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds) and not absent.any():
        return _stacked(name, values, at)
    first = {kind: row for row, kind in reversed([*enumerate(map(type, values))]) if kind in kinds}
    shown = " and ".join(f"{values[row]!r} in {at(row)}" for row in sorted(first.values())[:2])
    raise InputError(
        f"column {name!r} holds {shown}, expected only numbers or only text. {OPTIONS}"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return None if is_missing(value) else str(value)


def _in_utf8(name: str, column: np.ndarray, at: At) -> np.ndarray:
    try:
        "".join(filter(None, column)).encode()
    except UnicodeError:
        for row, text in enumerate(column):
            if text is not None and text.encode(errors="ignore").decode() != text:
                raise InputError(
                    f"column {name!r} has {text!r} in {at(row)}, expected text in UTF-8. {OPTIONS}"
                ) from None
    return column


def _stacked(name: str, values: list[Any], at: At) -> np.ndarray:
    """Return a column of lists or arrays as one array. All must have the same shape."""
    arrays = [np.asarray(value) for value in values]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape or array.dtype.kind not in "biuf":
            raise InputError(
                f"column {name!r} has {array.dtype} of the shape {array.shape} in {at(row)}, "
                f"expected numbers of the shape {arrays[0].shape}, as in the first row. {OPTIONS}"
            )
    return np.stack(arrays)


def without_empty(column: np.ndarray) -> np.ndarray:
    """Return a plain column in which the texts of `MISSING` have become None."""
    if column.dtype != object:
        return column
    return _objects([None if text in MISSING else text for text in column.tolist()])


def parsed(column: np.ndarray) -> np.ndarray:
    """Return a column of text as numbers, if all its texts are numbers or in `MISSING`.

    The numbers are integers if all texts are integers and none is missing.
    """
    column = without_empty(column)
    present = [text for text in column.tolist() if text is not None]
    letters = set("".join(present))
    if not present or "_" in letters:  # Python would read 1_000 as a number
        return column
    try:
        numbers = np.array([np.nan if text is None else float(text) for text in column])
    except ValueError:
        return column
    exact = len(present) == len(column) and abs(numbers).max() < 2**53
    return numbers.astype(np.int64) if exact and letters <= set("+-0123456789") else numbers


def missing(column: np.ndarray) -> np.ndarray:
    """Return a mask of the rows of a plain column that have no value."""
    if column.dtype == object:
        return np.asarray(column == None, bool)  # noqa: E711 - for each value
    if column.dtype.kind != "f":
        return np.zeros(len(column), bool)
    return np.isnan(column).any(axis=tuple(range(1, column.ndim)))


def finite(name: str, column: np.ndarray, at: At) -> np.ndarray:
    """Return a plain column as finite numbers of at most 4 bytes, or raise an `InputError`."""
    if column.dtype == object:
        row = int((~missing(column)).argmax())
        raise InputError(
            f"column {name!r} holds {column[row]!r} in {at(row)}, expected numbers. "
            "Without preparation, all features must be numbers: leave the column out with ignore."
        )
    with np.errstate(over="ignore"):  # too large numbers become infinite and are refused below
        column = narrowed(column)
    wrong = ~np.isfinite(column).reshape(len(column), -1).all(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        value = column[row].ravel()[~np.isfinite(column[row].ravel())][0]
        raise InputError(
            f"column {name!r} has {value} in {at(row)}, expected finite numbers of float32. "
            f"{OPTIONS}"
        )
    return column


def narrowed(column: np.ndarray) -> np.ndarray:
    """Return numbers of at most 4 bytes. Larger integers would overflow on the device."""
    if column.dtype.kind != "b" and column.dtype.itemsize <= 4:
        return column
    return column.astype(np.float32)
