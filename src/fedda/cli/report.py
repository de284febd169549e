"""The command `fedda report`, and the table that other commands print as well."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedda.cli.terminal import err, print_whole
from fedda.errors import MissingExtraError, writing
from fedda.report import comparison, tables
from fedda.report.runs import read_runs
from fedda.report.statistics import Row, table

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
    print_table(table(read_runs(directories), threshold), threshold)
    write_report(directories, out_dir or directories[0], threshold, needed=True)


def print_table(rows: list[Row], threshold: float | None = None) -> None:
    header, *lines = tables.text_table(rows)
    # On a terminal a column in which every method has the same to report only takes room.
    dull = {"seeds": str(rows[0].seeds)}
    kept = [i for i, name in enumerate(header) if any(line[i] != dull.get(name) for line in lines)]
    if threshold is None and len(rows) == 1:  # it would be measured by itself
        kept = [i for i in kept if not header[i].startswith("rounds to ")]
    columns = []
    listing = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for i in kept:
        # Words under one another, a spread under its mean: side by side they would not fit.
        cells = [line[i].replace(" ± ", "\n±").replace(" (", "\n(") for line in lines]
        title = escape(header[i]).replace(" ", "\n")
        listing.add_column(title, justify="left" if i == 0 else "right")
        columns.append(map(escape, cells))
    for row in zip(*columns, strict=True):
        listing.add_row(*row)
    listing.caption = tables.meaning_of_interval(rows) or None
    print_whole(listing)


def write_report(paths: list[Path], directory: Path, threshold: float | None, needed: bool) -> None:
    try:
        files, notes = comparison.write(paths, directory, threshold)
    except MissingExtraError as error:
        if needed:
            raise
        err.print(escape(f"No report: {error}"))
        return
    for note in notes:
        err.print(escape(note), soft_wrap=True)
    err.print(f"Report: {files[0]}", soft_wrap=True)
