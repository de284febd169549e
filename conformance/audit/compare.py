"""Judge what an adapter wrote: equal to the vector, to another reading, or different, and where."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from conformance.audit.trials import Trial
from conformance.reader import Difference, Vector, first_difference, read_problem, read_vectors
from conformance.references import REFERENCES, run
from conformance.references.reference import Reference, State

# Numbers of about 1 after some thousand operations.
ROUNDING = {"float32": 1e-6, "float64": 1e-10}
UNEXPLAINED = "unexplained"


class Judgement(NamedTuple):
    """The result of a trial.

    Attributes:
        verdict: `equal`, `another reading`, `different`, or `unexplained` if nothing reproduces it.
        error: The largest difference from what it equals.
        first: The first difference from the vector, None if there is none.
        distance: The difference of the model from that of the vector after the last round.
    """

    verdict: str
    error: float
    first: Difference | None
    distance: float


@cache
def vector_of(algorithm: str, case: str) -> Vector:
    (found,) = (vector for vector in read_vectors(algorithm) if vector.name == case)
    return found


def hyper_of(trial: Trial) -> dict[str, float]:
    """Return the hyper-parameters of a trial: those of the vector, but for a few."""
    return {**vector_of(trial.algorithm, trial.case).hyper, **trial.hyper}


def states(trial: Trial, reference: Reference, options: Mapping[str, Any]) -> list[State]:
    """Return what a reference computes with the hyper-parameters of a trial."""
    problem = read_problem()
    settings = {**options, **hyper_of(trial), "clients": len(problem.clients)}
    return list(run(reference, problem.weights, problem.visits("epochs"), **settings))


def expected(trial: Trial) -> Sequence[Mapping[str, Any]]:
    """Return the states of the vector, or those of its reference if the library lacks a setting."""
    vector = vector_of(trial.algorithm, trial.case)
    if not trial.hyper:
        return vector.rounds
    return states(trial, REFERENCES[trial.algorithm], vector.options)


def error(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the largest difference of two sequences of models, in the terms of the vectors."""
    scales = [max(1.0, np.abs(model).max()) for model in map(np.asarray, other)]
    parts = [
        np.abs(np.subtract(a, b)).max() / c for a, b, c in zip(one, other, scales, strict=True)
    ]
    return float(max(parts))


def judge(trial: Trial, models: Sequence[Any], dtype: str) -> Judgement:
    """Return the verdict on the models of a library after each round."""
    right, rounding = expected(trial), ROUNDING[dtype]
    of_vector = [state["params"] for state in right]
    distance = error(models[-1:], of_vector[-1:])
    first = first_difference(right, [{"params": model} for model in models], rounding)
    if first is None:
        return Judgement("equal", error(models, of_vector), None, distance)
    if trial.reading is None:
        return Judgement(UNEXPLAINED, np.nan, first, distance)
    like = states(trial, trial.reading.reference, trial.reading.options)
    of_reading = [state["params"] for state in like]
    if first_difference(like, [{"params": model} for model in models], rounding) is not None:
        return Judgement(UNEXPLAINED, error(models, of_reading), first, distance)
    # The reading's state is the library's, so it shows in which quantity the difference begins.
    shared = [{name: state[name] for name in state if name in right[0]} for state in like]
    first = first_difference(right, shared, rounding)
    return Judgement(trial.reading.verdict, error(models, of_reading), first, distance)
