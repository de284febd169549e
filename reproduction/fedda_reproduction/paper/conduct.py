"""FedDA by itself, as its settings change: the claims F8 to F12."""

import itertools
from collections.abc import Sequence

import numpy as np

from fedda_reproduction.paper import evidence, experiments, methods, rates
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import FEDDA
from fedda_reproduction.paper.judging import FAILS, HOLDS, IN_PART, OPEN, SO_FAR, Verdict, decided


def local_iterations(found: Sequence[Cell]) -> Verdict:
    claim = (
        "Accuracy first rises with local iterations T, then saturates; with SGDM and AdaGrad it "
        "collapses on EMNIST beyond T = 10."
    )
    by_work = evidence.runs(
        "figure5", found, lambda entry: (entry.task, entry.algorithm, entry.values["local_work"])
    )
    told, rises, collapses = [], [], []
    for key in dict.fromkeys(key[:2] for key in by_work):
        runs = [by_work.get((*key, work), []) for work in experiments.LOCAL]
        seeds = set.intersection(*({cell.config.seed for cell in own} for own in runs))
        if not seeds:
            continue
        shared = [[cell for cell in own if cell.config.seed in seeds] for own in runs]
        ends = [evidence.over_seeds(own) for own in shared]
        best = max(range(len(ends)), key=lambda place: ends[place])
        rises.append(best > 0)
        if key[0] == "emnist" and key[1] != "fedda-adam":
            collapses.append(ends[-1] < ends[best] / 2)
        told.append(
            f"{_series(*key)} {ends[0]:.4g}, {ends[best]:.4g} (T = {experiments.LOCAL[best]}), "
            f"{ends[-1]:.4g}"
        )
    if not told:
        return Verdict("F8", claim, OPEN, "No series is whole.")
    parts = rises + collapses
    return Verdict(
        "F8",
        claim,
        decided(sum(parts), len(parts), 8),
        f"More than one iteration is best in {sum(rises)} of {len(rises)} series, and accuracy "
        f"collapses at T = 20 in {sum(collapses)} of the {len(collapses)} in which it should.",
        f"With T = 1, the best T, T = 20, over the seeds that all T share: {'; '.join(told)}.",
    )


def _series(task: str, algorithm: str) -> str:
    return f"{methods.title(task)} {methods.OPTIMISER_NAMES[algorithm.partition('-')[2]]}"


def more_rounds(found: Sequence[Cell]) -> Verdict:
    claim = "Accuracy rises with the number of rounds."
    series = evidence.series("figure6", found, lambda cell: cell.at)
    rising = {
        key: all(after > before - 0.01 for (_, before), (_, after) in itertools.pairwise(points))
        for key, points in series.items()
    }
    told = [f"{_series(*key)} {p[0][1]:.4g} to {p[-1][1]:.4g}" for key, p in series.items()]
    falling = ", ".join(_series(*key) for key, rises in rising.items() if not rises)
    if not told:
        return Verdict("F9", claim, OPEN, "No run yet.")
    return Verdict(
        "F9",
        claim,
        decided(sum(rising.values()), len(rising), 6),
        f"More rounds never cost a point in {sum(rising.values())} of {len(rising)} series"
        + (f", and on the way they do in {falling}." if falling else "."),
        f"After few and after all rounds: {'; '.join(told)}.",
    )


def sensitivity(found: Sequence[Cell]) -> Verdict:
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
        f"{agreed} of {pairs} pairs of rates come in the paper's order, where 0.9 are asked, and "
        "over 0.6 for a part.",
        f"Of the pairs that it has unequal numbers for: {', '.join(told)}.",
    )


def stabilisation(found: Sequence[Cell]) -> Verdict:
    """By the spread of the metric over the rounds that are full-batch ones, or would be."""
    claim = "Full-batch rounds at the end make training converge."
    shared = evidence.runs(
        "stabilise", found, lambda entry: (entry.task, entry.algorithm, entry.values["stabilise"])
    )
    compared = {
        f"{_series(*key)}, 5 %": (0.05, shared.get((*key, 0.05), []), shared.get((*key, 0.0), []))
        for key in dict.fromkeys(key[:2] for key in shared)
    }
    for task, name in experiments.TUNED.items():
        tuned, recommended = (evidence.runs(each, found) for each in (name, f"recommended-{task}"))
        compared |= {
            f"{_series(task, name)}, tuned, 10 %": (0.1, recommended[name], tuned.get(name, []))
            for name in FEDDA
            if name in recommended
        }
    told, calmer, higher = [], [], []
    for words, (share, ours, theirs) in compared.items():
        if not (pairs := evidence.pairs(ours, theirs)):
            continue
        last = round(share * pairs[0][0].config.rounds)
        full, without = (
            float(np.mean([evidence.late_spread(each, last) for each in own]))
            for own in zip(*pairs, strict=True)
        )
        calmer.append(full < without)
        higher.append(evidence.order(ours, theirs) == 1)
        gain = evidence.signed(evidence.margin(ours, theirs))
        told.append(f"{words} {full:.2g} (without {without:.2g}; its mean {gain})")
    if not told:
        return Verdict("F11", claim, OPEN, "No pair of runs yet.")
    return Verdict(
        "F11",
        claim,
        decided(sum(calmer), len(calmer), 15),
        f"The metric is calmer in such rounds in {sum(calmer)} of {len(calmer)} comparisons, and "
        f"ends higher in {sum(higher)}; but they have one step, so they are shorter too.",
        "Standard deviation of the metric over the full-batch rounds, of shared seeds: "
        f"{'; '.join(told)}.",
    )


def decoupling(found: Sequence[Cell]) -> Verdict:
    """Momentum must help, in the runs of shared seeds; and more than local momentum does."""
    claim = "It is the decoupled momentum that helps."
    runs = evidence.runs("ablation", found, lambda entry: entry.label)
    helped, told = [], []
    for task in ("emnist", "cifar100"):
        for algorithm in FEDDA:
            usual = experiments.named(task, algorithm)
            rivals = {"none": f"{usual}, beta1 0", "restarted": f"{usual}, restarted"}
            if algorithm == FEDDA[0]:
                rivals["local"] = f"{experiments.named(task, 'mfl-sgdm')}, damped"
            own, margins = runs.get(f"{usual}, beta1 0.9", []), []
            for kind, other in rivals.items():
                if evidence.pairs(own, theirs := runs.get(other, [])):
                    margins.append(f"{evidence.signed(evidence.margin(own, theirs))} to {kind}")
                    helped += [evidence.order(own, theirs) == 1] if kind != "restarted" else []
            if margins:
                told.append(f"{_series(task, algorithm)} {', '.join(margins)}")
    if not told:
        return Verdict("F12", claim, OPEN, "No pair of runs yet.")
    return Verdict(
        "F12",
        claim,
        decided(sum(helped), len(helped), 8),
        f"A momentum of 0.9 is ahead of none and of local momentum in {sum(helped)} of "
        f"{len(helped)} comparisons.",
        f"What it gains over shared seeds: {'; '.join(told)}.",
    )
