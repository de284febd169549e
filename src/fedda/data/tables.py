"""The rows of a table: their clients, their labels, and which are test examples."""

import hashlib
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fedda.data import columns
from fedda.data.columns import OPTIONS, Columns
from fedda.errors import InputError, check_whole_number, is_finite, shown, unknown

MOST_CLASSES = 100  # different labels, unless target="classes"
CLIENT, LABEL = "client", "label"  # the default names of these columns
TARGETS = ("classes", "numbers")


class Part(NamedTuple):
    """Some rows of a table, as they were read."""

    place: str  # a file or a client, for messages
    client: np.ndarray
    label: np.ndarray
    features: Columns
    is_test: bool | None = None  # None if the rows are not split into training and test yet
    is_text: bool = False  # whether all values, also numbers, are text, as in CSV files


class Choices(NamedTuple):
    """The arguments of `fedda.federation` except the source; see its documentation."""

    client: str | None = None
    label: str | None = None
    features: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    target: str | None = None
    test: float | None = 0.2
    seed: int = 0
    prepare: bool = True


def check_choices(choices: Choices) -> None:
    """Check the arguments that do not depend on the source."""
    for option, names in (("features", choices.features), ("ignore", choices.ignore)):
        if isinstance(names, str):
            raise InputError(
                f'{option} must be a list of columns, got {names!r}. Write ["{names}"]'
            )
    test = choices.test
    number = isinstance(test, Real) and not isinstance(test, bool) and is_finite(test)
    if test is not None and not (number and 0 <= test < 1):
        raise InputError(
            f"test must be a share of each client's rows from 0 to below 1, got {shown(test)}."
        )
    check_whole_number("seed", choices.seed, least=0)
    if choices.target is not None and choices.target not in TARGETS:
        raise unknown("value of target", choices.target, TARGETS)


def chosen_features(known: Sequence[str], choices: Choices, place: str) -> list[str]:
    """Return the names of the columns of features of a table.

    Args:
        known: The names of all columns.
        choices: The choices. Its label is set, and its client unless each file is a client.
        place: The table, for messages.
    """
    special = [name for name in (choices.client, choices.label) if name is not None]
    for name in (*special, *(choices.features or ()), *choices.ignore):
        if name not in known:
            problem = unknown("column", name, known)
            raise InputError(f"{place}: {problem} Name columns with client, label and features.")
    others = [name for name in known if name not in special and name not in choices.ignore]
    features = choices.features or others
    named = [*special, *features]
    if len(set(named)) < len(named):
        raise InputError(
            f"a column is named twice: {', '.join(named)}. The client, the label and each feature "
            "must be different columns. A model must not get its label as a feature."
        )
    if not features:
        raise InputError(f"{place} has no columns of features: it has {', '.join(known)}.")
    return list(features)


def clients(name: str, column: np.ndarray, at: columns.At) -> list[str]:
    """Return the name of the client of each row."""
    column = columns.plain(name, column, at)
    _refuse_missing(name, column, at)
    fractions = column.dtype.kind == "f" and (column % 1 != 0).any()
    if column.ndim != 1 or fractions:
        raise InputError(
            f"the client column {name!r} holds {column.dtype} of the shape {column.shape} in "
            f"{at(0)}, expected text or a whole number for each row. {OPTIONS}"
        )
    if column.dtype == object:
        return column.tolist()
    return [columns.as_text(value) for value in column.tolist()]


def _refuse_missing(name: str, column: np.ndarray, at: columns.At) -> None:
    rows = np.flatnonzero(columns.missing(column))
    if len(rows):
        more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
        places = "; ".join(at(int(row)) for row in rows[:3])
        raise InputError(
            f"column {name!r} has no value in {places}{more}, expected one in every row. Fill it "
            "in, or remove the rows."
        )


def labels(column: np.ndarray, choices: Choices, at: columns.At) -> tuple[np.ndarray, list[Any]]:
    """Return classes numbered from 0 and their values, or float32 targets and no classes."""
    name = str(choices.label)
    _refuse_missing(name, column, at)
    if column.ndim > 1 and (column.ndim, column.dtype.kind) != (2, "f"):
        raise InputError(
            f"the label {name!r} holds {column.dtype} of the shape {column.shape} in {at(0)}, "
            f"expected one label for each row, or several floats for a regression. {OPTIONS}"
        )
    if (column.dtype.kind == "f" and choices.target != "classes") or choices.target == "numbers":
        numbers = columns.finite(name, column, at).astype(np.float32)
        return numbers.reshape(len(numbers), -1), []
    values = sorted(set(column.tolist()))
    if len(values) > MOST_CLASSES and choices.target is None:
        raise InputError(
            f"the label {name!r} has {len(values):,} different values, so it is unclear whether "
            'they are classes. Give target="classes", or target="numbers" for a regression.'
        )
    number = {value: place for place, value in enumerate(values)}
    return np.array([number[value] for value in column.tolist()], np.int32), values


def held_out(
    parts: Sequence[Part], names: Sequence[str], by_client: Sequence[np.ndarray], choices: Choices
) -> np.ndarray:
    """Return a mask of the rows that are test examples; see `federation` for the rule."""
    is_test = np.repeat([bool(part.is_test) for part in parts], [len(part.label) for part in parts])
    if is_test.any() or not choices.test:
        return is_test
    for name, rows in zip(names, by_client, strict=True):
        count = min(round(choices.test * len(rows)), len(rows) - 1)
        if count > 0:
            ids = (f"{choices.seed}:{name}:{row}".encode() for row in range(len(rows)))
            digests = [hashlib.sha256(text).digest() for text in ids]
            is_test[rows[sorted(range(len(rows)), key=digests.__getitem__)[:count]]] = True
    return is_test
