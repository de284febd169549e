"""The command `fedda reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.terminal import Quiet, note, print_table, say, training
from fedda.errors import InputError, writing

if TYPE_CHECKING:
    from fedda.tasks.config import Config
    from fedda_reproduction.paper.cells import Cell
    from fedda_reproduction.paper.experiments import Experiment


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
        bool, typer.Option("--list", help="List all experiments, or those given.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each run.")] = 1,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train for this many rounds: such runs are kept apart.",
            show_default="paper's",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Only these algorithms and tasks.", show_default="all"
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--results", metavar="DIR", help="The folder of finished runs, a file each."),
    ] = Path("reproduction/results"),
    precision: Annotated[
        str | None,
        typer.Option(
            help="The precision of products, as in fedda run.", show_default="as there, or tf32"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--time",
            metavar="SECONDS",
            help="After this time, begin no run, and stop at the next evaluation. The same command "
            "continues.",
        ),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Take over finished runs of fedda run.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Fill in the pages in --results, from the full-length runs."),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the pages as web pages with figures to this folder."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run the experiments of the FedDA paper again, and print its numbers and ours.

    Every finished run is one file in the results folder and is never made again. The same command
    continues after an interruption. More seeds make only the new runs. Several processes or
    machines may fill one folder.
    """
    from fedda.reports.runs import read_runs
    from fedda.simulate import devices
    from fedda_reproduction import reproduce
    from fedda_reproduction.paper import cells, experiments, page

    devices.start_up()
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
    kept = [] if only is None else [name.strip() for name in only.split(",")]
    if listing:
        _list(experiments.chosen(names or ["all"], kept), folder, rounds)
    elif add:
        if not names:
            raise InputError("--add needs directories of finished runs, as fedda run writes them.")
        for run in read_runs(names):
            say(f"{run.path} is {cells.add(folder, run)}")
    elif names:
        chosen = experiments.chosen(names, kept)
        runs = reproduce.wanted(chosen, seeds, rounds, precision, cells.read_all(folder).finished)
        failed = _fill(runs, folder, seconds, quiet)
        _print(chosen, runs, folder, rounds)
    elif not write and report is None:
        raise InputError("say what to reproduce, such as table3: fedda reproduce --list names all.")
    if write:
        _name_damaged(folder)
        first, *others = page.write(folder)
        say(f"Written to {first}{f' and {len(others)} pages beside it' if others else ''}")
    if report is not None:
        from fedda_reproduction.paper import report as web  # late: it loads what draws

        say(f"Written to {web.write(folder, report)[0]}")
    if failed:
        raise InputError("\n".join(f"{what}: {why}" for what, why in failed.items()))


def _name_damaged(folder: Path) -> list[Cell]:
    """Read the cells of the folder, and name damaged files."""
    from fedda_reproduction.paper import cells

    results = cells.read_all(folder)
    note(*(f"{damaged.path} {damaged.why}" for damaged in results.damaged))
    return results.finished


def _list(chosen: list[Experiment], folder: Path, rounds: int | None) -> None:
    from fedda_reproduction.paper import tables

    finished = _name_damaged(folder)
    rows = [["name", "what it is", "tasks", "runs", "done"]]
    for experiment in chosen:
        if experiment.entries:  # --only may leave none
            done, wanted = tables.counted(experiment, finished, rounds)
            tasks = ", ".join(experiment.tasks)
            rows.append([experiment.name, experiment.title, tasks, str(wanted), str(done)])
    print_table(rows, "lllrr")


def _fill(runs: list[Config], folder: Path, seconds: float | None, quiet: bool) -> dict[str, str]:
    """Make the missing runs. Return the reasons why some could not be made."""
    from fedda_reproduction import reproduce

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    with training(lambda: "Continue with the same command."):
        filled = reproduce.fill(runs, folder, seconds, report, note)
    if filled.busy:
        note(f"Other processes are working on {len(filled.busy)} of the runs.")
    if left := len(filled.stopped) + filled.late:
        note(
            f"The time is over. Runs left: {left}; of these stopped on the way: "
            f"{len(filled.stopped)}. The same command continues them."
        )
    return filled.failed


def _print(chosen: list[Experiment], runs: list[Config], folder: Path, rounds: int | None) -> None:
    from fedda_reproduction import reproduce
    from fedda_reproduction.paper import cells, tables

    finished = cells.read_all(folder).finished
    for experiment in chosen:
        rows = tables.rows(experiment, finished, rounds)
        if all(row["seeds"] == "-" for row in rows):
            continue
        names = list(rows[0])[:-1]  # the settings are too long for a terminal
        print_table(
            [names, *([row[name] for name in names] for row in rows)], title=experiment.title
        )
        lengths = {entry.resolved().rounds for entry in experiment.entries}
        if rounds is not None and lengths != {rounds}:
            theirs = " or ".join(f"{length:,}" for length in sorted(lengths))
            say(f"These are after {rounds:,} rounds, not {theirs}: do not compare them.")
        say(*filter(None, [experiment.note]))
    gone = reproduce.missing(runs, finished)
    say(f"{len(runs) - gone} of {len(runs)} runs are done, {gone} are missing.")
