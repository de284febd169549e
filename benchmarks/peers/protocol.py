"""The part that all peers share: read the problem, and answer the lines of the driver.

A peer is a process that was started with the file of a problem. Its standard input has the commands

    check FILE     take the round whose clients and batches the problem fixes, from the problem's
                   weights. The answer has the loss before and after, and how far the weights are
                   from those in FILE; the first peer that is asked writes the file.
    round N        take N rounds with clients and batches of its own choice. The answer has the
                   seconds.

It answers each command with one line of JSON. Needs NumPy and no other package.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]  # by path; kernels are [height, width, in, out] or [in, out]


class Problem(NamedTuple):
    x: list[np.ndarray]  # of each client [examples, ...], channels last
    y: list[np.ndarray]
    check_x: list[np.ndarray]  # of each client of the checked round: what it visits, in order
    check_y: list[np.ndarray]
    weights: Weights
    model: str
    algorithm: str
    cohort: int
    batch: int
    sizes: str  # "equal": `steps` batches are exactly one epoch of a client
    steps: int
    rate: float
    beta1: float
    l2: float
    precision: str


def load(path: str) -> Problem:
    with np.load(path) as file:
        settings = json.loads(str(file["settings"]))
        x, y, count, cohort, rows = (file[name] for name in ("x", "y", "count", "cohort", "rows"))
        weights = {
            name.removeprefix("weights/"): file[name]
            for name in file.files
            if name.startswith("weights/")
        }
    columns = [list(column) for column in zip(*split(x, y, count), strict=True)]
    visited = np.split(rows, np.cumsum(count[cohort])[:-1])
    checked = [
        [column[client][own] for client, own in zip(cohort, visited, strict=True)]
        for column in columns
    ]
    return Problem(*columns, *checked, weights, **settings)


def split(x: np.ndarray, y: np.ndarray, count: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The examples of each client."""
    ends = np.cumsum(count)[:-1]
    return list(zip(np.split(x, ends), np.split(y, ends), strict=True))


def local_work(settings: dict[str, Any]) -> dict[str, Any]:
    """One epoch of every client, in the words of `fedda.run`."""
    if settings["sizes"] == "equal":
        return {"local_work": settings["steps"]}
    return {"local_work": 1, "local_unit": "epochs"}


class Driver:
    """The other end of the pipes. What a framework prints goes to standard error instead."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, **values: Any) -> None:
        print(json.dumps(values), file=self.answers, flush=True)

    def serve(
        self,
        problem: Problem,
        loss: Callable[[], float],
        check: Callable[[], Weights],
        rounds: Callable[[int], None],
        *,
        packages: Sequence[str],
        device: str = "cpu",
    ) -> None:
        """Answers until the driver closes the pipe.

        `loss` is that of the model as it is now, on the examples of the checked round. `check`
        takes that round and returns its weights. `rounds` returns when its rounds are done.
        """
        self.answer(versions={name: version(name) for name in packages}, device=device)
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            if command == "check":
                before = loss()
                weights = check()
                deviation = compare(problem.weights, weights, Path(argument))
                self.answer(before=before, after=loss(), deviation=deviation)
            elif command == "round":
                begin = time.perf_counter()
                rounds(int(argument))
                self.answer(seconds=time.perf_counter() - begin)
            else:
                raise ValueError(f"the driver said {line!r}")


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # found on the path, without having been installed
        return "from source"


def compare(start: Weights, weights: Weights, path: Path) -> float | None:
    """The distance to the weights in the file, as a share of how far those moved.

    Over all layers together: in one whose weights are near 1 and move by 1e-5, rounding is much.
    """
    if not path.exists():
        np.savez(path, **weights)  # type: ignore[arg-type]
        return None
    with np.load(path) as file:
        expected = dict(file)
    assert expected.keys() == weights.keys() == start.keys()

    def distance(a: Weights, b: Weights) -> float:
        return float(np.sqrt(sum(np.sum((a[name] - b[name]) ** 2) for name in start)))

    return distance(weights, expected) / distance(expected, start)
