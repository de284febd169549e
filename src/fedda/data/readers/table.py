"""A federation of a user's own: a table in Parquet or NumPy files, whose rows are examples.

The rows of a client may be anywhere in a table; they keep their order. Where there is no test
split, each client gives up the whole number of examples that is nearest to a fifth of them: those
whose `client:row` has the least SHA-256, `row` counting the client's examples from 0. So what is
held out depends on nothing but the ids, the number of examples and their order.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedda.data.readers import columns, text
from fedda.data.readers.columns import Columns
from fedda.data.readers.common import check_id
from fedda.data.store import Client, Source
from fedda.errors import InputError

SPLITS = ("train", "test")
SUFFIXES = (".parquet", ".npz")


class _Names(NamedTuple):
    client: str
    label: str
    features: tuple[str, ...]


class _Rows(NamedTuple):
    """Examples that were checked; labels that are text are still text."""

    x: np.ndarray
    y: np.ndarray


class _Part(NamedTuple):
    """A split, which can be gone through more than once."""

    labels: Callable[[], Iterator[tuple[Path, np.ndarray]]]
    clients: Callable[[], Iterator[tuple[str, _Rows]]]


def layout(name: str) -> str:
    return (
        "a table of your own: .parquet or .npz files with a client and a label for every row, or a "
        "folder with one .npz file for each client; train and test apart in folders of these names"
    )


def files(path: Path, name: str) -> list[Path]:
    return [file for place in _places(path).values() for file in _tables(place)]


def read(
    path: Path,
    name: str,
    client: str | None = None,
    label: str | None = None,
    features: Sequence[str] = (),
) -> Source:
    """Reads the columns that are named; by default `client` and `label`, or `y` in .npz files.

    Features are columns of single numbers, or one column of lists or arrays of one shape. By
    default they are all other columns of numbers in a Parquet file, and `x` in .npz files.
    """
    places = _places(path)
    if "train" not in places:
        raise InputError(f"{path} holds no table to train on. Expected {layout(name)}.")
    tables = {split: _tables(place) for split, place in places.items()}
    suffixes = {file.suffix for each in tables.values() for file in each}
    if len(suffixes) > 1:
        raise InputError(f"{path} holds both .parquet and .npz files. Leave only one kind there.")
    first, parquet = tables["train"][0], suffixes == {".parquet"}
    names = _Names(
        client or "client",
        label or ("label" if parquet else "y"),
        tuple(features) or (() if parquet else ("x",)),
    )
    if not names.features:
        names = names._replace(features=_all_features(first, names))
    if len({names.client, names.label, *names.features}) < 2 + len(names.features):
        raise InputError(
            f"a column is named twice: {', '.join(_flat(names))}. Name different ones with "
            "--client, --label and --feature."
        )
    file_each = (
        not parquet
        and places["train"].is_dir()
        and names.client == "client"
        and names.client not in columns.names_in(first)
    )
    part = _file_each if file_each else _grouped
    parts = {split: part(each, names) for split, each in tables.items()}
    classes = _classes(parts)
    form: dict[str, np.ndarray] = {}
    clients = {split: _encoded(each, classes, form) for split, each in parts.items()}
    words = (
        f"the client of an example is its {'file' if file_each else names.client}, its label "
        f"{names.label}, its features {', '.join(names.features)}"
    )
    if "test" not in parts:
        train = parts["train"]
        clients = {split: _held_out(_encoded(train, classes, form), split) for split in SPLITS}
        words += "; a fifth of every client's examples, chosen by SHA-256, is held out for testing"
    return Source(clients, lambda: {"labels.txt": "\n".join(classes)} if classes else {}, words)


def _places(path: Path) -> dict[str, Path]:
    """The file or folder of each split. What is not split is there to train on."""
    found = {
        split: place
        for split in SPLITS
        for place in (path / split, *(path / f"{split}{suffix}" for suffix in SUFFIXES))
        if _tables(place)
    }
    return found or ({"train": path} if _tables(path) else {})


def _tables(place: Path) -> list[Path]:
    return [
        file
        for file in (sorted(place.iterdir()) if place.is_dir() else [place])
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
    ]


def _flat(names: _Names) -> list[str]:
    return [names.client, names.label, *names.features]


def _grouped(files: Sequence[Path], names: _Names) -> _Part:
    """The clients of tables that name the client of every row."""
    numbers: dict[str, int] = {}
    owners: list[np.ndarray] = []
    xs: list[np.ndarray] = []
    ys: list[tuple[Path, np.ndarray]] = []
    for file in files:
        found = columns.load(file, _flat(names))
        ids, owner = columns.clients(file, names.client, found[names.client])
        if ids:
            x, y = _checked(file, found, names)
            number = [numbers.setdefault(each, len(numbers)) for each in ids]
            owners.append(np.array(number)[owner])
            xs.append(x)
            ys.append((file, y))
            _same_form(str(file), x, xs[0])
    if not xs:
        raise InputError(f"{files[0]} holds no rows.")
    all_x = np.concatenate(xs)
    order = np.argsort(np.concatenate(owners), kind="stable")
    ends = np.cumsum(np.bincount(np.concatenate(owners)))

    def clients() -> Iterator[tuple[str, _Rows]]:
        all_y = np.concatenate([y for _, y in ys])  # all of one kind by now
        for each, own in zip(numbers, np.split(order, ends[:-1]), strict=True):
            yield each, _Rows(all_x[own], all_y[own])

    return _Part(lambda: iter(ys), clients)


def _file_each(files: Sequence[Path], names: _Names) -> _Part:
    """The clients of a folder where every file is one, with the name of the file as its id."""

    def labels() -> Iterator[tuple[Path, np.ndarray]]:
        for file in files:
            found = columns.load(file, [names.label])
            yield file, columns.labels(file, names.label, found[names.label])

    def clients() -> Iterator[tuple[str, _Rows]]:
        for file in files:
            if names.client in columns.names_in(file):
                raise InputError(
                    f"{file} has {names.client!r}, but {files[0]} has not: either all or none."
                )
            check_id(file.stem, file, "Rename the file.")
            found = columns.load(file, [names.label, *names.features])
            yield file.stem, _checked(file, found, names)

    return _Part(labels, clients)


def _all_features(file: Path, names: _Names) -> tuple[str, ...]:
    found = [each for each in columns.parquet_numbers(file) if each not in names]
    if not found:
        raise InputError(
            f"{file} has no columns of single numbers but {names.client!r} and {names.label!r}. "
            "Name the column of features with --feature."
        )
    return tuple(found)


def _checked(file: Path, found: Columns, names: _Names) -> _Rows:
    y = columns.labels(file, names.label, found[names.label])
    features = [columns.numbers(file, name, found[name]) for name in names.features]
    if len(features) == 1 and features[0].ndim > 1:
        return _Rows(features[0], y)
    if any(feature.ndim > 1 for feature in features):
        raise InputError(
            f"{file}: features must be single numbers, or be one column of lists or arrays; "
            f"{', '.join(names.features)} are of both kinds."
        )
    return _Rows(columns.narrowed(np.stack(features, axis=1)), y)


def _same_form(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    if (got.dtype, got.shape[1:]) != (expected.dtype, expected.shape[1:]):
        raise InputError(
            f"{what}: an example is {got.dtype} of the shape {got.shape[1:]}, but "
            f"{expected.dtype} of {expected.shape[1:]} in others."
        )


def _classes(parts: Mapping[str, _Part]) -> list[str]:
    """The labels that are text, in the order of their numbers."""
    kinds: dict[str, Path] = {}
    classes: set[str] = set()
    for part in parts.values():
        for file, labels in part.labels():
            kind = "text" if labels.dtype == object else labels.dtype.name
            kinds.setdefault(" x ".join([kind, *map(str, labels.shape[1:])]), file)
            classes.update(labels.tolist() if labels.dtype == object else ())
    if len(kinds) > 1:
        found = ", ".join(f"{kind} in {file}" for kind, file in kinds.items())
        raise InputError(f"labels must be of one kind, but there are {found}.")
    return list(text.one_line_each("label", sorted(classes)))


def _encoded(part: _Part, classes: list[str], form: dict[str, np.ndarray]) -> Iterator[Client]:
    """Clients as they are stored. `form` is of the first one, for all splits together."""
    number = {label: place for place, label in enumerate(classes)}
    for name, (x, y) in part.clients():
        if classes:
            y = np.array([number[label] for label in y.tolist()], np.int32)
        if len(y):
            _same_form(f"client {name!r}", x, form.setdefault("x", x[:0]))
            yield name, {"x": x, "y": y}


def _held_out(clients: Iterator[Client], split: str) -> Iterator[Client]:
    nobody = True
    for name, own in clients:
        count = len(own["y"])
        digests = [hashlib.sha256(f"{name}:{row}".encode()).digest() for row in range(count)]
        test = np.zeros(count, bool)
        test[sorted(range(count), key=digests.__getitem__)[: (count + 2) // 5]] = True
        mine = test if split == "test" else ~test
        if mine.any():
            nobody = False
            yield name, {each: column[mine] for each, column in own.items()}
    if nobody:
        raise InputError(
            "no client has three examples, so none can be held out for testing. Give the test "
            "examples in a folder of their own, test beside train."
        )
