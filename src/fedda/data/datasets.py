"""The data sets on this machine: fetched or imported once, found by name, never read when stale."""

import json
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedda.data import archives, catalogue, sandbox, store
from fedda.data import download as fetch
from fedda.data import memory as free_memory
from fedda.data.catalogue import DATASETS
from fedda.data.store import Client, Rows, Source, Stale, Store
from fedda.errors import InputError, unknown

Tell = Callable[[str], None]  # of what is being done, about once a second
Track = Callable[[str], fetch.Progress]  # makes, for each file, what its download is told to

_DOWNLOADS = "downloads"  # a folder beside the stores
_NAME = re.compile(rf"(?!{_DOWNLOADS}$)\w[\w.-]*")
_OPTIONS = {"client": "--client", "label": "--label", "features": "--feature"}  # of the command
_NEW = "new"  # the folder of a store that is being made
_log = logging.getLogger(__name__)

# What reading may take by default. JSON takes most memory, some ten times the size of the file;
# Stack Overflow takes most time, as its archive unpacks to many times its size and is read twice.
LEAST_MEMORY = 2 * 10**9  # bytes
MEMORY_PER_BYTE = 50  # of the files, as far as the machine has it
LEAST_SECONDS = 120.0
SECONDS_PER_MB = 20.0


def root() -> Path:
    """Where the data sets are kept."""
    if own := os.environ.get("FEDDA_DATA"):
        return Path(own).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches).absolute() / "fedda"


def downloads(name: str) -> Path:
    """Where the files that were downloaded for a data set are kept."""
    return root() / _DOWNLOADS / name


def names() -> list[str]:
    """The data sets known, then a user's own ones that are here."""
    here = sorted(path.parent for path in root().glob("*/meta.json"))
    own = [path.name for path in here if _origin(path) and _NAME.fullmatch(path.name)]
    return [*DATASETS, *(name for name in own if name not in DATASETS)]


def leftovers() -> list[Path]:
    """Folders of imports that are at work, or that were killed: then they may be large."""
    return sorted(root().glob(f"{store.WORK}*"))


class State(NamedTuple):
    """What is here of a data set: a store that may be read, or the reason why it must not be."""

    store: Store | None
    problem: str  # empty if there is no store at all
    origin: dict[str, Any]


def look(name: str) -> State:
    path = _place(name)
    store.recover(path)
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
    """Opens a data set; one that is stale is imported anew if the files it came from are there."""
    opened, problem, origin = look(name)
    if opened is not None:
        return opened
    if not problem:
        raise _absent(name)
    path = origin.get("path")
    if path is not None and catalogue.fingerprint(name, Path(path)) is not None:
        # A warning, which Python prints even if nobody has set up logging: results may change.
        _log.warning("%s is imported anew from %s: %s", name, path, problem)
        return import_files(name, Path(path), **origin.get("options", {}))
    gone = f" and the files it came from are no longer in {path}" if path else ""
    raise InputError(f"the data set {name} cannot be used: {problem}{gone}. {_advice(name)}")


def fetch_dataset(
    name: str,
    mirror: str | None = None,
    track: Track = lambda file: _unseen,
    tell: Tell = _log.info,
    memory: int | None = None,
    seconds: float | None = None,
) -> Store:
    """Downloads a data set and imports it; does only what has not been done."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if not DATASETS[name].downloads:
        raise InputError(f"{name} cannot be downloaded by this command. {DATASETS[name].by_hand}")
    folder = downloads(name)
    for url, checksum in DATASETS[name].downloads:
        url = url if mirror is None else fetch.mirrored(url, mirror)
        try:
            fetch.download(url, folder, checksum, track(fetch.file_name(url)))
        except InputError as error:
            raise InputError(
                f"{error} Another server can be given with --mirror URL, and files downloaded by "
                f"hand are imported with: fedda data import {name} PATH"
            ) from None
    opened, _, origin = look(name)
    if opened is not None and origin.get("path") == str(folder):
        return opened
    return import_files(name, folder, tell, True, memory, seconds)


def import_files(
    name: str,
    path: Path,
    tell: Tell = _log.info,
    replace: bool = False,
    memory: int | None = None,
    seconds: float | None = None,
    **options: Any,
) -> Store:
    """Makes a store of a file, a folder or an archive, in any layout known for the data set.

    A name that is not in `DATASETS` is a federation of the user's own, read as a table; `options`
    are the names of its columns. A store that was made from other files, and can be read, is only
    replaced if that is asked for.

    Files are read in a child process that may use so much `memory` (bytes) and take so many
    `seconds`. By default both grow with the size of the files.
    """
    target, path = _place(name), path.expanduser().absolute()
    if name in DATASETS and options:
        raise InputError(
            f"columns are named for a federation of your own; the files of {name} say themselves "
            f"what they hold. Leave out: {', '.join(_OPTIONS.get(each, each) for each in options)}."
        )
    if target.exists() and not _origin(target):
        raise InputError(
            f"{target} would be replaced, but holds files that are not of a data set of fedda. "
            "Move them away, or let FEDDA_DATA name another folder for the data sets."
        )
    if not path.exists():
        raise InputError(
            f"there are no files at {path}. Give the path of a file, a folder or an archive that "
            "is there; a relative one begins at the folder you are in."
        )
    if found := catalogue.find_reader(name, path):
        _, path = found  # what else lies around it does not belong to the data set
    # Before reading: a change meanwhile makes the store stale.
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
    with store.work_folder(target) as (work, lock):
        arguments = [name, str(path), str(work), origin]
        what = f"the data set {name} in {path}"
        sandbox.call(convert, arguments, what, _limits(name, path, memory, seconds), tell, lock)
        store.put(work / _NEW, target)
    return store.open_store(target)


def convert(name: str, path: str, work: str, origin: dict[str, Any], tell: Tell) -> None:
    """Make a store of some files, in the folder `work`. This runs in a child process."""
    reader, place = _unpacked(name, Path(path), Path(work) / "unpacked", tell)
    tell(f"reading {place.name}")
    source: Source = reader.read(place, name, **origin["options"])
    splits = {each: _told(each, own, tell) for each, own in source.splits.items()}
    origin = {"reader": reader.__name__.rpartition(".")[2], **origin}
    store.build(Path(work) / _NEW, source._replace(splits=splits), origin)


def _limits(name: str, path: Path, memory: int | None, seconds: float | None) -> sandbox.Limits:
    """What an import may use: enough for every layout, unless the files were made to use more."""
    size = sum(file.stat().st_size for file in catalogue.data_files(name, path))
    usual = max(LEAST_MEMORY, min(MEMORY_PER_BYTE * size, free_memory.of_host()))
    return sandbox.Limits(memory or usual, seconds or LEAST_SECONDS + SECONDS_PER_MB * size / 1e6)


def verify(name: str) -> list[str]:
    """Reads every byte of a store and names its files. Raises `Stale` if one byte is wrong."""
    path = _place(name)
    if not path.exists():
        raise _absent(name)
    opened = store.open_store(path)  # says it better if a file is missing
    store.verify(path)
    return list(opened.meta["files"])


def repair(name: str) -> str:
    """What replaces a store that is not as it was written."""
    target = _place(name)
    origin = _origin(target)
    if not origin:  # an import would take it for something else
        return f"Delete {target}. {_advice(name)}"
    path = origin.get("path")
    if path is None or catalogue.fingerprint(name, Path(path)) is None:
        return _advice(name)
    words = ["fedda", "data", "import", name, path, *option_words(origin)]
    return f"Import it again, which replaces it: {shlex.join(words)}"


def option_words(origin: dict[str, Any]) -> list[str]:
    """The options of the import that made a store, as the command takes them."""
    words = []
    for option, value in origin.get("options", {}).items():
        for each in [value] if isinstance(value, str) else value:
            words += [_OPTIONS[option], each]
    return words


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


def _unpacked(name: str, path: Path, work: Path, tell: Tell) -> tuple[ModuleType, Path]:
    """The reader of some files and where they are, which is in `work` if they were unpacked."""
    place = path
    if packed := catalogue.packed_files(name, path):
        # Named as the archive is: a reader may take a folder's name for a part of an id.
        place = work / (path.name.partition(".")[0] or name)
        for archive in packed:
            limit = catalogue.dataset(name).unpacked_limit
            archives.unpack(archive, place, limit, _bytes_told(archive, tell))
    found = catalogue.find_reader(name, place)
    if found is None:
        raise catalogue.unknown_layout(name, path)
    return found


def _origin(path: Path) -> dict[str, Any]:
    """What a store was made from, also one of another version; nothing if it is not a store."""
    try:
        origin = json.loads((path / "meta.json").read_text(encoding="utf-8"))["origin"]
        options = dict(origin.get("options", {}))
        words = [origin.get("path", "")]
        for option, value in options.items():
            words += [_OPTIONS[option], *([value] if isinstance(value, str) else value)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return origin if all(isinstance(word, str) for word in words) else {}


def _told(split: str, clients: Iterable[Client], tell: Tell) -> Iterator[Client]:
    """The same clients, counted."""
    number = examples = 0
    seldom = _seldom(tell)
    for client in clients:
        yield client
        x = client[1]["x"]
        number, examples = number + 1, examples + len(x.length if isinstance(x, Rows) else x)
        seldom(f"{split}: {number:,} clients, {examples:,} examples")
    tell(f"{split}: {number:,} clients, {examples:,} examples")


def _bytes_told(archive: Path, tell: Tell) -> Callable[[int], None]:
    seldom = _seldom(tell)
    return lambda done: seldom(f"unpacking {archive.name}: {done:,} bytes")


def _seldom(tell: Tell) -> Tell:
    """Passes on one message a second."""
    last = 0.0

    def pass_on(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 1:
            last = time.monotonic()
            tell(message)

    return pass_on


def _unseen(done: int, total: int | None) -> None:
    pass
