"""TensorFlow Federated's SQLite files: a row for each example, which is a tf.train.Example."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers.common import Arrays
from fedda.data.readers.tf_example import Value, decode
from fedda.data.readers.tff import ADVICE, IMAGES, Clients, counts, counts_layout, features, source
from fedda.data.store import Source
from fedda.errors import InputError

FILE = {
    "emnist": "emnist_all.sqlite",
    "emnist-digits": "emnist_all.sqlite",
    "cifar100": "cifar100.sqlite",
    "stackoverflow": "stackoverflow.sqlite",
}
SPLITS = {  # ours -> the file's
    "emnist": {"train": "all_train", "test": "all_test"},
    "emnist-digits": {"train": "digits_only_train", "test": "digits_only_test"},
    "cifar100": {"train": "train", "test": "test"},
    "stackoverflow": {"train": "train", "held_out": "heldout", "test": "test"},
}
_MAGIC = b"SQLite format 3\0"


def layout(name: str) -> str:
    return f"TensorFlow Federated's SQLite file {FILE[name]}{counts_layout(name)}"


def files(path: Path, name: str) -> list[Path]:
    if name not in FILE:
        return []
    file = _file(path, name)
    if not file.is_file():
        return []
    if file.name != FILE[name]:
        with open(file, "rb") as content:
            if content.read(len(_MAGIC)) != _MAGIC:
                return []
    return [file, *counts(name, file.parent)]


def read(path: Path, name: str) -> Source:
    file = _file(path, name)
    _check_size(file)
    found = {row[0] for row in _rows(file, "SELECT DISTINCT split_name FROM client_metadata")}
    for split in SPLITS[name].values():
        if split not in found:
            raise InputError(
                f"{file} has no split {split!r}, only {', '.join(sorted(map(str, found)))}. "
                f"Expected {FILE[name]} with {', '.join(SPLITS[name].values())}."
            )
    clients = {
        ours: Clients(f"{file}, split {split}", partial(_clients, file, split, name))
        for ours, split in SPLITS[name].items()
    }
    words = f"{name} as in TensorFlow Federated's SQLite files."
    return source(name, file.parent, clients, words)


def _file(path: Path, name: str) -> Path:
    return path if path.is_file() else path / FILE[name]


def _check_size(file: Path) -> None:
    """Refuses a file that ends within a page, the rest of which SQLite would take for zeros."""
    with open(file, "rb") as content:
        header = content.read(18)
    page = int.from_bytes(header[16:], "big")
    page = page if page > 1 else 65536  # which is written as 1, as two bytes cannot hold it
    size = file.stat().st_size
    if not header.startswith(_MAGIC) or size % page:
        raise InputError(
            f"{file} is damaged or no SQLite file: it has {size} bytes, expected whole pages of "
            f"{page} bytes that begin with {_MAGIC!r}. {ADVICE}"
        )


def _rows(file: Path, query: str, *values: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, one after the other. Nothing is written, not even beside the file."""
    try:
        address = f"{file.resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.set_authorizer(_authorise)
            yield from connection.execute(query, values)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if it cannot even say so
        if re.search("not authorized|prohibited", str(error)):
            raise InputError(
                f"{file} computes what it holds, for example in a view ({error}); expected plain "
                f"tables. {ADVICE}"
            ) from None
        raise InputError(
            f"{file} is damaged or none of TensorFlow Federated's SQLite files ({error}). {ADVICE}"
        ) from None


def _authorise(
    action: int, _: str | None, __: str | None, ___: str | None, view: str | None
) -> int:
    """Allows to read tables. A view, or a function in the file, could go on without end."""
    plain = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) and view is None
    return sqlite3.SQLITE_OK if plain else sqlite3.SQLITE_DENY


def _clients(file: Path, split: str, name: str) -> Iterator[tuple[str, Arrays]]:
    query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
    counts: dict[str, int] = {}
    for client, count in _rows(file, query, split):
        if not isinstance(client, str) or client in counts:
            raise InputError(
                f"{file}, split {split}: the table client_metadata has the client {client!r}, "
                f"expected every id once and as text. {ADVICE}"
            )
        counts[client] = count
    # The official index makes this order free; in it, examples stay in the order of the file.
    query = (
        "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
        "ORDER BY client_id, rowid"
    )
    for client, own in groupby(_rows(file, query, split), key=itemgetter(0)):
        place = f"{file}, split {split}, client {client!r}"
        examples = [row[1] for row in own]
        _check_count(counts.pop(client, 0), len(examples), place)
        yield client, _arrays(examples, name, place)
    for client, count in counts.items():
        place = f"{file}, split {split}, client {client!r}"
        _check_count(count, 0, place)
        yield client, _arrays([], name, place)


def _check_count(expected: int, got: int, place: str) -> None:
    if expected != got:
        raise InputError(
            f"{place} has {got} rows in the table examples, but client_metadata says {expected}. "
            f"{ADVICE}"
        )


def _arrays(examples: list[Any], name: str, place: str) -> Arrays:
    """The features of a client's examples, one array for each."""
    names = features(name)
    columns: dict[str, list[Any]] = {feature: [] for feature in names}
    for number, example in enumerate(examples):
        try:
            if not isinstance(example, bytes):
                raise InputError(f"expected bytes, got {example!r:.60}")
            for feature, value in decode(example, names).items():
                columns[feature].append(_checked(value, feature, name))
        except InputError as error:
            raise InputError(f"{place}, example {number}: {error}. {ADVICE}") from None
    if name not in IMAGES:
        return {feature: np.array(column, object) for feature, column in columns.items()}
    kind = IMAGES[name]
    image = np.float32 if kind.kinds == "f" else np.int64
    arrays = {each: np.array(columns[each], np.int64) for each in kind.labels}
    return arrays | {kind.feature: np.array(columns[kind.feature], image).reshape(-1, *kind.shape)}


def _checked(value: Value, feature: str, name: str) -> Any:
    """The value of a feature in one example: a byte string, an integer, or a flat image."""
    if name not in IMAGES:
        kind, size = "O", 1
    elif feature == IMAGES[name].feature:
        kind, size = IMAGES[name].kinds[0], int(np.prod(IMAGES[name].shape))
    else:
        kind, size = "i", 1
    got = value.dtype.kind if isinstance(value, np.ndarray) else "O"
    if got != kind or len(value) != size:
        words = {"O": "byte strings", "f": "floats", "i": "integers"}
        raise InputError(
            f"the feature {feature!r} is {len(value)} {words[got]}, expected {size} {words[kind]}"
        )
    return value if size > 1 else value[0]
