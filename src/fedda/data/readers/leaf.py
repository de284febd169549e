"""FEMNIST as LEAF's scripts write it: JSON files, each with the images of some writers."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.readers.common import Arrays, are_bytes, check_id, labels, pixels, stored
from fedda.data.store import Source
from fedda.errors import InputError

_CLASSES = 62
_SHAPE = (28, 28)
_PIXELS = 28 * 28
_ADVICE = "Make it again with LEAF's scripts."


def layout(name: str) -> str:
    return "LEAF's FEMNIST: a folder with train/*.json and test/*.json, or with all_data_*.json"


def files(path: Path, name: str) -> list[Path]:
    return list(chain(*_by_split(path).values())) if name == "emnist" else []


def read(path: Path, name: str) -> Source:
    found = _by_split(path)
    for split, own in found.items():
        if not own:
            raise InputError(
                f"{path} has no files for the split {split!r}. Expected {layout(name)}."
            )
    words = "FEMNIST from LEAF's JSON files"
    # Parsing takes minutes, so the first file stands for all: one script wrote them.
    exact = are_bytes(_writers(next(iter(found.values()))[0]))
    if "all" not in found:
        splits = {split: _stored(own, exact) for split, own in found.items()}
        return Source(splits, words=f"{words}, in their split.")
    return Source(
        {
            "train": _part(_stored(found["all"], exact), test=False),
            "test": _part(_stored(found["all"], exact), test=True),
        },
        words=f"{words}, which were not split: the last tenth of every writer's images, and at "
        "least one where there are two, became the test split.",
    )


def _by_split(path: Path) -> dict[str, list[Path]]:
    split = {each: sorted((path / each).glob("*.json")) for each in ("train", "test")}
    if any(split.values()):
        return split
    folders = (path, path / "all_data")
    return {"all": sorted(chain(*(folder.glob("all_data_*.json") for folder in folders)))}


def _part(clients: Iterator[tuple[str, Arrays]], test: bool) -> Iterator[tuple[str, Arrays]]:
    """What a writer gives to one of the splits, if anything."""
    for client, columns in clients:
        count = len(columns["y"])
        cut = count - (max(1, count // 10) if count > 1 else 0)
        own = slice(cut, None) if test else slice(0, cut)
        if cut < count or not test:
            yield client, {name: column[own] for name, column in columns.items()}


def _stored(files: Sequence[Path], exact: bool) -> Iterator[tuple[str, Arrays]]:
    """The writers of one file after the other."""
    for file in files:
        for client, columns in stored(_writers(file), exact):
            if exact and columns["x"].dtype != np.uint8:
                raise InputError(
                    f"{file}, user {client!r}: 'x' has pixels that are no multiples of 1/255, as "
                    f"those of the first file are. {_ADVICE}"
                )
            yield client, columns


def _writers(file: Path) -> Iterator[tuple[str, Arrays]]:
    data = _user_data(file)
    images: dict[str, np.ndarray] = {}
    targets: dict[str, np.ndarray] = {}
    for user in list(data):
        own = data.pop(user)  # an array takes a tenth of the memory of its lists
        place = f"{file}, user {user!r}: "
        images[user] = _floats(own["x"], f"{place}'x'")
        y = _array(own["y"], f"{place}'y'")
        y = y if y.size else y.astype(int)
        targets[user] = labels(y, _CLASSES, len(y), f"{place}'y'", _ADVICE)
    # The script divides by 255, but its documentation speaks of integers.
    integers = any((x > 1).any() for x in images.values())
    for user in list(images):
        x = images.pop(user)
        place = f"{file}, user {user!r}: 'x'"
        if integers and (x != np.rint(x)).any():
            raise InputError(
                f"{place} has both fractions and, as others, values above 1. {_ADVICE}"
            )
        x = x.astype(np.uint8) if integers else x
        x = pixels(x.reshape(-1, *_SHAPE), _SHAPE, place, _ADVICE)
        yield user, {"x": x, "y": targets[user]}


def _floats(rows: list[Any], place: str) -> np.ndarray:
    """Images in a row each, not yet known to be in 0..1 or in 0..255."""
    values = _array(rows, place)
    if not rows:
        return np.zeros((0, _PIXELS), np.float32)
    if values.dtype.kind not in "if" or values.shape[1:] != (_PIXELS,):
        raise InputError(
            f"{place} is {values.dtype} of the shape {values.shape}, expected numbers of the shape "
            f"({len(rows)}, {_PIXELS}). {_ADVICE}"
        )
    if not ((values >= 0) & (values <= 255)).all():  # nor is NaN
        raise InputError(f"{place} has values that are not in 0..255. {_ADVICE}")
    return values.astype(np.float32)


def _array(values: list[Any], place: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(f"{place} has rows of unequal lengths. {_ADVICE}") from None


def _user_data(file: Path) -> dict[str, Any]:
    """The lists `x` and `y` of each user, as many as the file says."""
    try:
        with open(file, encoding="utf-8") as content:
            table = json.load(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged or no JSON in UTF-8 ({error}). {_ADVICE}") from None
    match table:
        case {"users": list(users), "num_samples": list(counts), "user_data": dict(data)}:
            pass
        case _:
            raise InputError(
                f"{file}: expected the lists 'users' and 'num_samples' and the object 'user_data'."
            )
    named = all(isinstance(user, str) for user in users) and sorted(users) == sorted(data)
    if not named or len(counts) != len(users):
        raise InputError(
            f"{file}: 'users' has {len(users)} names, 'num_samples' {len(counts)} numbers and "
            f"'user_data' {len(data)} users, expected the same users in each. {_ADVICE}"
        )
    for user, count in zip(users, counts, strict=True):
        check_id(user, file, _ADVICE)
        match data[user]:
            case {"x": list(x), "y": list(y)} if count == len(x) == len(y):
                pass
            case {"x": list(x), "y": list(y)}:
                raise InputError(
                    f"{file}, user {user!r}: {len(x)} images in 'x' and {len(y)} labels in 'y', "
                    f"but 'num_samples' says {count}. {_ADVICE}"
                )
            case _:
                raise InputError(f"{file}, user {user!r}: expected the lists 'x' and 'y'.")
    return data
