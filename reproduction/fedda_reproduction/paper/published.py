"""The numbers that were printed: the tables of the FedDA paper, and FedOpt's own results.

`tables/tableNN.csv` is table NN as printed. `tables/fedopt.csv` is what Reddi et al. (2021) report
for methods that the FedDA paper ran again: means over the last 100 rounds. Others cite the same
numbers: for CIFAR-100 Flower (its baseline of that paper), for FedAvg also FedML, which cites that
of EMNIST too (benchmark/README.md). The other three of EMNIST are from memory of the paper.
"""

import csv
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parent / "tables"
OPTIMISERS = ("sgdm", "adam", "adagrad")

# The tasks here that stand for the paper's data sets. Stack Exchange is not the paper's data.
TASKS = {"CIFAR-100": "cifar100", "EMNIST": "emnist", "Stack Overflow": "stackexchange"}


class Pair(NamedTuple):
    """A line of the tables 6 to 11: what FedDA reached with these rates."""

    task: str
    optimiser: str
    client_lr: float
    server_lr: float
    value: float


@lru_cache
def _lines(name: str) -> tuple[dict[str, str], ...]:
    with open(TABLES / f"{name}.csv", encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def finals(number: int) -> dict[tuple[str, str], float]:
    """Tables 2 to 5: what a method reached with an optimiser."""
    return {
        (line["method"], optimiser): float(line[optimiser])
        for line in _lines(f"table{number:02}")
        for optimiser in OPTIMISERS
    }


def pairs(number: int) -> list[Pair]:
    """Tables 6 to 11: what FedDA reached with pairs of a client and a server rate."""
    return [
        Pair(
            TASKS[line["dataset"]],
            line["optimizer"],
            float(line["client_lr"]),
            float(line["server_lr"]),
            float(line["accuracy"]),
        )
        for line in _lines(f"table{number:02}")
    ]


def settings() -> dict[str, float]:
    """Table 12: the paper's settings of FedDA, by the words it has for them."""
    return {line["parameter"]: float(line["value"]) for line in _lines("table12")}


def fedopt() -> dict[tuple[str, str], float]:
    """What the authors of FedOpt report, by task and algorithm."""
    return {(line["task"], line["algorithm"]): float(line["value"]) for line in _lines("fedopt")}
