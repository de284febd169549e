"""Judge the hypotheses of the protocol, from the files of the conditions alone.

A difference is in points, which are hundredths of the accuracy, or of the recall at 5.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedda.errors import InputError
from fedda_reproduction.inference import LEVEL, Difference, Finding, equivalence, holm, welch
from fedda_reproduction.study import design, study
from fedda_reproduction.study.design import CONDITIONS, METHODS, Condition

MARGIN = 1.0  # points: two methods tie if their difference is smaller
FEDDA = [name for name, method in METHODS.items() if method.fedda]
RIVALS = [name for name, method in METHODS.items() if not (method.fedda or method.own)]
# FedOpt with the optimiser and the momentum of a FedDA. Where there are two, the better is taken.
CONTROLS = {
    "fedda-sgdm": ["fedavgm"],
    "fedda-adam": ["fedadam"],
    "fedda-adagrad": ["fedadagrad-step", "fedadagrad-gradient"],
}

Methods = Mapping[str, Any]  # the records of a condition's methods
Cells = Mapping[Condition, Methods]


class Verdict(enum.StrEnum):
    CONFIRMED = "confirmed"
    UNDECIDED = "undecided"
    REFUTED = "refuted"


class Outcome(NamedTuple):
    """The difference between two methods in a condition."""

    condition: Condition
    ours: str
    theirs: str
    difference: Difference  # in points
    p: float  # by Holm over the other conditions too; the confirmation is tested by itself
    ties: bool  # two one-sided tests show that the difference is smaller than `MARGIN`
    seeds: int  # of each of the two methods

    @property
    def finding(self) -> Finding:
        if self.p < LEVEL:
            return Finding.AHEAD if self.difference.mean > 0 else Finding.BEHIND
        return Finding.EQUIVALENT if self.ties else Finding.UNDECIDED


class Comparison(NamedTuple):
    """The outcomes of a comparison in all conditions, and in the one that only confirms."""

    outcomes: Sequence[Outcome]
    confirmation: Outcome

    def where(self, finding: Finding) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.finding == finding]

    @property
    def ties(self) -> int:
        return sum(outcome.ties for outcome in self.outcomes)

    @property
    def all(self) -> list[Outcome]:
        return [*self.outcomes, self.confirmation]


# ------------------------------------------------------------------------------------------- cells


def read(folder: Path) -> dict[Condition, Methods]:
    """Return the records of all conditions and methods.

    Raises:
        InputError: Something was not run yet.
    """
    cells, missing = {}, []
    for condition in CONDITIONS:
        path = folder / f"{condition.name}.json"
        records = study.read(path)["methods"] if path.exists() else {}
        if any("endings" not in records.get(name, {}) for name in METHODS):
            missing.append(condition.name)
        cells[condition] = records
    if missing:
        raise InputError(
            f"{folder} lacks runs of {', '.join(missing)}: expected all conditions of the "
            "protocol. Run fedda study to make them."
        )
    return cells


def dates(cells: Cells) -> list[str]:
    """Return when each part of the cells was made, sorted."""
    return sorted(
        part["date"]
        for methods in cells.values()
        for record in methods.values()
        for part in (*record["waves"], record["finals"])
    )


def held_out(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return the metric of the chosen point on held-out data, and its loss, negative."""
    return study.best(record)[:2]


def best(methods: Methods, names: Sequence[str]) -> str:
    """Return the method with the highest held-out metric; of equal ones, with the lowest loss."""
    return max(names, key=lambda name: held_out(methods[name]))


def ends(record: Mapping[str, Any], ending: str = "plain") -> list[float]:
    """Return the metric of each seed on its test set, in points; NaN if it is not finite."""
    metric = record["endings"][ending]["metric"]
    return [math.nan if value is None else 100 * value for value in metric]


def gains(record: Mapping[str, Any], ending: str) -> list[float]:
    """Return by how much an ending is above the plain one, for each seed."""
    return list(np.subtract(ends(record, ending), ends(record)))


def at_an_end(folder: Path) -> list[tuple[Condition, str]]:
    """Return the conditions and methods whose chosen point is at an end of a widened axis."""
    found = []
    for condition, methods in read(folder).items():
        cell = study.read(folder / f"{condition.name}.json")
        first = [(axis, end) for axis, end in map(str.split, cell["ends of wave 1"])]
        axes = design.widened(design.AXES, first)
        for name, method in METHODS.items():
            if design.ends(methods[name]["chosen"], axes, method.coordinates):
                found.append((condition, name))
    return found


# ------------------------------------------------------------------------------------- comparisons

# Returns the names of two methods, ours first.
Pair = Callable[[Methods], tuple[str, str]]


def compare(
    cells: Cells, pair: Pair, values: Callable[[Mapping[str, Any]], list[float]] = ends
) -> Comparison:
    """Compare two methods in every condition.

    Args:
        cells: The records.
        pair: Chooses the methods of a condition.
        values: Returns a value for each seed of a method, in points.
    """
    names = {condition: pair(methods) for condition, methods in cells.items()}
    seeds = {
        condition: (values(cells[condition][ours]), values(cells[condition][theirs]))
        for condition, (ours, theirs) in names.items()
    }
    found = {condition: welch(*both) for condition, both in seeds.items()}
    family = [condition for condition in cells if not condition.confirms]
    adjusted = dict(zip(family, holm([found[each].p for each in family]), strict=True))
    outcomes = {
        condition: Outcome(
            condition,
            *names[condition],
            found[condition],
            p=adjusted.get(condition, found[condition].p),
            ties=equivalence(ours, theirs, MARGIN) < LEVEL,
            seeds=len(ours),
        )
        for condition, (ours, theirs) in seeds.items()
    }
    (confirmation,) = (condition for condition in cells if condition.confirms)
    return Comparison([outcomes[condition] for condition in family], outcomes[confirmation])


def equal_choices(cells: Cells) -> list[Condition]:
    """Return the conditions in which two FedDAs, or two rivals, have the highest metric."""
    found = []
    for condition, methods in cells.items():
        for names in (FEDDA, RIVALS):
            metrics = sorted(held_out(methods[name])[0] for name in names)
            if metrics[-1] == metrics[-2]:
                found.append(condition)
    return found


def champions(methods: Methods) -> tuple[str, str]:
    """Return the best FedDA and the best rival, by held-out data."""
    return best(methods, FEDDA), best(methods, RIVALS)


def against_control(name: str) -> Pair:
    """Return the pair of a FedDA and its control."""
    return lambda methods: (name, best(methods, CONTROLS[name]))


# -------------------------------------------------------------------------------------- hypotheses


class Study(NamedTuple):
    """The comparisons that the protocol names, and one more: FedDA+Adam with FedAdam."""

    cells: Cells
    h1: Comparison  # FedDA+SGDM and FedAvgM
    h2: Comparison  # FedDA+AdaGrad and the better FedAdagrad with momentum
    h3: Comparison  # the gains by full-batch rounds of the best FedDA and the best rival
    h4: Comparison  # the best FedDA and the best rival
    extension: Comparison  # FedMoments and the best rival
    adam: Comparison
    decay: Comparison  # as h3, the gains by step decay

    @property
    def verdicts(self) -> dict[str, Verdict]:
        equal = self.h1
        if equal.where(Finding.AHEAD) or equal.where(Finding.BEHIND):
            first = Verdict.REFUTED
        else:
            tied = equal.ties == len(equal.outcomes)
            first = Verdict.CONFIRMED if tied else Verdict.UNDECIDED
        others = {"H2": self.h2, "H3": self.h3, "H4": self.h4}
        return {"H1": first, **{name: _ahead_in_none(each) for name, each in others.items()}}


def judge(cells: Cells) -> Study:
    """Make all comparisons."""
    return Study(
        cells,
        h1=compare(cells, against_control("fedda-sgdm")),
        h2=compare(cells, against_control("fedda-adagrad")),
        h3=compare(cells, champions, lambda record: gains(record, "full batches")),
        h4=compare(cells, champions),
        extension=compare(cells, lambda methods: ("fedmoments", best(methods, RIVALS))),
        adam=compare(cells, against_control("fedda-adam")),
        decay=compare(cells, champions, lambda record: gains(record, "step decay")),
    )


def _ahead_in_none(found: Comparison) -> Verdict:
    """Judge the hypothesis that a method is ahead in no condition."""
    if found.where(Finding.AHEAD):
        return Verdict.REFUTED
    small = all(outcome.difference.high < MARGIN for outcome in found.outcomes)
    return Verdict.CONFIRMED if small else Verdict.UNDECIDED
