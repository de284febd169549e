"""The command `fedda compare`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedda import algorithms
from fedda.cli import progress
from fedda.cli.report import Threshold, print_table, write_report
from fedda.cli.settings import from_command_line
from fedda.cli.terminal import Json, Quiet, err, new_directory, print_error, training
from fedda.errors import InputError, writing
from fedda.experiments import compare
from fedda.experiments import run as experiment
from fedda.report import statistics
from fedda.report.runs import read_runs
from fedda.simulate.result import why_untrained
from fedda.tasks import config

COMPARED = ("fedavg", "fedprox", "fedda-sgdm", "fedda-adam", "fedda-adagrad")


@writing("--out")
def compare_command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALGORITHM]... [CONFIG.toml] [KEY=VALUE]...",
            help=f"Default: {', '.join(COMPARED)}.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every algorithm there is.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each algorithm.")] = 1,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", help="A new directory, or a comparison to finish.", show_default="runs/..."
        ),
    ] = None,
    threshold: Threshold = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several algorithms on one task, from the same model and with the same cohorts.

    With no arguments: 100 clients with handwritten digits, five algorithms, well under a minute.
    Given the --out of a comparison that was interrupted, it does the rest of it.
    """
    words = settings or []
    directory = out_dir or new_directory("compare")
    planned = {} if words or everything or seeds > 1 else compare.written(directory)
    planned = planned or _planned(words, everything, seeds)
    if not compare.is_there(directory):
        experiment.check_new(directory, "that of a comparison to finish.")

    def hint() -> str:
        begun = compare.is_there(directory)
        return (
            f"Continue with: fedda compare --out {directory}" if begun else "Nothing was written."
        )

    with progress.shown(quiet) as track, training(hint):
        summaries = compare.train(planned, directory, track)
    rows = statistics.table(read_runs([directory]), threshold)
    if as_json:
        table = [row._asdict() for row in rows]
        print(json.dumps({"directory": str(directory), "runs": summaries, "table": table}))
    else:
        print_table(rows, threshold)
    write_report([directory], directory, threshold, needed=False)
    untrained = {
        name: why
        for name, summary in zip(planned, summaries, strict=True)
        if (why := why_untrained({**summary, "round": summary["rounds"]}))
    }
    for name, why in untrained.items():
        print_error(f"{name}: {why}")
    if len(untrained) == len(planned):
        raise typer.Exit(1)


def _planned(words: list[str], everything: bool, seeds: int) -> compare.Plans:
    names = [word for word in words if "=" not in word and not word.endswith(".toml")]
    others = [word for word in words if word not in names]
    values = from_command_line(others)
    if "algorithm" in values:
        words = [word for word in others if word.startswith("algorithm=")]
        files = [word for word in others if "=" not in word]
        where = words[0] if words else f"the key algorithm from {', '.join(files)}"
        raise InputError(
            f"compare takes algorithms by name: fedda compare fedavg fedda-adam. Remove {where}."
        )
    if names and everything:
        raise InputError("give names of algorithms or --all, not both.")
    compared = algorithms.names() if everything else list(dict.fromkeys(names)) or list(COMPARED)
    first_seed = config.resolve({"seed": values.pop("seed", 0)}).seed
    own, notes = compare.shared(compared, values)
    for note in notes:
        err.print(note, soft_wrap=True)
    return compare.plans(own, first_seed, seeds)
