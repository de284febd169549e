"""How fast approximations approach what they approximate, as powers of steps and of local steps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda_reproduction.theory import fits
from fedda_reproduction.theory.flows import (
    KINDS,
    Flow,
    Hyper,
    begin,
    centralised,
    divided,
    field,
    momentum,
    solve,
    steps,
)
from fedda_reproduction.theory.problems import Gradient, Problem

ETA = 0.1
HORIZON = 2.0  # in the time tau
POINTS = 21  # at which solutions are wanted; always as many, so that a program serves all

# The federated methods as repeated rounds of a decomposition, and what they approximate.
FEDERATED = {
    "FedAvg": ("gd", "local"),
    "FedDA": ("sgdm", "decoupled"),
    "local momentum": ("sgdm", "local"),
}


@partial(jax.jit, static_argnames=("gradient", "method", "rtol"))
def solutions(
    gradient: Gradient,
    method: str,
    problems: Problem,
    eta: Any,
    times: Array,
    beta1: Any,
    rtol: float = 1e-10,
) -> Array:
    """Means m and models W of the exact solutions: [problems, times, 4 flows, 2, d].

    The flows are the centralised one and its decompositions, in the order of `KINDS`.
    """

    def one(problem: Problem) -> Array:
        hyper = Hyper(eta, beta1)
        flows = [centralised(method, gradient, problem, hyper)]
        flows += [divided(method, kind, gradient, problem, hyper) for kind in KINDS]

        def watch(states: Any) -> Array:
            pairs = zip(flows, states, strict=True)
            return jnp.stack([jnp.stack([momentum(*pair), pair[1].model]) for pair in pairs])

        def together(tau: Any, states: Any) -> Any:
            return [field(flow, tau, state) for flow, state in zip(flows, states, strict=True)]

        start = [begin(flow, problem.start) for flow in flows]
        return solve(together, start, times, eta / 10, watch, rtol)

    return jax.vmap(one)(problems)


@partial(jax.jit, static_argnames=("gradient", "method"))
def stepped(
    gradient: Gradient,
    method: str,
    problems: Problem,
    eta: Any,
    number: Any,
    h: Any,
) -> Array:
    """The m and W after so many centralised Euler steps of length h: [problems, 2, d]."""

    def one(problem: Problem) -> Array:
        flow = centralised(method, gradient, problem, Hyper(eta))
        state = steps(flow, begin(flow, problem.start), number, h)
        return jnp.stack([momentum(flow, state), state.model])

    return jax.vmap(one)(problems)


def _norms(difference: Any) -> np.ndarray:
    return np.asarray(jnp.linalg.norm(difference, axis=-1))


def of_euler(gradient: Gradient, method: str, problems: Problem, exact: Array) -> dict[str, Any]:
    """Order of Euler's scheme in its step h, for the equation of one eta, at the horizon.

    `exact` is of `solutions`; at h = eta the scheme is the optimiser. Where h is not yet small the
    order is another one: sqrt(v) of AdaGrad has no derivative at its start.
    """
    counts = [round(HORIZON / ETA) * 4**k for k in range(7)]
    hs = [HORIZON / count for count in counts]
    errors = np.stack(
        [
            _norms(stepped(gradient, method, problems, ETA, count, h)[:, 1] - exact[:, -1, 0, 1])
            for count, h in zip(counts, hs, strict=True)
        ],
        -1,
    )
    return {
        "h": hs,
        "error": np.median(errors, 0),
        "order at eta": fits.mean(fits.power(hs[:2], errors[:, :2]).slope),
        "order": fits.mean(fits.power(hs[-2:], errors[:, -2:]).slope),
    }


def of_optimiser(gradient: Gradient, method: str, problems: Problem) -> dict[str, Any]:
    """Order in eta of the optimiser as an approximation of its own equation, where h = eta.

    After the time 1, and for momentum after 5 steps too: it changes within 1 / (1 - beta1) steps,
    however small eta is.
    """
    etas = [0.1 / 2**k for k in range(4)]
    errors: dict[str, list[Any]] = {"W": [], "m": [], "m after 5 steps": []}
    for eta in etas:
        number = round(1 / eta)
        for names, count in ((("m", "W"), number), (("m after 5 steps", ""), 5)):
            times = jnp.linspace(0.0, count * eta, POINTS)
            exact = solutions(gradient, method, problems, eta, times, 0.9)[:, -1, 0]
            apart = _norms(stepped(gradient, method, problems, eta, count, eta) - exact)
            for index, name in enumerate(names):
                if name:
                    errors[name].append(apart[:, index])
    found: dict[str, Any] = {"eta": etas}
    for name, each in errors.items():
        if method == "gd" and name != "W":
            continue
        rows = np.stack(each, -1)
        order = fits.mean(fits.power(etas, rows).slope)
        found[name] = {"error": np.median(rows, 0), "order": order}
    return found


@partial(jax.jit, static_argnames=("gradient", "name"))
def _error(
    gradient: Gradient,
    name: str,
    problems: Problem,
    eta: Any,
    local: Any,
    rounds: Any,
) -> Array:
    """The distance of the model from the centralised one after rounds of `local` steps."""
    method, kind = FEDERATED[name]

    def one(problem: Problem) -> Array:
        central = centralised(method, gradient, problem, Hyper(eta))
        flow = divided(method, kind, gradient, problem, Hyper(eta))
        reference = steps(central, begin(central, problem.start), local * rounds)
        start = problem.start, jnp.zeros_like(problem.start)
        model, _ = lax.fori_loop(0, rounds, partial(_round, flow, local), start)
        return jnp.linalg.norm(model - reference.model)

    return jax.vmap(one)(problems)


def _round(flow: Flow, local: Any, _: Any, carried: tuple[Array, Array]) -> tuple[Array, Array]:
    """A round by everybody: all start at the server's model and momentum."""
    state = steps(flow, begin(flow, *carried), local)
    return state.model, momentum(flow, state)


def of_federated(gradient: Gradient, name: str, problems: Problem) -> dict[str, Any]:
    """Orders in eta and in T of the distance to the centralised trajectory of the same eta.

    After one round, and at a fixed time after many.
    """

    def order(x: Sequence[float], runs: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
        errors = np.stack([np.asarray(_error(gradient, name, problems, *run)) for run in runs], -1)
        slope = fits.power(x, errors).slope
        return {"x": list(x), "error": np.median(errors, 0), "order": fits.mean(slope)}

    etas = [0.04 / 2**k for k in range(4)]
    few, many, periods = [2, 4, 8], [64, 128, 256], [2, 4, 8, 16]
    more = [T - 1 for T in periods]
    return {
        "one round, eta": order(etas, [(eta, 8, 1) for eta in etas]),
        "one round, T <= 8": order(few, [(0.001, T, 1) for T in few]),
        "one round, T >= 64": order(many, [(0.0001, T, 1) for T in many]),
        "fixed time, eta": order(etas, [(eta, 8, round(1.28 / eta) // 8) for eta in etas]),
        "fixed time, T - 1": order(more, [(0.01, T, 128 // T) for T in periods]),
    }


def after_rounds(
    gradient: Gradient, problems: Problem, eta: float, local: int, rounds: int
) -> dict[str, Any]:
    """Whose model is nearer to centralised SGDM after rounds in which momentum is carried on."""
    decoupled, own = (
        np.asarray(_error(gradient, name, problems, eta, local, rounds))
        for name in ("FedDA", "local momentum")
    )
    return {"local nearer": fits.share(own < decoupled), "ratio": fits.spread(own / decoupled)}
