"""What our results say of each claim of the paper that numbers can settle.

F1 to F4 and F13 are about mathematics: `fedda theory` measures them, and what it wrote into
`theory` beside the cells is read here. So is what `fedda bench` wrote into `bench.json`, as the
seconds of cells depend on what else the machine did. The rest is read off the cells alone. One
counter-example refutes a claim about all. What nothing refutes holds; so far, if runs are missing.
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
HOLDS, SO_FAR, IN_PART = "holds", "holds so far", "holds in part"
FAILS, OPEN = "does not hold", "not settled"

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
        told = [
            f"{part['claim']}: {part['verdict']} ({part['measured'].partition(';')[0]})"
            for part in parts
        ]
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
    ahead: bool | None = None  # of all that were run; None: nothing to compare
    missing: int = 0  # methods that were not run


def _columns(name: str, found: Sequence[Cell], higher: bool = True) -> list[Column]:
    """FedDA beside the best other method, for each optimiser of a table."""
    lines, sign = evidence.lines_of(name, found), 1 if higher else -1
    made = []
    for optimiser, column in evidence.columns(name).items():
        title = methods.OPTIMISER_NAMES[optimiser]
        others = {each: lines[methods.label(each)] for each in column}
        fedda = others.pop(f"fedda-{optimiser}")
        ends = {each: evidence.mean(line) for each, line in others.items()}
        ends = {each: mean for each, mean in ends.items() if not math.isnan(mean)}
        if not (fedda.seeds and ends):
            made.append(Column(f"{title} not run"))
            continue
        rival = max(ends, key=lambda each: sign * ends[each])
        words = f"{title} {evidence.mean(fedda):.4g} ({_method(rival)} {ends[rival]:.4g}"
        missing = sum(not line.seeds for line in others.values())
        ahead = sign * evidence.mean(fedda) > sign * ends[rival]
        words += f", {missing} not run)" if missing else ")"
        made.append(Column(words, ahead, missing))
    return made


def _method(algorithm: str) -> str:
    return methods.label(algorithm).partition(",")[0]


def _judged(columns: Sequence[Column]) -> str:
    if any(each.ahead is False for each in columns):
        return IN_PART if any(each.ahead for each in columns) else FAILS
    led = [each for each in columns if each.ahead]
    return _decided(len(led), len(led), len(columns) + sum(each.missing for each in led))


def _best(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA ends best in every column of tables 2 to 4."
    tables = {
        "CIFAR-100": _columns("table2", found),
        "EMNIST": _columns("table3", found),
        "autoencoder": _columns("table4", found, higher=False),
    }
    every = [each for columns in tables.values() for each in columns]
    best = sum(bool(each.ahead) for each in every)
    told = "; ".join(
        f"{title} {', '.join(each.words for each in columns)}" for title, columns in tables.items()
    )
    words = f"Best of what was run in {best} of {len(every)} columns; FedDA (best other): {told}."
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
        f"Stack Exchange, not its data, FedDA (best other): {told}. Its own table 5 has CLIMB "
        "0.302 and FedOpt 0.691 above FedDA's 0.273 and 0.674.",
    )


def _faster(found: Sequence[Cell]) -> Verdict:
    claim = "FedDA needs 34.3 % (CIFAR-100), 22.6 % (EMNIST), 75.4 % (Stack Overflow) fewer rounds."
    told, shares, done = [], [], []
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
        shares.append(
            float(np.mean([evidence.saved(*pair, goal) for pair in pairs for goal in goals]))
        )
        own_ends = float(np.mean([evidence.saved(*pair) for pair in pairs]))
        words = f"{methods.title(task)} {100 * shares[-1]:.1f} % ({100 * own_ends:.1f} %"
        words += f", without {len(lost)} that failed" if lost else ""
        if len(runs) == count:
            done.append(shares[-1] >= PAPER_FASTER[task])
        else:
            words += f", {len(runs)} of {count} methods"
        told.append(words + ")")
    verdict = _decided(sum(done), len(done), 3)
    if verdict == FAILS and max(shares) > 0:
        verdict = IN_PART
    every = "; ".join(
        f"{methods.title(task)} {each[0]} to {each[-1]}" for task, each in THRESHOLDS.items()
    )
    return Verdict(
        "F5",
        claim,
        verdict,
        f"Rounds saved to fixed values ({every}), in brackets to {evidence.OWN} of what a run "
        f"itself ends with, mean over the rivals: {', '.join(told) or 'no pair of runs yet'}.",
    )


def _local_iterations(found: Sequence[Cell]) -> Verdict:
    claim = "Accuracy first rises with local iterations T, then saturates or collapses."
    series = evidence.series("figure5", found, lambda cell: cell.values["local_work"])
    whole = {key: points for key, points in series.items() if len(points) == len(experiments.LOCAL)}
    tops = {key: max(points, key=lambda point: point[1]) for key, points in whole.items()}
    rising = [points[0] != tops[key] for key, points in whole.items()]
    told = [
        f"{_series(*key)} {points[0][1]:.4g}, {tops[key][1]:.4g} (T = {tops[key][0]:g}), "
        f"{points[-1][1]:.4g}"
        for key, points in whole.items()
    ]
    return Verdict(
        "F8",
        claim,
        _decided(sum(rising), len(rising), 6),
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
    """Four values each, in whose order ours and the paper's should agree.

    Where our best is under half of the paper's, all runs failed, and have no order.
    """
    claim = "FedDA reacts to its rates as tables 6 to 11 show."
    told, agreed = [], []
    for number in range(6, 12):
        lines = [line for line in evidence.lines_of(f"table{number}", found).values() if line.seeds]
        for task in ("emnist", "cifar100"):
            own = [line for line in lines if line.label.startswith(task)]
            ours = [0.0 if math.isnan(evidence.mean(line)) else evidence.mean(line) for line in own]
            paper = [line.paper for line in own if line.paper is not None]
            if len(own) < 4:
                continue
            failed = max(ours) < max(paper) / 2
            alike = math.nan if failed else evidence.rank_correlation(paper, ours)
            agreed.append(alike >= 0.8)
            told.append(
                f"table {number} {methods.title(task)} {'all fail' if failed else f'{alike:.2f}'}"
            )
    words = f"Rank correlation of ours and the paper's: {', '.join(told)}; 0.8 is asked."
    return Verdict(
        "F10",
        claim,
        _decided(sum(agreed), len(agreed), 12),
        words if told else "No table is whole.",
    )


def _stabilisation(found: Sequence[Cell]) -> Verdict:
    claim = "Full-batch rounds at the end make training converge."
    usual = 0.05
    told, calmer = [], []
    by_share = evidence.runs(
        "stabilise", found, lambda entry: (entry.task, entry.algorithm, entry.values["stabilise"])
    )
    for key in dict.fromkeys(key[:2] for key in by_share):
        pairs = evidence.pairs(by_share.get((*key, usual), []), by_share.get((*key, 0.0), []))
        if not pairs:
            continue
        last = round(usual * pairs[0][0].config.rounds)
        full, without = (
            float(np.mean([evidence.late_spread(each, last) for each in own]))
            for own in zip(*pairs, strict=True)
        )
        calmer.append(full < without)
        gain = evidence.signed(evidence.margin(*zip(*pairs, strict=True)))
        told.append(f"{_series(*key)} {full:.2g} (without {without:.2g}; accuracy {gain})")
    words = f"Deviation over the last {100 * usual:g} % of rounds, if these are full-batch: "
    return Verdict(
        "F11",
        claim,
        _decided(sum(calmer), len(calmer), 6),
        f"{words}{', '.join(told)}." if told else "No pair of runs yet.",
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
                    margin = evidence.margin(own, theirs)
                    margins.append(f"{evidence.signed(margin)} to {kind}")
                    helped += [margin.mean > 0] if kind != "restarted" else []
            if margins:
                told.append(f"{_series(task, algorithm)} {', '.join(margins)}")
    words = f"A momentum of 0.9 against others, in the same seeds: {'; '.join(told)}."
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
