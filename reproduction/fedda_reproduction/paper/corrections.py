"""Results that were made before the program was corrected: `corrections.toml`."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedda_reproduction.paper.cells import Cell

MARK = " ‡"
_TEXT = Path(__file__).with_name("corrections.toml").read_text(encoding="utf-8")
CORRECTIONS: list[dict[str, Any]] = tomllib.loads(_TEXT)["correction"]


def missing_in(finished: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the corrections that are missing in some of these cells."""
    runs = list(finished)
    return [each for each in CORRECTIONS if any(_lacks(cell, each) for cell in runs)]


def mark(finished: Iterable[Cell]) -> str:
    """Return the mark of results that were made before a correction, or nothing."""
    return MARK if missing_in(finished) else ""


def _lacks(cell: Cell, correction: dict[str, Any]) -> bool:
    values = cell.config.flat()
    same = all(values.get(name) == value for name, value in correction["settings"].items())
    full_batches = cell.config.stabilise > 0 or not correction.get("full_batches", False)
    before = "since" in correction and cell.content["date"] < correction["since"]
    return same and full_batches and (before or cell.version < correction.get("version", 1))
