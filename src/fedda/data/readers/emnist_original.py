"""EMNIST as its authors publish it, in the idx format of MNIST or for MATLAB.

Both hold images as MATLAB does, column after column, with bright ink on black. Here they come out
upright, with dark ink on white, as in the federated data set made from the same forms. Only the
MATLAB file knows who wrote what, so it is preferred. It is not the federated data set: that one
has other writers, and its images were cut out and scaled in another way.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedda.data.readers import matlab
from fedda.data.readers.common import DEFLATE
from fedda.data.readers.matlab import Matrix
from fedda.data.store import Client, Source
from fedda.errors import InputError

PARTS = {"emnist": "byclass", "emnist-digits": "digits"}
CLASSES = {"byclass": 62, "digits": 10}
SPLITS = ("train", "test")
MOST_IMAGES = 2_000_000  # of a file: the largest official one has 697,932
MOST_BYTES = 2 * 10**9  # of a MATLAB file
WORDS = "EMNIST ({}) by its authors, turned upright and to dark ink on white"
_ADVICE = "Download or unpack it again."


def layout(name: str) -> str:
    part = PARTS[name]
    return (
        f"EMNIST by its authors: emnist-{part}.mat, or "
        f"{_idx_name(part, 'train', 'images')}(.gz) and the three files that go with it"
    )


def files(path: Path, name: str) -> list[Path]:
    if name not in PARTS:
        return []
    part = PARTS[name]
    if file := _matlab(path, part):
        return [file]
    wanted = [_idx(path, part, split, kind) for split in SPLITS for kind in ("images", "labels")]
    return [file for file in wanted if file is not None]


def read(path: Path, name: str) -> Source:
    part = PARTS[name]
    file = _matlab(path, part)
    if file:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise InputError(f"{file} has {size} bytes, expected at most {MOST_BYTES}.")
        dataset = matlab.variable(file, "dataset", MOST_BYTES)
        return Source(
            {split: _writers(file, dataset, split, CLASSES[part]) for split in SPLITS},
            words=f"{WORDS.format(part)}; a client is a writer.",
        )
    return Source(
        {
            split: _everything(
                _needed(path, name, split, "images"),
                _needed(path, name, split, "labels"),
                CLASSES[part],
            )
            for split in SPLITS
        },
        words=f"{WORDS.format(part)}; the files name no writers: a split is one client.",
    )


def _matlab(path: Path, part: str) -> Path | None:
    name = f"emnist-{part}.mat"
    places = [path / name, path / "matlab" / name] if path.is_dir() else [path]
    return next((each for each in places if each.name == name and each.is_file()), None)


def _idx_name(part: str, split: str, kind: str) -> str:
    return f"emnist-{part}-{split}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"


def _idx(path: Path, part: str, split: str, kind: str) -> Path | None:
    name = _idx_name(part, split, kind)
    places = (path / inner / f"{name}{end}" for inner in ("", "gzip") for end in ("", ".gz"))
    return next((each for each in places if each.is_file()), None)


def _needed(path: Path, name: str, split: str, kind: str) -> Path:
    file = _idx(path, PARTS[name], split, kind)
    if file is None:
        missing = _idx_name(PARTS[name], split, kind)
        raise InputError(f"{path} has no file {missing}(.gz). Expected {layout(name)}.")
    return file


def _everything(images: Path, labels: Path, classes: int) -> Iterator[Client]:
    x = _unpacked(images, (28, 28))
    y = _labels(labels, _unpacked(labels, ()), classes)
    if len(x) != len(y):
        raise InputError(f"{images} has {len(x)} images, but {labels} has {len(y)} labels.")
    yield "all", {"x": _upright(x), "y": y}


def _unpacked(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array in an idx file: 0, 0, 8 for bytes, the number of axes, their lengths, the bytes."""
    packed = file.suffix == ".gz"
    size = file.stat().st_size
    try:
        with gzip.open(file) if packed else open(file, "rb") as stream:
            count = _count(file, stream, shape)
            length = count * int(np.prod(shape))
            if length > size * (DEFLATE if packed else 1):
                raise InputError(f"{file} has {size} bytes, too few for {count} entries.")
            # One more than there should be, which also makes gzip check its sum at the end.
            data = stream.read(length + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is damaged or cut short ({error}). Unpack it anew.") from None
    if len(data) != length:
        what = "more" if len(data) > length else f"{len(data)}"
        raise InputError(f"{file} says it has {length} bytes of {count} entries, but has {what}.")
    return np.frombuffer(data, np.uint8).reshape(count, *shape)


def _count(file: Path, stream: BinaryIO | gzip.GzipFile, shape: tuple[int, ...]) -> int:
    axes = 1 + len(shape)
    head = stream.read(4 + 4 * axes)
    if len(head) < 4 + 4 * axes or head[:4] != bytes([0, 0, 8, axes]):
        raise InputError(
            f"{file} begins with {head[:4].hex(' ')!r}, expected '00 00 08 0{axes}' and {axes} "
            "lengths, as idx files do."
        )
    count, *rest = struct.unpack(f">{axes}I", head[4:])
    if tuple(rest) != shape or not 0 < count <= MOST_IMAGES:
        raise InputError(
            f"{file} has the lengths {(count, *rest)}, expected {('1 or more', *shape)} and at "
            f"most {MOST_IMAGES} entries."
        )
    return int(count)


def _labels(file: Path, values: np.ndarray, classes: int) -> np.ndarray:
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise InputError(
            f"{file} has the label {values[wrong[0]]} for image {wrong[0]}, expected 0 to "
            f"{classes - 1}."
        )
    return values.astype(np.int32)


def _upright(columns: np.ndarray) -> np.ndarray:
    return np.subtract(255, columns.reshape(-1, 28, 28).transpose(0, 2, 1), order="C")


def _writers(file: Path, dataset: Matrix, split: str, classes: int) -> Iterator[Client]:
    part = _field(file, "dataset", dataset, split)
    where = f"dataset.{split}"
    images = _array(file, where, part, "images")
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 784:
        raise InputError(
            f"{file}: {where}.images is {images.dtype} of the shape {images.shape}, expected uint8 "
            "of (images, 784)."
        )
    images = np.ascontiguousarray(images)  # MATLAB has the first pixel of every image first
    labels = _labels(file, _numbers(file, where, part, "labels", len(images)), classes)
    writers = _numbers(file, where, part, "writers", len(images))
    order = np.argsort(writers, kind="stable")
    names, first = np.unique(writers[order], return_index=True)
    for name, rows in zip(names, np.split(order, first[1:]), strict=True):
        yield str(name), {"x": _upright(images[rows]), "y": labels[rows]}


def _field(file: Path, where: str, record: Matrix, name: str) -> Matrix:
    if not isinstance(record, dict):
        raise InputError(f"{file}: {where} is missing or no struct. {_ADVICE}")
    if name not in record:
        raise InputError(f"{file}: {where} has no field {name!r}. {_ADVICE}")
    return record[name]


def _array(file: Path, where: str, record: Matrix, name: str) -> np.ndarray:
    array = _field(file, where, record, name)
    if not isinstance(array, np.ndarray):
        raise InputError(f"{file}: {where}.{name} is no array of numbers.")
    return array


def _numbers(file: Path, where: str, record: Matrix, name: str, count: int) -> np.ndarray:
    values = np.ravel(_array(file, where, record, name))
    whole = (values == np.rint(values)) & (abs(values) < 2**31)
    if len(values) != count or not whole.all():
        raise InputError(
            f"{file}: {where}.{name} has {len(values)} entries of {values.dtype}, expected a whole "
            f"number for each of {count} images."
        )
    return values.astype(np.int64)
