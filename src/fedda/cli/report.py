"""The command `fedda report`, and the table that other commands print as well."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli import terminal
from fedda.errors import writing

if TYPE_CHECKING:
    from fedda.reports.statistics import Row

Threshold = Annotated[
    float | None,
    typer.Option(
        help="Count the rounds until the metric reaches this.", show_default="95 % of best"
    ),
]


@writing("--out")
def report_command(
    directories: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where to write.", show_default="first DIRECTORY")
    ] = None,
    threshold: Threshold = None,
) -> None:
    """Write one self-contained page, figures and a table about finished or unfinished runs."""
    from fedda.reports.runs import read_runs
    from fedda.reports.statistics import table

    print_rows(table(read_runs(directories), threshold), threshold)
    write_report(directories, out_dir or directories[0], threshold)


def print_rows(rows: "list[Row]", threshold: float | None = None) -> None:
    """Print a comparison. A threshold that was not given says nothing about a single row."""
    from fedda.reports import tables

    header, *lines = tables.text_table(rows)
    # On a terminal a column in which every row has the same to report only takes room.
    dull = {"seeds": str(rows[0].seeds)}
    kept = [i for i, name in enumerate(header) if any(line[i] != dull.get(name) for line in lines)]
    if threshold is None and len(rows) == 1:
        kept = [i for i in kept if not header[i].startswith("rounds to ")]
    # Words under one another, a spread under its mean: side by side they would not fit.
    cells = [[header[i].replace(" ", "\n") for i in kept]]
    cells += [[line[i].replace(" ± ", "\n±").replace(" (", "\n(") for i in kept] for line in lines]
    terminal.print_table(cells, caption=tables.meaning_of_interval(rows))


def write_report(paths: list[Path], directory: Path, threshold: float | None) -> None:
    """Write the report of some runs, and say where."""
    from fedda.reports import comparison

    files, notes = comparison.write(paths, directory, threshold)
    terminal.note(*notes, f"Report: {files[0]}")
