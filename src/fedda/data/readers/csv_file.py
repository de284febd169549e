"""CSV files. The delimiter and the encoding are detected, and every cell is read as text."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedda.data.columns import check_names
from fedda.data.readers.common import damaged, parsing
from fedda.errors import InputError

SUFFIXES = (".csv", ".tsv")
DELIMITERS = ",;\t|"
BLOCK = 500  # lines that are transposed at once; few, so that they fit into the CPU's cache


def names_in(file: Path) -> list[str]:
    """Return the names of the columns of a file, without columns that have no name."""
    with _opened(file) as content:
        return [name for name in _header(file, content)[0] if name]


def load(file: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return columns of a file as arrays of text, without spaces around the values."""
    with _opened(file) as content:
        header, delimiter = _header(file, content)
        places = [header.index(name) for name in names]
        cells: list[list[str]] = [[] for _ in names]
        lines = _checked(file, csv.reader(content, delimiter=delimiter, strict=True), len(header))
        while block := list(islice(lines, BLOCK)):
            columns = list(zip(*block, strict=True))
            for own, place in zip(cells, places, strict=True):
                own.extend(map(str.strip, columns[place]))
    return {name: np.array(own, object) for name, own in zip(names, cells, strict=True)}


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    with open(file, "rb") as content:
        start = content.read(2)
    encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    with parsing(file), open(file, encoding=encoding, newline="") as text:
        try:
            yield text
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file} is not UTF-8: it has an unexpected byte "
                f"0x{error.object[error.start]:02x}. Save it as UTF-8. For a file in Latin-1: "
                "iconv -f latin1 -t utf-8"
            ) from None


def _header(file: Path, content: TextIO) -> tuple[list[str], str]:
    """Return the names of the columns, and the delimiter that gives the most columns."""
    first = content.readline()
    if not first.strip():
        raise InputError(f"{file} is empty, expected a line with the names of the columns.")
    splits = {mark: next(csv.reader([first], delimiter=mark, strict=True)) for mark in DELIMITERS}
    delimiter = max(splits, key=lambda mark: len(splits[mark]))
    header = [name.strip() for name in splits[delimiter]]
    check_names(header, str(file))
    return header, delimiter


def _checked(file: Path, lines: Any, width: int) -> Iterator[list[str]]:
    """Yield the lines that are not empty. All must have as many cells as the header."""
    try:
        for cells in lines:
            if len(cells) == width:
                yield cells
            elif cells:
                raise InputError(
                    f"{file}, line {lines.line_num + 1}: got {len(cells)} cells, expected {width}, "
                    "as in the first line. Correct the line; put a cell with a delimiter in quotes."
                )
    except csv.Error as error:
        raise damaged(f"{file}, line {lines.line_num + 1}: {error}") from None
