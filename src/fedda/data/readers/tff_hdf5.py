"""TensorFlow Federated's HDF5 files: a group for each client, in it an array for each feature.

`source` and what it calls serve the SQLite files as well, which came later with the same content.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fedda.data import text
from fedda.data.store import Source
from fedda.data.text import Post
from fedda.errors import InputError, unknown

LAYOUT = (
    "TensorFlow Federated's HDF5 files: a folder with fed_emnist_{train,test}.h5, "
    "fed_emnist_digitsonly_{train,test}.h5, fed_cifar100_{train,test}.h5 or "
    "stackoverflow_{train,held_out,test}.h5 (and stackoverflow.word_count, stackoverflow.tag_count)"
)
ADVICE = "Download or unpack it again."

PREFIX = {
    "emnist": "fed_emnist",
    "emnist-digits": "fed_emnist_digitsonly",
    "cifar100": "fed_cifar100",
    "stackoverflow": "stackoverflow",
}


class Images(NamedTuple):
    """The features of a data set of images, by the names that its files give them."""

    feature: str
    kinds: str  # of dtypes: "f" for pixels in 0..1, "iu" for 0..255
    shape: tuple[int, ...]
    labels: Mapping[str, tuple[str, int]]  # feature -> our column, number of classes


IMAGES = {
    "emnist": Images("pixels", "f", (28, 28), {"label": ("y", 62)}),
    "emnist-digits": Images("pixels", "f", (28, 28), {"label": ("y", 10)}),
    "cifar100": Images(
        "image", "iu", (32, 32, 3), {"label": ("y", 100), "coarse_label": ("coarse", 20)}
    ),
}
TEXTS = ("tokens", "title", "tags")  # of Stack Overflow; its other features are not used

Arrays = dict[str, np.ndarray]  # over a client's examples; byte strings as objects


class Clients(NamedTuple):
    """The clients of a split as a file has them."""

    place: str  # for messages
    read: Callable[[], Iterator[tuple[str, Arrays]]]  # called twice: to look, then to store


def finds(path: Path, name: str) -> bool:
    return name in PREFIX and any(file.is_file() for file in _files(path, name).values())


def read(path: Path, name: str) -> Source:
    if name not in PREFIX:
        raise unknown("data set in HDF5", name, PREFIX)
    files = _files(path, name)
    for file in files.values():
        if not file.is_file():
            raise InputError(f"{path} has no file {file.name}. Expected {LAYOUT}.")
    clients = {
        split: Clients(str(file), partial(_clients, file, features(name)))
        for split, file in files.items()
    }
    return source(name, path, clients, f"{name} as in TensorFlow Federated's HDF5 files.")


def features(name: str) -> tuple[str, ...]:
    """The features that a data set needs, the one that says how many examples there are first."""
    return (IMAGES[name].feature, *IMAGES[name].labels) if name in IMAGES else TEXTS


def source(name: str, folder: Path, splits: Mapping[str, Clients], words: str) -> Source:
    """The columns of a data set. Vocabularies are those of the count files in `folder`, if any."""
    if name not in IMAGES:
        word_count = folder / "stackoverflow.word_count"
        tag_count = folder / "stackoverflow.tag_count"
        return text.source(
            {split: partial(_users, clients) for split, clients in splits.items()},
            words=text.read_word_count(word_count) if word_count.is_file() else None,
            tags=text.read_tag_count(tag_count) if tag_count.is_file() else None,
            about=words,
        )
    kind = IMAGES[name]
    # A column has one dtype, so all floats must be seen before the first of them is stored.
    exact = kind.kinds != "f" or all(
        are_bytes(_columns(kind, clients)) for clients in splits.values()
    )
    return Source(
        {split: stored(_columns(kind, clients), exact) for split, clients in splits.items()},
        words=words,
    )


def pixels(values: np.ndarray, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Images as uint8, or as float32 if they are floats other than uint8 / 255."""
    if values.shape[1:] != shape:
        raise InputError(
            f"{place} has the shape {values.shape}, expected (examples, {str(shape)[1:]}."
        )
    top = 1 if values.dtype.kind == "f" else 255
    if not ((values >= 0) & (values <= top)).all():  # nor is NaN
        raise InputError(f"{place} has values that are not in 0..{top}. {ADVICE}")
    if values.dtype.kind != "f":
        return values.astype(np.uint8)
    floats = values.astype(np.float32)
    nearest = np.rint(floats * np.float32(255))
    return nearest.astype(np.uint8) if (nearest / np.float32(255) == floats).all() else floats


def labels(values: np.ndarray, classes: int, count: int, place: str) -> np.ndarray:
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise InputError(
            f"{place} is {values.dtype} of the shape {values.shape}, expected integers of the "
            f"shape ({count},), one for each image."
        )
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise InputError(
            f"{place} is {values[wrong[0]]} in example {wrong[0]}, expected 0 to {classes - 1}."
        )
    return values.astype(np.int32)


def are_bytes(clients: Iterable[tuple[str, Arrays]]) -> bool:
    """Whether the images of all clients are uint8."""
    return all(columns["x"].dtype == np.uint8 for _, columns in clients)


def stored(clients: Iterable[tuple[str, Arrays]], exact: bool) -> Iterator[tuple[str, Arrays]]:
    """The clients with images of one dtype: uint8 if they are `exact` in it, else float32."""
    for client, columns in clients:
        x = columns["x"]
        if not exact and x.dtype == np.uint8:
            x = x.astype(np.float32) / np.float32(255)
        yield client, columns | {"x": x}


def _files(path: Path, name: str) -> dict[str, Path]:
    splits = ("train", "test") if name in IMAGES else ("train", "held_out", "test")
    return {split: path / f"{PREFIX[name]}_{split}.h5" for split in splits}


def _columns(kind: Images, clients: Clients) -> Iterator[tuple[str, Arrays]]:
    for client, arrays in clients.read():
        place = f"{clients.place}, client {client!r}: the feature "
        values = arrays[kind.feature]
        if values.dtype.kind not in kind.kinds:
            expected = "floats" if kind.kinds == "f" else "integers"
            raise InputError(
                f"{place}{kind.feature!r} is of the dtype {values.dtype}, expected {expected}."
            )
        columns = {"x": pixels(values, kind.shape, f"{place}{kind.feature!r}")}
        for feature, (column, classes) in kind.labels.items():
            columns[column] = labels(arrays[feature], classes, len(values), f"{place}{feature!r}")
        yield client, columns


def _users(clients: Clients) -> Iterator[tuple[str, list[Post]]]:
    for client, arrays in clients.read():
        strings: dict[str, list[str]] = {}
        for feature in TEXTS:
            try:
                strings[feature] = [each.decode() for each in arrays[feature]]
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{clients.place}, client {client!r}: the feature {feature!r} is not UTF-8 "
                    f"({error}). {ADVICE}"
                ) from None
        rows = zip(*(strings[feature] for feature in TEXTS), strict=True)
        yield client, [Post(f"{body} {title}", tags.split("|")) for body, title, tags in rows]


def _clients(file: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Arrays]]:
    try:
        with h5py.File(file, "r") as content:
            clients = content.get("examples")
            if not isinstance(clients, h5py.Group):
                raise InputError(f"{file} has no group 'examples'. Expected {LAYOUT}.")
            for client in clients:
                check_id(client, file)
                place = f"{file}, client {client!r}"
                group = clients[client]
                if not isinstance(group, h5py.Group):
                    raise InputError(f"{place} is no group of features. {ADVICE}")
                yield client, _arrays(group, names, place)
    except InputError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError) as error:
        # How h5py says that bytes are missing or make no sense.
        raise InputError(f"{file} is damaged or no HDF5 file ({error}). {ADVICE}") from None


def _arrays(group: h5py.Group, names: tuple[str, ...], place: str) -> Arrays:
    """The features of one client, as many of each."""
    arrays: Arrays = {}
    for name in names:
        dataset = group.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise InputError(f"{place} has no feature {name!r}, only {', '.join(group)}. {ADVICE}")
        if (h5py.check_string_dtype(dataset.dtype) is not None) != (name in TEXTS):
            expected = "strings" if name in TEXTS else "numbers"
            raise InputError(
                f"{place}: the feature {name!r} is {dataset.dtype}, expected {expected}."
            )
        shape = dataset.shape or ()  # one number has (), nothing at all None
        count = len(arrays[names[0]]) if arrays else shape[0] if shape else 0
        if shape[:1] != (count,) or (name in TEXTS and len(shape) != 1):
            raise InputError(
                f"{place}: the feature {name!r} has the shape {shape} for {count} examples."
            )
        arrays[name] = dataset[()]
    return arrays


def check_id(client: str | bytes, file: Path) -> None:
    """Refuses an id that cannot be stored as UTF-8; h5py gives such names as bytes."""
    if isinstance(client, bytes) or client.encode(errors="ignore").decode() != client:
        raise InputError(f"{file}: the client id {client!r} is not UTF-8. {ADVICE}")
