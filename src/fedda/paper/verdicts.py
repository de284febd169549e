"""What our results say of each claim of the paper that numbers can settle.

F1 to F4 and F13 are about mathematics: `fedda theory` measures them, and what it wrote into
`theory` beside the cells is read here. So is what `fedda bench` wrote into `bench.json`, as the
seconds of cells depend on what else the machine did. The rest is read off the cells alone. A claim
that needs runs which are missing is not settled, and what is there so far is told.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedda.paper import evidence, experiments, methods
from fedda.paper.cells import Cell, Cells
from fedda.paper.experiments import FEDDA

LITTLE = 1.25  # times FedAvg's round, where we say that it is little time
HOLDS, IN_PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "not settled"

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
    return "\n".join(["## What becomes of the paper's claims", "", *head, *rows])


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
        told = [f"{part['claim']}, which {part['verdict']}: {part['measured']}" for part in parts]
    return Verdict(name, claim, verdict, ". ".join(told) + ".")


# -------------------------------------------------------------------------------------- from cells


def _ranked(name: str, found: Sequence[Cell], higher: bool) -> tuple[list[str], int, int]:
    """Of each column that was run: FedDA beside the best other; its wins; the columns."""
    lines = evidence.lines_of(name, found)
    words, wins, run = [], 0, 0
    for optimiser, column in evidence.columns(name).items():
        means = {each: evidence.mean(lines[methods.label(each)]) for each in column}
        ours = means.pop(f"fedda-{optimiser}")
        seen = [lines[methods.label(each)].seeds > 0 for each in column]
        if not all(seen):
            words.append(f"{methods.OPTIMISER_NAMES[optimiser]} {sum(seen)} of {len(seen)} runs")
            continue
        sign = 1 if higher else -1
        rivals = {each: mean for each, mean in means.items() if not math.isnan(mean)}
        rival = max(rivals, key=lambda each: sign * rivals[each])
        run += 1
        wins += sign * ours > sign * rivals[rival]
        words.append(
            f"{methods.OPTIMISER_NAMES[optimiser]} FedDA {ours:.4g}, best other "
            f"{methods.label(rival)} {rivals[rival]:.4g}"
        )
    return words, wins, run


def _decided(wins: int, run: int, needed: int) -> str:
    if run < needed:
        return OPEN
    return HOLDS if wins == run else FAILS if wins == 0 else IN_PART


def _best(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best in every column of tables 2 to 4."
    told, wins, run = [], 0, 0
    for name, title, higher in (
        ("table2", "CIFAR-100", True),
        ("table3", "EMNIST", True),
        ("table4", "autoencoder", False),
    ):
        words, won, ran = _ranked(name, found, higher)
        told.append(f"{title}: {'; '.join(words)}.")
        wins, run = wins + won, run + ran
    count = f"Best in {wins} of {run} complete columns of 9, at published rates."
    tuned = _tuned(found)
    return Verdict("F6", claim, _decided(wins, run, 9), " ".join([count, *told, *tuned]))


def _tuned(found: Sequence[Cell]) -> list[str]:
    """Each FedDA against the best other method, where all are tuned by one rule."""
    runs = evidence.runs("tuned", found)
    ours = [name for name in FEDDA if name in runs]
    means = {name: evidence.over_seeds(own) for name, own in runs.items() if name not in FEDDA}
    if not (ours and means):
        return []
    best = max(means, key=lambda name: means[name])
    margins = [
        f"{methods.label(name)} {evidence.signed(evidence.margin(runs[name], runs[best]))}"
        for name in ours
    ]
    return [
        f"EMNIST, all tuned by one rule: against the best other, {methods.label(best)} "
        f"{means[best]:.4g}: {'; '.join(margins)}."
    ]


def _stack_overflow(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best on Stack Overflow in most tests, by 22.3 % with SGDM."
    words, wins, run = _ranked("table5", found, True)
    own = "Its own table 5 has CLIMB 0.302 and FedOpt 0.691 above FedDA's 0.273 and 0.674."
    told = f"Stack Exchange, not its data: {'; '.join(words)}."
    return Verdict("F7", claim, _decided(wins, run, 3), f"{own} {told}")


def _faster(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA needs 34.3 % (CIFAR-100), 22.6 % (EMNIST), 75.4 % (Stack Overflow) fewer rounds."
    told, done = [], []
    for name, task in (("table2", "cifar100"), ("table3", "emnist"), ("table5", "stackexchange")):
        goals = THRESHOLDS[task]
        runs, count = evidence.runs(name, found), len(experiments.experiments()[name].entries)
        pairs = [
            pair
            for optimiser, column in evidence.columns(name).items()
            for other in column
            if other != (own := f"fedda-{optimiser}")
            for pair in evidence.pairs(runs.get(own, []), runs.get(other, []))
        ]
        # Who fails would make all others fast, and is done at once by its own measure.
        lost = {other.config.algorithm for _, other in pairs if evidence.end(other) < goals[0]}
        pairs = [pair for pair in pairs if pair[1].config.algorithm not in lost]
        if not pairs:
            continue
        saved = [evidence.saved(*pair, goal) for pair in pairs for goal in goals]
        own_ends = [evidence.saved(*pair) for pair in pairs]
        words = f"{task} {np.mean(saved):.1%}, {np.mean(own_ends):.1%}"
        if lost:
            words += f" without {', '.join(sorted(lost))}"
        if len(runs) == count:
            done.append(float(np.mean(saved)) >= PAPER_FASTER[task])
        else:
            words += f" ({len(runs)} of {count} runs)"
        told.append(words)
    every = "; ".join(f"{task} {', '.join(map(str, each))}" for task, each in THRESHOLDS.items())
    words = "; ".join(told) if told else "no pair of runs yet"
    return Verdict(
        "F5",
        claim,
        _decided(sum(done), len(done), 3),
        f"Mean share of rounds saved to the thresholds ({every}), and to "
        f"{evidence.OWN:.0%} of what a method itself ends with; without who ended below the lowest "
        f"threshold: {words}.",
    )


def _local_iterations(found: Sequence[Cell]) -> Verdict:
    claim = "Accuracy first rises with local iterations T, then saturates or collapses."
    series = evidence.series("figure5", found, lambda cell: cell.values["local_work"])
    whole = [points for points in series.values() if len(points) == len(experiments.LOCAL)]
    rising = [points[0][1] < max(value for _, value in points) for points in whole]
    return Verdict(
        "F8", claim, _decided(sum(rising), len(whole), 6), f"By T: {evidence.told(series)}"
    )


def _more_rounds(found: Sequence[Cell]) -> Verdict:
    claim = "Accuracy rises with the number of rounds."
    series = evidence.series("figure6", found, lambda cell: cell.at)
    rising = [
        all(after > before - 0.01 for (_, before), (_, after) in itertools.pairwise(points))
        for points in series.values()
    ]
    return Verdict(
        "F9", claim, _decided(sum(rising), len(series), 6), f"By rounds: {evidence.told(series)}"
    )


def _sensitivity(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA reacts to its rates as tables 6 to 11 show."
    told, agreed = [], []
    for number in range(6, 12):
        lines = [line for line in evidence.lines_of(f"table{number}", found).values() if line.seeds]
        for task in ("emnist", "cifar100"):
            own = [line for line in lines if line.label.startswith(task)]
            ours = [0.0 if math.isnan(evidence.mean(line)) else evidence.mean(line) for line in own]
            paper = [line.paper for line in own if line.paper is not None]
            if len(own) == 4:
                agreed.append(evidence.rank_correlation(paper, ours))
                told.append(f"table {number} {task} {agreed[-1]:.2f}")
    clear = [one for one in agreed if not math.isnan(one)]
    words = ", ".join(told) if told else "no table is complete"
    return Verdict(
        "F10",
        claim,
        _decided(sum(one >= 0.8 for one in clear), len(agreed), 12),
        f"Rank correlation of four values each: {words}.",
    )


def _stabilisation(found: Sequence[Cell]) -> Verdict:
    claim = "Full-batch rounds at the end make training converge."
    usual = 0.05
    told, calmer = [], []
    by_share = evidence.runs(
        "stabilise", found, lambda entry: (entry.task, entry.algorithm, entry.values["stabilise"])
    )
    for task, algorithm in dict.fromkeys(key[:2] for key in by_share):
        runs = {key[2]: own for key, own in by_share.items() if key[:2] == (task, algorithm)}
        shown = ", ".join(
            f"{share:g}: {evidence.over_seeds(own):.4g}" for share, own in sorted(runs.items())
        )
        words = f"{task} {methods.label(algorithm)} ({shown})"
        if pairs := evidence.pairs(runs.get(usual, []), runs.get(0.0, [])):
            last = round(usual * pairs[0][0].config.rounds)
            full, without = (
                float(np.mean([evidence.late_spread(each, last) for each in own]))
                for own in zip(*pairs, strict=True)
            )
            calmer.append(full < without)
            words += f", deviation over the last {last} rounds {full:.2g}, without {without:.2g}"
        told.append(words)
    words = "; ".join(told) + "." if told else "No run yet."
    return Verdict(
        "F11",
        claim,
        _decided(sum(calmer), len(calmer), 3),
        f"By share of rounds, mean of the last 100; and for {usual:.0%}, how much the full-batch "
        f"rounds vary: {words}",
    )


def _decoupling(found: Sequence[Cell]) -> Verdict:
    """Momentum must help, in the runs of shared seeds; and more than local momentum does."""
    claim = "It is the decoupled momentum that helps."
    series = evidence.series(
        "ablation", found, lambda cell: cell.values["beta1"] if "beta1" in cell.label else None
    )
    runs = evidence.runs("ablation", found, lambda entry: entry.label)
    helped = []
    for task, algorithm in series:
        usual = f"{task}, {methods.label(algorithm)}, beta1"
        without = [f"{usual} 0", *([f"{task}, MFL, SGDM, damped"] if algorithm == FEDDA[0] else [])]
        for other in without:
            if evidence.pairs(own := runs.get(f"{usual} 0.9", []), theirs := runs.get(other, [])):
                helped.append(evidence.margin(own, theirs).mean > 0)
    others = [
        f"{label} {evidence.over_seeds(own):.4g}"
        for label, own in runs.items()
        if "beta1" not in label
    ]
    words = f"By beta1: {evidence.told(series)}"
    if others:
        words += f" Otherwise: {'; '.join(others)}."
    words += f" In the same seeds 0.9 is above 0, and above local momentum, in {sum(helped)} of "
    words += f"{len(helped)} comparisons."
    return Verdict("F12", claim, _decided(sum(helped), len(helped), 4), words)


def _cost(found: Sequence[Cell], bench: Mapping[str, Any] | None) -> Verdict:
    claim = "FedDA costs a second model, down and up, and little time."
    told, doubled = [], []
    for name, task in (("table2", "cifar100"), ("table3", "emnist")):
        for algorithm, cell in evidence.first_runs(name, found).items():
            if algorithm not in (*FEDDA, "fedavg"):
                continue
            content, config = cell.content, cell.config
            model = 4 * content["parameters"] * config.cohort * config.rounds
            down, up = (content[f"bytes_{way}"] / model for way in ("down", "up"))
            told.append(f"{task} {methods.label(algorithm)} {down:.2f} down, {up:.2f} up")
            doubled += [round(down, 1) == round(up, 1) == 2] if algorithm in FEDDA else []
    words = "; ".join(told) + "." if told else "No run yet."
    ratios = {
        model: case["fedda_to_fedavg"]
        for model, case in (bench or {}).get("models", {}).items()
        if case.get("fedda_to_fedavg") is not None
    }
    verdict = OPEN
    if ratios and doubled:
        quick = max(ratios.values()) <= LITTLE
        verdict = HOLDS if quick and all(doubled) else IN_PART
        shown = ", ".join(f"{model} {ratio:.2f}" for model, ratio in ratios.items())
        words += (
            f" Time of a round of FedDA, SGDM over one of FedAvg's (fedda bench, "
            f"{(bench or {})['device']}): {shown}."
        )
    return Verdict("F14", claim, verdict, f"In models of float32: {words}")
