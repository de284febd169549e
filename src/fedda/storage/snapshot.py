"""The files of a run directory, read without a lock. Nothing here changes them."""

import hashlib
import json
import re
import tomllib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.errors import InputError
from fedda.storage import checkpoint, files
from fedda.storage.schema import mismatch

CONFIG = "config.toml"
LOG = "metrics.jsonl"
SUMMARY = "summary.json"
# The specification of the notes of a checkpoint.
NOTES = {
    "settings": str,
    "log_size": int,
    "log": str,
    "float": str,
    "made": {"seconds": {"total": float, "compile": float}},
    "progress": {...: Any},
}

Row = dict[str, Any]


def checkpoints(path: Path | None) -> list[Path]:
    """Return the checkpoints of a run directory, the oldest first."""
    folder = (path or Path()) / "checkpoints"
    found = folder.iterdir() if path is not None and folder.exists() else ()
    return sorted(
        (path for path in found if re.fullmatch(r"round-\d+", path.name)), key=checkpoint_round
    )


def checkpoint_round(checkpoint: Path) -> int:
    """Return the number of rounds before a checkpoint, which is in its name."""
    return int(checkpoint.name.removeprefix("round-"))


class Snapshot(NamedTuple):
    """The newest checkpoint of a run directory, read without a lock.

    Attributes:
        settings: The content of `config.toml`.
        history: The rows before the checkpoint. Numbers that JSON cannot hold are None.
        arrays: The arrays by name.
        finished: Whether the run has finished.
    """

    settings: dict[str, Any]
    history: list[Row]
    arrays: dict[str, np.ndarray]
    finished: bool


def read_newest(path: Path) -> Snapshot:
    """Read the newest checkpoint of a run directory. Nothing is changed.

    Raises:
        InputError: There is no checkpoint, or a file is damaged.
    """
    settings = read_settings(path)
    saved = checkpoints(path)
    if not saved:
        raise InputError(
            f"{path} has no checkpoint yet. Continue the run until its next checkpoint, with "
            "`fedda run --resume` or fedda.run(directory=...)."
        )
    _, arrays, notes = decoded(checkpoint.read(saved[-1]), path)
    lines = log_of(path / LOG, files.read_sealed(path / CONFIG), notes).splitlines()
    finished = notes["progress"].get("finished", False)
    return Snapshot(settings, [json.loads(line) for line in lines], arrays, finished)


def decoded(content: bytes, path: Path) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Return the round, arrays and notes of a checkpoint in a run directory."""
    try:
        number, arrays, notes = checkpoint.decode(content)
        why = mismatch(number, int, "its round") or mismatch(notes, NOTES, "its first line")
    except ValueError as error:
        why = str(error)
    if why:
        raise InputError(
            f"the newest checkpoint in {path} cannot be read: {why}. Nothing was changed. Delete "
            "this file to continue from the previous one, or choose another directory."
        )
    return number, arrays, notes


def log_of(path: Path, settings: str, notes: Mapping[str, Any]) -> bytes:
    """Return the lines before a checkpoint, after a check that all files belong together."""
    newest = checkpoints(path.parent)[-1]
    if notes["settings"] != identity(settings):
        raise InputError(
            f"{newest} belongs to a run with another {CONFIG} than that of {path.parent}. "
            "Nothing was changed. Restore the files, or choose another directory."
        )
    if notes["float"] != (here := str(jnp.result_type(float))):
        raise InputError(
            f"{path.parent} is a run with {notes['float']} as JAX's default type, here it is "
            f"{here}. Nothing was changed. Set JAX_ENABLE_X64 as it was."
        )
    log = path.read_bytes()[: notes["log_size"]] if path.exists() else b""
    if notes["log"] != _sha256(log):
        raise InputError(
            f"{path} is damaged: {newest} was written after other lines. Nothing was changed. "
            f"Restore {path.name}, or delete {newest} to continue from the previous "
            "checkpoint, or from the beginning if there is none."
        )
    return log


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the run in a directory.

    Raises:
        InputError: The directory has no `config.toml`, or the file was edited.
    """
    if not (path / CONFIG).exists():
        raise InputError(f"{path} is not a run directory: it has no {CONFIG}.")
    return tomllib.loads(files.read_sealed(path / CONFIG))


def check_same(
    path: Path,
    written: Mapping[str, Any],
    given: Mapping[str, Any],
    changeable: Container[str] = (),
) -> None:
    """Raise an `InputError` that names the first setting that differs from the run's."""
    for name in {**given, **written}:
        if name not in changeable and written.get(name) != given.get(name):
            raise InputError(
                f"{path} is a run with {name} = {written.get(name)!r}, got {given.get(name)!r}. "
                "A resumed run keeps its settings, and rounds may only grow: start a new one in "
                "another directory."
            )


def identity(settings: str) -> str:
    """Return a digest of what a checkpoint depends on: all settings but the number of rounds."""
    others = {name: value for name, value in tomllib.loads(settings).items() if name != "rounds"}
    return _sha256(files.toml(others).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
