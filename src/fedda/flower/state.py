"""What a server keeps: how far it has come, and the files that it goes on from."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fedda.errors import InputError
from fedda.simulate.train import Row
from fedda.storage.files import json_numbers, read_rows, write_whole

if TYPE_CHECKING:
    from fedda.storage.checkpoint import Checkpoints

IDENTITY = "federation.json"  # of the first round on; a run that had none may be set right

log = logging.getLogger("fedda.flower")


@dataclass
class Progress:
    """What a server that is started again must know besides its state."""

    round: int = 0  # the next one
    serial: int = 0  # of the last message
    counted: Mapping[str, int] = field(default_factory=dict)
    # the last upload of each client that counted, by its serial
    events: dict[str, int] = field(default_factory=dict)  # what did not go as it should
    events_by_client: dict[str, dict[str, int]] = field(default_factory=dict)
    train_loss: float | None = None  # of the last round that changed the state
    bytes_down: int = 0
    bytes_up: int = 0
    nonfinite_clients: int = 0
    skipped_rounds: int = 0

    def event(self, name: str, words: str, *details: object) -> None:
        """Something that did not go as it should: logged, and counted in the summary."""
        log.warning(words, *details)
        self.events[name] = self.events.get(name, 0) + 1

    def client_event(self, name: str, client: str, reason: object) -> None:
        """Log and count an event for which one client is responsible, and count it by client."""
        self.event(name, "%s: %s", client, reason)
        counts = self.events_by_client.setdefault(client, {})
        counts[name] = counts.get(name, 0) + 1


class Records:
    """The files of a federation: metrics, a line for each round, checkpoints, and a summary."""

    def __init__(self, directory: Path | None, identity: Mapping[str, str]) -> None:
        self.directory, self.identity, self.history = directory, identity, list[Row]()
        self.checkpoints: Checkpoints | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._check_identity(directory / IDENTITY)
            self.checkpoints = _checkpoints(directory / "checkpoints")

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *error: object) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()

    def _check_identity(self, written: Path) -> None:
        """Refuses to continue another federation, or to write over it."""
        was = json.loads(written.read_text()) if written.exists() else self.identity
        for name in sorted(was.keys() | self.identity.keys()):
            before, now = was.get(name, "none"), self.identity.get(name, "none")
            if before != now:
                raise InputError(
                    f"{written.parent} holds a federation with {name} {before}, got {now}. Give "
                    "another folder, or the settings of before to continue it."
                )

    def read_back(self, state: Any) -> tuple[Any, Progress]:
        """The newest whole checkpoint or the beginning; lines of later rounds are cut off."""
        if self.directory is None or self.checkpoints is None:
            return state, Progress()
        written = read_rows(self.directory / "metrics.jsonl", {"round": int})
        found, damaged = self.checkpoints.newest_whole(state, written.size)
        for note in damaged:
            log.warning(note)
        progress, size = Progress(), 0
        if found is not None:
            state = jax.tree.map(jnp.asarray, found.run)
            progress, size = Progress(**found.numbers["progress"]), found.numbers["metrics_bytes"]
        self.history = [row for row in written.rows if row["round"] <= progress.round]
        self.checkpoints.drop_after(progress.round if found is not None else -1)
        with open(self.directory / "metrics.jsonl", "ab") as lines:
            lines.truncate(size)
        return state, progress

    def add(self, row: Row, state: Any, progress: Progress) -> None:
        """Saves a round to its end: a server that is killed after it need not repeat it."""
        self.history.append(row)
        if self.directory is None or self.checkpoints is None:
            return
        if not (self.directory / IDENTITY).exists():
            write_whole(self.directory / IDENTITY, json.dumps(self.identity, indent=2) + "\n")
        with open(self.directory / "metrics.jsonl", "ab") as lines:
            lines.write(json.dumps(json_numbers(row), allow_nan=False).encode() + b"\n")
            size = lines.tell()
        numbers = {"metrics_bytes": size, "progress": asdict(progress)}
        for note in (
            *self.checkpoints.save(progress.round, state, numbers),
            *self.checkpoints.wait(),
        ):
            log.warning(note)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self.directory is not None:
            write_whole(self.directory / "summary.json", json.dumps(summary, indent=2) + "\n")


def _checkpoints(directory: Path) -> "Checkpoints":
    """Loads Orbax, for which clients, a process for each message, have no use."""
    from fedda.storage.checkpoint import Checkpoints

    return Checkpoints(directory)
