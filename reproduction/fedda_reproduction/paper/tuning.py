"""What tuning came to: for each method the lowest training loss that its grid had on a task.

Read off `tuning/<task>/<algorithm>.json` of a results folder, which `benchmarks/tune.py` writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedda import algorithms
from fedda.errors import InputError
from fedda.report.tables import markdown_table
from fedda.storage.files import read_json
from fedda_reproduction.paper.methods import METHODS, OPTIMISER_NAMES, label, title

HEADING = "What tuning came to"
MEANING = (
    "The training loss of the best point of each method, which is what it was chosen by. The test "
    "set was not looked at, and the seeds are not those of the tables. †: the best is at the end "
    "of a grid of three values or more. All points are in `tuning/`, and what was chosen is in the "
    "presets of the package."
)
TUNED = {
    "algorithm": str,
    "best": ({"train_loss": float, "at_the_end": [str]}, None),
    "runs": int,
    "rounds": int,
    "seeds": [int],
}
Best = Mapping[str, Mapping[str, Any]]  # what was written of each algorithm, by its name


def best(folder: Path) -> Mapping[str, Best]:
    """By task."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("tuning/*/*.json")):
        try:
            content = read_json(path, TUNED)
            if not content["seeds"]:
                raise ValueError("it has no seeds")
            algorithms.options(content["algorithm"])  # which refuses what is not known
        except ValueError as error:
            raise InputError(
                f"{path} is not what benchmarks/tune.py writes of an algorithm: {error}. Delete "
                "it, and tune that algorithm again."
            ) from error
        kept = {name: content[name] for name in ("best", "runs", "rounds", "seeds")}
        kept["label"] = label(content["algorithm"])
        found.setdefault(path.parent.name, {})[content["algorithm"]] = kept
    return found


def table(folder: Path) -> list[list[str]]:
    """Methods down, tasks across, under a header; nothing where nothing was tuned."""
    found = best(folder)
    if not found:
        return []
    every = {name: own["label"] for task in found.values() for name, own in task.items()}
    methods = [*METHODS, *sorted({name.partition("-")[0] for name in every} - {*METHODS})]
    names = [
        name
        for method in methods
        for name in (method, *(f"{method}-{optimiser}" for optimiser in OPTIMISER_NAMES))
        if name in every
    ]
    header = ["method", *(f"{title(task)}, {_budget(own)}" for task, own in found.items())]
    return [
        header,
        *([every[name], *(_loss(own, name) for own in found.values())] for name in names),
    ]


def section(folder: Path) -> list[str]:
    """The table as a section of Markdown, if there is one."""
    if not (rows := table(folder)):
        return []
    return [f"## {HEADING}", MEANING, markdown_table(rows)]


def _budget(own: Best) -> str:
    first = next(iter(own.values()))
    return f"{first['runs'] // len(first['seeds'])} points x {first['rounds']} rounds"


def _loss(own: Best, name: str) -> str:
    if name not in own:
        return "-"
    if (chosen := own[name]["best"]) is None:
        return "not finite"
    ended = [each["best"]["train_loss"] for each in own.values() if each["best"] is not None]
    lowest = " (lowest)" if chosen["train_loss"] == min(ended) else ""
    return f"{chosen['train_loss']:.4g}" + "†" * bool(chosen["at_the_end"]) + lowest
