"""How the columns of a table become the features of a model.

Means, standard deviations, medians and categories are those of the training examples of all
clients. A simulation can read all examples at once. In a real federation, the clients would have to
compute these statistics together: means and deviations from sums, medians and categories with
a federated protocol.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np

from fedda.data import columns
from fedda.data.columns import DATES, At, Columns
from fedda.errors import InputError

MOST_CATEGORIES = 100
SHOWN = 5  # categories of a column in a repr

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Column:
    """How one column becomes features. A constant column is dropped."""

    name: str
    kind: Literal["number", "category"]
    marks_missing: bool  # whether one more feature is 1 where the value is missing, else 0
    median: float = 0.0  # replaces missing numbers
    mean: float = 0.0
    deviation: float = 0.0  # 0 if the column is constant
    categories: tuple[str, ...] = ()  # each becomes a feature; empty if the column is constant

    @property
    def features(self) -> list[str]:
        """The names of the features, in their order."""
        values = [f"{self.name}={category}" for category in self.categories]
        if self.kind == "number" and self.deviation:
            values = [self.name]
        return values + ([f"{self.name} missing"] if self.marks_missing else [])

    def __repr__(self) -> str:
        mark = " and are marked" if self.marks_missing else ""
        if not self.deviation and not self.categories:
            return f"{self.name}: constant, dropped" + (
                ", missing values are marked" if mark else ""
            )
        if self.kind == "number":
            return (
                f"{self.name}: (value - {self.mean:.4g}) / {self.deviation:.4g}, "
                f"missing values become {self.median:.4g}{mark}"
            )
        more = "" if len(self.categories) <= SHOWN else f" and {len(self.categories) - SHOWN} more"
        shown = ", ".join(map(repr, self.categories[:SHOWN]))
        return f"{self.name}: one-hot of {shown}{more}, missing values become zeros{mark}"


@dataclass(frozen=True)
class Preparation:
    """How the columns of a table become the features of a model; stored with the model.

    Numbers: a missing value becomes the median, then the mean is subtracted and the result divided
    by the standard deviation. Text, categories and booleans become one feature for each category,
    1 or 0; a category that was not among the training examples is all zeros, and so is a missing
    one. Spaces around a text do not count. A column with missing values among the training examples
    has one more feature, 1 where the value is missing. Constant columns are dropped.

    The statistics are those of the training examples of all clients. In a real federation, the
    clients would have to compute them together, for example with secure sums.

    Example:
        >>> import fedda
        >>> hospitals = fedda.federation(
        ...     {"north": ({"age": [30, None], "sex": ["F", "M"]}, [0, 1]),
        ...      "south": ({"age": [50, 70], "sex": ["F", "F"]}, [1, 0])},
        ...     test=None,
        ... )
        >>> hospitals.preparation
        Preparation of 2 columns, 4 features
          age: (value - 50) / 14.14, missing values become 50 and are marked
          sex: one-hot of 'F', 'M', missing values become zeros
        >>> hospitals.preparation.apply({"age": [50, None], "sex": ["M", "unknown"]})
        array([[0., 0., 0., 1.],
               [0., 1., 0., 0.]], dtype=float32)
    """

    columns: tuple[Column, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in their order."""
        return tuple(name for column in self.columns for name in column.features)

    def apply(self, rows: Any) -> np.ndarray:
        """Return the features of new rows as float32, of the shape (rows, features).

        Args:
            rows: A pandas or Polars DataFrame, a dictionary of columns (or of single values, for
                one row), a list of dictionaries, or a list of rows with the columns in the order
                of the preparation. Other columns are ignored.
        """
        names = [column.name for column in self.columns]
        given = columns.of(rows, names)
        absent = [name for name in names if name not in given]
        if absent:
            raise InputError(
                f"the new rows lack the columns {', '.join(map(repr, absent))}, got "
                f"{', '.join(map(repr, given))}. Add them; None stands for a missing value."
            )
        found = {name: given[name] for name in names}
        columns.check_lengths(found, "the new rows")
        return self.features_of(
            {name: columns.plain(name, column, _at) for name, column in found.items()}, _at
        )

    def features_of(self, given: Mapping[str, np.ndarray], at: At) -> np.ndarray:
        """Return the features of columns in the forms of `columns.plain`."""
        parts: list[np.ndarray] = []
        for column in self.columns:
            values = given[column.name]
            absent = columns.missing(values)
            if column.kind == "number":
                parts += _standardised(column, values, absent, at)
            else:
                texts = _category_texts(values)
                parts += [texts == category for category in column.categories]
            if column.marks_missing:
                parts.append(absent)
        return np.stack(parts, axis=1).astype(np.float32)

    def to_json(self) -> str:
        """Return the preparation as JSON."""
        return json.dumps([asdict(column) for column in self.columns], indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Preparation":
        """Return the preparation that `to_json` wrote."""
        read = json.loads(text)
        return cls(
            tuple(
                Column(**{**column, "categories": tuple(column["categories"])}) for column in read
            )
        )

    def __repr__(self) -> str:
        title = f"Preparation of {len(self.columns)} columns, {len(self.features)} features"
        return "\n  ".join([title, *map(repr, self.columns)])


def _at(row: int) -> str:
    return f"row {row} (from 0)"


def learn(given: Columns) -> Preparation:
    """Return the preparation of a table.

    Args:
        given: The columns of features of the training examples, in the forms of `columns.plain`.

    Raises:
        InputError: A column cannot be used, or all columns are constant.
    """
    learned = []
    for name, values in given.items():
        absent = columns.missing(values)
        marks = bool(absent.any() and not absent.all())
        if values.dtype.kind in "iuf":
            learned.append(_number(name, values.astype(float), marks))
        else:
            learned.append(_category(name, values, marks))
    preparation = Preparation(tuple(learned))
    if not preparation.features:
        raise InputError(
            f"all columns of features are constant: {', '.join(given)}. A model cannot learn from "
            "them: add columns that vary."
        )
    return preparation


def _number(name: str, values: np.ndarray, marks: bool) -> Column:
    present = values[np.isfinite(values)]
    if not len(present) or present.min() == present.max():
        return Column(name=name, kind="number", marks_missing=marks)
    median = float(np.median(present))
    filled = np.where(np.isnan(values), median, values)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(filled.mean()), float(filled.std())
    if not np.isfinite(deviation) and np.isfinite(filled).all():
        raise InputError(f"column {name!r} has numbers too large to be standardised. Scale them.")
    return Column(
        name=name,
        kind="number",
        marks_missing=marks,
        median=median,
        mean=mean,
        deviation=deviation,
    )


def _category(name: str, values: np.ndarray, marks: bool) -> Column:
    categories = sorted({*_category_texts(values).tolist()} - {None})
    if categories and all(map(_is_date, categories)):
        raise InputError(
            f"column {name!r} holds dates, such as {categories[0]!r}, expected numbers or text. "
            f"{DATES}"
        )
    if categories and all(map(_DECIMAL_COMMA.fullmatch, categories)):
        raise InputError(
            f"column {name!r} holds numbers with a comma, such as {categories[0]!r}, expected a "
            "point: 1.5. Replace the commas, or leave the column out with ignore."
        )
    if len(categories) > MOST_CATEGORIES:
        texts = [category for category in categories if not _is_number(category)]
        if not texts:
            raise InputError(
                f"column {name!r} holds numbers as text, such as {categories[0]!r}, expected "
                "numbers. Convert the column, for example with float."
            )
        if len(texts) <= len(categories) / 2:
            shown = ", ".join(map(repr, texts[:SHOWN]))
            raise InputError(
                f"column {name!r} holds numbers, but also the text {shown}; expected only numbers. "
                "Replace the text by numbers, or leave it empty."
            )
        raise InputError(
            f"column {name!r} holds text with {len(categories):,} different values, such as "
            f"{categories[0]!r}; expected at most {MOST_CATEGORIES} categories. Leave the column "
            "out with ignore, or group rare values."
        )
    if len(categories) < 2:
        categories = []
    return Column(name=name, kind="category", marks_missing=marks, categories=tuple(categories))


def _category_texts(values: np.ndarray) -> np.ndarray:
    """Return categories as text, without spaces around them, which the reader of a CSV drops."""
    texts = [
        None if columns.is_missing(value) else columns.as_text(value).strip() for value in values
    ]
    return np.array(texts, object)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return not text.isdecimal()


def _standardised(
    column: Column, values: np.ndarray, absent: np.ndarray, at: At
) -> list[np.ndarray]:
    if values.dtype == object and not absent.all():
        row = int((~absent).argmax())
        raise InputError(
            f"column {column.name!r} has {values[row]!r} in {at(row)}, expected numbers, as among "
            "the training examples."
        )
    numbers = np.where(absent, column.median, 0.0 if values.dtype == object else values)
    infinite = ~np.isfinite(numbers)
    if infinite.any():
        row = int(infinite.argmax())
        raise InputError(
            f"column {column.name!r} has {numbers[row]} in {at(row)}, expected finite numbers. "
            "Correct it, or leave it empty: a missing value becomes the median."
        )
    if not column.deviation:
        return []
    return [(numbers.astype(float) - column.mean) / column.deviation]
