"""A user's federation from tables in files; see `fedda.federation`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedda.data import table_files
from fedda.data.preparation import Preparation
from fedda.data.readers.text import one_line_each
from fedda.data.store import Client, Source, Store
from fedda.data.tables import Choices
from fedda.data.tabular import Pair, build
from fedda.errors import InputError

PREPARATION = "preparation.json"


def layout(name: str) -> str:
    return table_files.LAYOUT


def files(path: Path, name: str) -> list[Path]:
    return table_files.files(path)


def read(path: Path, name: str, **options: Any) -> Source:
    """Read a table. The options are fields of `Choices`."""
    parts, choices = table_files.read(path, Choices(**options))
    made = build(parts, choices)
    if not any(len(y) for _, y in made.test):
        raise InputError(
            "no client has three examples, so there are no test examples. Put training and test "
            "examples into separate folders, train and test."
        )
    texts = {}
    if made.classes:
        texts["labels.txt"] = "\n".join(
            one_line_each("label", [str(value) for value in made.classes])
        )
    if made.preparation is not None:
        texts[PREPARATION] = made.preparation.to_json()
    description = (
        f"One client for each {choices.client or 'file'}; label {choices.label}; features "
        f"{', '.join(choices.features or ())}"
    )
    if not any(part.is_test for part in parts):
        description += "; a fifth of each client's examples is held out for testing"
    clients = {"train": _clients(made.names, made.clients), "test": _clients(made.names, made.test)}
    return Source(clients, lambda: texts, description)


def stored_preparation(stored: Store) -> Preparation | None:
    """Return how the columns of a stored table became features, or None if they were unchanged."""
    if PREPARATION not in stored.meta["files"]:
        return None
    return Preparation.from_json(stored.text(PREPARATION))


def _clients(names: list[str], pairs: list[Pair]) -> Iterator[Client]:
    for name, (x, y) in zip(names, pairs, strict=True):
        if len(y):
            yield name, {"x": x, "y": y}
