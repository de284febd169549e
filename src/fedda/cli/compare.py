"""The command `fedda compare`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.completion import compared_words
from fedda.cli.report import Pdf, Threshold, print_rows
from fedda.cli.terminal import (
    Json,
    Out,
    Quiet,
    new_directory,
    note,
    print_error,
    refuse_options,
    say,
    training,
)
from fedda.errors import InputError, MissingExtraError, unknown_setting, writing
from fedda.tasks import config, names

if TYPE_CHECKING:
    from fedda.experiments.compare import Plans

COMPARED = (
    *("fedavg", "fedopt-sgdm", "fedopt-adam", "fedopt-adagrad"),
    *("fedda-sgdm", "fedda-adam", "fedda-adagrad"),
)


@writing("--out")
def compare_command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALGORITHM]... [CONFIG.toml] [KEY=VALUE]...",
            help=f"Default: {', '.join(COMPARED)}.",
            show_default=False,
            autocompletion=compared_words,
            callback=refuse_options,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Compare all algorithms.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each algorithm.")] = 1,
    out_dir: Out = None,
    threshold: Threshold = None,
    pdf: Pdf = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several algorithms on one task, from the same model and with the same cohorts.

    Without arguments: seven algorithms on handwritten digits of 100 clients, in under a minute.
    With only the --out of an interrupted comparison, it finishes that comparison.

    For example: `fedda compare my_method.py fedavg --seeds 5`
    """
    words = settings or []
    _check_words(words, everything)

    from fedda.experiments import compare
    from fedda.reports import comparison, statistics
    from fedda.reports.runs import read_runs
    from fedda.simulate import devices
    from fedda.simulate.progress import bars, run_bar
    from fedda.simulate.run import why_untrained

    devices.start_up()
    directory = out_dir or new_directory("compare")
    planned = {} if words or everything or seeds > 1 else compare.written(directory)
    planned = planned or _planned(words, everything, seeds)

    def hint() -> str:
        if not (directory / compare.FILE).exists():
            return "Nothing was written."
        return f"Continue with: fedda compare --out {directory}"

    with training(hint), bars(quiet) as add:
        summaries = compare.train(planned, directory, lambda label: run_bar(add(label)))
    trained = read_runs([directory])
    rows = statistics.table(trained, threshold)
    if as_json:
        table = [row._asdict() for row in rows]
        print(json.dumps({"directory": str(directory), "runs": summaries, "table": table}))
    else:
        print_rows(rows, threshold)
    try:
        report = comparison.write(trained, directory, threshold, pdf)
        if not as_json:
            say(report.verdict)
        note(*report.notes, f"Report: {report.files[0]}")
    except MissingExtraError as error:
        note(f"No report: {error}")
    untrained = 0
    for name, summary in zip(planned, summaries, strict=True):
        if why := why_untrained({**summary, "round": summary["rounds"]}):
            print_error(f"{name}: {why}")
            untrained += 1
    if untrained == len(planned):
        raise typer.Exit(1)


def _split(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the algorithms that words of a command line name, and the settings."""
    compared = [word for word in words if "=" not in word and not word.endswith(".toml")]
    return compared, config.from_words([word for word in words if word not in compared])


def _check_words(words: list[str], everything: bool) -> None:
    """Refuse wrong names, before JAX is imported."""
    compared, values = _split(words)
    if "algorithm" in values:
        raise InputError(
            "compare takes algorithms by name: fedda compare fedavg fedda-adam. Remove the setting "
            "algorithm."
        )
    if compared and everything:
        raise InputError("give names of algorithms or --all, not both.")
    of_all = {key: value for key, value in values.items() if key in config.FIELDS}
    for name in compared or COMPARED:
        config.check_names({**of_all, "algorithm": name})
    known = [key for name in COMPARED for key in names.algorithms()[name]["settings"]]
    for key in values.keys() - of_all.keys():
        if not config.owners_of(key) and not any(name.endswith(".py") for name in compared):
            raise unknown_setting("setting", key, (*config.FIELDS, *known))


def _planned(words: list[str], everything: bool, seeds: int) -> "Plans":
    from fedda.experiments import compare

    given, values = _split(words)
    compared = list(names.algorithms()) if everything else list(dict.fromkeys(given or COMPARED))
    first_seed = config.resolve({"seed": values.pop("seed", 0)}).seed
    own, notes = compare.shared(compared, values)
    note(*notes)
    return compare.plans(own, first_seed, seeds)
