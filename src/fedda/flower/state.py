"""The progress of a federation, which the server saves after every round."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A child of the logger of Flower: `flwr log` shows its lines in the same form.
log = logging.getLogger("flwr.fedda")


@dataclass
class Progress:
    """The values that a server needs to resume a federation, besides the algorithm's state.

    Attributes:
        round: The number of the next round.
        serial: The number of the last order.
        counted: For each client, the number of its last order whose upload was used.
        events: The number of events of each kind, such as refused replies.
        events_by_client: The same for events that one client has caused.
        train_loss: The training loss of the last round that changed the state.
        bytes_down: The bytes sent to clients.
        bytes_up: The bytes received from clients.
        nonfinite_clients: The number of uploads refused because a number was not finite.
        skipped_rounds: The number of rounds that did not change the state.
        accepted: For each phase, the sizes of the last accepted replies (see `outliers`).
    """

    round: int = 0
    serial: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    events_by_client: dict[str, dict[str, int]] = field(default_factory=dict)
    train_loss: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    nonfinite_clients: int = 0
    skipped_rounds: int = 0
    accepted: list[list[Any]] = field(default_factory=list)

    def event(self, name: str, message: str, client: str = "") -> None:
        """Log and count an event. If one client has caused it, also count it for the client."""
        log.warning(f"{client}: {message}" if client else message)
        by_client = self.events_by_client.setdefault(client, {}) if client else {}
        for counts in (self.events, by_client):
            counts[name] = counts.get(name, 0) + 1
