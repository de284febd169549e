"""A data set on disk: converted once, then memory-mapped.

A store is a folder of plain arrays and `meta.json`, which says what they are and is written last.
The folder appears under its name only when it is whole, so a killed import leaves nothing that
could be taken for data. Clients may be written in any order; they are read in the order of their
ids, compared as text.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fedda.errors import InputError

VERSION = 1  # of the layout below: a store of another version is imported anew
LONGEST_ID = 1024  # bytes; all ids of a split are stored with the length of the longest
WORK = ".fedda-import-"  # how the names of temporary folders begin

_OLD = "old"  # in a temporary folder: a store that is being replaced
_RANDOM = 8  # characters at the end of a name that `tempfile` chooses


class Rows(NamedTuple):
    """Examples of unequal lengths, one after the other."""

    values: np.ndarray
    length: np.ndarray  # of each example


Column = np.ndarray | Rows
Client = tuple[str, Mapping[str, Column]]  # an id, and columns over the client's examples


class Source(NamedTuple):
    """What a reader finds: clients for each split, one at a time, and texts such as vocabularies.

    Every client has the columns `x` and `y`, of one dtype and shape an example in all of a split.
    """

    splits: Mapping[str, Iterable[Client]]
    texts: Callable[[], Mapping[str, str]] = dict  # asked after the clients were read
    words: str = ""  # how the data came to be, for a person


class Stale(Exception):  # noqa: N818 - a state, met on the way to a rebuild
    """A store that must not be read: made by another version, from other files, or not whole."""


@dataclass(frozen=True)
class Field:
    """One column of a split, as it lies on disk."""

    values: np.ndarray  # [examples, ...], or of all examples' parts if ragged
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
        """A client's examples, or the first `most` of them."""
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
    path: Path
    meta: Mapping[str, Any]
    splits: Mapping[str, Split]

    def text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


def write(path: Path, source: Source, origin: Mapping[str, Any]) -> Store:
    """Writes a store, or replaces it, and opens it. `origin` says what it was made from."""
    with work_folder(path) as (work, _):
        build(work / "new", source, origin)
        put(work / "new", path)
    return open_store(path)


def build(folder: Path, source: Source, origin: Mapping[str, Any]) -> None:
    """Write a store into a folder, which must not exist."""
    folder.mkdir()
    splits: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for name, clients in source.splits.items():
        (folder / name).mkdir()
        splits[name], written = _write_split(folder, name, clients)
        files |= written
    for name, text in source.texts().items():
        with _Part(folder, name) as part:
            part.write(text.encode())
        files[name] = part.facts()
    meta = {
        "version": VERSION,
        "origin": dict(origin),
        "words": source.words,
        "splits": splits,
        "files": files,
    }
    with open(folder / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def work_folder(path: Path) -> Iterator[tuple[Path, int]]:
    """Make a temporary folder beside a store, and remove those of imports that were killed.

    Yields the folder and a file descriptor that locks it. While a process has the descriptor open,
    nobody else removes the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with _opened(path.parent) as parent:
            # Locked, so that nobody takes the new folder for an old one before it is locked too.
            if _lock(parent, fcntl.LOCK_EX):
                for left in path.parent.glob(f"{WORK}*"):
                    _remove(left)
            temporary = tempfile.TemporaryDirectory(prefix=f"{WORK}{path.name}-", dir=path.parent)
            work = Path(stack.enter_context(temporary))
            descriptor = stack.enter_context(_opened(work))
            _lock(descriptor, fcntl.LOCK_SH)
        yield work, descriptor


def put(folder: Path, path: Path) -> None:
    """Give a new store its path. An old store at the path goes to where the new one was.

    Both are exchanged at once. Where the system cannot do that, a process that is killed between
    two renames leaves no store at the path; then `recover` brings the old one back.
    """
    if path.exists():
        if _exchange(folder, path):
            return
        old = folder.with_name(_OLD)
        try:
            os.rename(path, old)
            os.rename(folder, path)
        except BaseException:  # such as Ctrl-C
            if not path.exists() and old.exists():
                os.rename(old, path)
            raise
    else:
        os.rename(folder, path)


def recover(path: Path) -> None:
    """Bring back a store that was moved away by an import that was killed."""
    if not path.exists():
        for old in path.parent.glob(f"{WORK}{path.name}-{'?' * _RANDOM}/{_OLD}"):
            with suppress(OSError), _opened(old.parent) as descriptor:
                if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.rename(old, path)


def _remove(work: Path) -> None:
    """Remove a temporary folder if the processes that used it have ended."""
    recover(work.with_name(work.name.removeprefix(WORK)[: -_RANDOM - 1]))
    with suppress(OSError), _opened(work) as descriptor:
        if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Lock a folder. False if another process has it, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once. False where the system cannot do that."""
    try:
        rename = ctypes.CDLL(None).renameat2  # Linux's; Python has no function for it
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def open_store(path: Path) -> Store:
    """Maps a store into memory. Raises `Stale` if it is not one that this version wrote whole."""
    meta = _meta(path)
    for name, facts in meta["files"].items():
        try:
            size = (path / name).stat().st_size
        except (OSError, ValueError):
            raise Stale(f"{path / name} is missing") from None
        if size != facts["bytes"]:
            raise Stale(f"{path / name} has {size} bytes instead of {facts['bytes']}")
    try:
        splits = {name: _open_split(path / name, about) for name, about in meta["splits"].items()}
    except (OSError, TypeError, ValueError, ArithmeticError) as error:
        raise Stale(f"{path / 'meta.json'} does not fit the files beside it ({error})") from None
    return Store(path, meta, splits)


def verify(path: Path) -> None:
    """Reads every byte of a store. Raises `Stale` if one differs from what was written."""
    for name, facts in _meta(path)["files"].items():
        with open(path / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != facts["sha256"]:
            raise Stale(f"{path / name} has sha256 {found} instead of {facts['sha256']}")


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise Stale(f"{path} has no meta.json") from None
    except (ValueError, RecursionError):
        raise Stale(f"{path / 'meta.json'} is not valid JSON") from None
    if not isinstance(meta, dict) or meta.get("version") != VERSION:
        raise Stale(f"{path} was written by another version of fedda")
    if not {"splits", "files", "words", "origin"} <= meta.keys():
        raise Stale(f"{path / 'meta.json'} lacks keys")
    match meta:
        case {"splits": dict(splits), "files": dict(files), "words": str(), "origin": dict()}:
            parts = [*map(_is_split, splits.values()), *map(_is_file, files.values())]
            if splits and files and all(parts):
                return meta
    raise Stale(f"{path / 'meta.json'} has values of wrong types")


def _is_file(facts: Any) -> bool:
    match facts:
        case {"bytes": int(), "sha256": str()}:
            return True
    return False


def _is_split(about: Any) -> bool:
    match about:
        case {"clients": int(), "id": str(id_type), "fields": {"x": _, "y": _} as fields}:
            text = re.fullmatch(r"\|S[0-9]{1,4}", id_type)
            return text is not None and all(map(_is_field, fields.values()))
    return False


def _is_field(about: Any) -> bool:
    match about:
        case {"dtype": str(dtype), "shape": list(shape), "ragged": bool()}:
            number = re.fullmatch("[<>|][biuf][0-9]{1,2}", dtype)
            return number is not None and all(isinstance(length, int) for length in shape)
    return False


class _Part:
    """A file that grows, and what `meta.json` says of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file: BinaryIO = open(folder / name, "wb")  # noqa: SIM115 - closed by __exit__
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def append(self, array: np.ndarray) -> None:
        if array.size:
            self.write(np.ascontiguousarray(array).data.cast("B"))

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class _Growing:
    """One column while it is written."""

    def __init__(self, folder: Path, split: str, name: str, first: Column) -> None:
        values = first.values if isinstance(first, Rows) else first
        self.ragged = isinstance(first, Rows)
        self.dtype, self.shape = values.dtype, list(values.shape[1:])
        self.values = _Part(folder, f"{split}/{name}.values")
        self.length = _Part(folder, f"{split}/{name}.length") if self.ragged else None
        self.begins: list[int] = []
        self.total = 0

    def append(self, column: Column, count: int, owner: str) -> None:
        values = column.values if isinstance(column, Rows) else column
        length = len(column.length) if isinstance(column, Rows) else len(values)
        if (
            length != count
            or isinstance(column, Rows) != self.ragged
            or (values.dtype, list(values.shape[1:])) != (self.dtype, self.shape)
        ):
            raise InputError(
                f"client {owner} has {length} examples of {values.dtype} {values.shape[1:]} in one "
                f"column, expected {count} of {self.dtype} {tuple(self.shape)} as the others have."
            )
        self.begins.append(self.total)
        self.total += len(values)
        self.values.append(values)
        if self.length is not None and isinstance(column, Rows):
            self.length.append(column.length.astype(np.int32))


def _write_split(
    folder: Path, split: str, clients: Iterable[Client]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Appends one client after another; only ids and counts are held in memory."""
    columns: dict[str, _Growing] = {}
    ids: list[bytes] = []
    counts: list[int] = []
    try:
        for name, own in clients:
            if not columns:
                columns = {each: _Growing(folder, split, each, own[each]) for each in own}
            x = own["x"]
            examples = len(x.length) if isinstance(x, Rows) else len(x)
            for each, column in columns.items():
                column.append(own[each], examples, name)
            ids.append(_encoded(name))
            counts.append(examples)
    finally:
        for column in columns.values():
            column.values.close()
            if column.length is not None:
                column.length.close()
    if not sum(counts):
        raise InputError(f"the split {split!r} holds no examples.")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    if len(set(ids)) < len(ids):
        twice = next(a for a, b in pairwise(order) if ids[a] == ids[b])
        raise InputError(f"the client {ids[twice].decode()!r} is given twice in {split!r}.")
    count = np.array(counts, np.int64)
    start = np.cumsum(count) - count
    index = {"client": np.array(ids)[order], "start": start[order], "count": count[order]}
    files, fields = {}, {}
    for name, column in columns.items():
        files[f"{split}/{name}.values"] = column.values.facts()
        fields[name] = {"dtype": column.dtype.str, "shape": column.shape, "ragged": column.ragged}
        if column.length is not None:
            files[f"{split}/{name}.length"] = column.length.facts()
            index[f"{name}.first"] = np.array(column.begins, np.int64)[order]
    for name, array in index.items():
        with _Part(folder, f"{split}/{name}") as part:
            part.append(array)
        files[f"{split}/{name}"] = part.facts()
    about = {"clients": len(ids), "id": index["client"].dtype.str, "fields": fields}
    return about, files


def _encoded(client: str) -> bytes:
    try:
        encoded = client.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the client id {client[:60]!r} is not UTF-8, expected text. Rename the client."
        ) from None
    if len(encoded) > LONGEST_ID:
        raise InputError(
            f"the client id {client[:60]!r}... has {len(encoded):,} bytes, expected at most "
            f"{LONGEST_ID:,}. Shorten it, or name another column of clients."
        )
    return encoded


def _open_split(folder: Path, about: Mapping[str, Any]) -> Split:
    def array(name: str, dtype: Any, shape: Iterable[int] = ()) -> np.ndarray:
        path = folder / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.zeros((0, *shape), dtype)
        return np.memmap(path, dtype, mode="r").reshape(-1, *shape)

    def field(name: str, about: Mapping[str, Any]) -> Field:
        return Field(
            array(f"{name}.values", about["dtype"], about["shape"]),
            array(f"{name}.length", np.int32) if about["ragged"] else None,
            array(f"{name}.first", np.int64) if about["ragged"] else None,
        )

    split = Split(
        start=array("start", np.int64),
        count=array("count", np.int64),
        fields={name: field(name, each) for name, each in about["fields"].items()},
        _names=array("client", about["id"]),
    )
    for index in (split.start, split.count, split._names):
        if len(index) != about["clients"]:
            raise ValueError(f"{len(index)} entries for {about['clients']} clients")
    for own in split.fields.values():
        rows = len(own.values if own.length is None else own.length)
        if rows != split.num_examples:
            raise ValueError(f"{rows} rows for {split.num_examples} examples")
    return split
