"""A federation of tables: clients, test examples and how their columns were prepared."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

from fedda.data import columns, preparation
from fedda.data.columns import OPTIONS, Columns
from fedda.data.preparation import Preparation
from fedda.errors import InputError, check_whole_number, is_finite, shown, unknown

MOST_CLASSES = 100  # of labels, unless `target` says that they are classes
TARGETS = ("classes", "numbers")

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


class Part(NamedTuple):
    """Some rows of a table, as they were read."""

    place: str  # a file or a client, for messages
    client: np.ndarray
    label: np.ndarray
    features: Columns
    is_test: bool | None = None  # None: neither training nor test examples yet


class Choices(NamedTuple):
    """The arguments of `federation` that do not depend on the kind of source."""

    label: str = "label"
    client: str = "client"
    test: float | None = 0.2
    seed: int = 0
    prepare: bool = True
    target: Literal["classes", "numbers"] | None = None


def federation(
    source: Any,
    *,
    client: str = "client",
    label: str = "label",
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    target: Literal["classes", "numbers"] | None = None,
    test: float | None = 0.2,
    seed: int = 0,
    prepare: bool = True,
) -> Federation:
    """Make a federation of a table, a file or a dictionary.

    Columns become features as `fedda.Preparation` describes: numbers are standardised, missing
    values replaced, text becomes one-hot. Labels that are text, booleans or whole numbers are
    classes; other numbers are targets of a regression, with `y` of the shape (examples, 1).

    The test examples of a client are the whole number of rows nearest to the share `test`, at most
    all but one, so with 0.2 a client with one or two rows has none. They are the rows whose
    `seed:client:row` has the least SHA-256, where `row` counts the client's rows from 0. So the
    choice for one client does not depend on other clients.

    Args:
        source: A pandas or Polars DataFrame with one row for each example, or a dictionary from
            client to `(x, y)`. There, `x` is a DataFrame or a dictionary of columns, which are
            prepared, or an array, which is used as it is.
        client: The column of the client.
        label: The column to predict.
        features: The columns to predict from. None takes all others.
        ignore: Columns to leave out.
        target: `"classes"` or `"numbers"`, if the label should not be read as described above.
        test: The share of each client's rows to hold out for testing. None or 0 holds out none.
        seed: The seed of the choice of test examples.
        prepare: False uses the numbers as they are, and refuses missing values and text.

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
        label=label, client=client, test=test, seed=seed, prepare=prepare, target=target
    )
    names = None
    if isinstance(source, Mapping):
        parts = [_of_client(name, pair, features, ignore) for name, pair in source.items()]
        names = [columns.as_text(name) for name in source]
    elif columns.is_frame(source):
        found = columns.of(source)
        chosen = chosen_features(list(found), choices, features, ignore, "the table")
        parts = [
            Part(
                place="the table",
                client=columns.find(found, client, "the table"),
                label=columns.find(found, label, "the table"),
                features={name: found[name] for name in chosen},
            )
        ]
    else:
        raise InputError(
            f"got {type(source).__name__}, expected a pandas or Polars DataFrame, or a dictionary "
            "from client to (x, y)."
        )
    made = build(parts, choices, names)
    if len(made.names) < 2:
        raise InputError(
            f"there is only one client, {made.names[0]!r}, expected at least two. Name the column "
            "of the clients with client."
        )
    return made


def chosen_features(
    known: Sequence[str],
    choices: Choices,
    features: Sequence[str] | None,
    ignore: Sequence[str],
    place: str,
) -> list[str]:
    """Return the names of the columns of features, checked."""
    for option, names in (("features", features), ("ignore", ignore)):
        if isinstance(names, str):
            raise InputError(
                f'{option} must be a list of columns, got {names!r}. Write ["{names}"]'
            )
    for name in (choices.client, choices.label, *(features or ()), *ignore):
        columns.find(dict.fromkeys(known), name, place)
    special = {choices.client, choices.label}
    if features is None:
        features = [name for name in known if name not in special and name not in ignore]
    named = [choices.client, choices.label, *features]
    if len(set(named)) < len(named):
        raise InputError(
            f"a column is named twice: {', '.join(named)}. The client, the label and each feature "
            "must be different columns: a model that sees its label learns nothing else."
        )
    if not features:
        raise InputError(f"{place} has no columns of features: it has {', '.join(known)}.")
    return list(features)


def _of_client(name: Any, pair: Any, features: Sequence[str] | None, ignore: Sequence[str]) -> Part:
    place = f"client {name!r}"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(f"{place} must be a pair (x, y), got {type(pair).__name__}.")
    x, y = pair
    label = columns.of({"y": y})["y"]
    if columns.is_frame(x) or isinstance(x, Mapping):
        found = columns.of(x)
        names = [each for each in found if each not in ignore] if features is None else features
        own = {each: columns.find(found, each, place) for each in names}
    else:
        array = columns.plain("x", columns.of({"x": x})["x"], lambda row: f"{place}, row {row}")
        own = {"x": array[:, None] if array.ndim == 1 else array}
    for each, column in own.items():
        if len(column) != len(label):
            raise InputError(
                f"{place}: {each!r} has {len(column)} rows, but y has {len(label)}. Every example "
                "needs both."
            )
    return Part(place=place, client=np.full(len(label), name, object), label=label, features=own)


def build(parts: Sequence[Part], choices: Choices, names: list[str] | None = None) -> Federation:
    """Make a federation of the rows of all parts.

    Args:
        parts: Rows of one form.
        choices: The arguments of `federation`.
        names: All clients in their order. None takes those of the rows, sorted.
    """
    _check_choices(choices)
    ends = np.cumsum([len(part.label) for part in parts])

    def at(row: int) -> str:
        part = int(np.searchsorted(ends, row, side="right"))
        return f"{parts[part].place}, row {row - (ends[part - 1] if part else 0)} (from 0)"

    if not len(ends) or not ends[-1]:
        raise InputError("there are no rows. Give a table with at least one row for each client.")
    owner = _clients(choices.client, _joined(choices.client, parts, [p.client for p in parts]), at)
    names = names or sorted(set(owner))
    number = {name: place for place, name in enumerate(names)}
    owner = np.array([number[name] for name in owner])
    by_client = np.split(np.argsort(owner, kind="stable"), _ends(owner, len(names)))
    is_test = _held_out(parts, names, by_client, choices)
    label = _joined(choices.label, parts, [part.label for part in parts])
    y, classes = _labels(columns.plain(choices.label, label, at), choices, at)
    found = {
        name: _joined(name, parts, [columns.find(p.features, name, p.place) for p in parts])
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


def _check_choices(choices: Choices) -> None:
    test = choices.test
    number = isinstance(test, Real) and not isinstance(test, bool) and is_finite(test)
    if test is not None and not (number and 0 <= test < 1):
        raise InputError(
            f"test must be a share of each client's rows from 0 to below 1, got {shown(test)}."
        )
    check_whole_number("seed", choices.seed, least=0)
    if choices.target is not None and choices.target not in TARGETS:
        raise unknown("value of target", choices.target, TARGETS)


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


def _ends(owner: np.ndarray, clients: int) -> np.ndarray:
    return np.cumsum(np.bincount(owner, minlength=clients))[:-1]


def _clients(name: str, column: np.ndarray, at: columns.At) -> list[str]:
    column = columns.plain(name, column, at)
    _refuse_missing(name, column, at)
    fractions = column.dtype.kind == "f" and (column % 1 != 0).any()
    if column.ndim != 1 or fractions:
        raise InputError(
            f"the client {name!r} holds {column.dtype} of the shape {column.shape}, expected text "
            f"or a whole number for each row. {OPTIONS}"
        )
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


def _labels(column: np.ndarray, choices: Choices, at: columns.At) -> tuple[np.ndarray, list[Any]]:
    """Return classes numbered from 0 and their values, or float32 targets and no classes."""
    name = choices.label
    _refuse_missing(name, column, at)
    if column.ndim > 1 and (column.ndim, column.dtype.kind) != (2, "f"):
        raise InputError(
            f"the label {name!r} is {column.dtype} of the shape {column.shape}, expected one label "
            f"for each row, or some floats for regression. {OPTIONS}"
        )
    if (column.dtype.kind == "f" and choices.target != "classes") or choices.target == "numbers":
        numbers = columns.finite(name, column, at).astype(np.float32)
        return numbers.reshape(len(numbers), -1), []
    values, y = np.unique(column, return_inverse=True)
    if len(values) > MOST_CLASSES and choices.target is None:
        raise InputError(
            f"the label {name!r} has {len(values):,} different values, so it is unclear whether "
            'they are classes. Say so with target="classes" or, to predict a number, '
            'target="numbers".'
        )
    return y.astype(np.int32), values.tolist()


def _held_out(
    parts: Sequence[Part], names: Sequence[str], by_client: Sequence[np.ndarray], choices: Choices
) -> np.ndarray:
    """Return for each row whether it is a test example; see `federation` for the rule."""
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


def _examples(
    found: Columns, training: np.ndarray, choices: Choices, at: columns.At
) -> tuple[np.ndarray, Preparation | None]:
    """Return the features of all rows, and how they were prepared."""
    plain = {name: columns.plain(name, column, at) for name, column in found.items()}
    if all(column.ndim == 1 for column in plain.values()) and choices.prepare:
        learned = preparation.learn({name: column[training] for name, column in plain.items()})
        return learned.features_of(plain, at), learned
    numbers = [columns.finite(name, column, at) for name, column in plain.items()]
    if len(numbers) == 1 and numbers[0].ndim > 1:
        return numbers[0], None
    if any(column.ndim > 1 for column in numbers):
        raise InputError(
            "features must be single values, or be one column of lists or arrays; "
            f"{', '.join(plain)} are of both kinds. Choose with features."
        )
    return columns.narrowed(np.stack(numbers, axis=1)), None
