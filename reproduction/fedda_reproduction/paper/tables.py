"""Paper beside ours: lines of numbers out of finished cells, for a terminal or `README.md`."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedda import algorithms
from fedda.report.statistics import Interval, interval
from fedda.report.tables import markdown_table
from fedda.tasks import config as configs
from fedda.tasks.config import Config
from fedda_reproduction.paper import cells, corrections
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import Entry, Experiment

ALWAYS_WHOLE = ("table2", "table3", "table4", "table5")  # shown with what was not run yet


class Line(NamedTuple):
    label: str
    settings: str
    paper: float | None
    elsewhere: float | None
    ours: Interval | None = None
    last: Interval | None = None
    seeds: int = 0
    failures: int = 0
    variant: str = ""  # what tells two lines of one run from each other
    mark: str = ""  # of results that have to be run again; see `corrections`


def lines(experiment: Experiment, found: Iterable[Cell], rounds: int | None = None) -> list[Line]:
    """What an experiment is about, beside what was found of it: a line each.

    Runs of other seeds are one line; those of another precision or other data are another.
    """
    by_group: dict[str, list[Cell]] = {}
    for cell in found:
        by_group.setdefault(cell.group, []).append(cell)
    made = []
    for entry in experiment.entries:
        config = resolved(entry, rounds)
        at = None if entry.at is None else min(entry.at, config.rounds)
        line = Line(entry.label, settings(config), entry.paper, entry.elsewhere)
        variants: dict[tuple[str, str], list[Cell]] = {}
        for one in by_group.get(cells.group(config), []):
            variants.setdefault((one.config.precision, one.data or ""), []).append(one)
        for (precision, data), own in sorted(variants.items()):
            of_other = len({key[1] for key in variants}) > 1
            made.append(
                line._replace(
                    ours=interval([one.mean(at) for one in own]),
                    last=interval([one.final(at) for one in own]),
                    seeds=len(own),
                    failures=sum(
                        one.content["nonfinite_clients"] + one.content["skipped_rounds"]
                        for one in own
                    ),
                    variant=precision + (f", data {data[:8]}" if of_other else ""),
                    mark=corrections.mark(own),
                )
            )
        if not variants:
            made.append(line)
    return made


def resolved(entry: Entry, rounds: int | None, **own: object) -> Config:
    """The configuration of an entry, of another length where one is asked for."""
    length = {} if rounds is None else {"rounds": rounds}
    return configs.resolve({**entry.values, **length, **own})


def settings(config: Config) -> str:
    """The rates of a run, and what of the rest is not the algorithm's default."""
    options = algorithms.options(config.algorithm)
    chosen = {name: value for name, value in config.chosen.items() if name in options}
    defaults = algorithms.defaults(config.algorithm, **chosen)
    rates = ("client_lr", "server_lr", "eps", "tau", "a", "kappa")
    shown = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in config.chosen.items()
        if name in rates or value != defaults[name]
    ]
    work = f"{config.local_work} {config.local_unit}".removesuffix(
        "s" if config.local_work == 1 else ""
    )
    return ", ".join(
        [*shown, work, *([f"stabilise {config.stabilise:g}"] * (config.stabilise > 0))]
    )


# ------------------------------------------------------------------------------------------ as text


def text(value: Interval | float | None) -> str:
    """A number as the tables show it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}".removesuffix("0")
    if math.isnan(value.mean):
        return "not finite"
    return f"{value.mean:.4f}" + ("" if value.half is None else f" ± {value.half:.4f}")


def rows(made: Sequence[Line]) -> list[list[str]]:
    """The lines as text under a header, without columns that say nothing."""
    header = ["run", "paper", "elsewhere", "ours", "last", "seeds", "not finite", "precision"]
    body = [
        [
            f"{line.label}{line.mark}",
            text(line.paper),
            text(line.elsewhere),
            text(line.ours),
            text(line.last),
            str(line.seeds or "-"),
            str(line.failures) if line.seeds else "-",
            line.variant or "-",
        ]
        for line in made
    ]
    optional = ("paper", "elsewhere")
    kept = [
        i
        for i, name in enumerate(header)
        if name not in optional or any(row[i] != "-" for row in body)
    ]
    return [[row[i] for i in kept] for row in (header, *body)]


def markdown(made: Sequence[Line]) -> str:
    """The lines as a table, with the settings of each run as the last column."""
    header, *body = rows(made)
    body = [[*row, line.settings] for row, line in zip(body, made, strict=True)]
    return markdown_table([[*header, "settings"], *body], "l" + "r" * (len(header) - 1) + "l")


def other_length(experiment: Experiment, rounds: int | None) -> str:
    """A warning that runs of so many rounds stand beside numbers of others, if they do."""
    if rounds is None:
        return ""
    # A number of the paper may be one from the middle of a run.
    lengths = {entry.at or resolved(entry, None).rounds for entry in experiment.entries}
    lengths -= {entry.at for entry in experiment.entries if entry.at and entry.at <= rounds}
    if lengths <= {rounds}:
        return ""
    published = any(entry.paper is not None for entry in experiment.entries)
    whose = "the paper's are" if published else "the experiment's are"
    theirs = " or ".join(f"{length:,}" for length in sorted(lengths))
    ours = "1 round" if rounds == 1 else f"{rounds:,} rounds"
    return f"Ours are after {ours}, {whose} after {theirs}: do not compare them."


def counted(
    experiment: Experiment, found: Iterable[Cell], rounds: int | None = None
) -> tuple[int, int]:
    """How many of an experiment's runs there are, of how many; several entries may share one.

    Those of the experiment's own length or, if that is asked for, of so many rounds.
    """
    wanted = {cells.group(resolved(entry, rounds)) for entry in experiment.entries}
    return len(wanted & {cell.group for cell in found}), len(wanted)


def section(experiment: Experiment, found: Sequence[Cell]) -> str:
    made = lines(experiment, found)
    ran, wanted = counted(experiment, found)
    state = f"`fedda reproduce {experiment.name}`: {ran} of {wanted} runs."
    parts = [f"## {experiment.title}", " ".join([state, *experiment.notes])]
    if experiment.name not in ALWAYS_WHOLE:
        made = [line for line in made if line.seeds]
    if made:
        parts.append(markdown(made))
    return "\n\n".join(parts)
