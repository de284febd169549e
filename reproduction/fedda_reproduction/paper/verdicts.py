"""Check the claims of the paper against finished runs: a verdict and the numbers behind it.

F1 to F4 and F13 are about mathematics: `fedda theory` measures them and writes `theory.json`. The
times of F14 are from `fedda bench`, because the seconds of cells depend on other programs of the
machine. Everything else is computed from the cells. `lines` says each claim and what was found in
one line.
"""

import enum
import itertools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtrc

from fedda.errors import InputError
from fedda.storage.files import read_json
from fedda.storage.schema import NUMBER_OR_NULL
from fedda_reproduction.inference import LEVEL, Finding, holm
from fedda_reproduction.paper import comparison
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.comparison import THRESHOLDS
from fedda_reproduction.paper.experiments import FEDDA, TUNED, Entry, experiments
from fedda_reproduction.paper.methods import OPTIMISER_NAMES, TASKS, label

PAPER_FASTER = {"table2": 0.343, "table3": 0.226, "table5": 0.754}  # fewer rounds, it says
LOCAL_ITERATIONS = (1, 2, 5, 10, 20)
RATES = tuple(f"table{number}" for number in range(6, 12))
LITTLE_TIME = 1.25  # times FedAvg's round

# What is read of the files of `fedda theory` and `fedda bench`, if they are there.
File = Mapping[str, Any] | None
THEORY = {"claims": [{"key": str, "verdict": str}]}
BENCH = {"device": str, "models": {...: {"fedda_to_fedavg?": NUMBER_OR_NULL}}}


class Verdict(enum.StrEnum):
    CONFIRMED = "confirmed"
    PARTLY = "partly confirmed"
    NOT = "not confirmed"
    UNDECIDED = "undecided"


class Line(NamedTuple):
    """A claim in one line."""

    name: str  # F1 to F14
    claim: str
    verdict: Verdict
    found: str  # with its numbers
    numbers: Mapping[str, str]


class Check(NamedTuple):
    """The verdict on a claim, numbers to quote, and a table of the evidence."""

    verdict: Verdict
    numbers: Mapping[str, str] = {}
    table: Sequence[Mapping[str, str]] = ()


def checks(finished: Sequence[Cell], theory: File = None, bench: File = None) -> dict[str, Check]:
    """Check every claim, F1 to F14."""
    return {
        **{name: _theory(name, theory) for name in ("F1", "F2", "F3", "F4")},
        "F5": _faster(finished),
        "F6": _best(finished, "table2", "table3", "table4"),
        "F7": _best(finished, "table5"),
        "F8": _local_iterations(finished),
        "F9": _more_rounds(finished),
        "F10": _sensitivity(finished),
        "F11": _full_batches(finished),
        "F12": _momentum(finished),
        "F13": _theory("F13", theory),
        "F14": _cost(finished, bench),
    }


def lines(checks: Mapping[str, Check]) -> list[Line]:
    """Return every claim with its verdict and what was found, from the result of `checks`."""
    texts = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
    return [
        Line(
            name,
            texts[name]["claim"],
            check.verdict,
            texts[name]["found"].format(**check.numbers) if check.numbers else "Not measured yet.",
            check.numbers,
        )
        for name, check in checks.items()
    ]


def decided(cases: Sequence[bool], needed: int) -> Verdict:
    """Return the verdict on a claim from whether it is true in each case; `needed` is all cases."""
    if not all(cases):
        return Verdict.PARTLY if any(cases) else Verdict.NOT
    return Verdict.CONFIRMED if len(cases) >= needed else Verdict.UNDECIDED


def judged(findings: Sequence[Finding | None], whole: bool) -> Verdict:
    """Return the verdict on whether FedDA is ahead; `whole` is whether all cases were run.

    Cases that are not decided contradict nothing, but confirm nothing either.
    """
    against = Finding.BEHIND in findings or Finding.EQUIVALENT in findings
    if Finding.AHEAD not in findings:
        return Verdict.NOT if against else Verdict.UNDECIDED
    if against or any(each != Finding.AHEAD for each in findings):
        return Verdict.PARTLY
    return Verdict.CONFIRMED if whole else Verdict.UNDECIDED


def _gain(ours: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Format how much higher one method ends than another, with the interval of Welch's test."""
    if not ours or not theirs:
        return "-"
    mean, low, high, _ = comparison.margin(ours, theirs)
    return f"{mean:+.2g}" + ("" if np.isnan(low) else f" ± {(high - low) / 2:.2g}")


def _points(ours: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Format `_gain` in points."""
    mean, low, high, _ = comparison.margin(ours, theirs)
    interval = "" if np.isnan(low) else f" ± {50 * (high - low):.1f}"
    return f"{100 * mean:+.1f}{interval} points".replace("-", "\N{MINUS SIGN}")


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


# ---------------------------------------------------------------------------------- other commands


def read_beside(folder: Path) -> dict[str, Any]:
    """Read what `fedda theory` and `fedda bench` wrote beside the cells, for `checks`."""
    files = {"theory": ("theory/theory.json", THEORY), "bench": ("bench.json", BENCH)}
    contents = {}
    for command, (name, spec) in files.items():
        try:
            contents[command] = read_json(folder / name, spec) if (folder / name).exists() else None
        except ValueError as error:
            raise InputError(
                f"{folder / name} is not what fedda {command} writes: {error}. Delete it, or "
                "write it again."
            ) from error
    return contents


def _theory(name: str, theory: File) -> Check:
    verdict = {claim["key"]: claim["verdict"] for claim in (theory or {"claims": []})["claims"]}
    if theory is None or name not in verdict:
        return Check(Verdict.UNDECIDED)
    return Check(Verdict(verdict[name]), _theory_numbers(name, theory))


def _theory_numbers(name: str, record: Mapping[str, Any]) -> dict[str, str]:
    from fedda_reproduction.theory import page, verdicts

    n, growth = verdicts.numbers(dict(record)), record["growth"][0]
    nearer = verdicts.average(n["usual"], verdicts.NEARER[10])[0]
    return {
        "F1": {"apart": f"{max(n['f1'].values()):.1e}", "rounds": str(record["plan"]["rounds"])},
        "F2": {"apart": f"{n['f2']:.1e}"},
        "F3": {"nearer": page.percent(nearer)},
        "F4": {
            "printed": f"{growth['printed']:.3g}",
            "corrected": f"{growth['corrected']:.3f}",
            "local": f"{growth['local, equation'][0]:.3f}",
            "decoupled": f"{growth['decoupled, equation'][0]:.3f}",
        },
        "F13": {"near": page.percent(max(row["near"] for row in n["longer"]))},
    }[name]


def _cost(finished: Sequence[Cell], bench: File) -> Check:
    sent = set()
    for name in ("table2", "table3"):
        runs = comparison.runs(name, finished)
        for cell in (runs[algorithm][0] for algorithm in FEDDA if algorithm in runs):
            model = 4 * cell.content["parameters"] * cell.config.cohort * cell.config.rounds
            sent |= {round(cell.content[f"bytes_{way}"] / model, 2) for way in ("down", "up")}
    timed = {} if bench is None else bench["models"]
    times = {name: model.get("fedda_to_fedavg") for name, model in timed.items()}
    times = {name: ratio for name, ratio in times.items() if ratio is not None}
    if not (sent and times):
        return Check(Verdict.UNDECIDED)
    lowest, highest = min(times.values()), max(times.values())
    little = highest <= LITTLE_TIME and round(max(sent), 1) == 2
    models = " or ".join(f"{number:g}" for number in sorted(sent))
    table = [{"model": name, "FedDA's time / FedAvg's": f"{times[name]:.2f}"} for name in times]
    numbers = {"models": models, "times": f"{lowest:.2f} to {highest:.2f}"}
    verdict = Verdict.CONFIRMED if little else Verdict.PARTLY
    return Check(verdict=verdict, numbers=numbers, table=table)


# --------------------------------------------------------------------- FedDA against other methods


def _faster(finished: Sequence[Cell]) -> Check:
    """Compare the rounds to fixed values, with the methods that reach the lowest of them."""
    table, shares, won = [], {}, []
    for name, goals in THRESHOLDS.items():
        runs, entries = comparison.runs(name, finished), experiments()[name].entries
        races = {
            OPTIMISER_NAMES[optimiser]: _race(runs, f"fedda-{optimiser}", column, goals)
            for optimiser, column in comparison.optimiser_columns(name).items()
        }
        if not (every := [saved for race in races.values() for saved in race]):
            continue
        task = TASKS[entries[0].task]
        shares[task], to_own_end = np.mean(every, axis=0)
        if len(runs) == len(entries):
            won.append(shares[task] >= PAPER_FASTER[name])
        row = {"task": task, "paper": _percent(PAPER_FASTER[name]), "all": _percent(shares[task])}
        for optimiser, race in races.items():
            row[optimiser] = _percent(np.mean(race, axis=0)[0], 0) if race else "-"
        row[f"to {comparison.ARRIVED} of its own end"] = _percent(to_own_end)
        row["pairs"] = str(len(every))
        table.append(row)
    if len(table) < len(THRESHOLDS):
        return Check(verdict=decided(won, len(THRESHOLDS)), table=table)
    numbers = {task: _percent(share) for task, share in shares.items()}
    own = [row[f"to {comparison.ARRIVED} of its own end"] for row in table]
    numbers["ends"] = f"{', '.join(own[:-1])} and {own[-1]}"
    return Check(verdict=decided(won, len(THRESHOLDS)), numbers=numbers, table=table)


def _race(
    runs: Mapping[str, list[Cell]], fedda: str, column: Sequence[str], goals: Sequence[float]
) -> list[tuple[float, float]]:
    """Return the share of rounds saved to the goals, and to the run's own end, for each other run.

    Methods that fail are left out, because any method is faster than they are. A FedDA that fails
    saves nothing to its own end, which it would reach at once.
    """
    return [
        (
            float(np.mean([comparison.saved(*pair, goal) for goal in goals])),
            comparison.saved(*pair) if comparison.end(pair[0]) >= goals[0] else 0.0,
        )
        for other in column
        if other != fedda
        for pair in comparison.pairs(runs.get(fedda, []), runs.get(other, []))
        if comparison.end(pair[1]) >= goals[0]
    ]


def _best(finished: Sequence[Cell], *names: str) -> Check:
    columns = [column for column in comparison.columns(finished) if column.table in names]
    findings = [column.finding for column in columns]
    counts = {finding.value: str(findings.count(finding)) for finding in Finding}
    whole = None not in findings and not any(column.missing for column in columns)
    numbers = counts | {"columns": str(len(columns)), "none": str(findings.count(None))}
    return Check(verdict=judged(findings, whole), numbers=numbers)


def tuned_margins(finished: Sequence[Cell]) -> list[dict[str, str]]:
    """Return FedDA's margins to the best other method, with all methods tuned by the same rule.

    A star marks those that are significant after Holm's correction over this table.
    """
    table: list[dict[str, str]] = []
    tested: list[tuple[dict[str, str], str, float]] = []
    for task, name in TUNED.items():
        tuned, full = (comparison.runs(table, finished) for table in (name, f"recommended-{task}"))
        kinds = {"none": (tuned, tuned), "FedDA": (full, tuned), "all methods": (full, full)}
        for kind, (ours, theirs) in kinds.items():
            other = comparison.best(theirs, ours=False)
            if other is None or ours.keys().isdisjoint(FEDDA):
                continue
            best = f"{label(other)} {comparison.mean(theirs[other]):.4f}"
            row = {"task": TASKS[task], "with full-batch rounds": kind, "best other": best}
            for name in FEDDA:
                row[label(name)] = _gain(ours.get(name, []), theirs[other])
                if name in ours:
                    p = comparison.margin(ours[name], theirs[other]).p
                    tested.append((row, label(name), p))
            table.append(row)
    for (row, column, _), p in zip(tested, holm([p for _, _, p in tested]), strict=True):
        row[column] += "*" if p < LEVEL else ""
    return table


# --------------------------------------------------------------------------------- FedDA by itself


def _by(name: str) -> Callable[[Entry], tuple[str, str, Any]]:
    """Return a key for runs that differ in one setting."""
    return lambda entry: (entry.task, entry.algorithm, entry.values.get(name, entry.at))


def _local_iterations(finished: Sequence[Cell]) -> Check:
    """Compare numbers of local iterations, over the seeds that all of them share."""
    runs = comparison.runs("figure5", finished, _by("local_work"))
    rises, collapses = [], []
    for task, algorithm in dict.fromkeys(key[:2] for key in runs):
        lists = [runs.get((task, algorithm, work), []) for work in LOCAL_ITERATIONS]
        shared = set.intersection(*({cell.config.seed for cell in seeds} for seeds in lists))
        if not shared:
            continue
        alike = [[cell for cell in seeds if cell.config.seed in shared] for seeds in lists]
        ends = list(map(comparison.mean, alike))
        rises.append(max(ends) > ends[0])
        if task == "emnist" and algorithm != "fedda-adam":
            collapses.append(ends[-1] < max(ends) / 2)
    numbers = {"rising": _count(rises), "collapsing": _count(collapses)}
    return Check(verdict=decided(rises + collapses, 8), numbers=numbers)


def _more_rounds(finished: Sequence[Cell]) -> Check:
    series: dict[tuple[str, str], list[float]] = {}
    for (task, algorithm, at), seeds in comparison.runs("figure6", finished, _by("at")).items():
        series.setdefault((task, algorithm), []).append(comparison.mean(seeds, at))
    rising = [
        all(after > before - 0.01 for before, after in itertools.pairwise(values))
        for values in series.values()
    ]
    return Check(verdict=decided(rising, 6), numbers={"rising": _count(rising)})


def _sensitivity(finished: Sequence[Cell]) -> Check:
    """Compare the order of pairs of rates. By chance, half of the pairs would agree."""
    table, agreed, ordered = [], 0, 0
    for name, task in itertools.product(RATES, ("emnist", "cifar100")):
        runs = comparison.runs(name, finished, lambda entry: entry.label)
        entries = [entry for entry in experiments()[name].entries if entry.task == task]
        if any(entry.label not in runs for entry in entries):
            continue
        ours = [max(0.0, comparison.mean(runs[entry.label])) for entry in entries]
        agree, pairs = comparison.same_order([entry.paper or 0.0 for entry in entries], ours)
        agreed, ordered = agreed + agree, ordered + pairs
        table.append({"table": name, "task": TASKS[task], "same order": f"{agree} of {pairs}"})
    # The probability of so many pairs or more, if the order were random and pairs were independent.
    chance = float(bdtrc(agreed - 1, ordered, 0.5)) if agreed else 1.0
    verdict = Verdict.PARTLY if chance < LEVEL else Verdict.UNDECIDED
    if ordered and agreed <= ordered / 2:
        verdict = Verdict.NOT
    elif ordered and agreed >= 0.9 * ordered and len(table) == 2 * len(RATES):
        verdict = Verdict.CONFIRMED
    numbers = {"agreeing": f"{agreed} of {ordered}", "chance": f"{chance:.2f}"}
    return Check(verdict=verdict, numbers=numbers, table=table)


def _full_batches(finished: Sequence[Cell]) -> Check:
    """Compare the spread of the metric over the last rounds, with and without full batches."""
    table, calmer = [], []
    ends: list[tuple[Sequence[Cell], Sequence[Cell]]] = []
    runs = comparison.runs("stabilise", finished, _by("stabilise"))
    compared = [
        (task, name, 0.05, *(runs.get((task, name, share), []) for share in (0.05, 0.0)))
        for task, name in dict.fromkeys(key[:2] for key in runs)
    ]
    for task, tuned in TUNED.items():
        full, usual = (comparison.runs(table, finished) for table in (f"recommended-{task}", tuned))
        compared += [(task, name, 0.1, full.get(name, []), usual.get(name, [])) for name in FEDDA]
    for task, name, share, ours, theirs in compared:
        if not (pairs := comparison.pairs(ours, theirs)):
            continue
        last = round(share * pairs[0][0].config.rounds)
        spread, without = (
            comparison.late_spread(seeds, last) for seeds in zip(*pairs, strict=True)
        )
        calmer.append(spread < without)
        ends.append((ours, theirs))
        table.append(
            {
                "task": f"{TASKS[task]}, {'tuned' if share == 0.1 else 'published'} rates",
                "method": label(name),
                "share of rounds": _percent(share, 0),
                "spread": f"{spread:.2g}",
                "spread without": f"{without:.2g}",
                "gain": _gain(ours, theirs),
            }
        )
    p_values = holm([comparison.margin(*pair).p for pair in ends])
    higher = [
        comparison.compared(*pair, p) == Finding.AHEAD
        for pair, p in zip(ends, p_values, strict=True)
    ]
    numbers = {"calmer": _count(calmer), "higher": _count(higher)}
    return Check(verdict=decided(calmer, 15), numbers=numbers, table=table)


def _momentum(finished: Sequence[Cell]) -> Check:
    """Compare FedDA's momentum with none and with local momentum.

    The control, AdaGrad with momentum at the server, is shown, and not counted in the verdict: it
    was run last, when the other results were known.
    """
    runs = comparison.runs("ablation", finished, lambda entry: entry.label)
    table: list[dict[str, str]] = []
    helped: list[Finding | None] = []
    control = "not run"
    for task, algorithm in itertools.product(("emnist", "cifar100"), FEDDA):
        usual = f"{TASKS[task]}, {label(algorithm)}"
        local = f"{TASKS[task]}, {label('mfl-sgdm')}, damped" if algorithm == FEDDA[0] else ""
        adagrad = f"{TASKS[task]}, {label('fedopt-adagrad')}, momentum as gradient"
        others = {
            **{"none": f"{usual}, beta1 0", "restarted": f"{usual}, restarted", "local": local},
            "server momentum": adagrad if algorithm == "fedda-adagrad" else "",
        }
        ours, row = runs.get(f"{usual}, beta1 0.9", []), {"momentum 0.9": usual}
        for kind, other in others.items():
            theirs = runs.get(other, [])
            row[f"gain over {kind}"] = gain = _gain(ours, theirs)
            if gain != "-" and kind in ("none", "local"):
                helped.append(comparison.compared(ours, theirs))
            if gain != "-" and kind == "server momentum":
                control = f"{_points(ours, theirs)}, n = {len(ours)} + {len(theirs)}"
        if {*row.values()} != {usual, "-"}:
            table.append(row)
    ahead = _count([each == Finding.AHEAD for each in helped])
    numbers = {"ahead": ahead, "control": control}
    return Check(verdict=judged(helped, len(helped) >= 8), numbers=numbers, table=table)


def _count(cases: Sequence[bool]) -> str:
    return f"{sum(cases)} of {len(cases)}"
