"""How far momenta divided among clients stray from the centralised momentum within a round.

With `u` = sum p_i H_i (g_i - g) and `v` = H (g - m(0)) at the start, and while eta t is small,

    local:      |sum p_i m_i(t) - m(t)| = eta |A(t) - B(t)| |u|
    decoupled:  |sum p_i m_i(t) - m(t)| = eta |A(t) u + B(t) v|

where A(t) = (1 - beta) sum_{s<t} beta^(t-1-s) s, and B(t) has b(s) = beta (1 - beta^s) / (1 - beta)
in place of s. As 0 < B < A for t > 1, local momentum is then the nearer one where v = 0 or
<u, v> >= 0; and where clients are alike, u = 0: it is exact and decoupled momentum is not.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda_reproduction.theory import fits
from fedda_reproduction.theory.fits import Floats
from fedda_reproduction.theory.flows import (
    Hyper,
    State,
    begin,
    centralised,
    divided,
    euler,
    momentum,
    steps,
)
from fedda_reproduction.theory.problems import FAMILIES, Gradient, Problem

WARM = 20  # centralised steps before a warm round
MEASURES = ("local", "decoupled", "local W", "decoupled W", "local client", "decoupled client")
ROUNDS = (5, 10, 20)  # the paper's range of local steps


def trajectories(
    gradient: Gradient, problem: Problem, hyper: Hyper, warm: Any, number: int
) -> tuple[Array, Array]:
    """The `MEASURES` after 0..number steps of one round, and the norm of its first momentum.

    The mean momentum, the global model, and one client's momentum (their weighted mean), each as a
    distance to centralised SGDM that starts at the same point with the same momentum. That is zero,
    or what `warm` steps of centralised SGDM leave behind.
    """
    central = centralised("sgdm", gradient, problem, hyper)
    flows = [divided("sgdm", kind, gradient, problem, hyper) for kind in ("local", "decoupled")]
    first = steps(central, begin(central, problem.start), warm)
    m = first.momentum[0]

    def distances(reference: State, states: list[State]) -> Array:
        target = reference.momentum[0]
        means = [
            jnp.linalg.norm(momentum(flow, state) - target)
            for flow, state in zip(flows, states, strict=True)
        ]
        models = [jnp.linalg.norm(state.model - reference.model) for state in states]
        single = [
            problem.weights @ jnp.linalg.norm(state.momentum - target[None], axis=-1)
            for state in states
        ]
        return jnp.stack(means + models + single)

    def body(carry: tuple[State, list[State]], _: None) -> tuple[Any, Array]:
        reference, states = carry
        # None of these equations depends on the time.
        reference = euler(central, 0.0, reference)
        states = [euler(flow, 0.0, state) for flow, state in zip(flows, states, strict=True)]
        return (reference, states), distances(reference, states)

    states = [begin(flow, first.model, m) for flow in flows]
    begun = begin(central, first.model, m)
    _, found = lax.scan(body, (begun, states), None, number)
    return jnp.concatenate([jnp.zeros((len(MEASURES), 1)), found.T], 1), jnp.linalg.norm(m)


@partial(jax.jit, static_argnames=("name", "number"))
def of_family(name: str, problems: Problem, eta: Any, beta: Any, warm: Any, number: int) -> Any:
    """`trajectories` of many problems of a family."""

    def one(problem: Problem) -> Any:
        return trajectories(FAMILIES[name].gradient, problem, Hyper(eta, beta), warm, number)

    return jax.vmap(one)(problems)


def within_a_round(found: Floats) -> dict[str, Any]:
    """What the paper compares, for t up to 20: [problems, measures, steps] -> numbers."""
    t = np.arange(2, ROUNDS[-1] + 1)
    result: dict[str, Any] = {}
    for index, name in enumerate(MEASURES[:2]):
        window = found[:, index, t]
        power, exponential = fits.power(t, window), fits.exponential(t, window)
        result[f"{name} exponent"] = fits.mean(power.slope)
        result[f"{name} is a power"] = fits.share(power.residual < exponential.residual)[0]
    for T in ROUNDS:
        local, decoupled, local_w, decoupled_w, one_local, one_decoupled = found[:, :, T].T
        result[f"local nearer, T={T}"] = fits.share(local < decoupled)
        result[f"local W nearer, T={T}"] = fits.share(local_w < decoupled_w)[0]
        result[f"ratio, T={T}"] = fits.spread(local / decoupled)[1]
        result[f"client ratio, T={T}"] = fits.spread(one_local / one_decoupled)[1]
    return result


def beyond_a_round(found: Floats, eta: float) -> dict[str, Any]:
    """Growth over the last half of the steps, and where local momentum becomes the farther one."""
    number = found.shape[-1] - 1
    late = np.arange(number // 2, number + 1)
    crossing = fits.first_crossing(found[:, 0], found[:, 1])
    result: dict[str, Any] = {
        "time": number * eta,
        "crossing": fits.spread(crossing),
        "never crosses": fits.share(np.isinf(crossing)),
    }
    for index, name in enumerate(MEASURES[:2]):
        tail = np.maximum(found[:, index, late], 1e-300)
        result[f"{name} late rate"] = fits.mean(fits.exponential(late * eta, tail).slope)
        result[f"{name} last over largest"] = fits.spread(tail[:, -1] / found[:, index].max(-1))
    return result


def curves(found: Floats, times: Any) -> dict[str, Any]:
    """For figures: the quantiles of the deviations of the mean momenta at some of the times."""
    quantiles = np.quantile(found[:, :, times], (0.05, 0.5, 0.95), axis=0)
    return {"t": list(times)} | {
        name: quantiles[:, index].T.tolist() for index, name in enumerate(MEASURES[:2])
    }


def over_bound(found: Floats, first: Floats, bounds: Floats, eta: float) -> dict[str, float]:
    """The largest deviation over the paper's bound C eta t² / 2 for decoupled momentum.

    C = L_g (2 G + |m(0)|), where L_g = 1 and G bounds gradients: what |W_i - W| <= (2 G + |m(0)|)
    tau needs. Local momentum has that too: m_i and m start alike, so that |m_i - m| <= 2 G. With
    the factor 1 - beta, which the paper loses on the way, both bounds are C eta t at most.
    """
    bound = (2 * bounds + first)[:, None] * eta * np.arange(1, found.shape[-1]) ** 2 / 2
    return {
        name: float((found[:, index, 1:] / bound).max()) for index, name in enumerate(MEASURES[:2])
    }


def alike(problems: Problem) -> Problem:
    """The same problems, but every client has the data of the first."""

    def repeat(leaf: Array) -> Array:
        return jnp.repeat(leaf[:, :1], leaf.shape[1], 1)

    return problems._replace(data=jax.tree.map(repeat, problems.data))
