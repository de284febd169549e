"""The command `fedda run`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedda.cli import terminal
from fedda.errors import InputError, writing
from fedda.tasks import config

ABOUT_SETTINGS = f"""
The default is algorithm={config.Config.algorithm} task={config.Config.task}. `fedda data list`
lists the tasks, and `fedda algorithms NAME` the settings of an algorithm, such as client_lr and
server_lr. Every run has {", ".join(config.FIELDS)}.
"""


@writing("--out")
def run_command(
    settings: terminal.Settings = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="A new run directory.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue this run; a larger rounds=N extends it.", metavar="DIR"),
    ] = None,
    use: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="N|all", help="How many GPUs, or CPU cores, share a cohort."
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Train with other processes: the address of process 0."
        ),
    ] = None,
    together: Annotated[int, typer.Option("--processes", help="The number of processes.")] = 1,
    process: Annotated[int, typer.Option(help="The number of this process, from 0.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other processes.")] = 300,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files into the run directory.")
    ] = False,
    quiet: terminal.Quiet = False,
    as_json: terminal.Json = False,
) -> None:
    """Train one configuration.

    For example: `fedda run algorithm=fedda-adam rounds=500 client_lr=0.05`
    """
    values = config.from_words(settings or [])
    if resume is not None and out_dir is not None:
        raise InputError("--resume continues in its own directory: leave out --out.")
    if use not in (None, "all"):
        values |= config.parse([f"devices={use}"])
    if (together, process) != (1, 0) and coordinator is None:
        raise InputError("--processes and --process need --coordinator HOST:PORT.")
    if resume is None:
        config.check_names(values)

    import jax

    from fedda.cli.report import print_rows
    from fedda.cli.tensorboard import event_file
    from fedda.experiments import compare
    from fedda.experiments import run as experiment
    from fedda.reports.runs import read_runs
    from fedda.reports.statistics import table
    from fedda.simulate import devices, hosts
    from fedda.simulate.progress import Progress, bars, run_bar
    from fedda.simulate.run import why_untrained
    from fedda.storage.provenance import versions

    if resume is not None and (resume / compare.FILE).exists():
        raise InputError(
            f"{resume} is a comparison, not a run. Continue it with: fedda compare --out {resume}"
        )
    devices.start_up()
    if coordinator is not None:
        terminal.leaving.enter_context(hosts.parting())
        plan = {"resume": resume is not None, **values, "use": use, **versions()}
        hosts.join(coordinator, together, process, plan, wait)
    if use == "all":
        values["devices"] = len(jax.devices())  # of all processes
    quiet |= not hosts.is_first()
    resolved = config.resolve(values if resume is None else {})
    directory = resume or out_dir or Path()
    if resume is None and out_dir is None and hosts.is_first():
        directory = terminal.new_directory(f"{resolved.task}-{resolved.algorithm}")

    def hint() -> str:
        begun = (directory / "config.toml").exists()
        return f"Continue with: fedda run --resume {directory}" if begun else "Nothing was written."

    track = event_file(directory / "tensorboard") if tensorboard and hosts.is_first() else None
    with terminal.training(hint, terminable=coordinator is None), bars(quiet) as add:
        show = run_bar(add(resolved.algorithm if resume is None else "resumed run"))

        def on_progress(done: Progress | None) -> None:
            show(done)
            if track is not None and done is not None:
                track(done.row)

        if resume is not None:
            outcome = experiment.resume(directory, values, on_progress)
        else:
            outcome = experiment.run(resolved, directory, on_progress)
    if not hosts.is_first():
        return
    terminal.note(*outcome.notes)
    if as_json:
        print(json.dumps({"directory": str(directory), **outcome.summary}))
    else:
        print_rows(table(read_runs([directory])))
        if outcome.result.per_client is not None:
            print(outcome.result.per_client)
        terminal.say(f"Written to {directory}")
    if why := why_untrained(outcome.result.history[-1]):
        terminal.print_error(why)
        raise typer.Exit(1)
