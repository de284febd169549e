"""Where the numbers of a results folder are from: devices, versions, dates, commits, data."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedda.report import html as page
from fedda_reproduction.paper.cells import Cell, Cells
from fedda_reproduction.paper.methods import title


def count(many: Sequence[Any], name: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{len(many)} {name}{'' if len(many) == 1 else 's'}"


def html(results: Cells, theory: Mapping[str, Any] | None) -> str:
    """A line for each task, which unfolds; for the theory; and for files that were left out."""
    html = "".join(
        page.part("details", f"{title(task)}: {count(own, 'run')}", _facts(own))
        for task in sorted({one.config.task for one in results.found})
        for own in [[one for one in results.found if one.config.task == task]]
    )
    if theory is not None:
        known = {name: theory[name] for name in ("date", "device", "commit") if name in theory}
        known["versions"] = _versions(theory.get("versions", {}))
        html += page.part("details", "Theory", known.items())
    if results.damaged:
        told = [(each.path.name, each.why) for each in results.damaged]
        html += page.part("details", f"Left out: {count(told, 'file')}", told)
    return html


def _facts(own: Sequence[Cell]) -> list[tuple[str, str]]:
    """What the runs of a task were made with."""

    def every(values: Iterable[Any]) -> str:
        return "; ".join(f"{value} ({n})" for value, n in sorted(Counter(map(str, values)).items()))

    contents = [one.content for one in own]
    dates = sorted(each["date"] for each in contents)
    hours = math.fsum(each["seconds"]["total"] for each in contents) / 3600
    return [
        ("device", every(_device(each) for each in contents)),
        ("precision", every(one.config.precision for one in own)),
        ("versions", every(_versions(each["versions"]) for each in contents)),
        ("commit", every(each["commit"] for each in contents)),
        ("finished", f"{dates[0]} to {dates[-1]}"),
        ("time", f"{hours:.2f} hours in all"),
        ("seeds", every(one.config.seed for one in own)),
        ("data", every(each["data"].get("words", "with the package") for each in contents)),
        ("sha256 of data", every(one.data or "-" for one in own)),
    ]


def _device(content: Mapping[str, Any]) -> str:
    count = content.get("devices", 1)
    return f"{content['device']}{f', {count} devices' if count > 1 else ''}"


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
