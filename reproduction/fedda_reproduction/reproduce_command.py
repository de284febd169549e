"""The command `fedda reproduce`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedda.cli.terminal import Quiet, err, out, print_whole, training
from fedda.errors import InputError, writing
from fedda.tasks.config import Config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import cells, choice, corrections, experiments, readme, tables
from fedda_reproduction.paper.cells import Cell


@writing("--results or --report")
def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT]...",
            help="Such as table3, or all. With --add: run directories, or folders of them.",
            show_default=False,
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Name all experiments, or those given.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each run.")] = 1,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train so many: such runs are kept apart.", show_default="paper's"
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="These algorithms and tasks.", show_default="all"),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--results", metavar="DIR", help="Where finished runs are kept, a file each."),
    ] = Path("reproduction/results"),
    precision: Annotated[
        str | None,
        typer.Option(help="Of products, as in fedda run.", show_default="as there, or tf32"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--time",
            metavar="SECONDS",
            help="After so long begin nothing more, and stop at the next evaluation. The same "
            "command goes on.",
        ),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Take over finished runs of fedda run.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write README.md there about the full-length runs.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write a web page and figures about the full-length runs there."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run the experiments of the FedDA paper again, and print its numbers beside ours.

    Every finished run is one file in the results folder and is never made again: the same command
    goes on where it was interrupted, more seeds add only those, and several processes or machines
    may fill one folder.
    """
    names, failed = names or [], {}
    if (write or report is not None) and (rounds is not None or only is not None):
        raise InputError(
            "--write and --report show all full-length runs of the results folder: leave out "
            "--rounds and --only, or write in a second command."
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"--results is {folder}, a file: expected the folder of finished runs, such as results."
        )
    if listing:
        _list(_chosen(names or ["all"], only), folder, rounds)
    elif add:
        _add(folder, names)
    elif names:
        chosen = _chosen(names, only)
        runs = reproduce.wanted(chosen, seeds, rounds, precision, cells.read_all(folder).found)
        failed = _fill(runs, folder, seconds, quiet).failed
        _print(chosen, runs, folder, rounds)
    elif not write and report is None:
        raise InputError("say what to reproduce, such as table3: fedda reproduce --list names all.")
    if write:
        results = _read(folder)
        out.print(f"Written to {readme.write(folder, results)}", soft_wrap=True)
    if report is not None:
        _report(folder, report)
    if failed:
        raise InputError("\n".join(f"{what}: {why}" for what, why in failed.items()))


def _chosen(names: list[str], only: str | None) -> list[experiments.Experiment]:
    words = [] if only is None else [word.strip() for word in only.split(",")]
    chosen = choice.chosen(names)
    choice.check_only(chosen, words)
    return [choice.only(each, words) for each in chosen]


def _report(folder: Path, directory: Path) -> None:
    from fedda_reproduction.paper import web  # late: it loads what draws

    try:
        page = web.write(folder, directory)[0]
    except ImportError as error:
        raise InputError(str(error)) from None
    out.print(f"Written to {page}", soft_wrap=True)


def _read(folder: Path) -> cells.Cells:
    """What the folder holds; files that do not count are named."""
    results = cells.read_all(folder)
    for each in results.damaged:
        _warn(f"{each.path} {each.why}")
    return results


def _list(chosen: list[experiments.Experiment], folder: Path, rounds: int | None) -> None:
    found = _read(folder).found
    listing = Table(box=box.SIMPLE)
    for name in ("name", "what it is", "tasks"):
        listing.add_column(name, no_wrap=name == "name")
    for name in ("runs", "done"):
        listing.add_column(name, justify="right")
    for each in chosen:
        if not each.entries:  # it has nothing of --only
            continue
        done, wanted = tables.counted(each, found, rounds)
        words = (each.name, escape(each.title), ", ".join(each.tasks))
        listing.add_row(*words, str(wanted), str(done))
    print_whole(listing)


def _add(folder: Path, directories: list[str]) -> None:
    if not directories:
        raise InputError("--add needs directories of finished runs, as fedda run writes them.")
    for directory in map(Path, directories):
        runs = sorted(log.parent for log in directory.rglob("metrics.jsonl"))
        if not runs:
            raise InputError(
                f"{directory} holds no run: expected a directory that fedda run wrote to, or a "
                "folder of such."
            )
        for run in runs:
            out.print(f"{run} is {reproduce.add(folder, run)}", soft_wrap=True)


def _fill(runs: list[Config], folder: Path, seconds: float | None, quiet: bool) -> reproduce.Filled:
    def tell(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    with training(lambda: "Continue with the same command."):
        filled = reproduce.fill(runs, folder, seconds, tell, _warn)
    if filled.busy:
        err.print(f"Other processes are at work on {len(filled.busy)} of the runs.")
    if left := len(filled.stopped) + filled.late:
        _warn(
            f"The time is over. Runs left: {left}; of these stopped on the way: "
            f"{len(filled.stopped)}. The same command goes on with them."
        )
    return filled


def _warn(line: str) -> None:
    err.print(escape(line), soft_wrap=True)


def _print(
    chosen: list[experiments.Experiment],
    runs: list[Config],
    folder: Path,
    rounds: int | None,
) -> None:
    found: list[Cell] = cells.read_all(folder).found
    for each in chosen:
        lines = tables.lines(each, found, rounds)
        if not any(line.seeds for line in lines):
            continue
        header, *body = tables.rows(lines)
        listing = Table(box=box.SIMPLE_HEAD, title=escape(each.title), title_justify="left")
        for name in header:
            listing.add_column(name, justify="left" if name in ("run", "precision") else "right")
        for row in body:
            listing.add_row(*map(escape, row))
        print_whole(listing)
        for note in (tables.other_length(each, rounds), *each.notes):
            if note:
                out.print(escape(note), soft_wrap=True)
    groups = {cells.group(config) for config in runs}
    again = corrections.paragraph(cell for cell in found if cell.group in groups)
    if again:
        out.print(escape(again.replace("**", "")), soft_wrap=True)
    gone = reproduce.missing(runs, found)
    out.print(f"{len(runs) - gone} of {len(runs)} runs are done, {gone} are missing.")
