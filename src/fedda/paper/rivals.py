"""FedDA against the other methods: the claims F5 to F7."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedda.paper import evidence, experiments, methods
from fedda.paper.cells import Cell
from fedda.paper.experiments import FEDDA
from fedda.paper.judging import FAILS, HOLDS, IN_PART, OPEN, SO_FAR, Verdict, decided

# What a convergence is measured by, as the paper's "turning points" are not defined.
THRESHOLDS = {
    "cifar100": (0.30, 0.35, 0.40, 0.45),
    "emnist": (0.75, 0.80, 0.82, 0.84),
    "stackexchange": (0.2, 0.4, 0.6),
}
PAPER_FASTER = {"cifar100": 0.343, "emnist": 0.226, "stackexchange": 0.754}  # fewer rounds, it says
PLACES = {1: "ahead of", 0: "level with", -1: "behind"}


class Column(NamedTuple):
    """What a table says of FedDA with one optimiser."""

    words: str
    order: int | None = None  # 1: ahead of all that were run; None: nothing to compare
    missing: int = 0  # methods that were not run


def _columns(name: str, found: Sequence[Cell], higher: bool = True) -> list[Column]:
    """FedDA beside the best other method, for each optimiser of a table."""
    runs, sign = evidence.runs(name, found), 1 if higher else -1
    made = []
    for optimiser, column in evidence.columns(name).items():
        title, own = methods.OPTIMISER_NAMES[optimiser], f"fedda-{optimiser}"
        ends = {each: evidence.over_seeds(runs[each]) for each in column if each in runs}
        ours = ends.pop(own, None)
        ends = {each: end for each, end in ends.items() if math.isfinite(end)}
        if ours is None or not ends:
            made.append(Column(f"{title} not run"))
            continue
        rival = max(ends, key=lambda each: sign * ends[each])
        # Who failed is behind, also where less is better.
        order = sign * evidence.order(runs[own], runs[rival]) if math.isfinite(ours) else -1
        missing = sum(each not in runs for each in column)
        end = f"{ours:.4g}" if math.isfinite(ours) else "failed,"
        words = f"{title} {end} {PLACES[order]} {_method(rival)}'s {ends[rival]:.4g}"
        made.append(Column(words + (f" ({missing} not run)" * bool(missing)), order, missing))
    return made


def _method(algorithm: str) -> str:
    return methods.label(algorithm).partition(",")[0]


def _judged(columns: Sequence[Column]) -> str:
    ahead = [each for each in columns if each.order == 1]
    if any(each.order == -1 for each in columns):
        return IN_PART if ahead else FAILS
    if not ahead:
        return OPEN
    whole = all(each.order is not None and not each.missing for each in columns)
    return IN_PART if any(each.order == 0 for each in columns) else HOLDS if whole else SO_FAR


def best(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best in every column of tables 2 to 4."
    tables = {
        "CIFAR-100": _columns("table2", found),
        "EMNIST": _columns("table3", found),
        "autoencoder": _columns("table4", found, higher=False),
    }
    every = [each for columns in tables.values() for each in columns]
    told = "; ".join(
        f"{title}: {', '.join(each.words for each in columns)}" for title, columns in tables.items()
    )
    words = " ".join([f"{told}.", *_tuned(found)])
    return Verdict("F6", claim, _judged(every), _counted(every), words)


def _counted(columns: Sequence[Column]) -> str:
    """How often FedDA is ahead of the best other method, level with it and behind it."""
    counts = [sum(each.order == order for each in columns) for order in PLACES]
    places = "{} ahead of all that were run, in {} level with the best and in {} behind"
    return f"Of {len(columns)} columns FedDA is in {places.format(*counts)}."


def _tuned(found: Sequence[Cell]) -> list[str]:
    """Each FedDA against the best other method, where all are tuned by one rule."""
    tuned, recommended = (evidence.runs(name, found) for name in ("tuned", "recommended"))
    if not (best := _best_other(tuned)):
        return []
    words = f"All tuned by one rule, EMNIST: {_margins(tuned, best, tuned[best])}"
    if recommended:
        alone = _margins(recommended, best, tuned[best])
        words += f"; if FedDA alone ends with full-batch rounds: {alone}"
    if other := _best_other(recommended):
        words += f"; if others do too: {_margins(recommended, other, recommended[other])}"
    return [words + "."]


def _best_other(runs: Mapping[str, list[Cell]]) -> str | None:
    """The method with the highest end, of those that are not FedDA."""
    others = [name for name in runs if name not in FEDDA]
    return max(others, key=lambda name: evidence.over_seeds(runs[name]), default=None)


def _margins(runs: Mapping[str, list[Cell]], other: str, theirs: Sequence[Cell]) -> str:
    """Each FedDA's, to the runs of another method."""
    told = ", ".join(
        f"{methods.OPTIMISER_NAMES[name.partition('-')[2]]} "
        f"{evidence.signed(evidence.margin(runs[name], theirs))}"
        for name in FEDDA
        if name in runs
    )
    name = f"{methods.label(other)} {evidence.over_seeds(theirs):.4g}"
    return f"against the best other, {name}: {told}"


def stack_overflow(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best on Stack Overflow in most tests, by 22.3 % with SGDM."
    columns = _columns("table5", found)
    told = ", ".join(each.words for each in columns)
    return Verdict(
        "F7",
        claim,
        _judged(columns),
        f"Stack Exchange is not its data. {_counted(columns)}",
        f"{told}. Few rivals were tuned. Its own table 5 has CLIMB 0.302 and FedOpt 0.691 above "
        "FedDA's 0.273 and 0.674.",
    )


def faster(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA needs 34.3 % (CIFAR-100), 22.6 % (EMNIST), 75.4 % (Stack Overflow) fewer rounds."
    told, shares, done = [], {}, []
    for name, task in (("table2", "cifar100"), ("table3", "emnist"), ("table5", "stackexchange")):
        runs, count = evidence.runs(name, found), len(experiments.experiments()[name].entries)
        columns = {
            optimiser: _race(runs, f"fedda-{optimiser}", column, THRESHOLDS[task])
            for optimiser, column in evidence.columns(name).items()
        }
        columns = {optimiser: saved for optimiser, saved in columns.items() if saved}
        if not columns:
            continue
        every = [each for saved in columns.values() for each in saved]
        mean, own = np.mean(every, axis=0)
        shares[methods.title(task)] = mean
        if len(runs) == count:
            done.append(mean >= PAPER_FASTER[task])
        shown = ", ".join(
            f"{methods.OPTIMISER_NAMES[optimiser]} {100 * np.mean(saved, axis=0)[0]:.0f} %"
            for optimiser, saved in columns.items()
        )
        told.append(
            f"{methods.title(task)} {shown}; to {evidence.OWN} of its own end {100 * own:.1f} %; "
            f"{len(every)} pairs of runs"
        )
    if not told:
        return Verdict("F5", claim, OPEN, "No pair of runs yet.")
    verdict = decided(sum(done), len(done), 3)
    if verdict == FAILS and max(shares.values()) > 0:
        verdict = IN_PART
    means = ", ".join(f"{100 * mean:.1f} % ({title})" for title, mean in shares.items())
    return Verdict(
        "F5",
        claim,
        verdict,
        f"It needs {means} fewer rounds to fixed values, in the mean over rivals that reach the "
        "lowest.",
        f"{'. '.join(told)}.",
    )


def _race(
    runs: Mapping[str, list[Cell]], own: str, column: Sequence[str], goals: Sequence[float]
) -> list[tuple[float, float]]:
    """Against each rival and seed, the share of rounds saved to the goals, and to its own end.

    Who fails is no rival: it would make all others fast. By its own end it arrives at once, so a
    FedDA that fails has saved nothing there.
    """
    pairs = [
        pair
        for other in column
        if other != own
        for pair in evidence.pairs(runs.get(own, []), runs.get(other, []))
        if evidence.end(pair[1]) >= goals[0]
    ]
    return [
        (
            float(np.mean([evidence.saved(*pair, goal) for goal in goals])),
            evidence.saved(*pair) if evidence.end(pair[0]) >= goals[0] else 0.0,
        )
        for pair in pairs
    ]
