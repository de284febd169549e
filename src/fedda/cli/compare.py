"""The command `fedda compare`."""

import json
from typing import Annotated

import typer

from fedda import algorithms
from fedda.cli.progress import bars, run_bar
from fedda.cli.report import Threshold, print_rows, write_report
from fedda.cli.terminal import Json, Out, Quiet, new_directory, note, print_error, training
from fedda.errors import InputError, MissingExtraError, writing
from fedda.experiments import compare
from fedda.reports import statistics
from fedda.reports.runs import read_runs
from fedda.simulate.run import why_untrained
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
    out_dir: Out = None,
    threshold: Threshold = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several algorithms on one task, from the same model and with the same cohorts.

    With no arguments: 100 clients with handwritten digits, five algorithms, well under a minute.
    Given the --out of an interrupted comparison, it finishes that comparison.
    """
    words = settings or []
    directory = out_dir or new_directory("compare")
    planned = {} if words or everything or seeds > 1 else compare.written(directory)
    planned = planned or _planned(words, everything, seeds)

    def hint() -> str:
        if not (directory / compare.FILE).exists():
            return "Nothing was written."
        return f"Continue with: fedda compare --out {directory}"

    with bars(quiet) as add, training(hint):
        summaries = compare.train(planned, directory, lambda label: run_bar(add(label)))
    rows = statistics.table(read_runs([directory]), threshold)
    if as_json:
        table = [row._asdict() for row in rows]
        print(json.dumps({"directory": str(directory), "runs": summaries, "table": table}))
    else:
        print_rows(rows, threshold)
    try:
        write_report([directory], directory, threshold)
    except MissingExtraError as error:
        note(f"No report: {error}")
    untrained = 0
    for name, summary in zip(planned, summaries, strict=True):
        if why := why_untrained({**summary, "round": summary["rounds"]}):
            print_error(f"{name}: {why}")
            untrained += 1
    if untrained == len(planned):
        raise typer.Exit(1)


def _planned(words: list[str], everything: bool, seeds: int) -> compare.Plans:
    names = [word for word in words if "=" not in word and not word.endswith(".toml")]
    others = [word for word in words if word not in names]
    values = config.from_words(others)
    if "algorithm" in values:
        raise InputError(
            "compare takes algorithms by name: fedda compare fedavg fedda-adam. Remove the setting "
            "algorithm."
        )
    if names and everything:
        raise InputError("give names of algorithms or --all, not both.")
    compared = algorithms.names() if everything else list(dict.fromkeys(names)) or list(COMPARED)
    first_seed = config.resolve({"seed": values.pop("seed", 0)}).seed
    own, notes = compare.shared(compared, values)
    note(*notes)
    return compare.plans(own, first_seed, seeds)
