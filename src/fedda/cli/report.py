"""The command `fedda report`, and the table that other commands print as well."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli import terminal
from fedda.errors import writing

if TYPE_CHECKING:
    from fedda.reports.statistics import Row

_HEADERS = {"standing": ""}  # its words say enough
_INTERVAL = "± is the 95 % interval over {} seeds (Student's t)."
_TIE = "tie: the 95 % interval of the difference to the best includes 0 (Welch)."

Threshold = Annotated[
    float | None,
    typer.Option(
        help="Count rounds and megabytes until the metric reaches this.",
        show_default="95 % of best",
    ),
]


Pdf = Annotated[bool, typer.Option("--pdf", help="Write each figure as PDF, too.")]


@writing("--out")
def report_command(
    directories: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where to write.", show_default="first DIRECTORY")
    ] = None,
    threshold: Threshold = None,
    pdf: Pdf = False,
) -> None:
    """Write a self-contained page, figures and a table about finished or unfinished runs."""
    from fedda.reports import comparison
    from fedda.reports.runs import read_runs
    from fedda.reports.statistics import table

    runs = read_runs(directories)
    print_rows(table(runs, threshold), threshold)
    report = comparison.write(runs, out_dir or directories[0], threshold, pdf)
    terminal.say(report.verdict)
    terminal.note(*report.notes, f"Report: {report.files[0]}")


def print_rows(rows: "list[Row]", threshold: float | None = None) -> None:
    """Print a comparison. A threshold that was not given says nothing about a single row."""
    from fedda.reports import tables
    from fedda.reports.statistics import TIE

    header, *lines = tables.text_table(rows)
    # On a terminal a column in which every row has the same to report only takes room.
    dull = {"seeds": str(rows[0].seeds)}
    kept = [i for i, name in enumerate(header) if any(line[i] != dull.get(name) for line in lines)]
    if threshold is None and len(rows) == 1:
        kept = [i for i in kept if " to " not in header[i]]
    elif len(rows) > 1:  # megabytes to the threshold take their place, so that 80 columns suffice
        kept = [i for i in kept if header[i] not in ("MB up", "MB down")]
    # Words under one another, a spread under its mean: side by side they would not fit.
    cells = [[_HEADERS.get(header[i], header[i]).replace(" ", "\n") for i in kept]]
    cells += [[line[i].replace(" ± ", "\n±").replace(" (", "\n(") for i in kept] for line in lines]
    terminal.print_table(cells)
    counts = sorted({row.seeds for row in rows})
    if counts != [1]:
        shown = counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        terminal.say(_INTERVAL.format(shown))
    if any(row.standing == TIE and row.seeds > 1 for row in rows):  # one seed: they are equal
        terminal.say(_TIE)
