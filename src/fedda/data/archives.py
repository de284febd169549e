"""Unpack archives of data sets.

This runs in a child process with limits on memory and time (`sandbox.py`). Here, only the written
files are limited. Bytes are counted while they are decompressed. Only plain files and folders are
created, so nothing is written through a link, and `tarfile` and `zipfile` keep them in the folder.
"""

import bz2
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fedda.data.readers.common import parsing
from fedda.errors import InputError

LIMIT = 20 * 10**9  # bytes
MEMBERS = 100_000
DEPTH = 100  # nested folders

Progress = Callable[[int], None]  # called with the bytes unpacked so far

_CHUNK = 1 << 18
_OPEN: dict[str, Callable[..., Any]] = {
    ".tar": open,
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".tbz2": bz2.open,
    ".xz": lzma.open,
    ".txz": lzma.open,
    ".lzma": lzma.open,
}


def is_archive(path: Path) -> bool:
    """Return whether a file can be unpacked, by its name."""
    return path.is_file() and path.suffix.lower() in (*_OPEN, ".zip")


def unpack(
    archive: Path, into: Path, limit_bytes: int = LIMIT, progress: Progress = lambda unpacked: None
) -> None:
    """Unpack an archive into a folder. After an error, the folder may contain some of its files."""
    into.mkdir(parents=True, exist_ok=True)
    suffixes = [suffix.lower() for suffix in archive.suffixes[-2:]]
    with parsing(archive):
        if suffixes[-1] == ".zip":
            _unpack_zip(archive, into, limit_bytes, progress)
            return
        with _OPEN[suffixes[-1]](archive, "rb") as file:
            stream = _Counted(archive, file, limit_bytes, progress)
            if {".tar", ".tgz", ".tbz2", ".txz"} & set(suffixes):
                _unpack_tar(stream, into)
                while stream.read(_CHUNK):  # to the end, to find a truncation or wrong checksum
                    pass
            else:
                with open(into / archive.stem, "wb") as target:
                    while data := stream.read(_CHUNK):
                        target.write(data)
            if not stream.count:
                raise EOFError("it is empty")


class _Counted:
    """A stream of decompressed bytes, which raises an error if there are too many."""

    def __init__(self, archive: Path, file: BinaryIO, limit: int, progress: Progress) -> None:
        self.archive, self.file, self.limit, self.progress = archive, file, limit, progress
        self.count = 0

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        _check_size(self.archive, self.count, self.limit)
        self.progress(self.count)
        return data


class _Header(tarfile.TarInfo):
    """A tar header that raises an error if it is damaged. `tarfile` would stop without an error."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Header":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the end mark
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a header is wrong or missing ({error})") from None


def _unpack_tar(stream: _Counted, into: Path) -> None:
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK, tarinfo=_Header) as tar:  # type: ignore[call-overload]
        for number, member in enumerate(tar, 1):
            _check_member(stream.archive, member.name, number)
            if not (member.isdir() or member.isreg()) or member.issparse():
                problem = f"holds {member.name!r}, which is not a plain file or folder"
                raise _refused(stream.archive, problem)
            tar.extract(member, into, filter="data")


def _unpack_zip(archive: Path, into: Path, limit: int, progress: Progress) -> None:
    count = 0
    with zipfile.ZipFile(archive) as opened:
        for number, member in enumerate(opened.infolist(), 1):
            _check_member(archive, member.filename, number)
            count += member.file_size  # `zipfile` never extracts more than that
            _check_size(archive, count, limit)
            opened.extract(member, into)
            progress(count)


def _check_size(archive: Path, count: int, limit: int) -> None:
    if count > limit:
        problem = f"unpacks to more than the {limit:,} bytes allowed for this data set"
        raise _refused(archive, problem)


def _check_member(archive: Path, name: str, number: int) -> None:
    if number > MEMBERS or name.count("/") > DEPTH:
        problem = f"holds more than {MEMBERS:,} files or {DEPTH} nested folders"
        raise _refused(archive, problem)


def _refused(archive: Path, problem: str) -> InputError:
    advice = "If this is intended, unpack it yourself and import the folder."
    return InputError(f"{archive} {problem}. {advice}")
