"""Which of the files at a path make up a data set, and who reads them."""

import hashlib
import json
import os
from pathlib import Path
from types import ModuleType

from fedda.data import archives, download
from fedda.data.catalogue import DATASETS, Dataset
from fedda.data.readers import table
from fedda.errors import InputError


def dataset(name: str) -> Dataset:
    return DATASETS.get(name, Dataset("a federation of your own", (table,)))


def match(name: str, place: Path) -> tuple[ModuleType, Path] | None:
    """Looks in a folder, and in what is alone in it, as after unpacking."""
    while True:
        for reader in dataset(name).readers:
            if reader.files(place, name):
                return reader, place
        inner = list(place.glob("[!._]*")) if place.is_dir() else []
        if len(inner) != 1:
            return None
        (place,) = inner


def packed(name: str, path: Path) -> list[Path]:
    """The archives that hold a data set, if its files do not lie open at a path."""
    if archives.is_archive(path):
        return [path]
    if match(name, path):
        return []
    expected = [path / download.file_name(url) for url, _ in dataset(name).downloads]
    return [file for file in expected if archives.is_archive(file)]


def files(name: str, path: Path) -> list[Path]:
    """The files of a data set at a path: archives, or those that its reader reads."""
    archived = packed(name, path)
    if archived or not (found := match(name, path)):
        return archived
    reader, place = found
    own: list[Path] = reader.files(place, name)
    return own


def fingerprint(name: str, path: Path) -> str | None:
    """Tells one state of the files that are read from another by names, sizes and times.

    Any other file may come, change and go. None: there are no files of the data set.
    """
    facts = []
    for file in sorted(files(name, path)):
        about = file.stat()
        facts.append([os.path.relpath(file, path), about.st_size, about.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest() if facts else None


def misfit(name: str, path: Path) -> InputError:
    layouts = "".join(f"\n- {reader.layout(name)}" for reader in dataset(name).readers)
    known = "" if name in DATASETS else f" (the data sets known are {', '.join(DATASETS)})"
    return InputError(f"{path} does not hold {name}{known}. Expected{layouts}")
