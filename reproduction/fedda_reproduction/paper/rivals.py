"""FedDA against the other methods: the claims F5 to F7."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedda_reproduction.paper import evidence, experiments, methods
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import FEDDA
from fedda_reproduction.paper.judging import FAILS, HOLDS, IN_PART, OPEN, SO_FAR, Verdict, decided

# What a convergence is measured by, as the paper's "turning points" are not defined.
THRESHOLDS = {
    "cifar100": (0.30, 0.35, 0.40, 0.45),
    "emnist": (0.75, 0.80, 0.82, 0.84),
    "stackexchange": (0.2, 0.4, 0.6),
}
PAPER_FASTER = {"cifar100": 0.343, "emnist": 0.226, "stackexchange": 0.754}  # fewer rounds, it says
PLACES = {1: "ahead of", 0: "level with", -1: "behind"}


class Column(NamedTuple):
    """FedDA with one optimiser in a table, beside the best other method that was run."""

    optimiser: str
    own: Sequence[Cell]  # FedDA's runs
    rival: str | None = None  # the best other; None: nothing to compare
    theirs: Sequence[Cell] = ()
    order: int | None = None  # 1: ahead of it, 0: level with it, -1: behind it
    missing: int = 0  # methods that were not run

    @property
    def words(self) -> str:
        title = methods.OPTIMISER_NAMES[self.optimiser]
        if self.rival is None or self.order is None:
            return f"{title} {'has no rival yet' if self.own else 'not run'}"
        ours, theirs = map(evidence.over_seeds, (self.own, self.theirs))
        end = f"{ours:.4g}" if math.isfinite(ours) else "failed,"
        place = f"{PLACES[self.order]} {_method(self.rival)}'s {theirs:.4g}"
        return f"{title} {end} {place}{_not_run(self.missing)}"


def columns(name: str, found: Sequence[Cell]) -> list[Column]:
    """FedDA beside the best other method, for each optimiser of a table."""
    runs, made = evidence.runs(name, found), []
    for optimiser, column in evidence.columns(name).items():
        own = runs.get(f"fedda-{optimiser}", [])
        others = {each: runs[each] for each in column if each in runs and runs[each] is not own}
        ends = {each: evidence.over_seeds(theirs) for each, theirs in others.items()}
        ended = [each for each, end in ends.items() if math.isfinite(end)]
        if not own or not ended:
            made.append(Column(optimiser, own))
            continue
        sign = 1 if own[0].content["higher_is_better"] else -1
        rival = max(ended, key=lambda each: sign * ends[each])
        # Who failed is behind, also where less is better.
        failed = not math.isfinite(evidence.over_seeds(own))
        order = -1 if failed else sign * evidence.order(own, runs[rival])
        missing = sum(each not in runs for each in column)
        made.append(Column(optimiser, own, rival, runs[rival], order, missing))
    return made


def _not_run(missing: int) -> str:
    return f" ({missing} not run)" if missing else ""


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
        "CIFAR-100": columns("table2", found),
        "EMNIST": columns("table3", found),
        "autoencoder": columns("table4", found),
    }
    every = [each for table in tables.values() for each in table]
    told = "; ".join(
        f"{title}: {', '.join(each.words for each in table)}" for title, table in tables.items()
    )
    words = _joined(f"{told}.", _tuned("emnist", found), _tuned("cifar100", found))
    return Verdict("F6", claim, _judged(every), _counted(every), words)


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _counted(columns: Sequence[Column]) -> str:
    """How often FedDA is ahead of the best other method, level with it and behind it."""
    counts = [sum(each.order == order for each in columns) for order in PLACES]
    places = "{} ahead of all that were run, in {} level with the best and in {} behind"
    return f"Of {len(columns)} columns FedDA is in {places.format(*counts)}."


def _tuned(task: str, found: Sequence[Cell]) -> str:
    """Each FedDA against the best other method, where all are tuned by one rule."""
    name = experiments.TUNED[task]
    tuned, recommended = (evidence.runs(each, found) for each in (name, f"recommended-{task}"))
    if not (best := evidence.best(tuned, ours=False)) or not any(each in tuned for each in FEDDA):
        return ""
    missing = len(experiments.experiments()[name].entries) - len(tuned)
    words = f"All tuned by one rule, {methods.title(task)}{_not_run(missing)}: "
    words += _margins(tuned, best, tuned[best])
    if recommended:
        alone = _margins(recommended, best, tuned[best])
        words += f"; if FedDA alone ends with full-batch rounds: {alone}"
    if other := evidence.best(recommended, ours=False):
        words += f"; if others do too: {_margins(recommended, other, recommended[other])}"
    return f"{words}."


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
    table = columns("table5", found)
    told = ", ".join(each.words for each in table)
    own = "Its own table 5 has CLIMB 0.302 and FedOpt 0.691 above FedDA's 0.273 and 0.674."
    return Verdict(
        "F7",
        claim,
        _judged(table),
        f"Stack Exchange is not its data. {_counted(table)}",
        _joined(f"{told}.", _tuned("stackexchange", found), _other_rates(found), own),
    )


def _other_rates(found: Sequence[Cell]) -> str:
    """How far the methods of table 5 get with the rates that tuning did not choose."""
    chosen = {cell.group for own in evidence.runs("table5", found).values() for cell in own}
    runs = evidence.runs("table5-rates", found, lambda entry: entry.label)
    told = "; ".join(
        f"{label} {evidence.over_seeds(own):.4g}"
        for label, own in runs.items()
        if own[0].group not in chosen
    )
    return f"With other rates of the grid: {told}." if told else ""


def faster(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA needs 34.3 % (CIFAR-100), 22.6 % (EMNIST), 75.4 % (Stack Overflow) fewer rounds."
    told, shares, done = [], {}, []
    for name, task in (("table2", "cifar100"), ("table3", "emnist"), ("table5", "stackexchange")):
        runs, count = evidence.runs(name, found), len(experiments.experiments()[name].entries)
        races = {
            optimiser: _race(runs, f"fedda-{optimiser}", column, THRESHOLDS[task])
            for optimiser, column in evidence.columns(name).items()
        }
        if not (every := [each for saved in races.values() for each in saved]):
            continue
        mean, own = np.mean(every, axis=0)
        shares[methods.title(task)] = mean
        if len(runs) == count:
            done.append(mean >= PAPER_FASTER[task])
        shown = ", ".join(
            f"{methods.OPTIMISER_NAMES[optimiser]} "
            + (f"{100 * np.mean(saved, axis=0)[0]:.0f} %" if saved else "(no rival gets so far)")
            for optimiser, saved in races.items()
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
