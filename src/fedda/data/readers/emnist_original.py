"""EMNIST as its authors publish it, in the idx format of MNIST or for MATLAB.

Both formats store images column by column, with bright ink on black. The reader returns them row by
row, with dark ink on white, as in the federated data set, which was made from the same forms. Only
the MATLAB file has the writer of each image, so it is preferred. It is not the federated data set,
which has other writers and crops and scales the images in another way.
"""

import gzip
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers.common import damaged, existing, labels, parsing
from fedda.data.store import Client, Source

PARTS = {"emnist": "byclass", "emnist-digits": "digits"}
CLASSES = {"byclass": 62, "digits": 10}
SPLITS = ("train", "test")


def layout(name: str) -> str:
    images = _idx_file(Path(), PARTS[name], "train", "images")
    return (
        f"EMNIST by its authors: emnist-{PARTS[name]}.mat, or {images}(.gz) and the three other "
        "files with images and labels"
    )


def files(path: Path, name: str) -> list[Path]:
    if name not in PARTS:
        return []
    if file := _matlab_file(path, PARTS[name]):
        return [file]
    return [
        file
        for split in SPLITS
        for kind in ("images", "labels")
        if (file := _idx_file(path, PARTS[name], split, kind)).is_file()
    ]


def read(path: Path, name: str) -> Source:
    part = PARTS[name]
    description = f"EMNIST ({part}) by its authors, converted to dark ink on white"
    if file := _matlab_file(path, part):
        with parsing(file):
            # A damaged file can crash SciPy. This ends only the child process (`sandbox.py`).
            from scipy.io import loadmat  # slow to import

            dataset = loadmat(file, variable_names=["dataset"], simplify_cells=True)["dataset"]
        return Source(
            {split: _writers(file, dataset, split, CLASSES[part]) for split in SPLITS},
            description=f"{description}. Each writer is a client.",
        )
    splits = {}
    for split in SPLITS:
        images, targets = (
            existing(_idx_file(path, part, split, kind), layout(name))
            for kind in ("images", "labels")
        )
        splits[split] = _everything(images, targets, CLASSES[part])
    return Source(
        splits,
        description=f"{description}. The files name no writers: each split is a single client.",
    )


def _matlab_file(path: Path, part: str) -> Path | None:
    name = f"emnist-{part}.mat"
    places = [path / name, path / "matlab" / name] if path.is_dir() else [path]
    return next((file for file in places if file.name == name and file.is_file()), None)


def _idx_file(path: Path, part: str, split: str, kind: str) -> Path:
    """Return the path of the images or labels of a split. It need not exist."""
    name = f"emnist-{part}-{split}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    places = [path / inner / f"{name}{end}" for inner in ("", "gzip") for end in ("", ".gz")]
    return next((file for file in places if file.is_file()), places[0])


def _everything(images: Path, targets: Path, classes: int) -> Iterator[Client]:
    x = _idx_array(images, (28, 28))
    y = labels(_idx_array(targets, ()), classes, len(x), f"{targets}: the label")
    yield "all", {"x": _upright(x), "y": y}


def _idx_array(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an idx file: 0, 0, 8 (for bytes), the number of axes, their lengths, the bytes."""
    axes = 1 + len(shape)
    with parsing(file), gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        kind, count, *rest = struct.unpack(f">{1 + axes}I", stream.read(4 + 4 * axes))
        if kind != 0x0800 + axes or tuple(rest) != shape:
            raise damaged(
                f"{file} begins with {kind:08x} and the lengths {(count, *rest)}, expected "
                f"{0x0800 + axes:08x} and {('any number', *shape)}"
            )
        return np.frombuffer(stream.read(), np.uint8).reshape(count, *shape)


def _upright(columns: np.ndarray) -> np.ndarray:
    return np.subtract(255, columns.reshape(-1, 28, 28).transpose(0, 2, 1), order="C")


def _writers(file: Path, dataset: Mapping[str, Any], split: str, classes: int) -> Iterator[Client]:
    place = f"{file}: dataset.{split}"
    with parsing(file):
        images = np.atleast_2d(dataset[split]["images"])  # SciPy drops the axis of a single image
        if images.dtype != np.uint8 or images.shape[1:] != (784,):
            raise damaged(
                f"{place}.images is {images.dtype} of the shape {images.shape}, expected uint8 of "
                "(images, 784)"
            )
        images = np.ascontiguousarray(images)  # MATLAB stores arrays by columns
        y, writers = (
            labels(_integers(dataset[split][name]), most, len(images), f"{place}.{name}")
            for name, most in (("labels", classes), ("writers", 2**31))
        )
    order = np.argsort(writers, kind="stable")
    names, first = np.unique(writers[order], return_index=True)
    for name, rows in zip(names, np.split(order, first[1:]), strict=True):
        yield str(name), {"x": _upright(images[rows]), "y": y[rows]}


def _integers(values: Any) -> np.ndarray:
    """Convert doubles that are whole numbers, as MATLAB stores them. `labels` refuses others."""
    array = np.atleast_1d(values)
    whole = array.dtype.kind == "f" and (abs(array) < 2**31).all() and not (array % 1).any()
    return array.astype(np.int64) if whole else array
