"""What the adapters share. An adapter runs in its library's environment, which has NumPy."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conformance.problem import Array
from conformance.reader import read_problem

PROBLEM = read_problem()
CLIENTS = len(PROBLEM.clients)
Hyper = Mapping[str, float]


class Rows(NamedTuple):
    """The examples that a client works through in a round, in the order of its batches."""

    client: int
    x: Array
    y: Any

    def batches(self) -> list[tuple[Array, Any]]:
        """Return the batches of the local steps."""
        cuts = range(PROBLEM.batch, len(self.x), PROBLEM.batch)
        return list(zip(np.split(self.x, cuts), np.split(self.y, cuts), strict=True))


def rows_of_round(visits: Sequence[Mapping[str, Any]]) -> dict[int, Rows]:
    """Return the rows of each client of a cohort.

    They are two epochs, so that their number is twice that of the client's examples.
    """
    found = {}
    for visit in visits:
        x, y = PROBLEM.clients[visit["client"]]
        rows = np.concatenate(visit["batches"])
        found[visit["client"]] = Rows(visit["client"], x[rows], y[rows])
    return found


ROUNDS = [rows_of_round(visits) for visits in PROBLEM.schedules["epochs"]]


def main(package: str, trials: Mapping[str, Callable[[Hyper], Sequence[Any]]]) -> None:
    """Run the trials that a file asks for, and write the models after each round to another file.

    Args:
        package: The distribution of the library.
        trials: By name, a function of the hyper-parameters that returns the models.
    """
    wanted, out = map(Path, sys.argv[1:])
    found = {}
    for name, hyper in json.loads(wanted.read_text()).items():
        models = [np.asarray(model) for model in trials[name](hyper)]
        (dtype,) = {str(model.dtype) for model in models}
        found[name] = {"dtype": dtype, "models": [model.tolist() for model in models]}
    out.write_text(json.dumps({"version": version(package), "trials": found}))
