"""Read the vectors, and compare results with them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conformance.problem import Array, Visit, visit

FOLDER = Path(__file__).parent / "vectors"
Rounds = Sequence[Mapping[str, Any]]  # the state after each round


class Vector(NamedTuple):
    """One case of an algorithm, as in its file."""

    algorithm: str
    name: str
    options: dict[str, str]
    hyper: dict[str, float]
    schedule: str
    reduction: str
    rounds: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.name}"


class Problem(NamedTuple):
    """The federation of all vectors, as in `problem.json`."""

    batch: int
    weights: Array
    clients: list[tuple[Array, Any]]
    schedules: dict[str, list[list[dict[str, Any]]]]

    def visits(self, schedule: str, reduction: str = "mean") -> list[list[Visit]]:
        """Return what the clients work with in each round."""

        def given(each: dict[str, Any]) -> Visit:
            x, y = self.clients[each["client"]]
            return visit(each["client"], x, y, each["batches"], self.batch, reduction)

        return [[given(each) for each in cohort] for cohort in self.schedules[schedule]]


def read_problem() -> Problem:
    """Return the problem of the vectors."""
    content = json.loads((FOLDER / "problem.json").read_text())
    clients = [(np.array(each["x"]), np.array(each["y"])) for each in content["clients"]]
    schedules = {name: each["rounds"] for name, each in content["schedules"].items()}
    return Problem(content["batch"], np.array(content["weights"]), clients, schedules)


def read_vectors(algorithm: str | None = None) -> list[Vector]:
    """Return all vectors, or those of one algorithm."""
    paths = sorted(FOLDER.glob(f"{algorithm or '[!p]*'}.json"))
    contents = [json.loads(path.read_text()) for path in paths]
    return [Vector(each["algorithm"], **case) for each in contents for case in each["cases"]]


class Difference(NamedTuple):
    """The first quantity that differs from a vector."""

    round: int  # the first round is 1
    quantity: str
    error: float  # relative to the largest expected entry, or absolute if that is below 1
    got: Any
    expected: Any

    def __str__(self) -> str:
        return (
            f"{self.quantity} after round {self.round} differs by {self.error:.1e}: "
            f"got {self.got}, expected {self.expected}"
        )


def first_difference(
    expected: Rounds, got: Iterable[Mapping[str, Any]], tolerance: float = 1e-10
) -> Difference | None:
    """Return the first quantity of `got` that differs from that of the vector.

    Args:
        expected: The rounds of a vector.
        got: The state after each round, with any of the vector's quantities. The others of a round
            are compared before `params`, because these follow from them.
        tolerance: The largest error that counts as rounding.
    """
    found = list(got)
    if len(found) != len(expected):
        return Difference(len(found), "rounds", np.inf, len(found), len(expected))
    for number, (right, state) in enumerate(zip(expected, found, strict=True), start=1):
        for quantity in sorted(state, key=lambda name: name == "params"):
            one, other = np.asarray(state[quantity]), np.asarray(right[quantity])
            if one.shape != other.shape:
                return Difference(number, quantity, np.inf, one.shape, other.shape)
            error = float(np.max(np.abs(one - other)) / max(1.0, np.max(np.abs(other))))
            if not error <= tolerance:
                where = np.unravel_index(np.argmax(np.abs(one - other)), one.shape)
                return Difference(number, quantity, error, one[where], other[where])
    return None
