"""The progress of a federation, which the server saves after every round."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

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
