"""The command `fedda sweep`."""

import json
from typing import Annotated, Any

import typer

from fedda.cli import terminal
from fedda.errors import InputError, writing
from fedda.tasks import config


@writing("--out")
def sweep_command(
    settings: terminal.Settings = None,
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
        str, typer.Option(help="train_loss or train_METRIC; or, on the test set, loss or METRIC.")
    ] = "train_loss",
    together: Annotated[
        int | None,
        typer.Option(min=1, help="The most runs at a time.", show_default="as fit in memory"),
    ] = None,
    out_dir: terminal.Out = None,
    quiet: terminal.Quiet = False,
    as_json: terminal.Json = False,
) -> None:
    """Train every point of one algorithm's grid, many at once, and find the best.

    The best has the lowest training loss, averaged over the last 100 rounds (or half of them) and
    over the seeds; --by chooses another measure. The same command with the --out of an interrupted
    sweep finishes that sweep.

    For example: `fedda sweep algorithm=fedavg --grid client_lr=0.03,0.1,0.3`
    """
    values = config.from_words(settings or [])
    config.check_names(values)

    from fedda.experiments import sweep
    from fedda.reports import heatmap
    from fedda.simulate import devices
    from fedda.simulate.progress import bars, grid_bar

    devices.start_up()
    resolved = config.resolve(values)
    points = _grid(grid or [])
    directory = out_dir or terminal.new_directory(f"sweep-{resolved.task}-{resolved.algorithm}")
    hint = f"Continue with the same command and --out {directory}"
    with terminal.training(lambda: hint), bars(quiet) as add:
        tell = grid_bar(add(resolved.algorithm))
        summary = sweep.run(
            resolved, points, seeds, directory, by=by, together=together, on_progress=tell
        )
        drawn = heatmap.write(summary, directory / "heatmap.png")
    if as_json:
        print(json.dumps({"directory": str(directory), **summary}))
        return
    _print_ranking(summary)
    terminal.say(*_about_best(summary))
    if drawn:
        terminal.say(f"Drawn in {directory / 'heatmap.png'}")
    terminal.say(f"Written to {directory}")
    if summary["best"] is not None:
        terminal.say(f"Use it: fedda run {directory / 'preset.toml'}")


def _grid(words: list[str]) -> dict[str, list[Any]]:
    """Return the values to try, by name."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not (name and equals and values):
            raise InputError(f"--grid must look like client_lr=0.01,0.1,1, got {word!r}.")
        if name in grid:
            raise InputError(f"--grid {name} is given twice: list all its values in one.")
        grid[name] = [config.parse([f"{name}={value}"])[name] for value in values.split(",")]
    return grid


def _print_ranking(summary: dict[str, Any]) -> None:
    """Print the points of a sweep, the best first, and what their numbers are."""
    ranking, by = summary["ranking"], summary["by"]
    hidden = {"hyper", "spread", "at_the_end"}
    measures = [name for name in ranking[0] if name not in hidden]
    rows = [[*summary["grid"], *measures]]
    for point in ranking:
        cells = [f"{value:g}" for value in point["hyper"].values()]
        for name in measures:
            spread = f" ± {point['spread']:.2g}" if name == by and point["spread"] else ""
            cells.append("-" if point[name] is None else f"{point[name]:.4g}{spread}")
        rows.append(cells)
    title = f"Points: {len(ranking)}. Rounds: {summary['rounds']}."
    terminal.print_table(rows, "r" * len(rows[0]), title)
    trained = ", ".join(name for name in measures if name.startswith("train_"))
    rounds, seeds = summary["averaged_rounds"], len(summary["seeds"])
    terminal.say(f"{trained}: means over the last rounds ({rounds}) and the seeds ({seeds})")


def _about_best(summary: dict[str, Any]) -> list[str]:
    """Return what a person should know about the choice."""
    best = summary["best"]
    if best is None:
        return ["No point is usable: all had non-finite uploads or skipped rounds."]
    chosen = ", ".join(f"{name}={value:g}" for name, value in best["hyper"].items())
    lines = [f"Best by {summary['by']}: {chosen or 'the only point'}"]
    if best["at_the_end"]:
        ends = ", ".join(best["at_the_end"])
        lines.append(f"At an end of the grid: {ends}. Try values beyond it.")
    if not summary["by"].startswith("train_"):
        lines.append("It was chosen on the test set, so its results on the test set are too good.")
    return lines
