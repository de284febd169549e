"""Tables, figures and a web page that compare runs.

This module sees result files only, so a report never depends on how its runs were made.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedda.report import html as page
from fedda.report import markdown as markdown_text
from fedda.report.html import Drawn, Panel
from fedda.report.statistics import (
    Interval,
    Row,
    Run,
    curves,
    group,
    measure,
    megabytes,
    read_runs,
    table,
)
from fedda.storage.files import write_whole

__all__ = [
    "Report",
    "Row",
    "Run",
    "figures",
    "html",
    "markdown",
    "meaning_of_interval",
    "read_runs",
    "table",
    "text_table",
    "write",
]


class Report(NamedTuple):
    """What `write` wrote, and what a reader of it should know."""

    files: list[Path]
    notes: list[str]


def write(
    paths: Sequence[str | Path], directory: str | Path, threshold: float | None = None
) -> Report:
    """Write `table.md`, the figures and `report.html` of the runs at or below `paths`."""
    runs = read_runs(paths)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    notes = _notes(runs)
    rows = table(runs, threshold)
    listed = "".join(f"- {markdown_text.escaped(note)}\n" for note in notes)
    text = f"{markdown(rows)}\n{markdown_text.escaped(_how_to_read(rows, threshold))}\n"
    write_whole(directory / "table.md", f"{text}\n{listed}" if notes else text)
    drawn = figures(runs, directory)
    html(runs, directory / "report.html", threshold)
    return Report([directory / "report.html", directory / "table.md", *drawn], notes)


def figures(runs: Sequence[Run], directory: str | Path) -> list[Path]:
    """Draw the curves as PNG and PDF: mean over seeds, and a band from lowest to highest."""
    return [
        path for panel in _panels(runs) for path in page.draw([panel], Path(directory), panel.name)
    ]


def html(runs: Sequence[Run], path: str | Path, threshold: float | None = None) -> None:
    """Write one page with the table, interactive curves and each run's details.

    The page loads nothing: it can be mailed, archived and opened without a network.
    """
    plots = []
    for number, panel in enumerate(_panels(runs)):
        heading = escape(page.headed(f"{panel.y_label} by {panel.x_label}"))
        plots.append(f"<h2>{heading}</h2>\n{page.plot(panel, first=number == 0)}")
    rows = table(runs, threshold)
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(runs))
    details = "".join(
        _details(label, run) for label, members in group(runs).items() for run in members
    )
    body = f"""<p>{escape(_what_was_run(runs))}</p>
{page.table(text_table(rows), "results")}
<p class="small">{escape(_how_to_read(rows, threshold))}</p>
{f"<h2>Notes</h2><ul class='notes'>{notes}</ul>" if notes else ""}
{"".join(plots)}
<h2>Runs</h2>
{details}"""
    title = f"Federated algorithms on {runs[0].config['task']}"
    write_whole(Path(path), page.document(title, body))


def _panels(runs: Sequence[Run]) -> list[Panel]:
    metric, higher_is_better = measure(runs)

    def panel(name: str, key: str, x_label: str, log: bool) -> Panel:
        drawn = curves(runs, key, megabytes if name == "megabytes" else lambda row: row["round"])
        lines = [Drawn(curve, number) for number, curve in enumerate(drawn)]
        return Panel(name, x_label, page.words(key), lines, log_y=log and page.spans(drawn))

    return [
        panel("metric", metric, "round", not higher_is_better),
        panel("train_loss", "train_loss", "round", True),
        panel("megabytes", metric, "megabytes up and down", not higher_is_better),
    ]


def _what_was_run(runs: Sequence[Run]) -> str:
    def values(key: str) -> str:
        found = {str(run.config[key]): None for run in runs if key in run.config}
        return " or ".join(found)

    numbers = sorted({run.seed for run in runs})
    seeds = f"{'seed' if len(numbers) == 1 else 'seeds'} {', '.join(map(str, numbers))}"
    parts = [f"Task {values('task')}"]
    if partition := values("partition"):
        parts.append(f"partition {partition}")
    if cohort := values("cohort"):
        of = f" of {clients}" if (clients := values("clients")) else ""
        parts.append(f"{cohort}{of} clients a round")
    if rounds := values("rounds"):
        parts.append(f"{rounds} rounds")
    return f"{', '.join(parts)}; {seeds}."


def _how_to_read(rows: Sequence[Row], threshold: float | None) -> str:
    row, counted = rows[0], failures(rows)
    sentences = [
        f"{page.headed(page.words(row.metric))} after the last round, and its mean over the last "
        f"{row.last} evaluations: {'higher' if row.higher_is_better else 'lower'} is better",
        meaning_of_interval(rows),
    ]
    if threshold is None and row.threshold is not None:
        share = "95 % of the highest" if row.higher_is_better else "105 % of the lowest"
        sentences.append(
            f"The threshold {row.threshold:g} is {share} mean of last {row.last}, rounded"
        )
    sentences += [
        "Seconds are without compilation",
        "Non-finite uploads and skipped rounds are totals over the seeds"
        if counted
        else "No upload was non-finite, and no round was skipped",
        "Bands in the figures span the seeds" if any(row.seeds > 1 for row in rows) else "",
    ]
    return "".join(f"{sentence}. " for sentence in sentences if sentence).rstrip()


def _details(label: str, run: Run) -> str:
    facts: dict[str, Any] = {"directory": run.path, "notes": "; ".join(run.notes) or "none"}
    if run.summary is not None:
        facts |= {key: run.summary.get(key) for key in ("parameters", "device", "commit")}
        for key, style in (("seconds", ".1f"), ("versions", "")):
            parts = run.summary.get(key, {}).items()
            facts[key] = ", ".join(f"{name} {part:{style}}" for name, part in parts)
    state = ", unfinished" if run.summary is None else ""
    heading = f"{label}, seed {run.seed}{state}"
    return page.details(heading, [*facts.items(), *run.config.items()])


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    for key in ("partition", "clients", "cohort", "rounds", "model", "batch", "local_work"):
        values = sorted({str(run.config.get(key)) for run in runs})
        if len(values) > 1:
            notes.append(f"not one setting: runs differ in {key} ({', '.join(values)})")
    return notes


# ------------------------------------------------------------------------------ the table in words


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """The table as text: the header, then a line of cells for each row.

    Failures have columns only where there were any.
    """
    metric, threshold, last = rows[0].metric, rows[0].threshold, rows[0].last
    header = [
        "algorithm",
        "seeds",
        metric,
        f"last {last}",
        "rounds to threshold" if threshold is None else f"rounds to {threshold:g}",
        "train loss",
        "MB up",
        "MB down",
        "seconds",
    ]
    lines = [
        [
            row.label,
            f"{row.seeds} ({row.unfinished} unfinished)" if row.unfinished else str(row.seeds),
            _interval_text(row.final),
            _interval_text(row.mean_of_last),
            _rounds_text(row),
            _interval_text(row.train_loss),
            _interval_text(row.megabytes_up),
            _interval_text(row.megabytes_down),
            _interval_text(row.seconds, style=",.1f"),
        ]
        for row in rows
    ]
    for name, counts in failures(rows).items():
        header.append(name)
        for line, count in zip(lines, counts, strict=True):
            line.append(str(count))
    return [header, *lines]


def failures(rows: Sequence[Row]) -> dict[str, list[int]]:
    """What went wrong anywhere, by the name of its column: how often in each row."""
    counted = {
        "non-finite": [row.nonfinite_clients for row in rows],
        "skipped": [row.skipped_rounds for row in rows],
    }
    return {name: counts for name, counts in counted.items() if any(counts)}


def meaning_of_interval(rows: Sequence[Row]) -> str:
    """What ± says in a table of these rows; empty where no row has several seeds."""
    counts = {row.seeds for row in rows}
    if counts == {1}:
        return ""
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else "seeds"
    return f"± 95 % interval over {seeds} (Student's t)"


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = text_table(rows)
    return markdown_text.table(lines, "l" + "r" * (len(lines[0]) - 1)) + "\n"


def _interval_text(found: Interval | None, style: str | None = None) -> str:
    if found is None:
        return "-"
    if math.isnan(found.mean):
        return "nan"
    size = abs(found.mean)
    if style is None and size != 0 and not 1e-3 <= size < 1e9:
        style = ".2e"
    elif style is None:  # four significant digits, and an interval with as many decimals
        style = f",.{min(4, max(0, 3 - math.floor(math.log10(size or 1))))}f"
    # Seeds that agree exactly, as on bytes, have no interval worth a column.
    return f"{found.mean:{style}}" + (f" ± {found.half:{style}}" if found.half else "")


def _rounds_text(row: Row) -> str:
    if row.rounds_to_threshold is None:
        return "-" if row.threshold is None else "never"
    mean, half = row.rounds_to_threshold
    text = f"{mean:.1f}".removesuffix(".0") + (f" ± {half:.1f}" if half else "")
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"
