"""The pages of results: one screen (`results/README.md`), and every comparison of the study.

Their text is written by hand in `templates/`, and every number is filled in. `statements` has the
sentences that hold only for some numbers: `fedda study --write` names those that no longer hold.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedda.reports import statistics
from fedda.reports.html import render
from fedda.storage.files import write_whole
from fedda_reproduction.inference import Finding
from fedda_reproduction.paper import cells as paper_cells
from fedda_reproduction.paper import methods as paper_methods
from fedda_reproduction.paper import verdicts as paper_verdicts
from fedda_reproduction.study import analysis, figures
from fedda_reproduction.study.analysis import CONTROLS, MARGIN, RIVALS, Comparison, Outcome, Study
from fedda_reproduction.study.design import CONDITIONS, METHODS

MARKERS = {
    **{"confirmed": "🟢", "partly confirmed": "🟡", "not confirmed": "🔴"},
    **{"undecided": "⚪", "refuted": "🔴"},
    **{"wins": "🟢", "draws": "🟡", "loses": "🔴"},
}


class Claim(NamedTuple):
    """A claim of the paper in a few words, its verdict, and what was found."""

    name: str
    claim: str
    verdict: str
    found: str


def claims(folder: Path) -> list[Claim]:
    """Return F1 to F14, from the results folder of the paper's tables."""
    texts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    finished = paper_cells.read_all(folder).finished
    checks = paper_verdicts.checks(finished, **paper_verdicts.read_beside(folder))
    return [
        Claim(
            name,
            texts[name]["claim"],
            check.verdict,
            texts[name]["found"].format(**check.numbers) if check.numbers else "not measured",
        )
        for name, check in checks.items()
    ]


# ----------------------------------------------------------------------------------------- numbers


def lowest(comparison: Comparison) -> str:
    """Format the lowest difference of the conditions."""
    return figures.interval(min(outcome.difference for outcome in comparison.outcomes))


def highest(comparison: Comparison) -> str:
    """Format the highest difference of the conditions."""
    return figures.interval(max(outcome.difference for outcome in comparison.outcomes))


def ending(record: Mapping[str, Any], name: str = "plain") -> str:
    """Format the mean of an ending over seeds, in points, with its 95 % interval."""
    return "{:.1f} ± {:.1f}".format(*statistics.interval(analysis.ends(record, name)))


def controls(found: Study) -> list[Comparison]:
    """Return the comparisons of each FedDA with its control, in the order of `CONTROLS`."""
    return [found.h1, found.adam, found.h2]


def numbers(found: Study, folder: Path) -> dict[str, Any]:
    """Return the values that the templates fill in, from the folder of the conditions' files."""
    against = controls(found)
    dates = analysis.dates(found.cells)
    return {
        "study": found,
        "verdicts": found.verdicts,
        "conditions": len(found.h4.outcomes),
        "seeds": {outcome.seeds for outcome in found.h4.all}.pop(),
        "of_controls": {
            "ahead": sum(len(each.where(Finding.AHEAD)) for each in against),
            "behind": sum(len(each.where(Finding.BEHIND)) for each in against),
            "all": sum(len(each.outcomes) for each in against),
        },
        "won": [figures.interval(each.difference) for each in _won_against_control(found)],
        "extension": _standing(found.extension),
        "above": {
            name: sum(outcome.difference.high >= MARGIN for outcome in comparison.outcomes)
            for name, comparison in {"H2": found.h2, "H3": found.h3}.items()
        },
        "not_highest": sum(
            analysis.best(methods, RIVALS) != max(RIVALS, key=lambda name: _mean(methods[name]))
            for methods in found.cells.values()
        ),
        "furthest": _furthest(found),
        "equal": list(map(figures.name, analysis.equal_choices(found.cells))),
        "at_an_end": analysis.at_an_end(folder),
        "tuned": len(found.cells) * len(METHODS),
        "halves": sorted(each.difference.high - each.difference.mean for each in found.h4.outcomes),
        "coverage": coverage(folder),
        "dates": [date[:16].replace("T", " ") for date in (dates[0], dates[-1])],
    }


def _won_against_control(found: Study) -> list[Outcome]:
    """Return how a FedDA that is ahead of the best rival differs from its control there."""
    against = dict(zip(CONTROLS, controls(found), strict=True))
    return [
        next(each for each in against[won.ours].outcomes if each.condition == won.condition)
        for won in found.h4.where(Finding.AHEAD)
    ]


def _standing(comparison: Comparison) -> str:
    won, lost = (len(comparison.where(each)) for each in (Finding.AHEAD, Finding.BEHIND))
    return "draws" if won == lost else "wins" if won > lost else "loses"


def _mean(record: Mapping[str, Any]) -> float:
    return float(np.mean(analysis.ends(record)))


def _furthest(found: Study) -> dict[str, str]:
    """Return the method that ends furthest below its held-out metric."""
    _, condition, name = min(
        (_mean(record) - 100 * analysis.held_out(record)[0], condition, name)
        for condition, methods in found.cells.items()
        for name, record in methods.items()
    )
    record = found.cells[condition][name]
    mean, half = statistics.interval(analysis.ends(record))
    return {
        "condition": figures.name(condition),
        "method": METHODS[name].label,
        "held_out": f"{analysis.held_out(record)[0]:.2f}",
        "end": f"{mean / 100:.1f} ± {(half or 0) / 100:.1f}",
    }


def coverage(folder: Path) -> list[list[str]]:
    """Return the table of what was run, with a row for each task; `-` was not run."""
    finished = [cell.config.task for cell in paper_cells.read_all(folder.parent).finished]
    columns = list(dict.fromkeys(map(figures.factors, CONDITIONS)))
    rows = [["", *(column or "T 5, C 10" for column in columns), "runs of the tables"]]
    for task, title in {**figures.TASKS, **paper_methods.TASKS}.items():
        row = [title]
        for column in columns:
            run = [
                each for each in CONDITIONS if (each.task, figures.factors(each)) == (task, column)
            ]
            row.append(", ".join(sorted(map(figures.variety, run))) or ("●" if run else "-"))
        rows.append([*row, str(finished.count(task) or "-")])
    return rows


# --------------------------------------------------------------------------------------- sentences


def statements(found: Study) -> dict[str, bool]:
    """Return the sentences that hold only for some numbers, and whether they hold."""
    won = _won_against_control(found)
    against = controls(found)
    ahead = [len(each.where(Finding.AHEAD)) for each in (found.h4, *against)]
    undecided = [name for name, verdict in found.verdicts.items() if verdict == "undecided"]
    return {
        "but ahead of its control": ahead[0] > 0 and not any(ahead[1:]),
        "Where FedDA is ahead of the best rival, it ties with its control": (
            bool(won) and all(outcome.ties for outcome in won)
        ),
        "H2 and H3 need every interval below 1 point": {"H2", "H3"} <= {*undecided},
        "a tie within ±1 is often out of reach": 2 * found.h4.ties < len(found.h4.outcomes),
    }


# ------------------------------------------------------------------------------------------- write


def pages(found: Study, folder: Path) -> dict[Path, str]:
    """Return the text of each page, from the folder of the conditions' files."""
    functions = (ending, highest, lowest, analysis.held_out, figures.interval, figures.name)
    values: dict[str, Any] = {function.__name__: function for function in functions}
    values |= {"Finding": Finding, "markers": MARKERS, "methods": METHODS}
    values |= numbers(found, folder) | {"claims": claims(folder.parent)}
    templates = {folder.parent / "README.md": "results.md", folder / "README.md": "study.md"}
    return {
        path: render(template, package="fedda_reproduction.study", **values)
        for path, template in templates.items()
    }


def write(folder: Path) -> list[str]:
    """Write the pages and figures. Return a message for each sentence that no longer holds."""
    found = analysis.judge(analysis.read(folder))
    for path, text in pages(found, folder).items():
        write_whole(path, text)
    figures.forest(found, folder / "forest.png")
    figures.heat(found, folder / "heat.png")
    return [
        f"{sentence!r} no longer holds: write it again, in study/templates/results.md."
        for sentence, holds in statements(found).items()
        if not holds
    ]
