"""TensorFlow Federated's SQLite files: a row for each example, stored as a tf.train.Example."""

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers.common import Arrays, begins_with, damaged, parsing
from fedda.data.readers.tf_example import decode
from fedda.data.readers.tff import KINDS, Clients, count_files, counts_layout, features, source
from fedda.data.store import Source
from fedda.errors import InputError

FILE = {
    "emnist": "emnist_all.sqlite",
    "emnist-digits": "emnist_all.sqlite",
    "cifar100": "cifar100.sqlite",
    "stackoverflow": "stackoverflow.sqlite",
}
SPLITS = {  # from our names to those in the file
    "emnist": {"train": "all_train", "test": "all_test"},
    "emnist-digits": {"train": "digits_only_train", "test": "digits_only_test"},
    "cifar100": {"train": "train", "test": "test"},
    "stackoverflow": {"train": "train", "held_out": "heldout", "test": "test"},
}


def layout(name: str) -> str:
    return f"TensorFlow Federated's SQLite file {FILE[name]}{counts_layout(name)}"


def files(path: Path, name: str) -> list[Path]:
    if name not in FILE:
        return []
    file = _file(path, name)
    if (file.name == FILE[name] and file.is_file()) or begins_with(file, b"SQLite format 3\0"):
        return [file, *count_files(name, file.parent)]
    return []


def read(path: Path, name: str) -> Source:
    file = _file(path, name)
    _check_size(file)
    stored = {row[0] for row in _rows(file, "SELECT DISTINCT split_name FROM client_metadata")}
    for split in SPLITS[name].values():
        if split not in stored:
            raise InputError(
                f"{file} has no split {split!r}, only {', '.join(sorted(map(str, stored)))}. "
                f"Expected {FILE[name]} with {', '.join(SPLITS[name].values())}."
            )
    clients = {
        ours: Clients(f"{file}, split {split}", partial(_clients, file, split, name))
        for ours, split in SPLITS[name].items()
    }
    return source(name, file.parent, clients, "SQLite")


def _file(path: Path, name: str) -> Path:
    return path if path.is_file() else path / FILE[name]


def _check_size(file: Path) -> None:
    """Refuse a truncated file, because SQLite would read zeros instead of the missing bytes."""
    query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    size, ((expected,),) = file.stat().st_size, _rows(file, query)
    if size != expected:
        raise damaged(f"{file} is damaged: it has {size} bytes, expected {expected}")


def _rows(file: Path, query: str, *values: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query. Nothing is written, not even temporary files beside the file."""
    address = f"{file.resolve().as_uri()}?mode=ro&immutable=1"
    with parsing(file), closing(sqlite3.connect(address, uri=True)) as connection:
        yield from connection.execute(query, values)


def _clients(file: Path, split: str, name: str) -> Iterator[tuple[str, Arrays]]:
    query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
    counts = dict(_rows(file, query, split))
    # The official file has an index with this order. A client's examples stay in file order.
    query = (
        "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
        "ORDER BY client_id, rowid"
    )
    with_examples = groupby(_rows(file, query, split), key=itemgetter(0))
    without_examples = ((client, ()) for client in list(counts) if client in counts)
    for client, rows in chain(with_examples, without_examples):
        place = f"{file}, split {split}, client {client!r}"
        examples = [example for _, example in rows]
        expected = counts.pop(client, 0)
        if expected != len(examples) or not isinstance(client, str):
            raise damaged(
                f"{place} has {len(examples)} rows in the table examples, but client_metadata says "
                f"{expected}; or its id is not text"
            )
        yield client, _arrays(examples, name, place)


def _arrays(examples: list[Any], name: str, place: str) -> Arrays:
    """Return an array for each feature of a client's examples."""
    expected = features(name)
    columns: dict[str, list[np.ndarray]] = {feature: [] for feature in expected}
    for number, example in enumerate(examples):
        with parsing(Path(f"{place}, example {number}")):
            for feature, values in decode(example, expected).items():
                kind, size = expected[feature].kind, math.prod(expected[feature].shape)
                if (values.dtype.kind, len(values)) != (kind, size):
                    raise damaged(
                        f"{place}, example {number}: the feature {feature!r} is {len(values)} "
                        f"{KINDS[values.dtype.kind]}, expected {size} {KINDS[kind]}"
                    )
                columns[feature].append(values)
    dtypes = {"f": np.float32, "i": np.int64, "O": object}
    return {
        feature: np.array(columns[feature], dtypes[kind]).reshape(len(examples), *shape)
        for feature, (kind, shape, *_) in expected.items()
    }
