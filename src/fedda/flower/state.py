"""The progress of a federation, which the server saves after every round."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

log = logging.getLogger("fedda.flower")


@dataclass
class Progress:
    """What a server needs to continue a federation, besides the state of the algorithm.

    Attributes:
        round: The next round.
        serial: The number of the last order.
        counted: The last order of each client whose upload counted.
        events: What went wrong, and how often.
        events_by_client: The events for which one client is responsible.
        train_loss: The training loss of the last round that changed the state.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        nonfinite_clients: Uploads that were refused because a number was not finite.
        skipped_rounds: Rounds that did not change the state.
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

    def event(self, name: str, message: str, client: str = "") -> None:
        """Log and count an event, also by client if one is responsible."""
        log.warning(f"{client}: {message}" if client else message)
        by_client = self.events_by_client.setdefault(client, {}) if client else {}
        for counts in (self.events, by_client):
            counts[name] = counts.get(name, 0) + 1
