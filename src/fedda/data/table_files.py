"""Tables in files: CSV, Parquet or NumPy files, whose rows are examples.

Training and test examples may be in separate files or folders with the names train and test.
"""

from pathlib import Path

import numpy as np

from fedda.data.readers import columns, csv_file
from fedda.data.readers.columns import SUFFIXES
from fedda.data.tables import CLIENT, Choices, Part, chosen_features
from fedda.errors import InputError

LAYOUT = (
    "a table: a .csv, .tsv, .parquet or .npz file with a client and a label in every row, or a "
    "folder with one such file for each client. Training and test examples may be in separate "
    "folders, train and test"
)
SPLITS = ("train", "test")


def files(path: Path) -> list[Path]:
    """Return the files of a table at a path."""
    return [file for place in _places(path).values() for file in _tables(place)]


def read(path: Path, choices: Choices) -> tuple[list[Part], Choices]:
    """Read a table.

    Args:
        path: A file or a folder.
        choices: The columns to read; those not chosen have the defaults of `federation`.

    Returns:
        The rows of each file, and the choices with the names of all columns. If each file is a
        client, the choices have no column of the client.
    """
    places = _places(path)
    if "train" not in places:
        problem = "holds no table to train on" if path.exists() else "does not exist"
        raise InputError(f"{path} {problem}. Expected {LAYOUT}.")
    found = {split: _tables(place) for split, place in places.items()}
    suffixes = {file.suffix for own in found.values() for file in own}
    if len(suffixes) > 1:
        kinds = " and ".join(sorted(suffixes))
        raise InputError(f"{path} holds both {kinds} files. Leave only one kind there.")
    first, is_npz = found["train"][0], suffixes == {".npz"}
    known = columns.names_in(first)
    label = choices.label or ("y" if is_npz else "label")
    file_each = places["train"].is_dir() and choices.client is None and CLIENT not in known
    client = None if file_each else choices.client or CLIENT
    choices = choices._replace(label=label, client=client)
    if is_npz and not choices.features:
        choices = choices._replace(features=("x",))
    choices = choices._replace(features=chosen_features(known, choices, str(first)))
    parts = []
    for split, own in found.items():
        is_test = split == "test" if "test" in found else None
        parts += [_part(file, choices, is_test) for file in own]
    return parts, choices


def _part(file: Path, choices: Choices, is_test: bool | None) -> Part:
    client, label, features = choices.client, str(choices.label), list(choices.features or ())
    if client is None and CLIENT in columns.names_in(file):
        raise InputError(
            f"{file} has a column {CLIENT!r}, but the first file has none. Give it to all files or "
            "to none."
        )
    found = columns.load(file, [*([] if client is None else [client]), label, *features])
    rows = len(found[label])
    return Part(
        place=str(file),
        client=np.full(rows, file.stem, object) if client is None else found[client],
        label=found[label],
        features={name: found[name] for name in features},
        is_test=is_test,
        is_text=file.suffix in csv_file.SUFFIXES,
    )


def _places(path: Path) -> dict[str, Path]:
    """Return the file or folder of each split. Without splits, all files are for training."""
    places = {
        split: place
        for split in SPLITS
        for place in (path / split, *(path / f"{split}{suffix}" for suffix in SUFFIXES))
        if _tables(place)
    }
    return places or ({"train": path} if _tables(path) else {})


def _tables(place: Path) -> list[Path]:
    return [
        file
        for file in (sorted(place.iterdir()) if place.is_dir() else [place])
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
    ]
