"""The known data sets: their names, readers and downloads.

Any other name is a table of the user.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fedda.data import archives, download
from fedda.data.readers import (
    cifar_python,
    emnist_original,
    leaf,
    stackexchange,
    table,
    tff_hdf5,
    tff_sqlite,
)
from fedda.errors import InputError


@dataclass(frozen=True)
class Dataset:
    description: str
    readers: tuple[ModuleType, ...]  # the first that finds its files is used
    downloads: tuple[tuple[str, str], ...] = ()  # the address and the SHA-256 of each file
    unpacked_limit: int = archives.LIMIT
    by_hand: str = ""  # advice for a data set without downloads


_TFF = {  # the SHA-256 of TensorFlow Federated's archives
    "fed_emnist": "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
    "fed_emnist_digitsonly": "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
    "fed_cifar100": "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
    "stackoverflow": "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
    "stackoverflow.word_count": "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
    "stackoverflow.tag_count": "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
}


def _tff(*names: str) -> tuple[tuple[str, str], ...]:
    base = "https://storage.googleapis.com/tff-datasets-public"
    return tuple((f"{base}/{name}.tar.bz2", _TFF[name]) for name in names)


DATASETS = {
    "emnist": Dataset(
        description="handwritten digits and letters of 3,400 writers, 62 classes",
        readers=(tff_hdf5, tff_sqlite, leaf, emnist_original),
        downloads=_tff("fed_emnist"),
    ),
    "emnist-digits": Dataset(
        description="handwritten digits of 3,383 writers, 10 classes",
        readers=(tff_hdf5, tff_sqlite, emnist_original),
        downloads=_tff("fed_emnist_digitsonly"),
    ),
    "cifar100": Dataset(
        description="colour photographs, 100 classes in 20 groups, over 500 clients",
        readers=(tff_hdf5, tff_sqlite, cifar_python),
        downloads=_tff("fed_cifar100"),
    ),
    "stackoverflow": Dataset(
        description="questions and answers of 342,477 users of Stack Overflow, with tags",
        readers=(tff_hdf5, tff_sqlite),
        downloads=_tff("stackoverflow", "stackoverflow.word_count", "stackoverflow.tag_count"),
        unpacked_limit=400 * 10**9,
    ),
    "stackexchange": Dataset(
        description="questions and answers of users of Stack Exchange sites you choose, with tags",
        readers=(stackexchange,),
        by_hand=(
            "Its dumps are .7z files, one for each site, at https://archive.org/details/"
            "stackexchange. Extract Posts.xml of each into a folder with the name of the site, all "
            "in one FOLDER, then: fedda data import stackexchange FOLDER"
        ),
    ),
}


def dataset(name: str) -> Dataset:
    """Return the entry of a data set, or the entry of tables for any other name."""
    return DATASETS.get(name, Dataset("a federation of your own", (table,)))


def find_reader(name: str, path: Path) -> tuple[ModuleType, Path] | None:
    """Return the reader of the files at a path, and the folder or file that it reads.

    If a folder only contains one other folder or file, as after unpacking, that one is used.
    """
    while True:
        for reader in dataset(name).readers:
            if reader.files(path, name):
                return reader, path
        inner = list(path.glob("[!._]*")) if path.is_dir() else []
        if len(inner) != 1:
            return None
        (path,) = inner


def packed_files(name: str, path: Path) -> list[Path]:
    """Return the archives of a data set; empty if its files are unpacked already."""
    if archives.is_archive(path):
        return [path]
    if find_reader(name, path):
        return []
    expected = [path / download.file_name(url) for url, _ in dataset(name).downloads]
    return [file for file in expected if archives.is_archive(file)]


def data_files(name: str, path: Path) -> list[Path]:
    """Return the files of a data set at a path: archives, or the files for its reader."""
    packed = packed_files(name, path)
    if packed or not (match := find_reader(name, path)):
        return packed
    reader, place = match
    files: list[Path] = reader.files(place, name)
    return files


def fingerprint(name: str, path: Path) -> str | None:
    """Return a digest of the names, sizes and times of the files of a data set.

    Other files in the folder do not matter. The result is None if the data set has no files there.
    """
    facts = []
    for file in sorted(data_files(name, path)):
        about = file.stat()
        facts.append([os.path.relpath(file, path), about.st_size, about.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest() if facts else None


def unknown_layout(name: str, path: Path) -> InputError:
    """Return the error for files that no reader of a data set knows."""
    layouts = "".join(f"\n- {reader.layout(name)}" for reader in dataset(name).readers)
    known = "" if name in DATASETS else f" (the data sets known are {', '.join(DATASETS)})"
    problem = f"does not hold {name}{known}" if path.exists() else "does not exist"
    return InputError(f"{path} {problem}. Expected{layouts}")
