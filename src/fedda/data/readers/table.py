"""A federation of a user's own: a table in Parquet or NumPy files, whose rows are examples.

The rows of a client may be anywhere in a table; they keep their order. Where there is no test
split, each client gives up the whole number of examples that is nearest to a fifth of them: those
whose `client:row` has the least SHA-256, `row` counting the client's examples from 0. So what is
held out depends on nothing but the ids, the number of examples and their order.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
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

    client: str | None  # None: every file is a client
    label: str
    features: tuple[str, ...]


class _Table(NamedTuple):
    """The rows of a file. Labels that are text are still text."""

    file: Path
    ids: list[str]  # of the clients
    owner: np.ndarray  # for each row, the place of its client in `ids`
    x: np.ndarray
    y: np.ndarray


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
    files = {split: _tables(place) for split, place in places.items()}
    suffixes = {file.suffix for own in files.values() for file in own}
    if len(suffixes) > 1:
        raise InputError(f"{path} holds both .parquet and .npz files. Leave only one kind there.")
    first, parquet = files["train"][0], suffixes == {".parquet"}
    client, label = client or "client", label or ("label" if parquet else "y")
    if not features:
        features = _all_features(first, client, label) if parquet else ("x",)
    if len({client, label, *features}) < 2 + len(features):
        raise InputError(
            f"a column is named twice: {', '.join([client, label, *features])}. Name different "
            "ones with --client, --label and --feature."
        )
    file_each = not parquet and places["train"].is_dir() and client == "client"
    file_each = file_each and client not in columns.names_in(first)
    names = _Names(None if file_each else client, label, tuple(features))
    tables = {split: [_load(file, names) for file in own] for split, own in files.items()}
    classes = _classes([table for own in tables.values() for table in own])
    clients = {split: _clients(own, classes) for split, own in tables.items()}
    description = (
        f"the client of an example is its {'file' if file_each else client}, its label {label}, "
        f"its features {', '.join(features)}"
    )
    if "test" not in tables:
        clients = {split: _held_out(_clients(tables["train"], classes), split) for split in SPLITS}
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


def _load(file: Path, names: _Names) -> _Table:
    if names.client is None and "client" in columns.names_in(file):
        raise InputError(f"{file} has 'client', but the first file has not: either all or none.")
    optional = [] if names.client is None else [names.client]
    found = columns.load(file, [*optional, names.label, *names.features])
    y = columns.labels(file, names.label, found[names.label])
    ids, owner = [file.stem], np.zeros(len(y), np.int64)
    if names.client is not None:
        ids, owner = columns.clients(file, names.client, found[names.client])
    features = [columns.numbers(file, name, found[name]) for name in names.features]
    if len(features) == 1 and features[0].ndim > 1:
        return _Table(file=file, ids=ids, owner=owner, x=features[0], y=y)
    if any(feature.ndim > 1 for feature in features):
        raise InputError(
            f"{file}: features must be single numbers, or be one column of lists or arrays; "
            f"{', '.join(names.features)} are of both kinds."
        )
    x = columns.narrowed(np.stack(features, axis=1))
    return _Table(file=file, ids=ids, owner=owner, x=x, y=y)


def _all_features(file: Path, client: str, label: str) -> list[str]:
    numbers = [name for name in columns.parquet_numbers(file) if name not in (client, label)]
    if not numbers:
        raise InputError(
            f"{file} has no columns of single numbers but {client!r} and {label!r}. Name the "
            "column of features with --feature."
        )
    return numbers


def _classes(tables: Sequence[_Table]) -> list[str]:
    """The labels that are text, in the order of their numbers. All files must be of one form."""
    forms: dict[str, Path] = {}
    classes: set[str] = set()
    for file, _, _, x, y in tables:
        kind = "text" if y.dtype == object else y.dtype
        if len(y):
            form = f"{x.dtype} of the shape {x.shape[1:]} with a label {kind} of {y.shape[1:]}"
            forms.setdefault(form, file)
            classes.update(y.tolist() if y.dtype == object else ())
    if len(forms) != 1:
        found = ", ".join(f"{form} in {file}" for form, file in forms.items()) or "no rows"
        raise InputError(f"all examples must be of one form, but there are {found}.")
    return list(text.one_line_each("label", sorted(classes)))


def _clients(tables: Sequence[_Table], classes: list[str]) -> Iterator[Client]:
    """The clients of a split with their rows in the order of the files."""
    tables = [table for table in tables if len(table.y)]
    if not tables:
        return
    ids = list(dict.fromkeys(chain.from_iterable(table.ids for table in tables)))
    place = {client: number for number, client in enumerate(ids)}
    owners = [np.array([place[client] for client in table.ids])[table.owner] for table in tables]
    owner = np.concatenate(owners)
    x, y = np.concatenate([table.x for table in tables]), np.concatenate([t.y for t in tables])
    if classes:
        number = {label: number for number, label in enumerate(classes)}
        y = np.array([number[label] for label in y.tolist()], np.int32)
    ends = np.cumsum(np.bincount(owner))
    parts = np.split(np.argsort(owner, kind="stable"), ends[:-1])
    for client, rows in zip(ids, parts, strict=True):
        yield client, {"x": x[rows], "y": y[rows]}


def _held_out(clients: Iterator[Client], split: str) -> Iterator[Client]:
    empty = True
    for client, own in clients:
        count = len(own["y"])
        names = [encoded_id(client) + f":{row}".encode() for row in range(count)]
        digests = [hashlib.sha256(name).digest() for name in names]
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
