"""Results as files.

A file has the format of a checkpoint: a line of JSON, the bytes of the arrays, and the SHA-256 of
all of it. Nothing in it is code.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.simulate import client_metrics, devices
from fedda.storage import checkpoint, interrupts
from fedda.storage.provenance import versions
from fedda.storage.schema import mismatch

if TYPE_CHECKING:
    from fedda.simulate.result import Result

VERSION = 1  # of the content of a file
NOTES = {
    "kind": str,
    "version": int,
    "versions": {"fedda": str},
    "settings": {...: Any},
    "history": [{"round": int}],
    "per_client": (client_metrics.SCHEMA, None),
    "warnings": [str],
    "preparation": (str, None),
}
MOST_MEMORY = 1e9  # bytes of client memory that a file holds
PARAMS = ".state.params"  # before the names of the parameters

log = logging.getLogger("fedda")


class Content(NamedTuple):
    """The content of a file."""

    arrays: dict[str, np.ndarray]
    notes: dict[str, Any]


class _Arrays(NamedTuple):
    """The arrays of a result, with the names that they have in a checkpoint of its run."""

    state: PyTree
    memory: PyTree


def write(result: "Result", path: Path) -> None:
    """Write a result to a file, which gets its name when it is complete."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise InputError(f"got {path}, which {what}; expected a file to write. Correct the path.")
    arrays = checkpoint.on_host(_Arrays(devices.here(result.state), result.memory))
    kept = sum(array.nbytes for name, array in arrays.items() if name.startswith(".memory"))
    if kept > MOST_MEMORY:
        log.warning(
            "%s: saved without the memory of the clients, which takes %.3g GB. So no run can "
            "continue from it. To continue later, train with directory=... and keep that folder.",
            path,
            kept / 1e9,
        )
        arrays = {name: array for name, array in arrays.items() if name.startswith(".state")}
    notes = {
        "kind": "result",
        "version": VERSION,
        "versions": versions(),
        "settings": result.settings,
        "history": result.history,
        "per_client": None if result.per_client is None else result.per_client.to_json(),
        "warnings": list(result.warnings),
        "preparation": None if result.preparation is None else result.preparation.to_json(),
    }
    with interrupts.critical():
        checkpoint.write(path, result.history[-1]["round"], arrays, notes)


def read(path: Path) -> Content:
    """Return the content of a file.

    Raises:
        InputError: There is no such file, or it is damaged, of another kind or of a newer fedda.
    """
    expected = "expected a file of result.save, or a run directory"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"got {path}, which does not exist; {expected}. Correct the path."
        ) from None
    if not content.startswith(b'{"round": '):
        raise InputError(
            f"got {path}, which is another kind of file; {expected}. Give one of these."
        )
    if not checkpoint.is_whole(content):
        raise InputError(
            f"got {path}, which is damaged: its checksum does not match; {expected}. Copy the file "
            "again from where it was saved, or save the result again."
        )
    try:
        _, arrays, notes = checkpoint.decode(content)
        is_result, why = notes.get("kind") == "result", mismatch(notes, NOTES, "its first line")
    except (ValueError, AttributeError) as error:
        is_result, why = True, str(error)  # a checksum, but not after what fedda writes
    if is_result and why:
        raise InputError(f"got {path}, which cannot be read: {why}; {expected}. Give one of these.")
    if not is_result:
        raise InputError(
            f"got {path}, which is a checkpoint; {expected}. Give the run directory, two levels up."
        )
    if notes["version"] > VERSION:
        written, here = notes["versions"]["fedda"], versions()["fedda"]
        raise InputError(
            f"got {path}, which fedda {written} has written; expected a file of fedda {here} or "
            "earlier. Install the newer version."
        )
    return Content(arrays, notes)


def parameters(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters among the arrays of a result or a checkpoint, without `PARAMS`."""
    return {
        name.removeprefix(PARAMS): array
        for name, array in arrays.items()
        if re.match(rf"{re.escape(PARAMS)}(\W|$)", name)
    }
