"""TensorFlow Federated's HDF5 files: a group for each client, with an array for each feature."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedda.data.readers.common import Arrays, damaged, existing, parsing
from fedda.data.readers.tff import Clients, count_files, counts_layout, features, source
from fedda.data.store import Source

PREFIX = {
    "emnist": "fed_emnist",
    "emnist-digits": "fed_emnist_digitsonly",
    "cifar100": "fed_cifar100",
    "stackoverflow": "stackoverflow",
}


def layout(name: str) -> str:
    expected = ", ".join(file.name for file in _by_split(Path(), name).values())
    return f"TensorFlow Federated's HDF5 files: a folder with {expected}{counts_layout(name)}"


def files(path: Path, name: str) -> list[Path]:
    if name not in PREFIX:
        return []
    here = [file for file in _by_split(path, name).values() if file.is_file()]
    return here + count_files(name, path) if here else []


def read(path: Path, name: str) -> Source:
    clients = {
        split: Clients(str(file), partial(_clients, existing(file, layout(name)), name))
        for split, file in _by_split(path, name).items()
    }
    return source(name, path, clients, "HDF5")


def _by_split(path: Path, name: str) -> dict[str, Path]:
    splits = ("train", *(["held_out"] if name == "stackoverflow" else []), "test")
    return {split: path / f"{PREFIX[name]}_{split}.h5" for split in splits}


def _clients(file: Path, name: str) -> Iterator[tuple[str, Arrays]]:
    with parsing(file), h5py.File(file, "r") as content:
        clients = _member(content, "examples", h5py.Group, str(file))
        for client in clients:
            if isinstance(client, bytes):  # h5py could not decode it
                raise damaged(f"{file}: the client id {client!r} is not UTF-8")
            place = f"{file}, client {client!r}"
            yield client, _arrays(_member(clients, client, h5py.Group, place), name, place)


def _arrays(group: h5py.Group, name: str, place: str) -> Arrays:
    """Return the features of one client."""
    arrays: Arrays = {}
    for feature in features(name):
        dataset = _member(group, feature, h5py.Dataset, place)
        if dataset.external or dataset.is_virtual:
            raise damaged(f"{place}: the feature {feature!r} is stored in another file")
        arrays[feature] = np.asarray(dataset[()])
    return arrays


def _member(group: h5py.Group, name: str, kind: type, place: str) -> Any:
    """Return a member of a group. Links are refused, because they can lead to another file."""
    link, member = group.get(name, getlink=True), None
    if isinstance(link, h5py.HardLink):
        member = group.get(name)
    if not isinstance(member, kind):
        what = "missing" if link is None else f"a {type(member or link).__name__}"
        raise damaged(f"{place}: {name!r} is {what}, expected a {kind.__name__} in the file itself")
    return member
