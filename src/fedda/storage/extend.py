"""More rounds for a run directory."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedda.errors import InputError
from fedda.storage import files
from fedda.storage.snapshot import (
    CONFIG,
    SUMMARY,
    check_same,
    checkpoint_round,
    checkpoints,
    read_settings,
)

# Settings that count rounds from the last one: with more rounds, earlier rounds would change.
FROM_THE_END = ("stabilise", "late_every")


def extend(path: Path, settings: Mapping[str, Any], changeable: Collection[str]) -> None:
    """Give the run in a directory more rounds, if `settings` ask for more than it was begun with.

    The run then ends with exactly the numbers of one that had all its rounds from the start. If the
    old last round was evaluated only because it was the last, it is trained again from the
    checkpoint before it.

    Args:
        path: The directory. Nothing is done if it holds no run.
        settings: The settings of the run, with the new number of `rounds`.
        changeable: The names of other settings that may differ.

    Raises:
        InputError: Another setting differs, or one depends on the number of rounds.
    """
    if not (path / CONFIG).exists() or read_settings(path).get("rounds", 0) >= settings["rounds"]:
        return
    with files.locked(path):
        written = read_settings(path)
        check_same(path, written, settings, (*changeable, "rounds"))
        for name in FROM_THE_END:
            if written.get(name):
                raise InputError(
                    f"{path} is a run of {written['rounds']} rounds with {name} = {written[name]}, "
                    f"which counts from the last round, got rounds = {settings['rounds']}. Such a "
                    "run cannot be extended: start a new one in another directory."
                )
        for checkpoint in checkpoints(path):
            if checkpoint_round(checkpoint) % written["eval_every"]:
                checkpoint.unlink()
        (path / SUMMARY).unlink(missing_ok=True)
        text = files.toml(written | {"rounds": settings["rounds"]})
        files.write_whole(path / CONFIG, files.sealed(text))
