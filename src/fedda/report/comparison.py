"""The report of a comparison: a table, figures and a web page about runs of one task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.report import figures, html, tables
from fedda.report.figures import Line, Panel, metric_label, needs_log_axis
from fedda.report.runs import Run, read_runs
from fedda.report.statistics import Row, curves, group, measure, megabytes, table
from fedda.storage.files import write_whole

# Settings that the page names. Runs that differ in one of them are compared with a note.
_SETTINGS = ("partition", "clients", "cohort", "rounds", "model", "batch", "local_work")


class Report(NamedTuple):
    """The files that were written, and notes about the runs."""

    files: list[Path]
    notes: list[str]


def write(
    paths: Sequence[str | Path], directory: str | Path, threshold: float | None = None
) -> Report:
    """Write `table.md`, the figures as PNG and PDF, and `report.html`.

    Args:
        paths: Run directories, or folders of them.
        directory: Where to write.
        threshold: Count the rounds until the metric reaches this. By default 5 % short of the best.
    """
    runs = read_runs(paths)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "table.md", markdown(runs, threshold))
    drawn = draw(runs, directory)
    write_whole(directory / "report.html", page(runs, threshold))
    return Report([directory / "report.html", directory / "table.md", *drawn], _notes(runs))


def markdown(runs: Sequence[Run], threshold: float | None = None) -> str:
    """Return the table, how to read it, and the notes in Markdown."""
    rows = table(runs, threshold)
    about = tables.markdown_text(_how_to_read(rows, threshold))
    text = f"{tables.markdown_table(tables.text_table(rows))}\n\n{about}\n"
    listed = "".join(f"- {tables.markdown_text(note)}\n" for note in _notes(runs))
    return f"{text}\n{listed}" if listed else text


def draw(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Draw the curves as PNG and PDF: means over seeds, with bands from lowest to highest."""
    return [
        path for panel in _panels(runs) for path in figures.draw([panel], directory, panel.name)
    ]


def page(runs: Sequence[Run], threshold: float | None = None) -> str:
    """Return a web page with the table, interactive curves and the details of each run."""
    rows = table(runs, threshold)
    return html.render(
        "comparison.html",
        title=f"Federated algorithms on {runs[0].config['task']}",
        plotly=html.plotly_script(),
        settings={key: " or ".join(_values(runs, key)) for key in ("task", *_SETTINGS)},
        seeds=sorted({run.seed for run in runs}),
        results=tables.text_table(rows),
        how_to_read=_how_to_read(rows, threshold),
        notes=_notes(runs),
        panels=_panels(runs),
        runs=[
            (label, run, _facts(run)) for label, members in group(runs).items() for run in members
        ],
    )


def _how_to_read(rows: Sequence[Row], threshold: float | None) -> str:
    return html.render(
        "how_to_read.txt",
        row=rows[0],
        interval=tables.meaning_of_interval(rows),
        threshold=threshold,
        failures=tables.failures(rows),
    )


def _panels(runs: Sequence[Run]) -> list[Panel]:
    metric, higher_is_better = measure(runs)

    def panel(name: str, key: str, x_label: str, log: bool) -> Panel:
        drawn = curves(runs, key, megabytes if name == "megabytes" else lambda row: row["round"])
        return Panel(
            name=name,
            x_label=x_label,
            y_label=metric_label(key),
            lines=[Line(curve, number) for number, curve in enumerate(drawn)],
            log_y=log and needs_log_axis(drawn),
        )

    return [
        panel("metric", metric, "round", not higher_is_better),
        panel("train_loss", "train_loss", "round", True),
        panel("megabytes", metric, "megabytes up and down", not higher_is_better),
    ]


def _facts(run: Run) -> list[tuple[str, Any]]:
    facts: dict[str, Any] = {"directory": run.path, "notes": "; ".join(run.notes) or "none"}
    if run.summary is not None:
        facts |= {key: run.summary.get(key) for key in ("parameters", "device", "commit")}
        for key, style in (("seconds", ".1f"), ("versions", "")):
            parts = run.summary.get(key, {}).items()
            facts[key] = ", ".join(f"{name} {part:{style}}" for name, part in parts)
    return [*facts.items(), *run.config.items()]


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    for key in _SETTINGS:
        values = sorted({str(run.config.get(key)) for run in runs})
        if len(values) > 1:
            notes.append(f"not one setting: runs differ in {key} ({', '.join(values)})")
    return notes


def _values(runs: Sequence[Run], key: str) -> list[str]:
    """Return the different values of a setting."""
    return list(dict.fromkeys(str(run.config[key]) for run in runs if key in run.config))
