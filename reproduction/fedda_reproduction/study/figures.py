"""Draw the forest plot and the heat map of the study: narrow, so that a phone can show them."""

from pathlib import Path
from typing import Any

import numpy as np

from fedda.reports.figures import BLUE, ORANGE, new_figure, save
from fedda_reproduction.inference import Difference, Finding
from fedda_reproduction.study.analysis import MARGIN, Comparison, Outcome, Study
from fedda_reproduction.study.design import CONDITIONS, METHODS, Condition

TASKS = {
    **{"digits": "Digits", "synthetic": "Synthetic", "emnist": "EMNIST"},
    "stackexchange": "Stack Exchange",
}
COLOURS = {Finding.AHEAD: BLUE, Finding.BEHIND: ORANGE}
GREY = "#555555"
MOST = 3  # points at which the colours of the heat map end
WIDTH, ROW = 4.6, 0.42  # inches
DPI = 144
MINUS = "\N{MINUS SIGN}"
COLUMNS = {
    "SGDM\nminus\nFedAvgM": "h1",
    "Adam\nminus\nFedAdam": "adam",
    "AdaGrad\nminus FedAdagrad\nwith momentum": "h2",
    "FedMoments\nminus\nbest rival": "extension",
}


def factors(condition: Condition) -> str:
    """Return the factors of a condition that are not those of its task's first condition."""
    usual = next(each for each in CONDITIONS if each.task == condition.task)
    values = {
        "T": (condition.local_steps, usual.local_steps),
        "C": (condition.cohort, usual.cohort),
        "B": (condition.batch, usual.batch),
    }
    return ", ".join(f"{name} {ours}" for name, (ours, first) in values.items() if ours != first)


def name(condition: Condition) -> str:
    """Return a short name of a condition, for readers."""
    task = f"{TASKS[condition.task]} {variety(condition)}".strip()
    return ", ".join(filter(None, [task, factors(condition)]))


def variety(condition: Condition) -> str:
    """Return the variety of a condition's clients as pages show it."""
    shown = condition.variety.replace("inf", "∞").replace(",", ", ")
    return f"({shown})" if "," in shown else shown


def signed(value: float) -> str:
    """Format a difference to a tenth, with its sign; 0 has none."""
    text = f"{value:+.1f}".replace("-", MINUS)
    return text[1:] if text[1:] == "0.0" else text


def interval(difference: Difference) -> str:
    """Format a difference in points with half of its 95 % interval."""
    return f"{signed(difference.mean)} ± {difference.high - difference.mean:.1f}"


def forest(study: Study, path: Path) -> None:
    """Draw FedDA minus the best rival in each condition, with its interval."""
    outcomes = study.h4.all
    low = min(outcome.difference.low for outcome in outcomes)
    high = max(outcome.difference.high for outcome in outcomes)
    figure = new_figure(WIDTH, 1 + ROW * len(outcomes))
    axes = _axes(figure, outcomes)
    seeds = outcomes[0].seeds
    axes.set_xlabel(f"FedDA {MINUS} best rival, in points; n = {seeds} + {seeds} seeds", fontsize=9)
    axes.axvspan(-MARGIN, MARGIN, color="0.93", zorder=0)
    axes.axvline(0, color="0.4", lw=1)
    axes.axhline(len(study.h4.outcomes) - 0.38, color="0.6", lw=0.8, ls=":")
    for row, outcome in enumerate(outcomes):
        found, colour = outcome.difference, COLOURS.get(outcome.finding, GREY)
        marker = "D" if outcome.condition.confirms else "o"
        axes.plot([found.low, found.high], [row, row], color=colour, lw=2)
        axes.plot(found.mean, row, marker, color=colour, ms=6)
        axes.text(high + 0.4, row, interval(found), va="center", fontsize=8, color=colour)
        pair = f"{METHODS[outcome.ours].label} {MINUS} {METHODS[outcome.theirs].label}"
        axes.text(low, row + 0.38, pair, va="center", fontsize=7, color="0.35")
    axes.set_xlim(low - 0.2, high + 2.6)
    axes.set_xticks(range(int(low), int(high) + 1))
    axes.grid(axis="x", alpha=0.3)
    save(figure, path, dpi=DPI)


def heat(study: Study, path: Path) -> None:
    """Draw the differences of each FedDA and of FedMoments in each condition."""
    columns: list[Comparison] = [getattr(study, column) for column in COLUMNS.values()]
    values = np.array([[each.difference.mean for each in column.all] for column in columns]).T
    figure = new_figure(WIDTH, 1.4 + 0.28 * len(values))
    axes = _axes(figure, study.h4.all)
    shown = axes.imshow(values, cmap="RdBu", vmin=-MOST, vmax=MOST, aspect="auto")
    for (row, place), value in np.ndenumerate(values):
        finding = columns[place].all[row].finding
        axes.text(
            place, row, signed(value), ha="center", va="center", fontsize=8,
            color="white" if abs(value) > 0.7 * MOST else "black",
            weight="bold" if finding in COLOURS else "normal",
        )  # fmt: skip
        if finding in COLOURS:
            axes.texts[-1].set_bbox({"boxstyle": "square,pad=0.3", "fill": False, "lw": 1.2})
    axes.axhline(len(study.h4.outcomes) - 0.5, color="0.2", lw=0.8, ls=":")
    axes.set_xticks(range(len(columns)), list(COLUMNS), fontsize=7.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    bar = figure.colorbar(shown, ax=axes, location="bottom", aspect=40, extend="both")
    bar.set_label("points; blue: FedDA (FedMoments) is higher", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    save(figure, path, dpi=DPI)


def _axes(figure: Any, outcomes: list[Outcome]) -> Any:
    """Return axes with a row for each condition, the first on top."""
    axes = figure.add_subplot()
    axes.set_yticks(range(len(outcomes)), [name(each.condition) for each in outcomes], fontsize=9)
    axes.set_ylim(len(outcomes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes
