"""Published numbers: the tables of the FedDA paper, and the results of the FedOpt paper.

`tables/tableNN.csv` is table NN as printed. `tables/fedopt.csv` has the results of Reddi et al.
(2021) for methods that the FedDA paper ran again: means over the last 100 rounds. Flower (its
baseline of that paper) cites the same numbers for CIFAR-100, and FedML (benchmark/README.md) cites
those of FedAvg on CIFAR-100 and EMNIST. The other three numbers of EMNIST are from memory.
"""

import csv
from functools import lru_cache
from pathlib import Path

OPTIMISERS = ("sgdm", "adam", "adagrad")

# Our tasks for the paper's data sets. Stack Exchange replaces Stack Overflow.
TASKS = {"CIFAR-100": "cifar100", "EMNIST": "emnist", "Stack Overflow": "stackexchange"}


@lru_cache
def lines(name: str) -> tuple[dict[str, str], ...]:
    """Return the lines of a table, such as `table02`, by column."""
    path = Path(__file__).parent / "tables" / f"{name}.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def finals(number: int) -> dict[tuple[str, str], float]:
    """Return the results of tables 2 to 5, by method and optimiser."""
    return {
        (line["method"], optimiser): float(line[optimiser])
        for line in lines(f"table{number:02}")
        for optimiser in OPTIMISERS
    }


def fedopt() -> dict[tuple[str, str], float]:
    """Return the results that the authors of FedOpt report, by task and algorithm."""
    return {(line["task"], line["algorithm"]): float(line["value"]) for line in lines("fedopt")}
