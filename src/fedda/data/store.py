"""A data set on disk, which is converted once and then mapped into memory.

A store is a folder of arrays with a description, `meta.json`. A store is written to a temporary
folder and renamed when it is complete, so a killed import leaves no incomplete store. Clients may
be written in any order. They are read in the order of their ids, sorted as text.
"""

import ctypes
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from fedda.errors import InputError

VERSION = 1  # of the format; a store of another version is imported again
LONGEST_ID = 1024  # bytes; all ids of a split take as many bytes as the longest
WORK = ".fedda-import-"  # prefix of temporary folders

_INT32, _INT64 = np.dtype(np.int32).str, np.dtype(np.int64).str

# The errors of reading metadata that a user has edited.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Rows(NamedTuple):
    """Examples of different lengths, one after the other."""

    values: np.ndarray
    length: np.ndarray  # of each example


Column = np.ndarray | Rows
Client = tuple[str, Mapping[str, Column]]  # the id, and columns with the client's examples


def num_examples(columns: Mapping[str, Column]) -> int:
    """Return the number of examples of a client."""
    x = columns["x"]
    return len(x.length if isinstance(x, Rows) else x)


class Source(NamedTuple):
    """The data that a reader returns: the clients of each split, and text files.

    Every client has the columns `x` and `y`. In a split, a column has one dtype, and all its
    examples have one shape.
    """

    splits: Mapping[str, Iterable[Client]]
    texts: Callable[[], Mapping[str, str]] = dict  # vocabularies; called after the clients are read
    description: str = ""


class Stale(Exception):  # noqa: N818 - usually handled by a new import
    """A store cannot be used: it has another version, is incomplete, or its files have changed."""


@dataclass(frozen=True)
class Field:
    """One column of a split on disk."""

    values: np.ndarray  # [examples, ...]; if ragged, the values of all examples in one axis
    length: np.ndarray | None  # [examples], if ragged
    first: np.ndarray | None  # [clients]: where each client's values begin, if ragged

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.length is None else self.length.nbytes)


@dataclass(frozen=True)
class Split:
    """The clients of one split, in the order of their ids."""

    start: np.ndarray  # [clients] int64: the row of each client's first example
    count: np.ndarray  # [clients] int64
    fields: Mapping[str, Field]
    _names: np.ndarray

    @property
    def num_clients(self) -> int:
        return len(self.count)

    @property
    def num_examples(self) -> int:
        return int(self.count.sum())

    @cached_property
    def clients(self) -> list[str]:
        return [name.decode() for name in self._names.tolist()]

    def column(self, name: str, client: int, most: int | None = None) -> Column:
        """Return a client's examples, or the first `most` of them."""
        field = self.fields[name]
        begin = int(self.start[client])
        count = int(self.count[client]) if most is None else min(int(self.count[client]), most)
        if field.length is None or field.first is None:
            return field.values[begin : begin + count]
        length = field.length[begin : begin + count]
        first = int(field.first[client])
        return Rows(field.values[first : first + int(length.sum(dtype=np.int64))], length)


@dataclass(frozen=True)
class Store:
    """A data set whose arrays are mapped into memory."""

    path: Path
    meta: Mapping[str, Any]
    splits: Mapping[str, Split]

    def text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


def write(path: Path, source: Source, origin: Mapping[str, Any]) -> Store:
    """Write or replace a store and open it. `origin` describes the files it was made from."""
    with work_folder(path) as work:
        build(work / "new", source, origin)
        put(work / "new", path)
    return open_store(path)


def build(folder: Path, source: Source, origin: Mapping[str, Any]) -> None:
    """Write a store into a folder, which must not exist."""
    folder.mkdir()
    splits = {name: _write_split(folder / name, own) for name, own in source.splits.items()}
    for name, text in source.texts().items():
        (folder / name).write_bytes(text.encode())
    files = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        _to_disk(file)
        about = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        files[str(file.relative_to(folder))] = about
    meta = {
        "version": VERSION,
        "origin": dict(origin),
        "words": source.description,
        "splits": splits,
        "files": files,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    _to_disk(folder / "meta.json")


def _to_disk(file: Path) -> None:
    with open(file, "rb") as content:
        os.fsync(content.fileno())


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder beside a store, and remove the folders of killed imports.

    The name of a folder contains the machine and the process id. A folder of a process that no
    longer exists is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    here = f"{WORK}{platform.node()}-"
    for old in path.parent.glob(f"{here}*"):
        process = old.name.removeprefix(here).partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{here}{os.getpid()}-", dir=path.parent) as work:
        yield Path(work)


def put(folder: Path, path: Path) -> None:
    """Move a new store to its path. An old store at this path moves to the new store's folder."""
    if not path.exists():
        os.rename(folder, path)
    elif not _exchange(folder, path):
        old = folder.with_name("old")
        os.rename(path, old)
        try:
            os.rename(folder, path)
        except BaseException:  # such as Ctrl-C
            os.rename(old, path)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically. Return False if the system cannot do that."""
    try:
        rename = ctypes.CDLL(None).renameat2  # only on Linux; Python has no function for it
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def open_store(path: Path) -> Store:
    """Map a store into memory.

    Raises:
        Stale: The store is incomplete, damaged, or of another version.
    """
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["version"] != VERSION:
            raise Stale(f"{path} was written by another version of fedda")
        if not isinstance(meta["words"], str) or not isinstance(meta["origin"], dict):
            raise TypeError("a description or an origin of a wrong type")
        for name, facts in meta["files"].items():
            size, _ = (path / name).stat().st_size, facts["sha256"]
            if size != facts["bytes"]:
                raise Stale(f"{path / name} has {size} bytes instead of {facts['bytes']}")
        splits = {name: _open_split(path / name, about) for name, about in meta["splits"].items()}
        if not splits or not meta["files"]:
            raise ValueError("no splits or no files")
    except OSError as error:
        raise Stale(f"{error.filename} is missing or cannot be read") from None
    except MALFORMED as error:
        raise Stale(f"{path / 'meta.json'} is damaged ({error!r})") from None
    return Store(path, meta, splits)


def verify(path: Path) -> list[str]:
    """Read every byte of a store and return the names of its files.

    Raises:
        Stale: A file has changed since it was written.
    """
    files = open_store(path).meta["files"]
    for name, facts in files.items():
        if (got := sha256(path / name)) != facts["sha256"]:
            raise Stale(f"{path / name} has sha256 {got} instead of {facts['sha256']}")
    return list(files)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _ColumnWriter:
    """Writes one column."""

    def __init__(self, stack: ExitStack, path: Path, first: Column) -> None:
        self.form = _form(first)
        self.values = stack.enter_context(open(f"{path}.values", "wb"))  # noqa: SIM115
        if isinstance(first, Rows):
            self.length = stack.enter_context(open(f"{path}.length", "wb"))  # noqa: SIM115
        self.begins: list[int] = []
        self.total = 0

    def append(self, column: Column, count: int, client: str) -> None:
        values, length = column if isinstance(column, Rows) else (column, None)
        rows = len(values if length is None else length)
        if rows != count or _form(column) != self.form:
            raise InputError(
                f"client {client} has {rows} examples of the form {_form(column)} in a column, "
                f"expected {count} of the form {self.form}, as in other clients or columns. "
                "Correct the data."
            )
        self.begins.append(self.total)
        self.total += len(values)
        self.values.write(values.tobytes())
        if length is not None:
            self.length.write(length.astype(np.int32).tobytes())


def _form(column: Column) -> dict[str, Any]:
    """Return the type of a column for `meta.json`."""
    ragged = isinstance(column, Rows)
    values = column.values if isinstance(column, Rows) else column
    return {"dtype": values.dtype.str, "shape": list(values.shape[1:]), "ragged": ragged}


def _write_split(folder: Path, clients: Iterable[Client]) -> dict[str, Any]:
    """Write the clients of a split. Only their ids and counts are kept in memory."""
    folder.mkdir()
    writers: dict[str, _ColumnWriter] = {}
    ids: list[bytes] = []
    counts: list[int] = []
    with ExitStack() as stack:
        for client, columns in clients:
            for name in columns if not writers else ():
                writers[name] = _ColumnWriter(stack, folder / name, columns[name])
            ids.append(encoded_id(client))
            counts.append(num_examples(columns))
            for name, writer in writers.items():
                writer.append(columns[name], counts[-1], client)
    if not sum(counts):
        raise InputError(f"the split {folder.name!r} holds no examples.")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for one, other in pairwise(order):
        if ids[one] == ids[other]:
            raise InputError(f"the client {ids[one].decode()!r} occurs twice in {folder.name!r}.")
    count = np.array(counts, np.int64)
    index = {"client": np.array(ids), "start": np.cumsum(count) - count, "count": count}
    for name, writer in writers.items():
        if writer.form["ragged"]:
            index[f"{name}.first"] = np.array(writer.begins, np.int64)
    for name, array in index.items():
        (folder / name).write_bytes(array[order].tobytes())
    fields = {name: writer.form for name, writer in writers.items()}
    return {"clients": len(ids), "id": index["client"].dtype.str, "fields": fields}


def encoded_id(client: str) -> bytes:
    """Return the bytes of a client id, or raise an `InputError` if it cannot be stored."""
    encoded = client.encode(errors="ignore")
    readable = encoded.decode() == client and client and "\0" not in client
    if not readable or len(encoded) > LONGEST_ID:
        raise InputError(
            f"the client id {client[:60]!r} must be UTF-8 text of 1 to {LONGEST_ID:,} bytes "
            "without the character NUL. Rename the client, or choose another column of clients."
        )
    return encoded


def _open_split(folder: Path, about: Mapping[str, Any]) -> Split:
    def array(name: str, dtype: str, kinds: str = "i", shape: Iterable[int] = ()) -> np.ndarray:
        if np.dtype(dtype).str != dtype or np.dtype(dtype).kind not in kinds:
            raise ValueError(f"{name} has the type {dtype}")
        if not (folder / name).stat().st_size:  # an empty file cannot be mapped
            return np.zeros((0, *shape), dtype)
        return np.memmap(folder / name, dtype, mode="r").reshape(-1, *shape)

    def field(name: str, form: Mapping[str, Any]) -> Field:
        return Field(
            values=array(f"{name}.values", form["dtype"], "biuf", form["shape"]),
            length=array(f"{name}.length", _INT32) if form["ragged"] else None,
            first=array(f"{name}.first", _INT64) if form["ragged"] else None,
        )

    split = Split(
        start=array("start", _INT64),
        count=array("count", _INT64),
        fields={name: field(name, form) for name, form in about["fields"].items()},
        _names=array("client", about["id"], "S"),
    )
    if not {"x", "y"} <= split.fields.keys():
        raise ValueError(f"only the columns {', '.join(split.fields)}")
    for index in (split.start, split.count, split._names):
        if len(index) != about["clients"]:
            raise ValueError(f"{len(index)} entries for {about['clients']} clients")
    for each in split.fields.values():
        rows = len(each.values if each.length is None else each.length)
        if rows != split.num_examples:
            raise ValueError(f"{rows} rows for {split.num_examples} examples")
    return split
