"""CIFAR-100 as its authors publish it for Python: one pickle of all images for each split."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers import plain_pickle
from fedda.data.store import Client, Source
from fedda.errors import InputError

FOLDER = "cifar-100-python"
MD5 = {  # of the files in the authors' archive
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
MOST_BYTES = 10**9  # of a file: the official ones have 155 MB and 31 MB
_ADVICE = "Unpack cifar-100-python.tar.gz anew."
CLASSES = {"fine_labels": 100, "coarse_labels": 20}


def layout(name: str) -> str:
    return "CIFAR-100 for Python: a folder cifar-100-python with the files train and test"


def files(path: Path, name: str) -> list[Path]:
    return [file for split in MD5 if _begins_as_pickle(file := _folder(path) / split)]


def read(path: Path, name: str) -> Source:
    """Files that are not the official ones are read too: the store says so."""
    folder = _folder(path)
    other = []
    for split, official in MD5.items():
        file = folder / split
        if not file.is_file():
            raise InputError(f"{folder} has no file {split!r}. Expected {layout(name)}.")
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes, expected at most {MOST_BYTES}. {_ADVICE}")
        with open(file, "rb") as content:
            if hashlib.file_digest(content, _md5).hexdigest() != official:
                other.append(split)
    which = "Its files are the official ones"
    if other:
        which = f"Not byte for byte the official ones: {' and '.join(other)}"
    return Source(
        {split: _clients(folder / split) for split in MD5},
        words=f"CIFAR-100 for Python, which knows no clients: all images of a split are one. "
        f"{which}.",
    )


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)  # what the authors publish; it tells, not protects


def _folder(path: Path) -> Path:
    return path / FOLDER if (path / FOLDER).is_dir() else path


def _begins_as_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"


def _clients(path: Path) -> Iterator[Client]:
    table = plain_pickle.read(path)
    images = table.get("data")
    if not isinstance(images, np.ndarray):
        raise InputError(f"{path}: the field 'data' is missing or no array. {_ADVICE}")
    if images.ndim != 2 or images.shape[1] != 3072 or not len(images):
        raise InputError(
            f"{path}: the field 'data' has the shape {images.shape}, expected (images, 3072)."
        )
    labels = {field: _labels(path, table, field, len(images)) for field in CLASSES}
    yield (
        "all",
        {
            "x": np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)),
            "y": labels["fine_labels"],
            "coarse": labels["coarse_labels"],
        },
    )


def _labels(path: Path, table: dict[str, Any], field: str, count: int) -> np.ndarray:
    values = table.get(field)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise InputError(
            f"{path}: the field {field!r} is missing or no list of whole numbers. {_ADVICE}"
        )
    if len(values) != count:
        raise InputError(f"{path}: {field!r} has {len(values)} entries for {count} images.")
    array = np.array(values, np.int32)
    wrong = np.flatnonzero((array < 0) | (array >= CLASSES[field]))
    if len(wrong):
        raise InputError(
            f"{path}: {field!r} is {array[wrong[0]]} for image {wrong[0]}, expected 0 to "
            f"{CLASSES[field] - 1}."
        )
    return array
