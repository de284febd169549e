"""CIFAR-100 as its authors publish it for Python: one pickle of all images for each split."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedda.data.readers.common import begins_with, existing, labels, parsing, pixels
from fedda.data.store import Client, Source

FOLDER = "cifar-100-python"
SPLITS = ("train", "test")
LABELS = {"fine_labels": ("y", 100), "coarse_labels": ("coarse", 20)}  # our column, classes


def layout(name: str) -> str:
    return "CIFAR-100 for Python: a folder cifar-100-python with the files train and test"


def files(path: Path, name: str) -> list[Path]:
    return [file for split in SPLITS if begins_with(file := _folder(path) / split, b"\x80")]


def read(path: Path, name: str) -> Source:
    folder = _folder(path)
    return Source(
        {split: _clients(existing(folder / split, layout(name))) for split in SPLITS},
        description="CIFAR-100 for Python. It names no clients: each split is a single client.",
    )


def _folder(path: Path) -> Path:
    return path / FOLDER if (path / FOLDER).is_dir() else path


def _clients(path: Path) -> Iterator[Client]:
    with parsing(path), open(path, "rb") as content:
        pickled = _Unpickler(content, encoding="bytes").load()
        table = {key.decode() if isinstance(key, bytes) else key: pickled[key] for key in pickled}
        images = pixels(table["data"].values, (3072,), f"{path}: 'data'")
        columns = {
            column: labels(np.array(table[field]), classes, len(images), f"{path}: {field!r}")
            for field, (column, classes) in LABELS.items()
        }
    x = np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    yield "all", {"x": x, **columns}


class _Unpickler(pickle.Unpickler):
    """Reads pickles, but creates only instances of the three classes below.

    A pickle is a program that can call any function. Even functions of NumPy are not safe: the
    state of a `numpy.dtype` can declare bytes of the file to be Python objects. So the classes
    below replace those that the file names. Each defines `__setstate__`, because a pickle could
    set its attributes otherwise.
    """

    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in _STAND_INS:
            raise pickle.UnpicklingError(
                f"it uses {module}.{name}, which may be harmful and is not part of this data set"
            )
        return _STAND_INS[f"{module}.{name}"]


class _Bytes:
    """Replaces the `numpy.dtype` of bytes. Its state, the byte order, is not needed."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise TypeError(f"it has an array of {code!r}, expected u1")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Replaces a `numpy.ndarray` of bytes."""

    values: np.ndarray

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, columns_first, content = state
        if not isinstance(dtype, _Bytes) or not isinstance(content, bytes):
            raise TypeError("it has an array of something other than bytes")
        order: Literal["C", "F"] = "F" if columns_first else "C"
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)


class _Encoded:
    """Replaces `_codecs.encode`, with which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise TypeError(f"it has text in {encoding!r}, expected latin1")
        return text.encode("latin-1")

    def __setstate__(self, state: object) -> None:
        pass


_STAND_INS: dict[str, type] = {
    "_codecs.encode": _Encoded,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,  # since NumPy 2
    "numpy.ndarray": _Array,  # the first argument of `_reconstruct`
    "numpy.dtype": _Bytes,
}
