"""Checkpoints of a run, kept by Orbax: each is written whole or not at all.

A checkpoint holds the run's pytree and a small dictionary of plain numbers.
"""

import errno
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.storage import interrupts

KEPT = 3  # more than one, so that a damaged file costs some rounds and not the run
COPIES = 3  # on the host while a checkpoint is made: of JAX, if it is on a device; ours; of Orbax


class Checkpoint(NamedTuple):
    round: int
    run: PyTree
    numbers: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory."""

    def __init__(self, directory: Path) -> None:
        _silence_orbax()
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.absolute()
        self._manager = self._new_manager()
        self._saving: int | None = None  # the round whose checkpoint is being written
        interrupts.finish_first.append(self._finish)

    def _new_manager(self) -> ocp.CheckpointManager:
        # Of several processes only the first keeps checkpoints: Orbax must not wait for the others.
        alone = ocp.options.MultiprocessingOptions(active_processes={0})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT,
            create=False,
            cleanup_tmp_directories=True,  # of a process that was killed, or a save that failed
            multiprocessing_options=alone,
        )
        return ocp.CheckpointManager(self._directory, options=options)

    def save(self, round_number: int, run: PyTree, numbers: dict[str, Any]) -> list[str]:
        """Copy the run, and write the copy while the run goes on; `close` waits for it.

        Returns:
            A note on each checkpoint that could not be written: this one, or the one before it. A
            full disk or too little memory does not end the run.
        """
        with interrupts.critical():  # Orbax's threads would report Ctrl-C as an error
            notes = self.wait()  # then the copies of the checkpoint before are gone
            if why := self._no_room(run):
                return [*notes, f"no checkpoint of round {round_number}: {why}"]
            arrays = [np.array(leaf) for leaf in jax.tree.leaves(run)]
            # Orbax refuses empty arrays, and none is needed to know that there is nothing.
            leaves = {str(i): array for i, array in enumerate(arrays) if array.size}
            items = ocp.args.Composite(
                run=ocp.args.StandardSave(leaves), numbers=ocp.args.JsonSave(numbers)
            )
            self._saving = round_number
            try:
                self._manager.save(round_number, args=items, force=True)
            except Exception as error:
                notes.append(self._given_up(error))
        return notes

    def _given_up(self, error: Exception) -> str:
        """Forget the checkpoint that could not be written; returns a note on it."""
        note = (
            f"no checkpoint of round {self._saving}: cannot write to {self._directory} "
            f"({_reason(error)})"
        )
        with suppress(Exception):  # it has failed for good
            self._manager.close()
        self._manager, self._saving = self._new_manager(), None
        return note

    def _no_room(self, run: PyTree) -> str:
        """Why a run cannot be saved, if so."""
        # Client memory on the host is asked whole: its leaves would be a copy already.
        parts = jax.tree.leaves(run, is_leaf=lambda part: hasattr(part, "nbytes"))
        size = sum(part.nbytes for part in parts)
        for what, needed, free in (
            ("disk", size, shutil.disk_usage(self._manager.directory).free),
            ("memory", COPIES * size, free_memory.of_host()),
        ):
            if needed > free:
                return f"it takes {needed / 1e9:.3g} GB of {what}, and {free / 1e9:.3g} GB are free"
        return ""

    def newest_whole(self, like: PyTree, written: int) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read, and a note on each that could not.

        `like` has the structure and types of the run. Also passed over are checkpoints that
        promise more of the metrics file than the bytes that are `written` whole.
        """
        wanted, structure = jax.tree.flatten(like)
        notes = []
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._manager.restore(
                    number,
                    args=ocp.args.Composite(
                        run=ocp.args.StandardRestore(), numbers=ocp.args.JsonRestore()
                    ),
                )
                leaves = [
                    np.asarray(found.run.get(str(i), np.zeros((0, *leaf.shape[1:]), leaf.dtype)))
                    for i, leaf in enumerate(wanted)
                ]
                for leaf, other in zip(leaves, wanted, strict=True):
                    if (leaf.dtype, leaf.shape[1:]) != (other.dtype, other.shape[1:]):
                        raise ValueError(
                            f"got {leaf.dtype}{leaf.shape} for {other.dtype}{other.shape}"
                        )
            except Exception as error:  # Orbax raises many kinds, all of which mean damage here
                notes.append(
                    f"passed over the damaged checkpoint of round {number} ({_reason(error)})"
                )
                continue
            if found.numbers["metrics_bytes"] > written:
                notes.append(
                    f"passed over the checkpoint of round {number}: metrics.jsonl is shorter"
                )
                continue
            run = jax.tree.unflatten(structure, leaves)
            return Checkpoint(number, run, found.numbers), notes
        return None, notes

    def drop_after(self, round_number: int) -> None:
        """Deletes the checkpoints of later rounds: those rounds are about to be run again."""
        for number in self._manager.all_steps():
            if number > round_number:
                self._manager.delete(number)

    def wait(self) -> list[str]:
        """Wait until the last checkpoint is written; returns a note if it could not be."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # Orbax raises many kinds here, too
            return [self._given_up(error)]
        self._saving = None
        return []

    def close(self) -> list[str]:
        """As `wait`, and end Orbax's threads."""
        notes = self.wait()
        self._manager.close()
        interrupts.finish_first.remove(self._finish)
        return notes

    def _finish(self) -> None:
        self._manager.wait_until_finished()


@lru_cache
def _silence_orbax() -> None:
    """Keep Orbax from printing; `save` and `close` return an error as one line.

    It logs every step of a save, and an error with pages of tracebacks before it raises it. Below
    it, TensorStore prints an error for each write that is pending when another has failed. Both are
    silenced for the whole process.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    usual = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if str(lost.exc_value) != "Event loop is closed":
            usual(lost)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    """One line about an error of Orbax, whose texts may be pages long."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if os.strerror(number) in text:
            return os.strerror(number)
    return text.splitlines()[0][:200] if text else type(error).__name__
