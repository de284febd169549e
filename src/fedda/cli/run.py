"""The command `fedda run`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedda.cli import progress
from fedda.cli import tensorboard as tracking
from fedda.cli.report import print_table
from fedda.cli.settings import from_command_line
from fedda.cli.terminal import Json, Quiet, Settings, err, new_directory, out, print_error, training
from fedda.errors import InputError, writing
from fedda.experiments import run as experiment
from fedda.report.runs import read_runs
from fedda.report.statistics import table
from fedda.simulate import devices, hosts
from fedda.simulate.result import why_untrained
from fedda.tasks import config

ABOUT_SETTINGS = f"""
The default is algorithm={config.Config.algorithm} task={config.Config.task}. Much used: algorithm,
task, model, partition, clients, cohort, rounds, batch, local_work, seed, client_lr, server_lr.

Every algorithm has settings of its own, which `fedda algorithms NAME` lists. `fedda data list`
lists the tasks. Every run has {", ".join(config.FIELDS)}. All values of a run are written to
config.toml in its directory.
"""


@writing("--out")
def run_command(
    settings: Settings = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="A new run directory.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run of this directory.", metavar="DIR")
    ] = None,
    use: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N|all",
            help="Spread the cohort over so many GPUs, or cores.",
            show_default="as many as pay off",
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Train together with other processes: where process 0 awaits them.",
            show_default="train alone",
        ),
    ] = None,
    together: Annotated[int, typer.Option("--processes", help="How many they are.")] = 1,
    process: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for them.")] = 300,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files into the run directory.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one configuration."""
    values = from_command_line(settings or [])
    if resume is not None and out_dir is not None:
        raise InputError("--resume continues in its own directory: leave out --out.")
    if use is not None:
        values |= config.parse([f"devices={use}"])
    if coordinator is not None:
        plan = {"resume": resume is not None, **values, **experiment.versions()}
        hosts.join(coordinator, together, process, plan, wait)
    elif (together, process) != (1, 0):
        raise InputError("--processes and --process need --coordinator HOST:PORT.")
    if values.get("devices") == "all":
        values["devices"] = devices.count()
    quiet |= not hosts.is_first()
    resolved = config.resolve(values if resume is None else {})
    directory = resume or out_dir or new_directory(f"{resolved.task}-{resolved.algorithm}")

    def hint() -> str:
        begun = (directory / "config.toml").exists()
        return f"Continue with: fedda run --resume {directory}" if begun else "Nothing was written."

    tracker = None
    if tensorboard and hosts.is_first():
        tracker = tracking.tensorboard(directory / "tensorboard")
    alone = coordinator is None
    with progress.shown(quiet) as track, training(hint, terminable=alone):
        show = track(str(directory) if resume is not None else resolved.algorithm)

        def on_progress(done: experiment.Progress) -> None:
            show(done)
            if tracker is not None:
                tracker(done.row)

        if resume is not None:
            outcome = experiment.resume(directory, values, on_progress)
        else:
            outcome = experiment.run(resolved, directory, on_progress)
    if not hosts.is_first():
        return
    for note in outcome.notes:
        err.print(escape(note), soft_wrap=True)
    if as_json:
        print(json.dumps({"directory": str(directory), **outcome.summary}))
    else:
        print_table(table(read_runs([directory])))
        out.print(f"Written to {directory}", soft_wrap=True)
    if why := why_untrained(outcome.result.history[-1]):
        print_error(why)
        raise typer.Exit(1)
