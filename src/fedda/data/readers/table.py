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
from fedda.data.store import Client, Source, encoded_id
from fedda.errors import InputError

SPLITS = ("train", "test")
SUFFIXES = (".parquet", ".npz")


class _Names(NamedTuple):
    """The names of the columns that are read."""

    client: str
    label: str
    features: tuple[str, ...]


Examples = tuple[np.ndarray, np.ndarray]  # x and y; labels that are text are still text


class _Part(NamedTuple):
    """A split, which can be read more than once."""

    labels: Callable[[], Iterator[tuple[Path, np.ndarray]]]
    clients: Callable[[], Iterator[tuple[str, Examples]]]


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
    """Read a table.

    Args:
        path: A file or a folder.
        name: The name of the data set.
        client: The column of the client; `client` by default.
        label: The column of the label; `label` by default, or `y` in .npz files.
        features: Columns of single numbers, or one column of lists or arrays of one shape; by
            default all other columns of numbers of a Parquet file, or `x` in .npz files.
    """
    places = _places(path)
    if "train" not in places:
        raise InputError(f"{path} holds no table to train on. Expected {layout(name)}.")
    tables = {split: _tables(place) for split, place in places.items()}
    suffixes = {file.suffix for files in tables.values() for file in files}
    if len(suffixes) > 1:
        raise InputError(f"{path} holds both .parquet and .npz files. Leave only one kind there.")
    first, parquet = tables["train"][0], suffixes == {".parquet"}
    client, label = client or "client", label or ("label" if parquet else "y")
    if not features:
        features = _all_features(first, client, label) if parquet else ("x",)
    names = _Names(client, label, tuple(features))
    if len({client, label, *features}) < 2 + len(features):
        raise InputError(
            f"a column is named twice: {', '.join([client, label, *features])}. Name different "
            "ones with --client, --label and --feature."
        )
    file_each = not parquet and places["train"].is_dir() and client == "client"
    file_each = file_each and client not in columns.names_in(first)
    part = _file_each if file_each else _grouped
    parts = {split: part(files, names) for split, files in tables.items()}
    classes = _classes(parts)
    form: dict[str, np.ndarray] = {}
    clients = {split: _encoded(own, classes, form) for split, own in parts.items()}
    description = (
        f"the client of an example is its {'file' if file_each else client}, its label {label}, "
        f"its features {', '.join(features)}"
    )
    if "test" not in parts:
        train = parts["train"]
        clients = {split: _held_out(_encoded(train, classes, form), split) for split in SPLITS}
        description += (
            "; a fifth of every client's examples, chosen by SHA-256, is held out for testing"
        )
    texts = {"labels.txt": "\n".join(classes)} if classes else {}
    return Source(clients, lambda: texts, description)


def _places(path: Path) -> dict[str, Path]:
    """The file or folder of each split. What is not split is there to train on."""
    places = {
        split: place
        for split in SPLITS
        for place in (path / split, *(path / f"{split}{suffix}" for suffix in SUFFIXES))
        if _tables(place)
    }
    return places or ({"train": path} if _tables(path) else {})


def _tables(place: Path) -> list[Path]:
    return [
        file
        for file in (sorted(place.iterdir()) if place.is_dir() else [place])
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
    ]


def _grouped(files: Sequence[Path], names: _Names) -> _Part:
    """The clients of tables that name the client of every row."""
    numbers: dict[str, int] = {}
    owners: list[np.ndarray] = []
    xs: list[np.ndarray] = []
    ys: list[tuple[Path, np.ndarray]] = []
    for file in files:
        found = columns.load(file, [names.client, names.label, *names.features])
        ids, owner = columns.clients(file, names.client, found[names.client])
        if ids:
            x, y = _examples(file, found, names)
            number = [numbers.setdefault(client, len(numbers)) for client in ids]
            owners.append(np.array(number)[owner])
            xs.append(x)
            ys.append((file, y))
            _check_form(str(file), x, xs[0])
    if not xs:
        raise InputError(f"{files[0]} holds no rows.")
    all_x = np.concatenate(xs)
    order = np.argsort(np.concatenate(owners), kind="stable")
    ends = np.cumsum(np.bincount(np.concatenate(owners)))

    def clients() -> Iterator[tuple[str, Examples]]:
        all_y = np.concatenate([y for _, y in ys])  # all of one kind by now
        for client, rows in zip(numbers, np.split(order, ends[:-1]), strict=True):
            yield client, (all_x[rows], all_y[rows])

    return _Part(lambda: iter(ys), clients)


def _file_each(files: Sequence[Path], names: _Names) -> _Part:
    """The clients of a folder where every file is one, with the name of the file as its id."""

    def labels() -> Iterator[tuple[Path, np.ndarray]]:
        for file in files:
            column = columns.load(file, [names.label])[names.label]
            yield file, columns.labels(file, names.label, column)

    def clients() -> Iterator[tuple[str, Examples]]:
        for file in files:
            if names.client in columns.names_in(file):
                raise InputError(
                    f"{file} has {names.client!r}, but {files[0]} has not: either all or none."
                )
            found = columns.load(file, [names.label, *names.features])
            encoded_id(file.stem)
            yield file.stem, _examples(file, found, names)

    return _Part(labels, clients)


def _all_features(file: Path, client: str, label: str) -> list[str]:
    numbers = [name for name in columns.parquet_numbers(file) if name not in (client, label)]
    if not numbers:
        raise InputError(
            f"{file} has no columns of single numbers but {client!r} and {label!r}. Name the "
            "column of features with --feature."
        )
    return numbers


def _examples(file: Path, found: columns.Columns, names: _Names) -> Examples:
    y = columns.labels(file, names.label, found[names.label])
    features = [columns.numbers(file, name, found[name]) for name in names.features]
    if len(features) == 1 and features[0].ndim > 1:
        return features[0], y
    if any(feature.ndim > 1 for feature in features):
        raise InputError(
            f"{file}: features must be single numbers, or be one column of lists or arrays; "
            f"{', '.join(names.features)} are of both kinds."
        )
    return columns.narrowed(np.stack(features, axis=1)), y


def _check_form(what: str, got: np.ndarray, expected: np.ndarray) -> None:
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
        files = ", ".join(f"{kind} in {file}" for kind, file in kinds.items())
        raise InputError(f"labels must be of one kind, but there are {files}.")
    return list(text.one_line_each("label", sorted(classes)))


def _encoded(part: _Part, classes: list[str], form: dict[str, np.ndarray]) -> Iterator[Client]:
    """Clients as they are stored. `form` is of the first one, for all splits together."""
    number = {label: place for place, label in enumerate(classes)}
    for client, (x, y) in part.clients():
        if classes:
            y = np.array([number[label] for label in y.tolist()], np.int32)
        if len(y):
            _check_form(f"client {client!r}", x, form.setdefault("x", x[:0]))
            yield client, {"x": x, "y": y}


def _held_out(clients: Iterator[Client], split: str) -> Iterator[Client]:
    empty = True
    for client, own in clients:
        count = len(own["y"])
        digests = [hashlib.sha256(f"{client}:{row}".encode()).digest() for row in range(count)]
        test = np.zeros(count, bool)
        test[sorted(range(count), key=digests.__getitem__)[: (count + 2) // 5]] = True
        rows = test if split == "test" else ~test
        if rows.any():
            empty = False
            yield client, {name: column[rows] for name, column in own.items()}
    if empty:
        raise InputError(
            "no client has three examples, so none can be held out for testing. Give the test "
            "examples in a folder of their own, test beside train."
        )
