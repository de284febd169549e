"""Tables of finished runs: the paper's numbers and ours, FedDA and the best others, tuning."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda import algorithms
from fedda.errors import InputError
from fedda.reports.statistics import Interval, interval
from fedda.reports.tables import markdown_table
from fedda.storage.files import read_json
from fedda.tasks.config import Config
from fedda_reproduction.inference import Difference, Finding, holm
from fedda_reproduction.paper import cells, comparison
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import METHOD_TABLES, Experiment, experiments
from fedda_reproduction.paper.methods import OPTIMISER_NAMES, TASKS, label, ordered

Rows = Sequence[Mapping[str, str]]  # a table: text by column

NUMBER = re.compile(r"[-+\d]|not finite")  # how the cells of a column of numbers begin
PLACES = {
    Finding.AHEAD: "▲ ahead",
    Finding.EQUIVALENT: "= equivalent",
    Finding.UNDECIDED: "? undecided",
    Finding.BEHIND: "▼ behind",
    None: "-",
}
# Where data are from, if the cells name no more than the format of the files.
FEMNIST = (
    "396 writers of LEAF's FEMNIST, with LEAF's split, in the layout of TensorFlow Federated: "
    "not its 3,400 writers, which the paper has."
)
CIFAR100 = (
    "CIFAR-100 in its layout for Python, split into 500 clients by our own Pachinko allocation. "
    "The images are not byte for byte the official ones."
)
ORIGINS = {"cifar100": CIFAR100, "emnist": FEMNIST, "emnist-autoencoder": FEMNIST}
UNCOMMITTED = " °"  # the mark of results of uncommitted code
TUNING = {
    "algorithm": str,
    "best": ({"train_loss": float, "at_the_end": [str]}, None),
    "runs": int,
    "rounds": int,
    "seeds": [int],
}


def markdown(rows: Rows) -> str:
    """Return a table in Markdown with numbers on the right, or a dash if it has no rows."""
    if not rows:
        return "-"
    columns = zip(*(row.values() for row in rows), strict=True)
    align = ["r" if all(map(NUMBER.match, column)) else "l" for column in columns]
    return markdown_table([list(rows[0]), *(list(row.values()) for row in rows)], "".join(align))


def text(value: Interval | float | None) -> str:
    """Format a number for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}".removesuffix("0")
    if math.isnan(value.mean):
        return "not finite"
    return f"{value.mean:.4f}" + ("" if value.half is None else f" ± {value.half:.4f}")


# ------------------------------------------------------------------------------- an experiment


def rows(
    experiment: Experiment, finished: Iterable[Cell], rounds: int | None = None
) -> list[dict[str, str]]:
    """Return a row for each run of an experiment over its seeds, with the published numbers.

    Missing runs have a row, too. Runs that differ in precision or data are separate rows. Columns
    without published numbers are left out.
    """
    made = []
    for entry, lists in comparison.variants(experiment.entries, finished, rounds):
        config = entry.resolved(rounds=rounds)
        at = None if entry.at is None else min(entry.at, config.rounds)
        for seeds in lists or [[]]:
            failures = [c.content["nonfinite_clients"] + c.content["skipped_rounds"] for c in seeds]
            made.append(
                {
                    "run": entry.label,
                    "paper": text(entry.paper),
                    "elsewhere": text(entry.elsewhere),
                    "ours": _over_seeds([cell.mean(at) for cell in seeds]),
                    "last": _over_seeds([cell.final(at) for cell in seeds]),
                    "seeds": f"{len(seeds)}{_uncommitted(seeds)}" if seeds else "-",
                    "not finite": str(sum(failures)) if seeds else "-",
                    "precision": seeds[0].config.precision if seeds else "-",
                    "settings": settings(config),
                }
            )
    empty = [name for name in ("paper", "elsewhere") if {row[name] for row in made} == {"-"}]
    return [{name: row[name] for name in row if name not in empty} for row in made]


def _uncommitted(seeds: Iterable[Cell]) -> str:
    return UNCOMMITTED if any(cell.uncommitted for cell in seeds) else ""


def _over_seeds(values: Sequence[float | None]) -> str:
    return text(interval(values)) if values else "-"


def settings(config: Config) -> str:
    """Return the rates of a run, and its other settings that are not the defaults."""
    options = algorithms.options(config.algorithm)
    chosen = {name: value for name, value in config.chosen.items() if name in options}
    defaults = algorithms.defaults(config.algorithm, **chosen)
    rates = ("client_lr", "server_lr", "eps", "tau", "a", "kappa")
    shown = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in config.chosen.items()
        if name in rates or value != defaults[name]
    ]
    unit = config.local_unit.removesuffix("s" if config.local_work == 1 else "")
    full = [f"stabilise {config.stabilise:g}"] if config.stabilise > 0 else []
    return ", ".join([*shown, f"{config.local_work} {unit}", *full])


def counted(
    experiment: Experiment, finished: Iterable[Cell], rounds: int | None = None
) -> tuple[int, int]:
    """Return how many runs of an experiment are finished, and how many it has.

    Several entries may share a run. Runs are of the experiment's length, or of `rounds`. Those of
    an earlier version of their algorithm do not count as finished.
    """
    wanted = {cells.group(entry.resolved(rounds=rounds)) for entry in experiment.entries}
    made = {cell.group for cell in finished if not cell.outdated}
    return len(wanted & made), len(wanted)


def section(experiment: Experiment, finished: Sequence[Cell]) -> str:
    """Return the state, the note and the table of an experiment in Markdown."""
    done, wanted = counted(experiment, finished)
    state = f"`fedda reproduce {experiment.name}`: {done} of {wanted} runs. {experiment.note}"
    whole = experiment.name in METHOD_TABLES
    shown = [row for row in rows(experiment, finished) if whole or row["seeds"] != "-"]
    return f"{state.strip()}\n\n{markdown(shown)}"


# --------------------------------------------------------------------------------- other tables


def fedda_columns(finished: Sequence[Cell]) -> Rows:
    """Compare FedDA with the best other method in every column of the paper's tables of methods."""
    made = []
    for column in comparison.columns(finished):
        if not column.ours:
            continue
        table, fedda, found = column.table, f"fedda-{column.optimiser}", column.difference
        printed = {entry.algorithm: entry.paper or 0.0 for entry in experiments()[table].entries}
        others = comparison.optimiser_columns(table)[column.optimiser]
        best = max if column.ours[0].content["higher_is_better"] else min
        theirs = best((name for name in others if name != fedda), key=printed.__getitem__)
        made.append(
            {
                "table": experiments()[table].title.partition(",")[0],
                "FedDA": OPTIMISER_NAMES[column.optimiser],
                "ours": _result(column.ours),
                "best other, ours": f"{_method(column.rival)} {_result(column.theirs)}".strip(),
                "better by, 95 %": "-" if found is None else better(found),
                "p": "-" if found is None or math.isnan(found.p) else f"{found.p:.2g}",
                "p, Holm": "-" if math.isnan(column.p) else f"{column.p:.2g}",
                "it is": PLACES[column.finding],
                "paper": text(printed[fedda]),
                "best other, paper": f"{_method(theirs)} {text(printed[theirs])}",
                "seeds": f"{len(column.ours)}, {len(column.theirs)}",
            }
        )
    return made


def server_rates(finished: Sequence[Cell]) -> Rows:
    """Compare FedDA with FedOpt on Stack Exchange at equal server rates, and each at its best.

    Holm's correction is over these comparisons.
    """
    runs = comparison.runs("table5-rates", finished, lambda entry: entry.label)
    made: list[dict[str, str]] = []
    p_values: list[float] = []

    def compare(rate: str, ours: str, theirs: str) -> None:
        if min(len(runs.get(ours, [])), len(runs.get(theirs, []))) == 0:
            return
        found = comparison.margin(runs[ours], runs[theirs])
        p_values.append(found.p)
        made.append(
            {
                "server_lr": rate,
                "FedDA": f"{ours.removeprefix('FedDA, ')}: {_result(runs[ours])}",
                "FedOpt": f"{theirs.removeprefix('FedOpt, ')}: {_result(runs[theirs])}",
                "FedDA better by, 95 %": better(found),
                "seeds": f"{len(runs[ours])}, {len(runs[theirs])}",
            }
        )

    for optimiser in ("Adam", "AdaGrad"):
        fedda, fedopt = (
            [name for name in runs if name.startswith(f"{method}, {optimiser},")]
            for method in ("FedDA", "FedOpt")
        )
        for ours in fedda:
            rate = ours.rpartition(" ")[2]
            for theirs in fedopt:
                if f"server_lr {rate}" in theirs.split(", "):
                    compare(rate, ours, theirs)
        if fedda and fedopt:
            best = [max(names, key=lambda n: comparison.mean(runs[n])) for names in (fedda, fedopt)]
            compare("each at its best", *best)
    for row, p in zip(made, holm(p_values), strict=True):
        row["p, Holm"] = "-" if math.isnan(p) else f"{p:.2g}"
    return made


def better(found: Difference) -> str:
    """Format a difference and its interval, if it has one."""
    interval = "" if math.isnan(found.low) else f" [{found.low:+.4f}, {found.high:+.4f}]"
    return f"{found.mean:+.4f}{interval}"


def _method(algorithm: str | None) -> str:
    return label(algorithm).partition(",")[0] if algorithm else ""


def _result(seeds: Sequence[Cell]) -> str:
    return _over_seeds([cell.mean() for cell in seeds])


def tuning(folder: Path) -> Rows:
    """Return the lowest training loss of each method's grid, with a column for each task."""
    best_points: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("tuning/*/*.json")):
        try:
            content = read_json(path, TUNING)
            algorithms.options(content["algorithm"])  # refuses an unknown one
            points = content["runs"] // len(content["seeds"])
        except (ValueError, ZeroDivisionError) as error:
            raise InputError(
                f"{path} is not what fedda_reproduction.tune writes: {error}. Delete it, and tune "
                "that algorithm again."
            ) from error
        budget = f"{points} points x {content['rounds']} rounds"
        task = f"{TASKS.get(path.parent.name, path.parent.name)}, {budget}"
        best_points.setdefault(task, {})[content["algorithm"]] = content["best"]
    known = {name for by_name in best_points.values() for name in by_name}
    made = []
    for name in ordered([name for name in algorithms.names() if name in known]):
        row = {"method": label(name)}
        for task, by_name in best_points.items():
            best = by_name.get(name, {"train_loss": None})
            row[task] = "-" if best else "not finite"
            if best and best["train_loss"] is not None:
                lowest = min(point["train_loss"] for point in by_name.values() if point)
                end = " (lowest)" if best["train_loss"] == lowest else ""
                row[task] = f"{best['train_loss']:.4g}{'†' if best['at_the_end'] else ''}{end}"
        made.append(row)
    return made


def grids(folder: Path, task: str) -> Rows:
    """Return how many values of each setting a method was tuned over, and which end was chosen."""
    made = []
    for path in sorted(folder.glob(f"tuning/{task}/*.json")):
        content = read_json(path, TUNING | {"grid": {...: [float]}})
        grid, best = content["grid"], (content["best"] or {"hyper": {}})["hyper"]
        ends = [n for n in grid if len(grid[n]) > 1 and best.get(n) in (min(grid[n]), max(grid[n]))]
        made.append(
            {
                "method": label(content["algorithm"]),
                "values": ", ".join(f"{name} {len(values)}" for name, values in grid.items()),
                "chosen at an end of": ", ".join(ends) or "-",
            }
        )
    return made


def sources(finished: Sequence[Cell]) -> Rows:
    """Return the runs, data and devices of each task."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for cell in finished:
        by_task.setdefault(cell.config.task, []).append(cell.content)
    return [
        {
            "task": TASKS.get(task, task),
            "runs": str(len(contents)),
            "clients": _each(str(content.get("clients", "-")) for content in contents),
            "finished": f"{min(c['date'] for c in contents):.10} to "
            f"{max(c['date'] for c in contents):.10}",
            "device": _each(content["device"] for content in contents),
            "data": ORIGINS.get(
                task, max(contents, key=lambda c: c["date"])["data"].get("words", "-")
            ),
        }
        for task, contents in sorted(by_task.items())
    ]


def _each(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values)))
