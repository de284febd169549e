"""The report of a comparison: a table, figures and a web page about runs of one task."""

from collections.abc import Sequence
from pathlib import Path

from fedda.reports import figures, html, tables
from fedda.reports.figures import Line, Panel
from fedda.reports.runs import Run, read_runs
from fedda.reports.statistics import curves, group, measure, megabytes, table
from fedda.storage.files import write_whole

# Settings that the page names. A note says if runs differ in one of them.
_SETTINGS = ("task", "partition", "clients", "cohort", "rounds", "model", "batch", "local_work")


def write(
    paths: Sequence[str | Path], directory: Path, threshold: float | None = None
) -> tuple[list[Path], list[str]]:
    """Write `report.html`, `table.md` and the figures as PNG and PDF.

    Args:
        paths: Run directories, or folders of them.
        directory: Where to write.
        threshold: Count the rounds until the metric reaches this. By default 5 % short of the best.

    Returns:
        The files, the web page first, and notes about the runs.
    """
    runs = read_runs(paths)
    files = [directory / "report.html", directory / "table.md"]
    pages = [page(runs, template, threshold) for template in ("comparison.html", "comparison.md")]
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(files, pages, strict=True):
        write_whole(path, text)
    for panel in _panels(runs):
        files += figures.draw([panel], directory, panel.name)
    return files, _notes(runs)


def page(runs: Sequence[Run], template: str, threshold: float | None = None) -> str:
    """Return one page of a report: the template `comparison.html` or `comparison.md`."""
    rows = table(runs, threshold)
    interval = tables.meaning_of_interval(rows)
    about = html.render("how_to_read.txt", rows=rows, interval=interval, threshold=threshold)
    return html.render(
        template,
        title=f"Federated algorithms on {runs[0].config['task']}",
        plotly=html.plotly_script(),
        settings=_settings(runs),
        seeds=sorted({run.config["seed"] for run in runs}),
        results=tables.text_table(rows),
        how_to_read=about.strip(),
        notes=_notes(runs),
        panels=_panels(runs),
        groups=group(runs),
    )


def _panels(runs: Sequence[Run]) -> list[Panel]:
    metric, higher_is_better = measure(runs)

    def panel(name: str, key: str, x_label: str, log: bool) -> Panel:
        drawn = curves(runs, key, megabytes if name == "megabytes" else lambda row: row["round"])
        return Panel(
            name=name,
            x_label=x_label,
            y_label=figures.metric_label(key),
            lines=[Line(curve, number) for number, curve in enumerate(drawn)],
            log_y=log and figures.needs_log_axis(drawn),
        )

    return [
        panel("metric", metric, "round", not higher_is_better),
        panel("train_loss", "train_loss", "round", True),
        panel("megabytes", metric, "megabytes up and down", not higher_is_better),
    ]


def _settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the different values of each setting."""
    return {
        key: sorted({run.settings[key] for run in runs if key in run.settings}) for key in _SETTINGS
    }


def _notes(runs: Sequence[Run]) -> list[str]:
    differences = [
        f"not one setting: runs differ in {key} ({', '.join(values)})"
        for key, values in _settings(runs).items()
        if len(values) > 1
    ]
    return [note for run in runs for note in run.notes] + differences
