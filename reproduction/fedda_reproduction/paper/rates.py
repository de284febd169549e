"""How FedDA reacts to its rates: the paper's tables 6 to 11 beside ours, as strips of colour."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from fedda.report import figures
from fedda.report.statistics import Interval
from fedda_reproduction.paper import evidence, experiments
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.methods import title

TABLES = tuple(f"table{number}" for number in range(6, 12))


class Strip(NamedTuple):
    """One table on one task: what each pair of rates came to."""

    task: str
    varied: str  # the rate that is
    fixed: str  # the other, and its value
    rates: list[float]
    paper: list[float]
    ours: list[Interval | None]  # None: not run yet

    @property
    def alike(self) -> tuple[int, int] | None:
        """Pairs in the paper's order, and all; None where some are missing."""
        if None in self.ours:
            return None
        return evidence.alike(self.paper, [_worth(each) for each in self.ours])


def _worth(ours: Interval | None) -> float:
    return 0.0 if ours is None or math.isnan(ours.mean) else ours.mean


def strips(name: str, found: Sequence[Cell]) -> list[Strip]:
    """Those of a table that were run at least in part."""
    experiment = experiments.experiments()[name]
    lines = evidence.lines_of(name, found)
    made = []
    for task in experiment.tasks:
        entries = [entry for entry in experiment.entries if entry.task == task]
        entries.sort(key=lambda entry: (entry.values["client_lr"], entry.values["server_lr"]))
        varied, fixed = "client_lr", "server_lr"
        if len({entry.values[varied] for entry in entries}) == 1:
            varied, fixed = fixed, varied
        ours = [lines[entry.label].ours for entry in entries]
        if any(each is not None for each in ours):
            made.append(
                Strip(
                    task,
                    varied,
                    f"{fixed} {entries[0].values[fixed]:g}",
                    [entry.values[varied] for entry in entries],
                    [entry.paper or 0.0 for entry in entries],
                    ours,
                )
            )
    return made


def _share(strip: Strip, value: float) -> float:
    """A value as a part of the highest of its strip."""
    highest = max([*strip.paper, *map(_worth, strip.ours)])
    return value / highest if highest > 0 else 0.0


def agreement(strip: Strip) -> str:
    """How far ours are in the paper's order, in words."""
    if strip.alike is None:
        ran = sum(each is not None for each in strip.ours)
        return f"{ran} of {len(strip.ours)} were run"
    agree, pairs = strip.alike
    return f"{agree} of {pairs} pairs in the paper's order"


def html(strip: Strip) -> str:
    """A small table, in which a stronger colour is a higher value."""

    def cells(name: str, values: Sequence[Interval | float | None]) -> str:
        shown = []
        for value in values:
            share = _share(strip, value if isinstance(value, float) else _worth(value))
            words = "not run" if value is None else _short(value)
            colour = f"rgba(0, 114, 178, {0.6 * share:.2f})"
            shown.append(f"<td style='background: {colour}'>{escape(words)}</td>")
        return f"<tr><th scope='row'>{name}</th>{''.join(shown)}</tr>\n"

    rates = "".join(f"<th>{rate:g}</th>" for rate in strip.rates)
    caption = f"{title(strip.task)}, {strip.fixed}: {agreement(strip)}"
    return (
        f"<div class='scroll'><table class='strip'><caption>{escape(caption)}</caption>\n"
        f"<thead><tr><th scope='row'>{strip.varied}</th>{rates}</tr></thead>\n"
        f"<tbody>{cells('paper', strip.paper)}{cells('ours', strip.ours)}</tbody></table></div>\n"
    )


def _short(value: Interval | float) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "not finite" if math.isnan(value.mean) else f"{value.mean:.3f}"


def draw(name: str, drawn: Sequence[Strip], directory: Path) -> list[Path]:
    """The strips of a table as one figure, PNG and PDF."""
    figure = figures.new_figure(3.6 * len(drawn), 1.9)
    figure.suptitle(experiments.experiments()[name].title, fontsize=10)
    for number, strip in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), number)
        rows: list[Sequence[Interval | float | None]] = [strip.paper, strip.ours]
        shares = [
            [_share(strip, value if isinstance(value, float) else _worth(value)) for value in row]
            for row in rows
        ]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        for down, row in enumerate(rows):
            for across, value in enumerate(row):
                words = "not run" if value is None else _short(value)
                axes.text(across, down, words, ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(strip.rates)), [f"{rate:g}" for rate in strip.rates])
        axes.set_yticks((0, 1), ("paper", "ours"))
        axes.set_xlabel(f"{strip.varied} ({strip.fixed})\n{agreement(strip)}", fontsize=8)
        axes.set_title(title(strip.task), fontsize=9)
        axes.tick_params(length=0, labelsize=8)
    return figures.save(figure, directory / f"{name}.png", directory / f"{name}.pdf")
