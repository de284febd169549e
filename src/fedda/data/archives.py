"""Archives of data sets, unpacked without trust in what they say of themselves.

Bytes are counted as they are decompressed, whatever sizes a header declares. Only plain files and
folders below the target are made, each file once, so nothing can be written through a link.
"""

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from fedda.errors import InputError

LIMIT = 20 * 10**9  # bytes
MEMBERS = 100_000
DEPTH = 100  # folders within one another

_CHUNK = 1 << 18
_LONGEST_HEADER = 1 << 16  # a tar's names and attributes: tarfile holds a header in memory

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
    return path.is_file() and path.suffix.lower() in (*_OPEN, ".zip")


def unpack(
    archive: Path,
    into: Path,
    limit_bytes: int = LIMIT,
    progress: Callable[[int], None] = lambda unpacked: None,
) -> None:
    """Unpacks an archive into a folder, which may hold a part of it after an error.

    `progress` is told the bytes unpacked so far.
    """
    into.mkdir(parents=True, exist_ok=True)
    work = _Unpacking(archive, into, limit_bytes, progress)
    suffix = archive.suffix.lower()
    if suffix == ".zip":
        _unpack_zip(work)
        return
    with _OPEN[suffix](archive, "rb") as work.stream:
        inner = Path(archive.stem).suffix.lower()
        if ".tar" in (suffix, inner) or suffix in (".tgz", ".tbz2", ".txz"):
            _unpack_tar(work)
            while work.read(_CHUNK):  # to the end, where a cut or a wrong checksum shows
                pass
        else:
            work.add_file(work.place(archive.stem), work)
    if not work.count:
        raise work.damaged("it is empty")


class _Unpacking:
    """One archive on its way: counts what it gives, and writes below one folder only."""

    stream: IO[bytes]  # decompressed: of the whole archive, or of one member after the other

    def __init__(
        self, archive: Path, into: Path, limit: int, progress: Callable[[int], None]
    ) -> None:
        self.archive = archive
        self.into = into
        self.limit = limit
        self.progress = progress
        self.count = 0
        self.members = 0

    def read(self, size: int) -> bytes:
        try:
            data = self.stream.read(size)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise self.damaged(error) from None
        self.count += len(data)
        if self.count > self.limit:
            raise InputError(
                f"{self.archive} unpacks to more than the {self.limit:,} bytes allowed for this "
                "data set. If the file is right, unpack it yourself and import the folder."
            )
        self.progress(self.count)
        return data

    def place(self, name: str) -> Path:
        """Where a member goes. Windows' rules see every kind of separator, and drives."""
        path = PureWindowsPath(name)
        if path.anchor or ".." in path.parts or "\0" in name:
            raise InputError(
                f"{self.archive} would write outside of its folder, to {name!r}. "
                "Nothing of it was used; get the file from a source you trust."
            )
        if len(path.parts) > DEPTH:
            raise InputError(
                f"{self.archive} holds a path of {len(path.parts):,} folders, {name[:60]!r}...; "
                f"expected at most {DEPTH}. If that is right, unpack it yourself and import the "
                "folder."
            )
        self.members += 1
        if self.members > MEMBERS:
            raise InputError(
                f"{self.archive} holds more than {MEMBERS:,} files. "
                "If that is right, unpack it yourself and import the folder."
            )
        return self.into.joinpath(*path.parts)

    def add_file(self, target: Path, stream: "IO[bytes] | _Unpacking") -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(target, "xb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise self._unwritable(target, error) from None
        with file:
            while data := stream.read(_CHUNK):
                file.write(data)

    def add_folder(self, target: Path) -> None:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(target, error) from None

    def _unwritable(self, target: Path, error: OSError) -> InputError:
        name = str(target.relative_to(self.into))
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            return self.damaged(f"it holds {name!r} twice")
        return InputError(f"{self.archive} holds {name!r}, which cannot be written: {error}")

    def special(self, name: str) -> InputError:
        return InputError(
            f"{self.archive} holds a link, a device or another special file, {name!r}; expected "
            "only plain files and folders. If that is right, unpack it yourself and import the "
            "folder."
        )

    def damaged(self, why: object) -> InputError:
        return InputError(f"{self.archive} is damaged or not whole: {why}. Get the file again.")


class _Header(tarfile.TarInfo):
    """A tar header. Where `tarfile` takes a damaged one for the end, this is an error."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Header":
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it ends before its end mark")
        if not any(buf):
            return super().frombuf(buf, encoding, errors)  # the end mark, told by an exception
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a header is wrong ({error})") from None
        plain = header.isreg() or header.isdir()
        if header.size < 0 or (not plain and header.size > _LONGEST_HEADER):
            raise tarfile.ReadError(f"a header of {header.size} bytes")
        return header


def _unpack_tar(work: _Unpacking) -> None:
    second_opinion = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
    try:
        with tarfile.open(fileobj=work, mode="r|", bufsize=_CHUNK, tarinfo=_Header) as tar:  # type: ignore[call-overload]
            for member in tar:
                if member.size < 0:
                    raise work.damaged(f"{member.name!r} has {member.size} bytes")
                if not (member.isdir() or member.isreg()) or member.issparse():
                    raise work.special(member.name)
                target = work.place(member.name)
                if second_opinion:
                    second_opinion(member, str(work.into))
                if member.isdir():
                    work.add_folder(target)
                else:
                    work.add_file(target, tar.extractfile(member))
    except InputError:
        raise
    except (tarfile.TarError, ValueError, ArithmeticError) as error:
        # The latter two where a number in an extended header is none, or is too large.
        raise work.damaged(error) from None


def _unpack_zip(work: _Unpacking) -> None:
    damage = (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError)
    try:
        opened = zipfile.ZipFile(work.archive)
    except damage as error:
        raise work.damaged(error) from None
    with opened:
        for member in opened.infolist():
            name = member.filename
            if member.is_dir():
                work.add_folder(work.place(name))
            elif stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                raise work.special(name)
            elif member.flag_bits & 1:
                raise InputError(f"{work.archive} is encrypted: unpack it yourself.")
            elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # The others are decompressed without a bound on memory.
                raise InputError(
                    f"{work.archive} is compressed in an unusual way (method "
                    f"{member.compress_type}): unpack it yourself and import the folder."
                )
            else:
                target = work.place(name)
                try:
                    work.stream = opened.open(member)
                except damage as error:
                    raise work.damaged(error) from None
                with work.stream:
                    work.add_file(target, work)
