"""Results that were made before the program was corrected, and have to be run again.

A cell that was finished after the day of a correction is no longer marked. Delete a correction when
all its runs have been made again.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fedda.tasks.config import Config
from fedda_reproduction.paper.cells import Cell

MARK = " ‡"


class Correction(NamedTuple):
    """A defect of the program that changed the numbers of some runs."""

    since: str  # the day from which on runs are right, as cells write it
    affects: Callable[[Config], bool]
    words: str  # which runs, and what was wrong


def _sums(config: Config) -> bool:
    """Whether the loss of a mini-batch is the sum over its examples, and not their mean."""
    return config.options.get("reduction") == "sum"


CORRECTIONS = (
    Correction(
        "2026-11-18",
        lambda config: config.task == "stackexchange" and _sums(config) and config.stabilise > 0,
        "Stack Exchange with full-batch rounds (the full-batch step of a client with fewer "
        "examples than a mini-batch was too long)",
    ),
    Correction(
        "2026-11-18",
        lambda config: config.algorithm == "fedlin" and _sums(config),
        "FedLin in table 5 (its correction did not fit mini-batches that are cut short)",
    ),
    Correction(
        "2026-11-18",
        lambda config: config.algorithm == "stem" and _sums(config),
        "STEM in table 5 (the gradients of its first round were too large for clients with fewer "
        "examples than a mini-batch)",
    ),
    Correction(
        "2026-11-18",
        lambda config: config.algorithm == "scaffold",
        "SCAFFOLD everywhere (its control variates were not weighted as its updates are)",
    ),
)


def mark(found: Iterable[Cell]) -> str:
    """Return the mark of a line that sums up these cells, if one of them was made too early."""
    return MARK if any(_of(cell) for cell in found) else ""


def paragraph(found: Iterable[Cell]) -> str:
    """Return a paragraph about the corrections that cells were made before; empty if none were."""
    open_ones = {correction for cell in found for correction in _of(cell)}
    if not open_ones:
        return ""
    listed = "; ".join(each.words for each in CORRECTIONS if each in open_ones)
    return (
        f"**Made before a correction**, marked{MARK}, until they are run again: {listed}. Verdicts "
        "that compare such runs may change with them."
    )


def _of(cell: Cell) -> list[Correction]:
    return [
        each
        for each in CORRECTIONS
        if cell.content["date"] < each.since and each.affects(cell.config)
    ]
