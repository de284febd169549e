"""TensorFlow Federated's HDF5 files: a group for each client, in it an array for each feature."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py

from fedda.data.readers.common import DEFLATE, Arrays, check_id
from fedda.data.readers.tff import (
    ADVICE,
    IMAGES,
    TEXTS,
    Clients,
    counts,
    counts_layout,
    features,
    source,
)
from fedda.data.store import Source
from fedda.errors import InputError

PREFIX = {
    "emnist": "fed_emnist",
    "emnist-digits": "fed_emnist_digitsonly",
    "cifar100": "fed_cifar100",
    "stackoverflow": "stackoverflow",
}


def layout(name: str) -> str:
    own = ", ".join(file.name for file in _by_split(Path(), name).values())
    return f"TensorFlow Federated's HDF5 files: a folder with {own}{counts_layout(name)}"


def files(path: Path, name: str) -> list[Path]:
    if name not in PREFIX:
        return []
    own = [file for file in _by_split(path, name).values() if file.is_file()]
    return own + counts(name, path) if own else []


def read(path: Path, name: str) -> Source:
    own = _by_split(path, name)
    for file in own.values():
        if not file.is_file():
            raise InputError(f"{path} has no file {file.name}. Expected {layout(name)}.")
    clients = {
        split: Clients(str(file), partial(_clients, file, features(name)))
        for split, file in own.items()
    }
    return source(name, path, clients, f"{name} as in TensorFlow Federated's HDF5 files.")


def _by_split(path: Path, name: str) -> dict[str, Path]:
    splits = ("train", "test") if name in IMAGES else ("train", "held_out", "test")
    return {split: path / f"{PREFIX[name]}_{split}.h5" for split in splits}


def _clients(file: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Arrays]]:
    try:
        with h5py.File(file, "r") as content:
            clients = _get(content, "examples", str(file))
            if not isinstance(clients, h5py.Group):
                raise InputError(f"{file} has no group 'examples' of clients. {ADVICE}")
            for client in clients:
                check_id(client, file, ADVICE)
                place = f"{file}, client {client!r}"
                group = _get(clients, client, place)
                if not isinstance(group, h5py.Group):
                    raise InputError(f"{place} is no group of features. {ADVICE}")
                yield client, _arrays(group, names, place)
    except InputError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        # How h5py says that bytes are missing or make no sense.
        raise InputError(f"{file} is damaged or no HDF5 file ({error}). {ADVICE}") from None


def _arrays(group: h5py.Group, names: tuple[str, ...], place: str) -> Arrays:
    """The features of one client, as many of each."""
    arrays: Arrays = {}
    for name in names:
        dataset = _get(group, name, place)
        if not isinstance(dataset, h5py.Dataset):
            raise InputError(f"{place} has no feature {name!r}, only {', '.join(group)}. {ADVICE}")
        if (h5py.check_string_dtype(dataset.dtype) is not None) != (name in TEXTS):
            expected = "strings" if name in TEXTS else "numbers"
            raise InputError(
                f"{place}: the feature {name!r} is {dataset.dtype}, expected {expected}. {ADVICE}"
            )
        shape = dataset.shape or ()  # one number has (), nothing at all None
        count = len(arrays[names[0]]) if arrays else shape[0] if shape else 0
        if shape[:1] != (count,) or (name in TEXTS and len(shape) != 1):
            raise InputError(
                f"{place}: the feature {name!r} has the shape {shape} for {count} examples. "
                f"{ADVICE}"
            )
        _check_storage(dataset, f"{place}: the feature {name!r}")
        arrays[name] = dataset[()]
    return arrays


def _get(group: h5py.Group, name: str, place: str) -> Any:
    """A member of a group. Links are refused, as they can lead to another file."""
    link = group.get(name, getlink=True)
    if link is not None and not isinstance(link, h5py.HardLink):
        raise InputError(
            f"{place}: {name!r} is a link ({type(link).__name__}), expected data in the file "
            f"itself. {ADVICE}"
        )
    return group.get(name)


def _check_storage(dataset: h5py.Dataset, place: str) -> None:
    """Refuses arrays that are stored in another file, or of which next to nothing is stored."""
    if dataset.external or dataset.is_virtual:
        raise InputError(f"{place} lies in another file, expected it in the file itself. {ADVICE}")
    size, stored = math.prod(dataset.shape) * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if size > DEFLATE * stored:
        raise InputError(
            f"{place} has {size:,} bytes, of which the file stores only {stored:,}. {ADVICE}"
        )
