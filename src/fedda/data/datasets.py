"""The data sets on this machine, by name. They are downloaded or imported once."""

import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedda.data import archives, catalogue, download, sandbox, store
from fedda.data import memory as free_memory
from fedda.data.catalogue import DATASETS
from fedda.data.store import Client, Source, Stale, Store
from fedda.errors import InputError, unknown

Tell = Callable[[str], None]  # called with a message about the progress, once a second at most
Track = Callable[[str], download.Progress]  # from the name of a file to its progress callback

_DOWNLOADS = "downloads"  # a folder beside the stores
_NAME = re.compile(rf"(?!{_DOWNLOADS}$)\w[\w.-]*")
_OPTIONS = {  # our names, and those of the command
    "client": "--client",
    "label": "--label",
    "features": "--feature",
    "ignore": "--ignore",
    "target": "--target",
    "prepare": "--no-prepare",
}
_NEW = "new"  # the folder of a new store
_log = logging.getLogger(__name__)

# The default limits of reading. JSON needs the most memory, about ten times the size of the file.
# Stack Overflow needs the most time: its archive unpacks to many times its size, and is read twice.
LEAST_MEMORY = 2 * 10**9  # bytes
MEMORY_PER_BYTE = 50  # for each byte of the files, but at most the free memory
LEAST_SECONDS = 120.0
SECONDS_PER_MB = 20.0


def root() -> Path:
    """Return the folder of the data sets."""
    if chosen := os.environ.get("FEDDA_DATA"):
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches).absolute() / "fedda"


def downloads(name: str) -> Path:
    """Return the folder of the files that were downloaded for a data set."""
    return root() / _DOWNLOADS / name


def names() -> list[str]:
    """Return the names of the known data sets, then of those that the user has imported."""
    here = sorted(path.parent for path in root().glob("*/meta.json"))
    imported = [path.name for path in here if _origin(path) and _NAME.fullmatch(path.name)]
    return [*DATASETS, *(name for name in imported if name not in DATASETS)]


class State(NamedTuple):
    """The state of a data set: a store, or the reason why it cannot be used."""

    store: Store | None
    problem: str  # empty if there is no store
    origin: dict[str, Any]


def look(name: str) -> State:
    """Return the state of a data set."""
    path = _place(name)
    if not path.exists():
        return State(None, "", {})
    origin = _origin(path)
    try:
        opened = store.open_store(path)
    except Stale as stale:
        return State(None, str(stale), origin)
    now = catalogue.fingerprint(name, Path(origin["path"])) if "path" in origin else None
    if now not in (None, origin.get("fingerprint")):
        return State(None, f"the files in {origin['path']} have changed", origin)
    return State(opened, "", origin)


def open_dataset(name: str) -> Store:
    """Open a data set. A stale one is imported again if its files still exist.

    Args:
        name: A data set of the catalogue, or one that the user has imported.

    Raises:
        InputError: There is no such data set, or it can neither be read nor imported again.
    """
    opened, problem, origin = look(name)
    if opened is not None:
        return opened
    if not problem:
        raise _absent(name)
    path = origin.get("path")
    if path is not None and catalogue.fingerprint(name, Path(path)) is not None:
        # A warning is shown even without a configuration of logging: results may change.
        _log.warning("%s is imported again from %s: %s", name, path, problem)
        return import_files(name, Path(path), **origin.get("options", {}))
    gone = f", and its files are no longer in {path}" if path else ""
    raise InputError(f"the data set {name} cannot be used: {problem}{gone}. {_advice(name)}")


def fetch_dataset(
    name: str,
    mirror: str | None = None,
    track: Track = lambda file: lambda done, total: None,
    tell: Tell = _log.info,
    memory: int | None = None,
    seconds: float | None = None,
) -> Store:
    """Download a data set and import it. Steps that are already done are skipped.

    Args:
        name: A data set of the catalogue.
        mirror: The address of another folder with the same files.
        track: Called with the name of each file; returns the progress callback of its download.
        tell: Called with messages about the progress.
        memory: The limit of memory for reading, in bytes. By default it grows with the files.
        seconds: The limit of time for reading. By default it grows with the files.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if not DATASETS[name].downloads:
        raise InputError(f"{name} cannot be downloaded by this command. {DATASETS[name].by_hand}")
    folder = downloads(name)
    for url, checksum in DATASETS[name].downloads:
        url = f"{mirror.rstrip('/')}/{download.file_name(url)}" if mirror else url
        try:
            download.download(url, folder, checksum, track(download.file_name(url)))
        except InputError as error:
            raise InputError(
                f"{error} Choose another server with --mirror URL, or download the files by hand "
                f"and import them: fedda data import {name} PATH"
            ) from None
    opened, _, origin = look(name)
    if opened is not None and origin.get("path") == str(folder):
        return opened
    return import_files(name, folder, tell, replace=True, memory=memory, seconds=seconds)


def import_files(
    name: str,
    path: Path,
    tell: Tell = _log.info,
    replace: bool = False,
    memory: int | None = None,
    seconds: float | None = None,
    **options: Any,
) -> Store:
    """Import a data set from a file, a folder or an archive.

    The files are read in a child process with limits of memory and time.

    Args:
        name: A data set of the catalogue, or any other name for a table of the user.
        path: The file, folder or archive.
        tell: Called with messages about the progress.
        replace: Whether to replace a usable data set of this name that was made from other files.
        memory: The limit of memory for reading, in bytes. By default it grows with the files.
        seconds: The limit of time for reading. By default it grows with the files.
        **options: For a table: `client`, `label`, `features`, `ignore`, `target` and `prepare`, as
            in `fedda.federation`.
    """
    target, path = _place(name), path.expanduser().absolute()
    if name in DATASETS and options:
        raise InputError(
            f"the files of {name} have fixed columns: only tables of your own have options. Leave "
            f"out: {', '.join(_OPTIONS.get(key, key) for key in options)}."
        )
    if target.exists() and not _origin(target):
        raise InputError(
            f"{target} would be replaced, but it is not a data set of fedda. Move it away, or "
            "choose another folder for the data sets with the environment variable FEDDA_DATA."
        )
    if match := catalogue.find_reader(name, path):
        _, path = match  # other files around it do not belong to the data set
    # Computed before reading, so that a change while reading makes the store stale.
    fingerprint = catalogue.fingerprint(name, path)
    if fingerprint is None:
        raise catalogue.unknown_layout(name, path)
    before = look(name)
    if before.store is not None and before.origin.get("path") != str(path) and not replace:
        raise InputError(
            f"there is a data set {name} already, from {before.origin.get('path', 'elsewhere')}. "
            "Choose another name, or replace it with --replace."
        )
    origin = {"path": str(path), "fingerprint": fingerprint, "options": options}
    limits = _limits(name, path, memory, seconds)
    with store.work_folder(target) as work:
        arguments = [name, str(path), str(work), origin]
        what = f"the data set {name} in {path}"
        sandbox.call(convert, arguments, what, limits, tell)
        store.put(work / _NEW, target)
    return store.open_store(target)


def _limits(name: str, path: Path, memory: int | None, seconds: float | None) -> sandbox.Limits:
    """Return the limits of an import, which are enough for honest files of every layout."""
    size = sum(file.stat().st_size for file in catalogue.data_files(name, path))
    usual = max(LEAST_MEMORY, min(MEMORY_PER_BYTE * size, free_memory.of_host()))
    return sandbox.Limits(memory or usual, seconds or LEAST_SECONDS + SECONDS_PER_MB * size / 1e6)


def convert(name: str, path: str, work: str, origin: dict[str, Any], tell: Tell) -> None:
    """Write a store to the folder `work`. This runs in a child process."""
    reader, place = _unpacked(name, Path(path), Path(work) / "unpacked", tell)
    tell(f"reading {place.name}")
    source: Source = reader.read(place, name, **origin["options"])
    splits = {split: _reported(split, own, tell) for split, own in source.splits.items()}
    origin = {"reader": reader.__name__.rpartition(".")[2], **origin}
    store.build(Path(work) / _NEW, source._replace(splits=splits), origin)


def _unpacked(name: str, path: Path, work: Path, tell: Tell) -> tuple[ModuleType, Path]:
    """Return the reader of some files and their place. Archives are unpacked into `work`."""
    place = path
    for archive in catalogue.packed_files(name, path):
        # It has the name of the archive, because a reader may use the folder's name in ids.
        place = work / (path.name.partition(".")[0] or name)

        def progress(done: int, file: str = archive.name) -> None:
            tell(f"unpacking {file}: {done:,} bytes")

        archives.unpack(archive, place, catalogue.dataset(name).unpacked_limit, progress)
    match = catalogue.find_reader(name, place)
    if match is None:
        raise catalogue.unknown_layout(name, path)
    return match


def _reported(split: str, clients: Iterable[Client], tell: Tell) -> Iterator[Client]:
    """Yield the same clients, and report their number."""
    examples = 0
    for number, client in enumerate(clients, 1):
        yield client
        examples += store.num_examples(client[1])
        tell(f"{split}: {number:,} clients, {examples:,} examples")


def verify(name: str) -> list[str]:
    """Read every byte of a store and return the names of its files.

    Raises:
        Stale: A file has changed since it was written.
    """
    path = _place(name)
    if not path.exists():
        raise _absent(name)
    return store.verify(path)


def repair(name: str) -> str:
    """Return advice on how to replace a damaged store."""
    target = _place(name)
    origin = _origin(target)
    if not origin:  # an import would refuse to replace it
        return f"Delete {target}. {_advice(name)}"
    path = origin.get("path")
    if path is None or catalogue.fingerprint(name, Path(path)) is None:
        return _advice(name)
    command = ["fedda", "data", "import", name, path, *_option_words(origin)]
    return f"Import it again, which replaces it: {shlex.join(command)}"


def _option_words(origin: dict[str, Any]) -> list[str]:
    """Return the options with which a store was imported, as words of the command."""
    options = dict(origin.get("options", {}))
    flags = [] if options.pop("prepare", True) else [_OPTIONS["prepare"]]
    return flags + [
        word
        for option, value in options.items()
        for column in ([value] if isinstance(value, str) else value)
        for word in (_OPTIONS[option], column)
    ]


def _place(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} cannot be the name of a data set: expected letters, digits, - and _, and "
            f"not {_DOWNLOADS!r}."
        )
    return root() / name


def _absent(name: str) -> InputError:
    if name not in DATASETS:
        return InputError(f"{unknown('data set', name, names())} {_advice(name)}")
    what = DATASETS[name].description
    return InputError(f"the data set {name} ({what}) is not here yet. {_advice(name)}")


def _advice(name: str) -> str:
    if name not in DATASETS:
        return f"Import it: fedda data import {name} PATH"
    if not DATASETS[name].downloads:
        return DATASETS[name].by_hand
    return f"Get it with: fedda data fetch {name}, or, from files: fedda data import {name} PATH"


def _origin(path: Path) -> dict[str, Any]:
    """Return the origin of a store of any version; empty if the folder is not a store."""
    try:
        origin: dict[str, Any] = json.loads((path / "meta.json").read_text("utf-8"))["origin"]
        words = [origin.get("path", ""), *_option_words(origin)]
    except (OSError, *store.MALFORMED):
        return {}
    return origin if all(isinstance(word, str) for word in words) else {}
