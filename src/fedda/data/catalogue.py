"""The data sets known by name: how they are read, and where they are downloaded from."""

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from fedda.data import archives
from fedda.data.readers import (
    cifar_python,
    emnist_original,
    leaf,
    stackexchange,
    tff_hdf5,
    tff_sqlite,
)


class Download(NamedTuple):
    url: str
    checksum: str


@dataclass(frozen=True)
class Dataset:
    description: str
    readers: tuple[ModuleType, ...]  # the first that finds its layout reads it
    downloads: tuple[Download, ...] = ()
    unpacked_limit: int = archives.LIMIT
    by_hand: str = ""  # how to get it where it cannot be downloaded


def _tff(name: str, sha256: str) -> Download:
    base = "https://storage.googleapis.com/tff-datasets-public"
    return Download(f"{base}/{name}.tar.bz2", f"sha256:{sha256}")


DATASETS = {
    "emnist": Dataset(
        "handwritten digits and letters of 3,400 writers, 62 classes",
        (tff_hdf5, tff_sqlite, leaf, emnist_original),
        (_tff("fed_emnist", "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"),),
    ),
    "emnist-digits": Dataset(
        "handwritten digits of 3,383 writers, 10 classes",
        (tff_hdf5, tff_sqlite, emnist_original),
        (
            _tff(
                "fed_emnist_digitsonly",
                "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
            ),
        ),
    ),
    "cifar100": Dataset(
        "colour photographs, 100 classes in 20 groups, over 500 clients",
        (tff_hdf5, tff_sqlite, cifar_python),
        (_tff("fed_cifar100", "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de"),),
    ),
    "stackoverflow": Dataset(
        "questions and answers of 342,477 users of Stack Overflow, with tags",
        (tff_hdf5, tff_sqlite),
        (
            _tff(
                "stackoverflow", "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2"
            ),
            _tff(
                "stackoverflow.word_count",
                "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
            ),
            _tff(
                "stackoverflow.tag_count",
                "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
            ),
        ),
        unpacked_limit=400 * 10**9,
    ),
    "stackexchange": Dataset(
        "questions and answers of the users of Stack Exchange sites of your choice, with tags",
        (stackexchange,),
        by_hand=(
            "Its dumps are .7z files, one for each site, at https://archive.org/details/"
            "stackexchange. Extract Posts.xml of each into a folder with the name of the site, all "
            "in one FOLDER, then: fedda data import stackexchange FOLDER"
        ),
    ),
}
