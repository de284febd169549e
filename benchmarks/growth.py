"""Time a round as the cohort, the population and the skew of the clients' sizes grow.

    python benchmarks/growth.py [--model mlp] [--out growth] [--chunks 10 100]

Measures seconds a round of FedAvg, on one device so that nothing else changes: against cohorts of
10 to 10,000 clients, against populations of 10^2 to 10^6 clients at cohort 10, and, at cohort 100,
against clients of log-normal sizes with the same mean and a growing sigma. `--chunks` repeats the
last of these with other numbers of clients at a time than the one that is chosen automatically. The
members of a comparison take turns; a number is the median of the turns. What is learnt does not
matter: the examples are random. Writes OUT.json and OUT.png.
"""

import argparse
import json
import math
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
from fedda.data import preprocessing
from fedda.data.federation import Shards
from fedda.models import cnn, mlp
from fedda.reports import figures
from fedda.reports.tables import markdown_table
from fedda.simulate.train import Setup, padding_waste, train
from fedda.storage.provenance import device

NETWORKS: dict[str, tuple[Callable[[], models.Model], tuple[int, ...], int]] = {
    "mlp": (lambda: mlp(64, 64, 10), (64,), 10),
    "cnn": (lambda: cnn(28, 1, 62), (28, 28, 1), 62),
}
COHORTS = (10, 30, 100, 300, 1000, 3000, 10_000)
POPULATIONS = (10**2, 10**3, 10**4, 10**5, 10**6)
SIGMAS = (0.0, 0.5, 1.0)
WITHIN = 0.10
PARTS = ("cohorts", "populations", "sizes")


def federation(count: np.ndarray, shape: tuple[int, ...], classes: int) -> Shards:
    """Return clients with these numbers of examples, of random bytes."""
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
    """Return random sizes of clients with one mean, which vary more for a larger sigma."""
    draws = np.random.default_rng(1).lognormal(0, sigma, clients)
    return np.maximum(np.rint(draws * mean / draws.mean()), 1).astype(np.int64)


class Case(NamedTuple):
    """A run whose rounds are timed."""

    label: Any
    setup: Setup
    evaluations: Iterator[Any]
    times: int  # evaluations in a turn
    seconds: list[float]  # per round, of every turn


class Bench:
    """The three comparisons, with the model and the options of the command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        make, self.shape, self.classes = NETWORKS[arguments.model]
        network = make()._replace(train=None)  # no dropout
        network = models.with_precision(network, arguments.precision)
        self.model = models.with_input(network, preprocessing.scaled)

    def clients(self, count: np.ndarray) -> Shards:
        return federation(count, self.shape, self.classes)

    def case(self, label: Any, shards: Shards, *, cohort: int, **settings: Any) -> Case:
        """Start a run, and measure how many evaluations take about `--seconds`."""
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
        evaluations = train(setup, api.traced(hyper, self.model), [0])
        next(evaluations)  # before the first round
        next(evaluations)  # compiles
        fastest = min(timed(evaluations) for _ in range(3))
        times = max(1, round(self.arguments.seconds / fastest))
        return Case(label, setup, evaluations=evaluations, times=times, seconds=[])

    def measure(self, cases: list[Case]) -> list[dict[str, Any]]:
        """Time the cases in turns."""
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
                "padding_waste": padding_waste(case.setup._replace(rounds=500), seed=0),
            }
            for case in cases
        ]

    def cohorts(self) -> list[dict[str, Any]]:
        """Compare cohorts of growing size."""
        shards = self.clients(np.full(10_000, 100))
        return self.measure([self.case(size, shards, cohort=size) for size in COHORTS])

    def populations(self) -> list[dict[str, Any]]:
        """Compare growing numbers of clients."""
        largest = POPULATIONS[-1] if self.arguments.model == "mlp" else POPULATIONS[-2]
        return self.measure(
            [
                self.case(number, self.clients(np.full(number, 10)), cohort=10)
                for number in POPULATIONS
                if number <= largest
            ]
        )

    def sizes(self) -> list[dict[str, Any]]:
        """Compare clients whose sizes vary more and more."""
        cases = []
        for sigma in SIGMAS:
            shards = self.clients(lognormal(sigma, 2000))
            for chunk in (None, *self.arguments.chunks):
                settings = {"chunk": chunk, "cohort": 100, "local_unit": "epochs", "local_work": 1}
                cases.append(self.case((sigma, chunk), shards, **settings))
        return self.measure(cases)


def timed(evaluations: Iterator[Any]) -> float:
    """Return the seconds until the next evaluation."""
    begin = time.perf_counter()
    next(evaluations)  # its row has the training loss, so the rounds are done
    return time.perf_counter() - begin


def examples_of(setup: Setup) -> float:
    """Return the mean number of examples of a round, without padding."""
    count = np.asarray(setup.shards.count)
    if setup.task.plan.unit == "steps":
        return float(setup.cohort * setup.task.plan.amount * setup.task.plan.batch)
    return float(setup.cohort * setup.task.plan.amount * count.mean())


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown tables."""
    head = (
        f"{results['device']}, jax {results['jax']}, {results['date']}, {results['model']}: "
        f"`{results['command']}`"
    )
    tables = {"cohorts": cohort_table, "populations": population_table, "sizes": size_table}
    rows = [tables[part](results[part]) for part in PARTS if part in results]
    return "\n\n".join([head, *(markdown_table(table, "r" * len(table[0])) for table in rows)])


def cohort_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table of cohorts, the header first."""
    table = [
        ["cohort", "time per round", "time per client", "difference to a line", "clients per chunk"]
    ]
    slope = line_through_origin(rows)
    for row in rows:
        size, seconds = row["label"], row["seconds"]
        off = f"{seconds / (slope * size) - 1:+.0%}"
        table.append(
            [f"{size:,}", duration(seconds), duration(seconds / size), off, f"{row['chunk']}"]
        )
    return table


def population_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table of populations, the header first."""
    table = [["population", "time per round, cohort 10", "ratio to the smallest"]]
    for row in rows:
        ratio = f"{row['seconds'] / rows[0]['seconds']:.2f}"
        table.append([f"{row['label']:,}", duration(row["seconds"]), ratio])
    return table


def size_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table of client sizes, the header first."""
    table = [["sigma of sizes", "clients per chunk", "time per round, cohort 100"]]
    table[0] += ["time per example, ratio to sigma 0", "padding", "padding for unequal clients"]
    first = rows[0]["seconds"] / rows[0]["examples"]
    for row in rows:
        sigma, chunk = row["label"]
        chosen = f"{row['chunk']}{' (chosen)' if chunk is None else ''}"
        ratio = f"{row['seconds'] / row['examples'] / first:.2f}"
        waste = [f"{share:.1%}" for share in row["padding_waste"].values()]
        table.append([f"{sigma:g}", chosen, duration(row["seconds"]), ratio, *waste])
    return table


def line_through_origin(rows: list[dict[str, Any]]) -> float:
    """Return its slope: the geometric mean of the least and the most seconds per client.

    The smallest cohort is left out.
    """
    slopes = [row["seconds"] / row["label"] for row in rows[1:]]
    return math.sqrt(min(slopes) * max(slopes))


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the figure of the results."""
    parts = [part for part in PARTS if part in results]
    figure = figures.new_figure(4.4 * len(parts), 3.6)
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        rows = [row for row in results[part] if part != "sizes" or row["label"][1] is None]
        x = [row["label"] if part != "sizes" else row["label"][0] for row in rows]
        y = [1e3 * row["seconds"] for row in rows]
        ends = [[1e3 * row[end] for row in rows] for end in ("from", "to")]
        bars = np.abs(np.array(ends) - y)
        axes.errorbar(x, y, bars, fmt="o", color=figures.ORANGE, capsize=3)
        figures.style_axes(axes)
        axes.set_ylabel("milliseconds a round")
        if part == "cohorts":
            line = 1e3 * line_through_origin(rows) * np.array(x)
            axes.plot(x, line, color=figures.GREY, label="line through the origin")
            band = {"color": figures.GREY, "alpha": 0.2, "label": f"within {WITHIN:.0%}"}
            axes.fill_between(x, (1 - WITHIN) * line, (1 + WITHIN) * line, **band)
            axes.legend(frameon=False)
            axes.set(xscale="log", yscale="log", xlabel="cohort")
        elif part == "populations":
            axes.set(xscale="log", xlabel="population, cohort 10", ylim=(0, 1.5 * max(y)))
        else:
            axes.set(xlabel="sigma of log-normal client sizes, cohort 100", ylim=(0, 1.5 * max(y)))
            for sigma, value, row in zip(x, y, rows, strict=True):
                text = f"{row['padding_waste']['unequal_clients']:.0%} padding"
                place = {"xytext": (0, 12), "textcoords": "offset points", "ha": "center"}
                axes.annotate(text, (sigma, value), **place)
            axes.margins(x=0.2)
    title = f"FedAvg, {results['model']}, {results['device']}, {results['date']}"
    figure.suptitle(title, fontsize="small")
    figures.save(figure, path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--chunks", type=int, nargs="*", default=[])
    parser.add_argument("--precision", choices=models.PRECISIONS, default="fp32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, about")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    arguments = parser.parse_args()
    bench = Bench(arguments)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/growth.py", *sys.argv[1:]]),
        "device": device(),
        "jax": jax.__version__,
        "model": f"{arguments.model} in {arguments.precision}",
    } | {part: getattr(bench, part)() for part in arguments.parts}
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))
    draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
