"""A federation of tables: clients, test examples and how their columns were prepared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedda.data import columns, preparation, table_files, tables
from fedda.data.columns import Columns
from fedda.data.preparation import Preparation
from fedda.data.tables import CLIENT, LABEL, Choices, Part
from fedda.errors import InputError

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients with their examples, as `fedda.federation` returns them.

    Attributes:
        clients: A pair of arrays `(x, y)` for each client, to train on.
        test: A pair `(x, y)` for each client, to evaluate on. Arrays may be empty.
        names: The names of the clients.
        classes: The values of the label in the order of their numbers; empty for regression.
        features: The names of the features, in the order of the last axis of `x`. Empty if the
            examples were given as arrays.
        preparation: How columns became features, or None if nothing was prepared.
    """

    clients: list[Pair]
    test: list[Pair]
    names: list[str]
    classes: list[Any]
    features: list[str]
    preparation: Preparation | None

    @property
    def num_features(self) -> int:
        """The number of values of an example."""
        return int(np.prod(self.clients[0][0].shape[1:]))

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 for regression."""
        return len(self.classes)

    def __repr__(self) -> str:
        train, test = (sum(len(y) for _, y in part) for part in (self.clients, self.test))
        label = f"{self.num_classes} classes" if self.classes else "regression"
        return (
            f"Federation({len(self.names):,} clients, {train:,} examples to train on, {test:,} to "
            f"test on, {self.num_features:,} features, {label})"
        )


def federation(
    source: Any,
    *,
    client: str | None = None,
    label: str | None = None,
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    target: Literal["classes", "numbers"] | None = None,
    test: float | None = 0.2,
    seed: int = 0,
    prepare: bool = True,
) -> Federation:
    """Return a federation of clients from a table, a file or a dictionary.

    Columns become features as `fedda.Preparation` describes: numbers are standardised, missing
    values replaced, text becomes one-hot. Labels that are text, booleans or whole numbers are
    classes; other numbers are targets of a regression, with `y` of the shape (examples, 1).

    Each client holds out the share `test` of its rows, rounded to a whole number, but keeps at
    least one row for training. With a share of 0.2, a client with one or two rows has no test
    examples. The test examples are the rows whose text `seed:client:row` has the smallest SHA-256,
    where `row` counts the client's rows from 0. So the split of a client does not depend on other
    clients.

    Args:
        source: A pandas or Polars DataFrame with one row for each example; the path of a CSV,
            Parquet or `.npz` file, or of a folder of such files; or a dictionary from client to
            `(x, y)`. In a folder, files or folders with the names `train` and `test` hold the
            training and the test examples. In a dictionary, `x` is a DataFrame or a dictionary of
            columns, which are prepared, or an array, which is used unchanged.
        client: The column of the client, by default `client`. If a folder has no such column, each
            file is a client.
        label: The column to predict, by default `label`, or `y` in `.npz` files.
        features: The columns to predict from. By default all other columns.
        ignore: Columns to leave out.
        target: `"classes"` or `"numbers"`, to override the rule above.
        test: The share of each client's rows to hold out for testing. None or 0 holds out none.
        seed: The seed of the test split.
        prepare: If false, numbers are used unchanged, and missing values and text are errors.

    Returns:
        The federation, which `fedda.run` takes as `clients`. Clients of a table are in the order
        of their names.

    Raises:
        InputError: The source cannot be read, or a column is missing or cannot be used.

    Example:
        >>> import fedda, pandas
        >>> visits = pandas.DataFrame(
        ...     {
        ...         "hospital": ["north"] * 5 + ["south"] * 5,
        ...         "age": [41, None, 67, 30, 52, 70, 58, 45, None, 33],
        ...         "ward": ["A", "B", "A", "C", "A", "B", "A", "A", "C", "B"],
        ...         "outcome": ["well", "ill", "ill", "well", "ill"] * 2,
        ...     }
        ... )
        >>> hospitals = fedda.federation(visits, client="hospital", label="outcome")
        >>> hospitals
        Federation(2 clients, 8 examples to train on, 2 to test on, 5 features, 2 classes)
        >>> hospitals.names, hospitals.classes
        (['north', 'south'], ['ill', 'well'])
        >>> hospitals.features
        ['age', 'age missing', 'ward=A', 'ward=B', 'ward=C']
    """
    choices = Choices(
        client=client,
        label=label,
        features=features,
        ignore=ignore,
        target=target,
        test=test,
        seed=seed,
        prepare=prepare,
    )
    tables.check_choices(choices)
    if isinstance(source, str | PathLike):
        made = build(*table_files.read(Path(source).expanduser(), choices))
    elif isinstance(source, Mapping):
        choices = choices._replace(client=client or CLIENT, label=label or LABEL)
        parts = [_of_client(name, pair, choices) for name, pair in source.items()]
        made = build(parts, choices, [columns.as_text(name) for name in source])
    elif columns.is_frame(source):
        choices = choices._replace(client=client or CLIENT, label=label or LABEL)
        made = build([_of_frame(source, choices)], choices)
    else:
        raise InputError(
            f"got {type(source).__name__}, expected a pandas or Polars DataFrame, the path of a "
            "file or folder, or a dictionary from client to (x, y)."
        )
    if len(made.names) < 2:
        raise InputError(
            f"there is only one client, {made.names[0]!r}, expected at least two. Name the column "
            "of the clients with client."
        )
    return made


def _of_frame(frame: Any, choices: Choices) -> Part:
    place, found = "the table", columns.of(frame)
    features = tables.chosen_features(list(found), choices, place)
    return Part(
        place=place,
        client=found[str(choices.client)],
        label=found[str(choices.label)],
        features={name: found[name] for name in features},
    )


def _of_client(name: Any, pair: Any, choices: Choices) -> Part:
    place = f"client {name!r}"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(
            f"{place} must be a pair (x, y), got {type(pair).__name__}. If the keys are columns, "
            "make a DataFrame of the dictionary."
        )
    x, y = pair
    label = columns.of({"y": y})["y"]
    if columns.is_frame(x) or isinstance(x, Mapping):
        found = columns.of(x)
        names = choices.features or [each for each in found if each not in choices.ignore]
        own = {each: columns.find(found, each, place) for each in names}
    else:
        array = columns.plain("x", columns.of({"x": x})["x"], lambda row: f"{place}, row {row}")
        own = {"x": array[:, None] if array.ndim == 1 else array}
    columns.check_lengths({"y": label, **own}, place)
    return Part(place=place, client=np.full(len(label), name, object), label=label, features=own)


def build(parts: Sequence[Part], choices: Choices, names: list[str] | None = None) -> Federation:
    """Make a federation of the rows of all parts.

    Args:
        parts: The rows.
        choices: The arguments of `federation`.
        names: All clients in order. By default the clients of the rows, sorted.
    """
    ends = np.cumsum([len(part.label) for part in parts])

    def at(row: int) -> str:
        part = int(np.searchsorted(ends, row, side="right"))
        return f"{parts[part].place}, row {row - (ends[part - 1] if part else 0)} (from 0)"

    if not len(ends) or not ends[-1]:
        raise InputError("there are no rows. Give a table with at least one row for each client.")
    client, label = choices.client or "client", str(choices.label)
    ids = columns.plain(client, _joined(client, parts, [part.client for part in parts]), at)
    owner = tables.clients(client, columns.without_empty(ids) if parts[0].is_text else ids, at)
    names = names or sorted(set(owner))
    number = {name: place for place, name in enumerate(names)}
    numbers = np.array([number[name] for name in owner])
    sizes = np.bincount(numbers, minlength=len(names))
    by_client = np.split(np.argsort(numbers, kind="stable"), np.cumsum(sizes)[:-1])
    is_test = tables.held_out(parts, names, by_client, choices)

    def joined_column(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        column = _joined(name, parts, arrays)
        return columns.parsed(column) if parts[0].is_text else columns.plain(name, column, at)

    y, classes = tables.labels(joined_column(label, [part.label for part in parts]), choices, at)
    found = {
        name: joined_column(name, [columns.find(p.features, name, p.place) for p in parts])
        for name in parts[0].features
    }
    x, prepared = _examples(found, ~is_test, choices, at)
    if prepared is not None:
        features = list(prepared.features)
    else:
        features = list(found) if len(found) == x.shape[1] and x.ndim == 2 else []
    return Federation(
        clients=[(x[rows], y[rows]) for rows in (own[~is_test[own]] for own in by_client)],
        test=[(x[rows], y[rows]) for rows in (own[is_test[own]] for own in by_client)],
        names=names,
        classes=classes,
        features=features,
        preparation=prepared,
    )


def _joined(name: str, parts: Sequence[Part], arrays: Sequence[np.ndarray]) -> np.ndarray:
    filled = [(part.place, array) for part, array in zip(parts, arrays, strict=True) if len(array)]
    first_place, first = filled[0]
    for place, array in filled:
        if array.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{place}: {name!r} has examples of the shape {array.shape[1:]}, but those of "
                f"{first_place} have {first.shape[1:]}. All need the same shape."
            )
    return np.concatenate([array for _, array in filled])


def _examples(
    found: Columns, training: np.ndarray, choices: Choices, at: columns.At
) -> tuple[np.ndarray, Preparation | None]:
    """Return the features of all rows, and how they were prepared."""
    if all(column.ndim == 1 for column in found.values()) and choices.prepare:
        learned = preparation.learn({name: column[training] for name, column in found.items()})
        return learned.features_of(found, at), learned
    numbers = [columns.finite(name, column, at) for name, column in found.items()]
    if len(numbers) == 1 and numbers[0].ndim > 1:
        return numbers[0], None
    if any(column.ndim > 1 for column in numbers):
        raise InputError(
            "features must be columns of single values, or one column of lists or arrays, got both "
            f"kinds: {', '.join(found)}. Choose columns with features."
        )
    return columns.narrowed(np.stack(numbers, axis=1)), None
