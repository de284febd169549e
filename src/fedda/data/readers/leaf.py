"""FEMNIST as LEAF's scripts write it: JSON files with the images of some writers each."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from fedda.data.readers.common import Arrays, are_bytes, damaged, labels, parsing, pixels, stored
from fedda.data.store import Source
from fedda.errors import InputError

CLASSES = 62


def layout(name: str) -> str:
    return "LEAF's FEMNIST: a folder with train/*.json and test/*.json, or with all_data_*.json"


def files(path: Path, name: str) -> list[Path]:
    return list(chain(*_by_split(path).values())) if name == "emnist" else []


def read(path: Path, name: str) -> Source:
    by_split = _by_split(path)
    for split, own in by_split.items():
        if not own:
            raise InputError(
                f"{path} has no files for the split {split!r}. Expected {layout(name)}."
            )
    description = "FEMNIST from LEAF's JSON files"
    # Parsing takes minutes, so only the first file is checked: the same script wrote all files.
    exact = are_bytes(_writers(next(iter(by_split.values()))[0]))
    if "all" not in by_split:
        splits = {split: _stored(own, exact) for split, own in by_split.items()}
        return Source(splits, description=f"{description}, in their split.")
    splits = {s: _part(_stored(by_split["all"], exact), s == "test") for s in ("train", "test")}
    return Source(
        splits,
        description=f"{description}, which had no test split: the last tenth of each writer's "
        "images, at least one of two or more, is the test split.",
    )


def _by_split(path: Path) -> dict[str, list[Path]]:
    by_split = {split: sorted((path / split).glob("*.json")) for split in ("train", "test")}
    if any(by_split.values()):
        return by_split
    folders = (path, path / "all_data")
    return {"all": sorted(chain(*(folder.glob("all_data_*.json") for folder in folders)))}


def _part(clients: Iterator[tuple[str, Arrays]], test: bool) -> Iterator[tuple[str, Arrays]]:
    """Yield the training or the test examples of each writer who has any."""
    for client, columns in clients:
        count = len(columns["y"])
        cut = count - (max(1, count // 10) if count > 1 else 0)
        rows = slice(cut, None) if test else slice(0, cut)
        if cut < count or not test:
            yield client, {name: column[rows] for name, column in columns.items()}


def _stored(files: Sequence[Path], exact: bool) -> Iterator[tuple[str, Arrays]]:
    """Yield the writers of all files."""
    return stored(chain.from_iterable(map(_writers, files)), exact)


def _writers(file: Path) -> Iterator[tuple[str, Arrays]]:
    images: dict[str, np.ndarray] = {}
    targets: dict[str, np.ndarray] = {}
    with parsing(file), open(file, encoding="utf-8") as content:
        data = json.load(content)["user_data"]
        for user in list(data):
            own = data.pop(user)  # arrays take a tenth of the memory of lists
            place = f"{file}, user {user!r}: "
            images[user] = np.asarray(own["x"], np.float32).reshape(-1, 28, 28)
            y = np.asarray(own["y"]) if own["y"] else np.zeros(0, int)
            targets[user] = labels(y, CLASSES, len(images[user]), f"{place}'y'")
    # The script divides pixels by 255, but its documentation describes integers.
    integers = any((x > 1).any() for x in images.values())
    for user in list(images):
        x = images.pop(user)
        place = f"{file}, user {user!r}: 'x'"
        if integers:
            if (x != np.rint(x)).any():
                raise damaged(f"{place} has fractions, but the file has values above 1")
            x = x.astype(np.int64)
        yield user, {"x": pixels(x, (28, 28), place), "y": targets[user]}
