"""What a round costs as the cohort, the population and the skew of the clients' sizes grow.

    python benchmarks/growth.py [--model mlp] [--out growth] [--chunks 10 100]

Measures seconds a round of FedAvg, on one device so that nothing else changes: against cohorts of
10 to 1,000 clients, against populations of 10^2 to 10^6 clients at cohort 10, and, at cohort 100,
against clients of log-normal sizes with the same mean and a growing sigma. `--chunks` also measures
the last of these with so many clients at a time, beside the number that is chosen automatically.
The members of a comparison take turns; a number is the median of the turns. What is learnt does not
matter: the examples are random. Writes OUT.json and, with Matplotlib, OUT.png.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedda import api, models
from fedda.core import losses
from fedda.data import inputs
from fedda.data.federation import Shards
from fedda.models import cnn, mlp
from fedda.simulate import train as simulate

NETWORKS: dict[str, tuple[Callable[[], models.Model], tuple[int, ...], int]] = {
    "mlp": (lambda: mlp(64, 64, 10), (64,), 10),
    "cnn": (lambda: cnn(28, 1, 62), (28, 28, 1), 62),
}
COHORTS = (10, 30, 100, 300, 1000)
POPULATIONS = (10**2, 10**3, 10**4, 10**5, 10**6)
SIGMAS = (0.0, 0.5, 1.0)
WITHIN = 0.15
PARTS = ("cohorts", "populations", "sizes")


def federation(count: np.ndarray, shape: tuple[int, ...], classes: int) -> Shards:
    """Clients with so many examples, of random bytes."""
    rng = np.random.default_rng(0)
    total = int(count.sum())
    return Shards(
        x=jax.device_put(rng.integers(0, 256, (total, *shape), np.uint8)),
        y=jax.device_put(rng.integers(0, classes, total, np.int32)),
        start=jax.device_put(np.append(0, np.cumsum(count)[:-1]).astype(np.int32)),
        count=jax.device_put(count.astype(np.int32)),
        max_count=int(count.max()),
        num_clients=len(count),
    )


def lognormal(sigma: float, clients: int, mean: int = 100) -> np.ndarray:
    """Sizes that are spread the more, the larger sigma is, with one mean."""
    draws = np.random.default_rng(1).lognormal(0, sigma, clients)
    return np.maximum(np.rint(draws * mean / draws.mean()), 1).astype(np.int64)


class Case(NamedTuple):
    """A run whose rounds are measured, some at a time."""

    label: Any
    setup: simulate.Setup
    evaluations: Iterator[Any]
    times: int  # it is asked for the next evaluation in a turn
    seconds: list[float]


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        make, self.shape, self.classes = NETWORKS[arguments.model]
        network = make()._replace(train=None)  # no dropout
        network = models.with_precision(network, arguments.precision)
        self.model = models.with_input(network, inputs.scaled)

    def clients(self, count: np.ndarray) -> Shards:
        return federation(count, self.shape, self.classes)

    def case(self, label: Any, shards: Shards, *, cohort: int, **settings: Any) -> Case:
        """Starts a run, and finds out how often it may be asked on in about `--seconds`."""
        rounds = max(1, 1000 // cohort)
        setup, hyper = api.prepare(
            "fedavg",
            self.model,
            shards,
            losses.cross_entropy,
            rounds=10**9,
            eval_every=rounds,
            cohort=cohort,
            batch=20,
            client_lr=0.01,
            **settings,
        )
        evaluations = simulate.train(setup, api.traced(hyper, self.model), [0])
        next(evaluations)  # before the first round
        next(evaluations)  # compiles
        took = min(timed(evaluations) for _ in range(3))
        return Case(label, setup, evaluations, max(1, round(self.arguments.seconds / took)), [])

    def measure(self, cases: list[Case]) -> list[dict[str, Any]]:
        for _ in range(self.arguments.repetitions):
            for case in cases:
                seconds = sum(timed(case.evaluations) for _ in range(case.times))
                case.seconds.append(seconds / (case.times * case.setup.eval_every))
        return [
            {
                "label": case.label,
                "seconds": statistics.median(case.seconds),
                "from": min(case.seconds),
                "to": max(case.seconds),
                "chunk": case.setup.layout.places(case.setup.cohort)[2],
                "examples": examples_of(case.setup),
                "padding_waste": simulate.padding_waste(case.setup._replace(rounds=500), seed=0),
            }
            for case in cases
        ]

    def cohorts(self) -> list[dict[str, Any]]:
        shards = self.clients(np.full(2000, 100))
        return self.measure([self.case(size, shards, cohort=size) for size in COHORTS])

    def populations(self) -> list[dict[str, Any]]:
        largest = POPULATIONS[-1] if self.arguments.model == "mlp" else POPULATIONS[-2]
        return self.measure(
            [
                self.case(number, self.clients(np.full(number, 10)), cohort=10)
                for number in POPULATIONS
                if number <= largest
            ]
        )

    def sizes(self) -> list[dict[str, Any]]:
        cases = []
        for sigma in SIGMAS:
            shards = self.clients(lognormal(sigma, 2000))
            for chunk in (None, *self.arguments.chunks):
                settings = {"chunk": chunk, "cohort": 100, "local_unit": "epochs", "local_work": 1}
                cases.append(self.case((sigma, chunk), shards, **settings))
        return self.measure(cases)


def timed(evaluations: Iterator[Any]) -> float:
    begin = time.perf_counter()
    next(evaluations)  # its row has the training loss, so the rounds are done
    return time.perf_counter() - begin


def examples_of(setup: simulate.Setup) -> float:
    """That count in a round, on average."""
    count = np.asarray(setup.shards.count)
    if setup.task.plan.unit == "steps":
        return float(setup.cohort * setup.task.plan.amount * setup.task.plan.batch)
    return float(setup.cohort * setup.task.plan.amount * count.mean())


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def report(results: dict[str, Any]) -> str:
    head = (
        f"{results['device']}, jax {results['jax']}, {results['date']}, {results['model']}: "
        f"`{results['command']}`"
    )
    shown = {"cohorts": cohort_table, "populations": population_table, "sizes": size_table}
    tables = ["\n".join(shown[part](results[part])) for part in PARTS if part in results]
    return "\n\n".join([head, *tables]) + "\n"


def cohort_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| cohort | a round | a client | off the line | clients at a time |"
    yield "|--:|--:|--:|--:|--:|"
    each = line_through_origin(rows)
    for row in rows:
        off = row["seconds"] / (each * row["label"]) - 1
        own = duration(row["seconds"] / row["label"])
        time = duration(row["seconds"])
        yield f"| {row['label']:,} | {time} | {own} | {off:+.0%} | {row['chunk']} |"


def population_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| population | a round, cohort 10 | to the smallest |"
    yield "|--:|--:|--:|"
    for row in rows:
        ratio = row["seconds"] / rows[0]["seconds"]
        yield f"| {row['label']:,} | {duration(row['seconds'])} | {ratio:.2f} |"


def size_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| sigma of sizes | clients at a time | a round, cohort 100 | per example, to sigma 0 | "
        "padding | of it, unequal clients |"
    )
    yield "|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        sigma, chunk = row["label"]
        at_a_time = f"{row['chunk']}{' (chosen)' if chunk is None else ''}"
        ratio = row["seconds"] / row["examples"] / (rows[0]["seconds"] / rows[0]["examples"])
        waste = " | ".join(f"{share:.1%}" for share in row["padding_waste"].values())
        yield f"| {sigma:g} | {at_a_time} | {duration(row['seconds'])} | {ratio:.2f} | {waste} |"


def line_through_origin(rows: list[dict[str, Any]]) -> float:
    """Its slope: of those past the smallest, halfway between the least and the most a client."""
    slopes = [row["seconds"] / row["label"] for row in rows[1:]]
    return math.sqrt(min(slopes) * max(slopes))


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    color, grey = "#c2410c", "#64748b"
    parts = [part for part in PARTS if part in results]
    figure, panels = plt.subplots(
        1, len(parts), figsize=(4.4 * len(parts), 3.6), squeeze=False, layout="constrained"
    )
    for panel, part in zip(panels[0], parts, strict=True):
        rows = [row for row in results[part] if part != "sizes" or row["label"][1] is None]
        x = [row["label"] if part != "sizes" else row["label"][0] for row in rows]
        y = [1e3 * row["seconds"] for row in rows]
        ends = [[1e3 * row[end] for row in rows] for end in ("from", "to")]
        panel.errorbar(x, y, np.abs(np.array(ends) - y), fmt="o", color=color, capsize=3)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylabel("milliseconds a round")
        if part == "cohorts":
            line = 1e3 * line_through_origin(rows) * np.array(x)
            panel.plot(x, line, color=grey, label="line through the origin")
            low, high = (1 - WITHIN) * line, (1 + WITHIN) * line
            panel.fill_between(x, low, high, color=grey, alpha=0.2, label=f"within {WITHIN:.0%}")
            panel.legend(frameon=False)
            panel.set(xscale="log", yscale="log", xlabel="cohort")
        elif part == "populations":
            panel.set(xscale="log", xlabel="population, cohort 10", ylim=(0, 1.5 * max(y)))
        else:
            panel.set(xlabel="sigma of log-normal client sizes, cohort 100", ylim=(0, 1.5 * max(y)))
            for sigma, value, row in zip(x, y, rows, strict=True):
                text = f"{row['padding_waste']['unequal_clients']:.0%} padding"
                panel.annotate(
                    text, (sigma, value), (0, 12), textcoords="offset points", ha="center"
                )
            panel.margins(x=0.2)
    title = f"FedAvg, {results['model']}, {results['device']}, {results['date']}"
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--chunks", type=int, nargs="*", default=[])
    parser.add_argument("--precision", choices=models.PRECISIONS, default="fp32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a turn takes, about")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    arguments = parser.parse_args()
    bench = Bench(arguments)
    where = jax.devices()[0]
    cores = f" ({os.cpu_count()} cores, {platform.machine()})" if where.platform == "cpu" else ""
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/growth.py", *sys.argv[1:]]),
        "device": f"{where.device_kind}{cores}",
        "jax": jax.__version__,
        "model": f"{arguments.model} in {arguments.precision}",
    } | {part: getattr(bench, part)() for part in arguments.parts}
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))
    try:
        draw(results, arguments.out.with_suffix(".png"))
    except ImportError:
        print("no figure: Matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
