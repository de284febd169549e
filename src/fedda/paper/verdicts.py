"""What our results say of each claim of the paper that numbers can settle.

F1 to F4 and F13 are about mathematics: `fedda theory` measures them, and what it wrote into
`theory` beside the cells is read here. So is what `fedda bench` wrote into `bench.json`, as the
seconds of cells depend on what else the machine did. The rest is read off the cells alone.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedda.paper import evidence, experiments, methods, rates
from fedda.paper.cells import Cell, Cells
from fedda.paper.experiments import FEDDA

LITTLE = 1.25  # times FedAvg's round, where we say that it is little time
HOLDS, SO_FAR, IN_PART = "holds", "holds so far", "holds in part"
FAILS, OPEN = "does not hold", "not settled"
MEANING = (
    "F1 to F14 are what the paper claims, and what using it asks for. *Holds*: in all that was "
    "compared; *so far*: in all that was run, of more; *in part*: in some of it; *does not hold*: "
    "in none of it. Two methods are told apart by the 95 % interval of their difference over "
    "shared seeds; where there is one seed, if they differ by over 1 % of what they come to."
)

# What a convergence is measured by, as the paper's "turning points" are not defined.
THRESHOLDS = {
    "cifar100": (0.30, 0.35, 0.40, 0.45),
    "emnist": (0.75, 0.80, 0.82, 0.84),
    "stackexchange": (0.2, 0.4, 0.6),
}
PAPER_FASTER = {"cifar100": 0.343, "emnist": 0.226, "stackexchange": 0.754}  # fewer rounds, it says


class Verdict(NamedTuple):
    name: str
    claim: str
    verdict: str
    measured: str


class Beside(NamedTuple):
    """What other commands wrote beside the cells; None: they were not run."""

    theory: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None


def verdicts(results: Cells, beside: Beside) -> list[Verdict]:
    """One for each claim, F1 to F14."""
    found = results.found
    return [
        *(_of_theory(name, claim, beside.theory) for name, claim in THEORY.items()),
        _faster(found),
        _best(found),
        _stack_overflow(found),
        _local_iterations(found),
        _more_rounds(found),
        _sensitivity(found),
        _stabilisation(found),
        _decoupling(found),
        _of_theory("F13", RATIOS, beside.theory),
        _cost(found, beside.bench),
    ]


def read_beside(folder: Path) -> Beside:
    paths = (folder / "theory" / "theory.json", folder / "bench.json")
    found = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in paths
    )
    return Beside(*found)


def section(results: Cells, beside: Beside) -> str:
    rows = [f"| {' | '.join(each)} |" for each in verdicts(results, beside)]
    head = ["| | the paper says | verdict | what we measured |", "|:--|:--|:--|:--|"]
    return "\n".join(["## What becomes of the paper's claims", "", MEANING, "", *head, *rows])


# ------------------------------------------------------------------------------------ from theory

THEORY = {
    "F1": "With one full-batch step and all clients, FedDA is the centralised optimiser.",
    "F2": "The mean of the decoupled momenta is the global momentum, exactly.",
    "F3": "Local momentum deviates exponentially with local steps t, decoupled momentum as t².",
    "F4": "Local deviations grow at the rate λ+ of its appendix.",
}
RATIOS = "In FedDA+Adam the entries of m̂ / √v̂ stay near ±1."


def _of_theory(name: str, claim: str, theory: Mapping[str, Any] | None) -> Verdict:
    """What `fedda theory` found; a claim of several parts holds if all of them do."""
    parts = [part for part in (theory or {}).get("claims", []) if part["key"].split()[0] == name]
    if not parts:
        return Verdict(name, claim, OPEN, "Not measured yet.")
    holding = sum(part["verdict"] == HOLDS for part in parts)
    partly = any(part["verdict"] == IN_PART for part in parts)
    verdict = HOLDS if holding == len(parts) else IN_PART if holding or partly else FAILS
    told = [part["measured"] for part in parts]
    if len(parts) > 1:
        told = [f"{part['claim']}: {part['verdict']} ({part['measured']})" for part in parts]
    words = ". ".join(told) + "."
    return Verdict(name, claim, verdict, words[0].upper() + words[1:])


# -------------------------------------------------------------------------------------- from cells


def _decided(won: int, judged: int, needed: int) -> str:
    if won < judged:
        return IN_PART if won else FAILS
    if not judged:
        return OPEN
    return HOLDS if judged >= needed else SO_FAR


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
        order = sign * evidence.order(runs[own], runs[rival])
        missing = sum(each not in runs for each in column)
        words = f"{title} {ours:.4g} {PLACES[order]} {_method(rival)}'s {ends[rival]:.4g}"
        made.append(Column(words + (f" ({missing} not run)" * bool(missing)), order, missing))
    return made


PLACES = {1: "ahead of", 0: "level with", -1: "behind"}


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


def _best(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best in every column of tables 2 to 4."
    tables = {
        "CIFAR-100": _columns("table2", found),
        "EMNIST": _columns("table3", found),
        "autoencoder": _columns("table4", found, higher=False),
    }
    every = [each for columns in tables.values() for each in columns]
    best = sum(each.order == 1 for each in every)
    told = "; ".join(
        f"{title}: {', '.join(each.words for each in columns)}" for title, columns in tables.items()
    )
    words = f"Ahead of all that were run in {best} of {len(every)} columns. {told}."
    return Verdict("F6", claim, _judged(every), " ".join([words, *_tuned(found)]))


def _tuned(found: Sequence[Cell]) -> list[str]:
    """Each FedDA against the best other method, where all are tuned by one rule."""
    tuned, recommended = (evidence.runs(name, found) for name in ("tuned", "recommended"))
    means = {name: evidence.over_seeds(own) for name, own in tuned.items() if name not in FEDDA}
    if not means:
        return []
    best = max(means, key=lambda name: means[name])

    def margins(runs: Mapping[str, list[Cell]]) -> str:
        return ", ".join(
            f"{methods.OPTIMISER_NAMES[name.partition('-')[2]]} "
            f"{evidence.signed(evidence.margin(runs[name], tuned[best]))}"
            for name in FEDDA
            if name in runs
        )

    words = f"All tuned by one rule, EMNIST: against the best other, {methods.label(best)} "
    words += f"{means[best]:.4g}: {margins(tuned)}"
    if recommended:
        words += f"; if FedDA alone ends with full-batch rounds: {margins(recommended)}"
    return [words + "."]


def _stack_overflow(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best on Stack Overflow in most tests, by 22.3 % with SGDM."
    columns = _columns("table5", found)
    told = ", ".join(each.words for each in columns)
    return Verdict(
        "F7",
        claim,
        _judged(columns),
        f"Stack Exchange, not its data, on which few rivals were tuned: {told}. Its own table 5 "
        "has CLIMB 0.302 and FedOpt 0.691 above FedDA's 0.273 and 0.674.",
    )


def _faster(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA needs 34.3 % (CIFAR-100), 22.6 % (EMNIST), 75.4 % (Stack Overflow) fewer rounds."
    told, shares, done = [], [], []
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
        shares.append(mean)
        if len(runs) == count:
            done.append(mean >= PAPER_FASTER[task])
        shown = ", ".join(
            f"{methods.OPTIMISER_NAMES[optimiser]} {100 * np.mean(saved, axis=0)[0]:.0f} %"
            for optimiser, saved in columns.items()
        )
        told.append(
            f"{methods.title(task)} {100 * mean:.1f} % ({shown}; to {evidence.OWN} of its own end "
            f"{100 * own:.1f} %; {len(every)} pairs of runs)"
        )
    verdict = _decided(sum(done), len(done), 3)
    if verdict == FAILS and max(shares) > 0:
        verdict = IN_PART
    return Verdict(
        "F5",
        claim,
        verdict,
        "Mean share of rounds saved to fixed values, against rivals that reach the lowest: "
        f"{', '.join(told) or 'no pair of runs yet'}.",
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


def _local_iterations(found: Sequence[Cell]) -> Verdict:
    claim = (
        "Accuracy first rises with local iterations T, then saturates; with SGDM and AdaGrad it "
        "collapses on EMNIST beyond T = 10."
    )
    by_work = evidence.runs(
        "figure5", found, lambda entry: (entry.task, entry.algorithm, entry.values["local_work"])
    )
    told, parts = [], []
    for key in dict.fromkeys(key[:2] for key in by_work):
        runs = [by_work.get((*key, work), []) for work in experiments.LOCAL]
        seeds = set.intersection(*({cell.config.seed for cell in own} for own in runs))
        if not seeds:
            continue
        shared = [[cell for cell in own if cell.config.seed in seeds] for own in runs]
        ends = [evidence.over_seeds(own) for own in shared]
        best = max(range(len(ends)), key=lambda place: ends[place])
        parts.append(best > 0)
        if key[0] == "emnist" and key[1] != "fedda-adam":
            parts.append(ends[-1] < ends[best] / 2)
        told.append(
            f"{_series(*key)} {ends[0]:.4g}, {ends[best]:.4g} (T = {experiments.LOCAL[best]}), "
            f"{ends[-1]:.4g}"
        )
    return Verdict(
        "F8",
        claim,
        _decided(sum(parts), len(parts), 8),
        f"With T = 1, the best T, T = 20: {'; '.join(told)}." if told else "No series is whole.",
    )


def _series(task: str, algorithm: str) -> str:
    return f"{methods.title(task)} {methods.OPTIMISER_NAMES[algorithm.partition('-')[2]]}"


def _more_rounds(found: Sequence[Cell]) -> Verdict:
    claim = "Accuracy rises with the number of rounds."
    series = evidence.series("figure6", found, lambda cell: cell.at)
    rising = {
        key: all(after > before - 0.01 for (_, before), (_, after) in itertools.pairwise(points))
        for key, points in series.items()
    }
    told = [f"{_series(*key)} {p[0][1]:.4g} to {p[-1][1]:.4g}" for key, p in series.items()]
    falling = ", ".join(_series(*key) for key, rises in rising.items() if not rises)
    words = f"After few and after all rounds: {'; '.join(told)}; more rounds "
    words += f"cost over a point somewhere in {falling}." if falling else "never cost a point."
    return Verdict(
        "F9",
        claim,
        _decided(sum(rising.values()), len(rising), 6),
        words if told else "No run yet.",
    )


def _sensitivity(found: Sequence[Cell]) -> Verdict:
    """By pairs of rates, as several numbers of the paper are equal; by chance half would agree."""
    claim = "FedDA reacts to its rates as tables 6 to 11 show."
    told, agreed, pairs, whole = [], 0, 0, 0
    for name in rates.TABLES:
        for strip in rates.strips(name, found):
            if strip.task == "stackexchange" or strip.alike is None:
                continue
            whole, agreed, pairs = whole + 1, agreed + strip.alike[0], pairs + strip.alike[1]
            told.append(f"table {name.removeprefix('table')} {methods.title(strip.task)} ")
            told[-1] += f"{strip.alike[0]} of {strip.alike[1]}"
    if not told:
        return Verdict("F10", claim, OPEN, "No table is whole.")
    share = agreed / pairs
    verdict = FAILS if share <= 0.6 else IN_PART if share < 0.9 else HOLDS
    return Verdict(
        "F10",
        claim,
        SO_FAR if verdict == HOLDS and whole < 12 else verdict,
        f"Pairs of rates that come in the paper's order, of those it has unequal numbers for: "
        f"{agreed} of {pairs} ({', '.join(told)}); 0.9 are asked, and over 0.6 for a part.",
    )


def _stabilisation(found: Sequence[Cell]) -> Verdict:
    """By the spread of the metric over the rounds that are full-batch ones, or would be."""
    claim = "Full-batch rounds at the end make training converge."
    shared = evidence.runs(
        "stabilise", found, lambda entry: (entry.task, entry.algorithm, entry.values["stabilise"])
    )
    tuned, recommended = (evidence.runs(name, found) for name in ("tuned", "recommended"))
    compared = {
        f"{_series(*key)}, 5 %": (0.05, shared.get((*key, 0.05), []), shared.get((*key, 0.0), []))
        for key in dict.fromkeys(key[:2] for key in shared)
    } | {
        f"{_series('emnist', name)}, tuned, 10 %": (0.1, recommended[name], tuned.get(name, []))
        for name in FEDDA
        if name in recommended
    }
    told, calmer = [], []
    for words, (share, ours, theirs) in compared.items():
        if not (pairs := evidence.pairs(ours, theirs)):
            continue
        last = round(share * pairs[0][0].config.rounds)
        full, without = (
            float(np.mean([evidence.late_spread(each, last) for each in own]))
            for own in zip(*pairs, strict=True)
        )
        calmer.append(full < without)
        gain = evidence.signed(evidence.margin(ours, theirs))
        told.append(f"{words} {full:.2g} (without {without:.2g}; accuracy {gain})")
    words = "Standard deviation of accuracy over the rounds that are full-batch ones: "
    return Verdict(
        "F11",
        claim,
        _decided(sum(calmer), len(calmer), 9),
        f"{words}{'; '.join(told)}. Such rounds have one step, so they are shorter too."
        if told
        else "No pair of runs yet.",
    )


def _decoupling(found: Sequence[Cell]) -> Verdict:
    """Momentum must help, in the runs of shared seeds; and more than local momentum does."""
    claim = "It is the decoupled momentum that helps."
    runs = evidence.runs("ablation", found, lambda entry: entry.label)
    helped, told = [], []
    for task in ("emnist", "cifar100"):
        for algorithm in FEDDA:
            usual = f"{task}, {methods.label(algorithm)}"
            rivals = {"none": f"{usual}, beta1 0", "restarted": f"{usual}, restarted"}
            if algorithm == FEDDA[0]:
                rivals["local"] = f"{task}, MFL, SGDM, damped"
            own, margins = runs.get(f"{usual}, beta1 0.9", []), []
            for kind, other in rivals.items():
                if evidence.pairs(own, theirs := runs.get(other, [])):
                    margins.append(f"{evidence.signed(evidence.margin(own, theirs))} to {kind}")
                    helped += [evidence.order(own, theirs) == 1] if kind != "restarted" else []
            if margins:
                told.append(f"{_series(task, algorithm)} {', '.join(margins)}")
    words = f"A momentum of 0.9 ahead of none and of local momentum in {sum(helped)} of "
    words += f"{len(helped)} comparisons: {'; '.join(told)}."
    return Verdict(
        "F12",
        claim,
        _decided(sum(helped), len(helped), 8),
        words if told else "No pair of runs yet.",
    )


def _cost(found: Sequence[Cell], bench: Mapping[str, Any] | None) -> Verdict:
    claim = "FedDA costs a second model, down and up, and little time."
    sent = set()
    for name in ("table2", "table3"):
        for algorithm, cell in evidence.first_runs(name, found).items():
            if algorithm in FEDDA:
                content, config = cell.content, cell.config
                model = 4 * content["parameters"] * config.cohort * config.rounds
                sent.add(tuple(round(content[f"bytes_{way}"] / model, 2) for way in ("down", "up")))
    ratios = {
        model: case["fedda_to_fedavg"]
        for model, case in (bench or {}).get("models", {}).items()
        if case.get("fedda_to_fedavg") is not None
    }
    if not (sent and bench and ratios):
        return Verdict("F14", claim, OPEN, "Not run, or not timed by fedda bench.")
    models = " or ".join(f"{down:g} models down and {up:g} up" for down, up in sorted(sent))
    shown = ", ".join(f"{model} {ratio:.2f}" for model, ratio in ratios.items())
    little = max(ratios.values()) <= LITTLE and all(round(max(each), 1) == 2 for each in sent)
    return Verdict(
        "F14",
        claim,
        HOLDS if little else IN_PART,
        f"{models}, in float32; a round takes {shown} times FedAvg's (fedda bench, "
        f"{bench['device']}).",
    )
