"""The command `fedda sweep`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table

from fedda.cli.terminal import Json, Quiet, Settings, err, new_directory, out, print_whole, training
from fedda.errors import InputError, writing
from fedda.experiments import halving, sweep
from fedda.report import heatmap
from fedda.tasks import config


@writing("--out")
def sweep_command(
    settings: Settings = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V1,V2,...",
            help="Values of a hyper-parameter. Given several times: every combination.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each point.")] = 1,
    by: Annotated[
        str,
        typer.Option(
            help="Choose by train_loss or the metric in training, such as train_accuracy; or on "
            "the test set by loss or the metric."
        ),
    ] = "train_loss",
    factor: Annotated[
        int | None,
        typer.Option(
            "--halving",
            help="Successive halving: train all points shortly, and one in so many on, and on.",
            show_default="train all points for all rounds",
        ),
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train at most so many runs at a time.",
            show_default="as many as fit in memory",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="A new directory, or one to finish.", show_default="runs/..."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train every point of one algorithm's grid, many at once, and find the best.

    The best has the lowest training loss, if --by names nothing else, averaged over the last 100
    rounds (or half of them) and over the seeds. Given the --out of a sweep that was interrupted, it
    does the rest of it.
    """
    resolved = config.resolve(config.from_words(settings or []))
    points = _grid(grid or [])
    directory = out_dir or new_directory(f"sweep-{resolved.task}-{resolved.algorithm}")
    hint = f"Continue with the same command and --out {directory}"
    with _progress(quiet) as tell, training(lambda: hint):
        if factor is None:
            summary = sweep.run(resolved, points, seeds, directory, by, together, tell)
        else:
            summary = halving.halve(resolved, points, seeds, directory, factor, by, together, tell)
        drawn = heatmap.write(summary, directory / "heatmap.png")
    if as_json:
        print(json.dumps({"directory": str(directory), **summary}))
        return
    for each in (*summary.get("rungs", []), summary):
        if "rungs" in summary:
            out.print(f"Points: {len(each['ranking'])}. Rounds: {each['rounds']}.", soft_wrap=True)
        print_whole(_table(each))
        for line in _about_table(each):
            out.print(line, soft_wrap=True)
    for line in _about_best(summary):
        out.print(escape(line), soft_wrap=True)
    if drawn:
        out.print(f"Drawn in {directory / 'heatmap.png'}", soft_wrap=True)
    out.print(f"Written to {directory}", soft_wrap=True)
    if summary["best"] is not None:
        out.print(f"Use it: fedda run {directory / 'preset.toml'}", soft_wrap=True)


def _grid(words: list[str]) -> dict[str, list[Any]]:
    """The values to try, by name."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not (name and equals and values):
            raise InputError(f"--grid must look like client_lr=0.01,0.1,1, got {word!r}.")
        if name in grid:
            raise InputError(f"--grid {name} is given twice: list all its values in one.")
        grid[name] = [config.parse([f"{name}={value}"])[name] for value in values.split(",")]
    return grid


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[sweep.Progress], None] | None]:
    """Gives the function that a sweep's evaluations are told to."""
    if quiet:
        yield None
    elif err.is_terminal:
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=err, expand=True) as bars:
            bar = bars.add_task("compiling", total=None)

            def tell(progress: sweep.Progress) -> None:
                rounds = progress.finished * progress.rounds + progress.training * progress.round
                total = progress.runs * progress.rounds
                bars.update(bar, description=_told(progress), completed=rounds, total=total)

            yield tell
    else:
        yield lambda progress: print(_told(progress), file=sys.stderr, flush=True)


def _told(progress: sweep.Progress) -> str:
    first, last = progress.finished + 1, progress.finished + progress.training
    runs = f"runs {first}-{last}" if last > first else f"run {first}"
    return f"{runs} of {progress.runs}: round {progress.round}/{progress.rounds}"


def _table(summary: dict[str, Any]) -> Table:
    """The points, the best first."""
    ranking, by = summary["ranking"], summary["by"]
    hidden = {"hyper", "spread", "failures", "at_the_end"}
    measures = [name for name in ranking[0] if name not in hidden]
    failed = any(point["failures"] for point in ranking)
    listing = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in (*summary["grid"], *measures, *(["failures"] if failed else [])):
        listing.add_column(escape(name), justify="right")
    for point in ranking:
        cells = [
            f"{value:g}" + ("*" if name in point["at_the_end"] else "")
            for name, value in point["hyper"].items()
        ]
        for name in measures:
            spread = f" ± {point['spread']:.2g}" if name == by and point["spread"] else ""
            cells.append("-" if point[name] is None else f"{point[name]:.4g}{spread}")
        listing.add_row(*cells, *([str(point["failures"])] if failed else []))
    return listing


def _about_table(summary: dict[str, Any]) -> Sequence[str]:
    """What the numbers of a table are, and how fast they were made."""
    rounds, seeds, pace = (
        summary[name] for name in ("averaged_rounds", "seeds", "runs_x_rounds_per_second")
    )
    last = f"last {rounds} rounds" if rounds > 1 else "last round"
    over = f" and {len(seeds)} seeds" if len(seeds) > 1 else ""
    trained = [name for name in summary["ranking"][0] if name.startswith("train_")]
    lines = [f"{', '.join(trained)}: mean over the {last}{over}"]
    if any(point["at_the_end"] for point in summary["ranking"]):
        lines.append("* the end of its grid")
    if pace is not None:
        lines.append(
            f"{summary['runs']} runs, {max(summary['together'])} at a time, "
            f"{pace:,.0f} runs x rounds a second without compilation"
        )
    return lines


def _about_best(summary: dict[str, Any]) -> Sequence[str]:
    """What a person should know about the choice."""
    best, lines = summary["best"], []
    if "rungs" in summary:
        lines.append(
            f"{summary['share_of_all_rounds']:.0%} of the rounds that all points would take"
        )
    if best is None:
        lines.append("No point is usable: every one had non-finite uploads or skipped rounds.")
    else:
        chosen = ", ".join(f"{name}={value:g}" for name, value in best["hyper"].items())
        lines.append(f"Best by {summary['by']}: {chosen or 'the only point'}")
        if best["at_the_end"]:
            lines.append(f"Try values beyond the end of its grid: {', '.join(best['at_the_end'])}.")
        if not summary["by"].startswith("train_"):
            lines.append("It was chosen on the test set, whose numbers flatter it now.")
    return lines
