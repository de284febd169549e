"""F3 and F4: distance of FedDA's and of local momentum from the centralised one.

With `u` = sum p_i H_i (g_i - g) and `v` = H (g - m(0)) at the start, and while eta t is small,

    local:      |sum p_i m_i(t) - m(t)| = eta |A(t) - B(t)| |u|
    decoupled:  |sum p_i m_i(t) - m(t)| = eta |A(t) u + B(t) v|

where A(t) = (1 - beta) sum_{s<t} beta^(t-1-s) s, and B(t) has b(s) = beta (1 - beta^s) / (1 - beta)
in place of s. As 0 < B < A for t > 1, local momentum is closer if v = 0 or <u, v> >= 0. If clients
have the same data, u = 0: local momentum is exact and decoupled momentum is not.

F4 is about the rate lambda+ of the paper's bound for local momentum. If a client's Hessian has the
eigenvalue -L_g, the deviation of local momentum solves

    lambda² + (1 - beta) / eta lambda - (1 - beta) L_g / eta = 0

and grows like exp(lambda tau) with the positive solution. Decoupled momentum follows clients that
descend by plain gradients, which move apart like exp(L_g tau): always faster, as lambda+ < L_g.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedda_reproduction.theory import equations, fits
from fedda_reproduction.theory.equations import LOCAL_STEPS, POINTS, Hyper, States
from fedda_reproduction.theory.fits import Floats
from fedda_reproduction.theory.problems import Problem, over_problems

STARTS = {"zero": 0, "warm": 20}  # m(0): the centralised steps before the round
MOMENTA = ("local", "decoupled")
LATE = 40.0  # rates of F4 are measured over the second half of this time


@partial(over_problems, static=("number",))
def momentum_distances(
    problem: Problem, *, hyper: Hyper, warm: Any, number: int
) -> tuple[Array, Array]:
    """Return distances from centralised SGDM after 0..number steps of a round, and |m(0)|.

    Centralised SGDM starts at the same point with the same momentum: zero, or that after `warm`
    centralised steps.

    Returns:
        [problems, 4, number + 1]: |sum p_i m_i - m| of `MOMENTA`, then sum p_i |m_i - m| of
        `MOMENTA`, the distance of a single client's momentum.
    """
    central = equations.centralised("sgdm", problem, hyper)
    parts = [equations.decomposed("sgdm", name, problem, hyper) for name in MOMENTA]
    first = equations.euler(central, equations.initial(central, problem.start), warm)
    m = first.momentum[0]

    def distances(states: States) -> Array:
        target, pairs = states[0].momentum[0], list(zip(parts, states[1:], strict=True))
        means = [jnp.linalg.norm(equations.observed(*pair)[0] - target) for pair in pairs]
        single = [
            problem.weights @ jnp.linalg.norm(state.momentum - target[None], axis=-1)
            for _, state in pairs
        ]
        return jnp.stack(means + single)

    states = [equations.initial(equation, first.model, m) for equation in (central, *parts)]
    rows = equations.follow((central, *parts), states, number, distances)
    return jnp.concatenate([jnp.zeros((4, 1)), rows.T], 1), jnp.linalg.norm(m)


def within_a_round(distances: Floats) -> dict[str, Any]:
    """Summarise `momentum_distances` of many problems for t <= 20, as the paper compares them."""
    t = np.arange(2, LOCAL_STEPS[-1] + 1)
    result: dict[str, Any] = {}
    for index, name in enumerate(MOMENTA):
        window = distances[:, index, t]
        power, exponential = fits.power(t, window), fits.exponential(t, window)
        result[f"{name} exponent"] = fits.mean(power.slope)
        result[f"{name} is a power"] = fits.share(power.residual < exponential.residual)[0]
    for T in LOCAL_STEPS:
        local, decoupled, one_local, one_decoupled = distances[:, :, T].T
        result[f"local nearer, T={T}"] = fits.share(local < decoupled)
        result[f"ratio, T={T}"] = fits.quantiles(local / decoupled)[1]
        result[f"client ratio, T={T}"] = fits.quantiles(one_local / one_decoupled)[1]
    return result


def beyond_a_round(distances: Floats, eta: float) -> dict[str, Any]:
    """Summarise the growth over the last half of the steps, and when local momentum is farther."""
    number = distances.shape[-1] - 1
    late = np.arange(number // 2, number + 1)
    crossing = fits.quantiles(fits.first_crossing(distances[:, 0], distances[:, 1]))
    result: dict[str, Any] = {"time": number * eta, "crossing": crossing}
    for index, name in enumerate(MOMENTA):
        tail = np.maximum(distances[:, index, late], 1e-300)
        rate = fits.mean(fits.exponential(late * eta, tail).slope)
        last = fits.quantiles(tail[:, -1] / distances[:, index].max(-1))[1]
        result[f"{name} late rate"] = rate
        result[f"{name} grows"] = rate[1] > 0 and last > 0.9999  # in most problems, to the end
    return result


def curves(distances: Floats, times: Any) -> dict[str, Any]:
    """Return quantiles of the distances of the mean momenta at some times t, for figures."""
    quantiles = np.quantile(distances[:, :, times], (0.05, 0.5, 0.95), axis=0)
    return {"t": list(times)} | {
        name: quantiles[:, index].T.tolist() for index, name in enumerate(MOMENTA)
    }


def over_bound(distances: Floats, first: Floats, bounds: Floats, eta: float) -> dict[str, float]:
    """Return the largest distance over the paper's bound C eta t² / 2 for decoupled momentum.

    C = L_g (2 G + |m(0)|), where L_g = 1 and G bounds gradients: it follows from
    |W_i - W| <= (2 G + |m(0)|) tau. The bound holds for local momentum too: m_i and m start at the
    same value, so |m_i - m| <= 2 G. With the factor 1 - beta, which the paper's proof drops, both
    bounds are at most C eta t.
    """
    bound = (2 * bounds + first)[:, None] * eta * np.arange(1, distances.shape[-1]) ** 2 / 2
    return {
        name: float((distances[:, index, 1:] / bound).max()) for index, name in enumerate(MOMENTA)
    }


def alike(problems: Problem) -> Problem:
    """Return the same problems, but give every client the data of the first."""

    def repeat(leaf: Array) -> Array:
        return jnp.repeat(leaf[:, :1], leaf.shape[1], 1)

    return replace(problems, data=jax.tree.map(repeat, problems.data))


def printed_rate(eta: float, beta: float, lipschitz: float) -> float:
    """Return lambda+ as the paper prints it: without eta under the root, it solves nothing."""
    c = 1 - beta
    return (-c + math.sqrt(c**2 + 4 * c * lipschitz)) / (2 * eta)


def corrected_rate(eta: float, beta: float, lipschitz: float) -> float:
    """Return lambda+, the positive solution of the equation in this module's description."""
    c = 1 - beta
    return (-c + math.sqrt(c**2 + 4 * c * lipschitz * eta)) / (2 * eta)


def growth_rates(problems: Problem, eta: float, beta: float) -> dict[str, Any]:
    """Measure late rates of growth of the exact solutions on indefinite quadratics.

    There L_g = 1, and every client has the eigenvalue -1.
    """
    times = jnp.concatenate([jnp.zeros(1), jnp.linspace(LATE / 2, LATE, POINTS - 1)])
    hyper = Hyper(eta, beta)
    solved = equations.solutions(problems, method="sgdm", hyper=hyper, times=times)[:, 1:, :, 0]
    # Without the precise decomposition, which is the centralised solution.
    apart = np.linalg.norm(np.asarray(solved[:, :, 2:] - solved[:, :, :1]), axis=-1)
    rates = {"printed": printed_rate(eta, beta, 1.0), "corrected": corrected_rate(eta, beta, 1.0)}
    measured = {
        f"{name}, equation": fits.mean(fits.exponential(times[1:], apart[..., index]).slope)
        for index, name in enumerate(MOMENTA)
    }
    return {"eta": eta, "beta": beta} | rates | measured
