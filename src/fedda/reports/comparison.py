"""The report of a comparison: a table, figures and a web page about runs of one task."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.reports import figures, html, tables
from fedda.reports.clients import Clients, evaluated_clients
from fedda.reports.figures import LINEAR, LOG, LOG_ERROR, Panel
from fedda.reports.runs import Evaluation, Run
from fedda.reports.statistics import (
    Curve,
    Row,
    curves,
    group,
    measure,
    megabytes,
    table,
    training_seconds,
)
from fedda.storage.files import write_whole

# The settings of the problem. A note warns if runs differ in one of them.
_PROBLEM = ("task", "partition", "clients", "cohort", "rounds", "model", "batch", "local_work")
_VIEWS = ("metric", "megabytes", "seconds")  # panels with the metric
_AXES = {LINEAR: "{0}", LOG: "{0}, log scale", LOG_ERROR: "{0}, log scale of 1 - {0}"}


class Report(NamedTuple):
    """A report that was written.

    Attributes:
        files: The paths, the web page first.
        verdict: Which algorithm ends best, in a sentence or two.
        notes: What a reader should know about the runs.
    """

    files: list[Path]
    verdict: str
    notes: list[str]


def write(
    runs: Sequence[Run], directory: Path, threshold: float | None = None, pdf: bool = False
) -> Report:
    """Write `report.html`, `table.md` and the figures.

    Args:
        runs: Runs of one task.
        directory: Where to write.
        threshold: Count rounds and megabytes until the metric reaches this. By default 5 % short of
            the best.
        pdf: Write each figure as PDF, too, beside the PNG file.
    """
    values = content(runs, threshold)
    templates = {"comparison.html": "report.html", "comparison.md": "table.md"}
    pages = {name: html.render(template, **values) for template, name in templates.items()}
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, text in pages.items():
        files.append(directory / name)
        write_whole(directory / name, text)
    for name, panel in values["panels"].items():
        files += figures.draw([panel], directory, name, pdf)
    return Report(files=files, verdict=values["verdict"], notes=values["notes"])


def content(runs: Sequence[Run], threshold: float | None = None) -> dict[str, Any]:
    """Return the variables of the templates `comparison.html` and `comparison.md`."""
    rows = table(runs, threshold)
    found = group(runs)
    groups = {row.label: found[row.label] for row in rows}
    clients = evaluated_clients(groups, rows[0].metric, rows[0].higher_is_better)
    panels = _panels(runs, rows, clients)
    how_to_read = html.render("how_to_read.txt", rows=rows, threshold=threshold)
    return {
        "title": f"Federated algorithms on {runs[0].task or 'one problem'}",
        "verdict": html.render("verdict.txt", rows=rows).strip(),
        "rows": rows,
        "results": tables.text_table(rows),
        "how_to_read": how_to_read.strip(),
        "notes": _notes(runs, groups),
        "panels": panels,
        "colours": {
            line.curve.label: figures.look(line)[0]
            for panel in panels.values()
            for line in panel.lines
        },
        "views": [panels[name] for name in _VIEWS if name in panels],
        "clients": clients,
        "client_results": tables.client_table(clients.rows) if clients else [],
        "problem": _problem(runs),
        "seeds": sorted({run.config["seed"] for run in runs}),
        "shared": _shared(runs),
        "differing": _differing(runs, groups),
        "groups": groups,
    }


def _panels(runs: Sequence[Run], rows: Sequence[Row], clients: Clients | None) -> dict[str, Panel]:
    metric, higher_is_better = measure(runs)
    order = [row.label for row in rows]

    def by_round(_: Run, row: Evaluation) -> float:
        return float(row["round"])

    def by_megabytes(_: Run, row: Evaluation) -> float:
        return megabytes(row)

    def by_seconds(run: Run, row: Evaluation) -> float:
        last = run.evaluations[-1]["round"] or 1  # 0: only the first model was evaluated
        return (training_seconds(run) or 0.0) * row["round"] / last

    timed = [run for run in runs if training_seconds(run) is not None and run.evaluations]
    drawn = {
        "metric": ("round", metric, curves(runs, metric, by_round)),
        "megabytes": ("megabytes up and down", metric, curves(runs, metric, by_megabytes)),
        "seconds": (
            "seconds, shared evenly by the rounds",
            metric,
            curves(timed, metric, by_seconds),
        ),
    }
    if metric != "train_loss":
        drawn["train_loss"] = ("round", "train_loss", curves(runs, "train_loss", by_round))
    if clients is not None:
        drawn["clients"] = ("percent of the clients, worst first", metric, clients.curves)
    return {
        name: _panel(
            name,
            x_label,
            key,
            sorted(lines, key=lambda curve: order.index(curve.label)),
            higher_is_better=higher_is_better and key == metric,
        )
        for name, (x_label, key, lines) in drawn.items()
        if any(curve.x for curve in lines)
    }


def _panel(
    name: str, x_label: str, key: str, drawn: Sequence[Curve], higher_is_better: bool
) -> Panel:
    drawn = [curve for curve in drawn if curve.x]
    scale = figures.choose_scale(drawn, higher_is_better)
    return Panel(
        name=name,
        x_label=x_label,
        y_label=_AXES[scale].format(figures.metric_label(key)),
        lines=figures.lines_of(drawn),
        scale=scale,
        y_range=None if name == "clients" else figures.late_range(drawn, scale),
    )


def _problem(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the different values of each setting of the problem."""
    return {
        key: sorted({run.settings[key] for run in runs if key in run.settings}) for key in _PROBLEM
    }


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """Return the settings that all runs have in common."""
    common = set.intersection(*(set(run.settings.items()) for run in runs))
    return {key: value for key, value in runs[0].settings.items() if (key, value) in common}


def _differing(runs: Sequence[Run], groups: dict[str, list[Run]]) -> list[list[str]]:
    """Return a table of the settings in which algorithms differ; the first row is the header."""
    known = {"algorithm", *_shared(runs)}
    lines = []
    for label, members in groups.items():
        values: dict[str, dict[str, None]] = {}
        for key, value in (item for run in members for item in run.settings.items()):
            if key not in known:
                values.setdefault(key, {})[_rounded(value)] = None
        pairs = (f"{key} {' or '.join(each)}" for key, each in values.items())
        lines.append([label, ", ".join(pairs)])
    return [["algorithm", "settings"], *lines] if any(line[1] for line in lines) else []


def _rounded(value: str) -> str:
    """Return a setting with at most six digits, as a sweep's rates have sixteen."""
    return f"{float(value):g}" if re.fullmatch(r"\d+\.\d{7,}", value) else value


def _notes(runs: Sequence[Run], groups: dict[str, list[Run]]) -> list[str]:
    warnings = {
        f"{label}: {warning}": None
        for label, members in groups.items()
        for run in members
        for warning in (run.summary or {}).get("warnings", ())
    }
    differences = [
        f"Runs differ in {key} ({', '.join(values)}): they are not of one problem."
        for key, values in _problem(runs).items()
        if len(values) > 1
    ]
    return [*(note for run in runs for note in run.notes), *warnings, *differences]
