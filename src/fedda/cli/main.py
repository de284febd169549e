"""The command `fedda`."""

import itertools
import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich import box
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

import fedda
from fedda import algorithms
from fedda.cli import progress
from fedda.cli import tensorboard as tracking
from fedda.cli.data import data_app
from fedda.cli.sweep import sweep_command
from fedda.cli.terminal import Json, Quiet, Settings, err, new_directory, out, print_whole, training
from fedda.data import datasets
from fedda.data.catalogue import DATASETS
from fedda.errors import InputError, unknown, writing
from fedda.experiments import compare
from fedda.experiments import run as experiment
from fedda.report import comparison as report
from fedda.simulate import devices, hosts
from fedda.simulate.result import why_untrained
from fedda.tasks import config

ORDER = ("run", "compare", "report", "sweep", "algorithms", "data", "reproduce", "theory", "bench")


class _Commands(TyperGroup):
    """Lists the commands in the order in which a user meets them, and suggests one, not twice."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = super().list_commands(ctx)
        return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class _WithSettings(TyperCommand):
    """Tells who writes a setting as an option how it is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for each in self.params for name in each.opts}
        for word, following in itertools.zip_longest(args, args[1:]):
            name, _, value = word.partition("=")
            key = name.lstrip("-").replace("-", "_")
            if name.startswith("--") and name not in options and key in _every_setting():
                given = following if following and not following.startswith("-") else "VALUE"
                value = value or given
                raise InputError(f"{key} is a setting, not an option: write {key}={value}")
        return super().parse_args(ctx, args)


def _every_setting() -> set[str]:
    of_tasks = (config.task_settings(task) for task in config.tasks())
    of_algorithms = (algorithms.settings(name, {}) for name in algorithms.names())
    return {*config.FIELDS}.union(*of_tasks, *of_algorithms)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fits paragraphs to the terminal
)
app.add_typer(data_app, name="data", cls=_Commands)
app.command("sweep", cls=_WithSettings)(writing("--out")(sweep_command))
for _plugin in entry_points(group="fedda.commands"):  # such as those of a source checkout
    app.command(_plugin.name)(_plugin.load())

SYMBOLS = """W is the server's model, N_i the number of examples of client i, and g_i(w; batch) the
gradient at w of its mean loss over a mini-batch."""
COMPARED = ("fedavg", "fedprox", "fedda-sgdm", "fedda-adam", "fedda-adagrad")

ABOUT_SETTINGS = f"""
The default is algorithm={config.Config.algorithm} task={config.Config.task}. Much used: algorithm,
task, model, partition, clients, cohort, rounds, batch, local_work, seed, client_lr, server_lr.

Every algorithm has settings of its own, which `fedda algorithms NAME` lists. `fedda data list`
lists the tasks. Every run has {", ".join(config.FIELDS)}. All values of a run are written to
config.toml in its directory.
"""

Threshold = Annotated[
    float | None,
    typer.Option(
        help="Count the rounds until the metric reaches this.", show_default="95 % of best"
    ),
]


def main() -> None:
    """Runs the command: a wrong input is a message, not a traceback."""
    with hosts.parting():
        try:
            app()
        except (InputError, OSError) as error:
            _print_error(str(error))
            sys.exit(2)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            details = str(error) or "no details are known"
            lack = "RESOURCE_EXHAUSTED" in details or "out of memory" in details.lower()
            if not isinstance(error, MemoryError) and not lack:
                raise
            _print_error(
                f"there is not enough memory ({details}). Lower batch, cohort, clients or chunk, "
                "or choose a smaller model."
            )
            sys.exit(1)
        except SystemExit as stop:
            if stop.code in (130, 143):  # JAX would wait for the rounds under way
                sys.stdout.flush()
                os._exit(stop.code)
            raise


def _print_error(words: str) -> None:
    err.print(f"[bold red]fedda:[/] {escape(words)}", soft_wrap=True)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"fedda {fedda.__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Federated optimisation: FedDA and its baselines, simulated."""
    devices.start_up()


@app.command(cls=_WithSettings, epilog=ABOUT_SETTINGS)
@writing("--out")
def run(
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
    values = _values(settings or [])
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
        _print_table(report.table(report.read_runs([directory])))
        out.print(f"Written to {directory}", soft_wrap=True)
    if why := why_untrained(outcome.result.history[-1]):
        _print_error(why)
        raise typer.Exit(1)


@app.command("compare", cls=_WithSettings)
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
    rows = report.table(report.read_runs([directory]), threshold)
    if as_json:
        table = [row._asdict() for row in rows]
        print(json.dumps({"directory": str(directory), "runs": summaries, "table": table}))
    else:
        _print_table(rows, threshold)
    _write_report([directory], directory, threshold, needed=False)
    untrained = {
        name: why
        for name, summary in zip(planned, summaries, strict=True)
        if (why := why_untrained({**summary, "round": summary["rounds"]}))
    }
    for name, why in untrained.items():
        _print_error(f"{name}: {why}")
    if len(untrained) == len(planned):
        raise typer.Exit(1)


def _planned(words: list[str], everything: bool, seeds: int) -> compare.Plans:
    names = [word for word in words if "=" not in word and not word.endswith(".toml")]
    others = [word for word in words if word not in names]
    values = _values(others)
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


def _values(words: list[str]) -> dict[str, Any]:
    """The settings of a command line; a user's own data are no task, but easily taken for one."""
    values = config.from_words(words)
    task = values.get("task")
    if task not in (*config.tasks(), *DATASETS) and task in datasets.names():
        raise InputError(f"unknown task {task!r}. It is a data set: write task=own data={task}")
    return values


@app.command("report")
@writing("--out")
def report_command(
    directories: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where to write.", show_default="first DIRECTORY")
    ] = None,
    threshold: Threshold = None,
) -> None:
    """Write one self-contained page, figures and a table about finished or unfinished runs."""
    runs = report.read_runs(directories)
    _print_table(report.table(runs, threshold), threshold)
    _write_report(directories, out_dir or directories[0], threshold, needed=True)


@app.command("algorithms")
def algorithms_command(
    name: Annotated[str | None, typer.Argument(help="One of them.", show_default=False)] = None,
) -> None:
    """List the algorithms, or show the equations and settings of one."""
    if name is None:
        listing = Table(box=box.SIMPLE)
        listing.add_column("name", no_wrap=True)
        listing.add_column("models\ndown/up", justify="center")
        listing.add_column("what it is")
        for each, make in algorithms.makers().items():
            sent = algorithms.communication(each)
            models = "-" if sent is None else "/".join(map(str, sent))
            listing.add_row(each, models, escape(make.__doc__ or ""))
        out.print(listing)
        return
    known = algorithms.options(name)
    text = (algorithms.module_of(name).__doc__ or "").strip()
    # Lines of equations stay whole.
    out.print(escape(f"{name}\n\n{text}\n\n{SYMBOLS}\n"), soft_wrap=True)
    listing = Table(box=box.SIMPLE, title="Settings", title_justify="left")
    for column in ("name", "default", "may be"):
        listing.add_column(column)
    shown: dict[str, tuple[str, str]] = {}  # an option may bring settings of its own
    for option, value in [("", ""), *((o, v) for o, choices in known.items() for v in choices)]:
        Hyper = algorithms.get(name, **({option: value} if option else {})).Hyper
        for each, domain in algorithms.domains(Hyper).items():
            under = f" (with {option}={value})" if option else ""
            shown.setdefault(each, (f"{Hyper._field_defaults[each]:.3g}", domain.words + under))
    for each, (default, words) in shown.items():
        listing.add_row(each, default, escape(words))
    for each, choices in known.items():
        listing.add_row(each, choices[0], " or ".join(choices))
    out.print(listing)


def _print_table(rows: list[report.Row], threshold: float | None = None) -> None:
    header, *lines = report.text_table(rows)
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
    listing.caption = report.meaning_of_interval(rows) or None
    print_whole(listing)


def _write_report(
    paths: list[Path], directory: Path, threshold: float | None, needed: bool
) -> None:
    try:
        written = report.write(paths, directory, threshold)
    except ImportError as error:
        if needed:
            raise InputError(str(error)) from None
        err.print(escape(f"No report: {error}"))
        return
    for note in written.notes:
        err.print(escape(note), soft_wrap=True)
    err.print(f"Report: {written.files[0]}", soft_wrap=True)


if __name__ == "__main__":
    main()
