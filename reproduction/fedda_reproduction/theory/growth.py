"""F4: the rate lambda+ at which the paper's bound for local momentum grows.

Where a client's Hessian has the eigenvalue -L_g, local momentum's deviation solves

    lambda² + (1 - beta) / eta lambda - (1 - beta) L_g / eta = 0

and grows like exp(lambda tau) with the positive solution. Decoupled momentum follows clients that
descend by plain gradients, which move apart like exp(L_g tau): always faster, as lambda+ < L_g.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedda_reproduction.theory import fits
from fedda_reproduction.theory.deviation import of_family
from fedda_reproduction.theory.orders import POINTS, solutions
from fedda_reproduction.theory.problems import FAMILIES, Problem

LATE = 40.0  # rates are those over the second half of so much time


def printed(eta: float, beta: float, lipschitz: float) -> float:
    """lambda+ as the paper prints it: without eta under the root, it solves nothing."""
    c = 1 - beta
    return (-c + math.sqrt(c**2 + 4 * c * lipschitz)) / (2 * eta)


def corrected(eta: float, beta: float, lipschitz: float) -> float:
    """The positive solution of the equation above."""
    c = 1 - beta
    return (-c + math.sqrt(c**2 + 4 * c * lipschitz * eta)) / (2 * eta)


def of_steps(eta: float, beta: float, lipschitz: float) -> float:
    """The same of the optimiser: log z / eta, where z² - (1 + beta + (1 - beta) eta L_g) z + beta.

    The optimiser takes Euler's steps, so that its rate differs from the equation's where eta is
    large.
    """
    half = (1 + beta + (1 - beta) * eta * lipschitz) / 2
    return math.log(half + math.sqrt(half**2 - beta)) / eta


def measure(problems: Problem, eta: float, beta: float) -> dict[str, Any]:
    """Late rates on indefinite quadratics, where L_g = 1 and every client has the eigenvalue -1."""
    name = "indefinite quadratic"
    number = round(LATE / eta)
    late = np.linspace(number // 2, number, 21).round().astype(int)
    found = np.asarray(of_family(name, problems, eta, beta, 0, number)[0])[:, :2, late]
    times = jnp.concatenate([jnp.zeros(1), jnp.linspace(LATE / 2, LATE, POINTS - 1)])
    exact = solutions(FAMILIES[name].gradient, "sgdm", problems, eta, times, beta)[:, 1:, :, 0]
    apart = np.linalg.norm(np.asarray(exact[:, :, 1:] - exact[:, :, :1]), axis=-1)
    _, local, decoupled = np.moveaxis(apart, -1, 0)  # the precise decomposition is not apart
    return {
        "eta": eta,
        "beta": beta,
        "printed": printed(eta, beta, 1.0),
        "corrected": corrected(eta, beta, 1.0),
        "corrected, of steps": of_steps(eta, beta, 1.0),
        "local, equation": fits.mean(fits.exponential(times[1:], local).slope),
        "local, steps": fits.mean(fits.exponential(late * eta, found[:, 0]).slope),
        "decoupled, equation": fits.mean(fits.exponential(times[1:], decoupled).slope),
        "decoupled, steps": fits.mean(fits.exponential(late * eta, found[:, 1]).slope),
    }
