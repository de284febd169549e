"""FedDA's momentum is a server's momentum that is read (T - 1) / 2 local steps too early.

`docs/momentum.md` derives what this module computes. T is the number of local steps, b the decay of
the momentum in a round, beta = b^(1/T), `step` the server's rate alpha times the client's eta.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedda_reproduction.theory.fits import Floats

# The gradients of all clients, each at its own point: [clients, d] -> [clients, d].
Gradients = Callable[[Floats], Floats]


def lag(b: float, T: int) -> float:
    """Return the lag L of FedDA+SGDM behind FedAvgM, in local steps.

    Example:
        >>> [round(lag(0.9, T), 2) for T in (1, 2, 5, 10, 20)]
        [0.0, 0.49, 1.95, 4.41, 9.32]
    """
    beta = b ** (1 / T)
    return beta / (1 - beta) - T * b / (1 - b)


def adagrad_lag(b: float, T: int) -> float:
    """Return the lag of FedDA+AdaGrad's gradient G behind the momentum of a round, in rounds.

    Example:
        >>> [round(adagrad_lag(0.9, T), 2) for T in (1, 2, 3, 10, 100)]
        [-9.0, -0.43, 0.01, 0.38, 0.48]
    """
    beta = b ** (1 / T)
    share = beta * (beta - b) / ((1 - beta) * (T - beta))  # of M in G, of which the rest is new
    return (share - b) / (1 - b)


class Runs(NamedTuple):
    """The server's models before the first round and after every round: [rounds + 1, d]."""

    fedda: Floats
    fedavgm: Floats


def runs(
    gradients: Gradients, start: Floats, *, b: float, T: int, eta: float, step: float, rounds: int,
    clients: int,
) -> Runs:  # fmt: skip
    """Run FedDA+SGDM and FedAvgM with matched settings, full batches and all clients.

    `eta` may be 0: the gradients of a round are then all at the server's model.
    """
    beta, found = b ** (1 / T), []
    for decoupled in (True, False):
        w, m, models = start, 0 * start, [start]
        for _ in range(rounds):
            points, total, momentum = np.tile(w, (clients, 1)), 0 * w, m
            for _ in range(T):
                g = gradients(points)
                points = points - eta * g
                momentum = beta * momentum + (1 - beta) * g.mean(0)
                total = total + (momentum if decoupled else g.mean(0))
            if decoupled:  # P, the sum of the momenta after every local step
                w, m = w - step * total, momentum
            else:
                m = b * m + (1 - b) * total
                w = w - step * m
            models.append(w)
        found.append(np.array(models))
    return Runs(*found)


def predicted(
    hessian: Floats, gradient: Floats, *, b: float, T: int, step: float, time: float
) -> Floats:
    """Return the leading part of FedDA's model minus FedAvgM's on a quadratic, after some time.

    A round takes the time `step` T. The difference is `step` L exp(-t H) (1 - t H) g, with the
    federation's Hessian H and the gradient g at the start.
    """
    values, vectors = np.linalg.eigh(hessian)
    damped = np.exp(-time * values) * (1 - time * values)
    part: Floats = step * lag(b, T) * (vectors @ (damped * (vectors.T @ gradient)))
    return part


def largest_step(b: float, T: int, fedda: bool) -> float:
    """Return the largest stable `step` T h on a quadratic with curvature h, for small eta.

    The characteristic polynomial is z² - (1 + b - s (1 - l)) z + b + s l with s = step T h (1 - b)
    and l = L / T, or l = 0 for FedAvgM. Its roots are within the unit circle if and only if
    b + s l < 1 and s (1 - 2 l) < 2 (1 + b).

    Example:
        >>> [round(largest_step(0.9, 10, fedda), 2) for fedda in (True, False)]
        [2.27, 38.0]
    """
    behind = lag(b, T) / T if fedda else 0.0
    bounds = [2 * (1 + b) / (1 - 2 * behind)] if behind < 0.5 else []
    return min(bounds + ([(1 - b) / behind] if behind > 0 else [])) / (1 - b)


class Case(NamedTuple):
    """A random quadratic federation: client i has the loss (w - c_i)' A_i (w - c_i) / 2."""

    matrices: Floats
    centres: Floats
    start: Floats

    def gradients(self, points: Floats) -> Floats:
        return np.einsum("cij,cj->ci", self.matrices, points - self.centres)

    @property
    def hessian(self) -> Floats:
        mean: Floats = self.matrices.mean(0)
        return mean

    @property
    def gradient(self) -> Floats:
        mean: Floats = self.gradients(np.tile(self.start, (len(self.matrices), 1))).mean(0)
        return mean


def case(seed: int = 0, clients: int = 4, dimension: int = 5) -> Case:
    """Draw a federation whose clients have curvatures between 0.1 and 1."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(clients, dimension, dimension)))
    values = 10 ** rng.uniform(-1, 0, (clients, dimension))
    matrices = np.einsum("cij,cj,ckj->cik", basis, values, basis)
    return Case(matrices, rng.normal(size=(clients, dimension)), 3 * rng.normal(size=dimension))


class Distance(NamedTuple):
    """How far FedDA is from FedAvgM, at a time when half of the way is gone."""

    measured: float
    predicted: float
    unexplained: float  # the length of the difference of the two vectors


def distance(
    problem: Case, *, b: float, T: int, eta: float, alpha: float = 1.0, time: float = 2.0
) -> Distance:
    """Measure the distance of FedDA's model to FedAvgM's after `time`, and predict it."""
    step = alpha * eta
    rounds = round(time / (step * T))
    found = runs(
        problem.gradients, problem.start, b=b, T=T, eta=eta, step=step, rounds=rounds,
        clients=len(problem.matrices),
    )  # fmt: skip
    apart = found.fedda[-1] - found.fedavgm[-1]
    told = predicted(problem.hessian, problem.gradient, b=b, T=T, step=step, time=step * T * rounds)
    return Distance(*(float(np.linalg.norm(part)) for part in (apart, told, apart - told)))
