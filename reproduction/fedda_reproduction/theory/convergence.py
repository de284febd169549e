"""Orders of approximation: errors as powers of the step size and of the number of local steps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda_reproduction.theory import equations, fits
from fedda_reproduction.theory.equations import DECOMPOSITIONS, LOCAL_STEPS, POINTS, Equation, Hyper
from fedda_reproduction.theory.fits import Floats
from fedda_reproduction.theory.problems import Problem, over_problems

ETA = 0.1
HORIZON = 2.0  # in the time tau

# Federated methods as repeated rounds of a decomposed method.
FEDERATED = {
    "FedAvg": ("gd", "local"),
    "FedDA": ("sgdm", "decoupled"),
    "local momentum": ("sgdm", "local"),
}


def order(x: Sequence[float], errors: Sequence[Any]) -> dict[str, Any]:
    """Return the median errors, and the mean of the powers of x fitted to each problem's."""
    rows = np.stack([np.asarray(column) for column in errors], -1)
    return {"error": np.median(rows, 0), "order": fits.mean(fits.power(x, rows).slope)}


def euler_order(problems: Problem, method: str, exact: Array) -> dict[str, Any]:
    """Measure the order in h of Euler's scheme for the equation with eta = `ETA`, at `HORIZON`.

    With h = eta the scheme is the optimiser. While h is not small the order differs: sqrt(v) of
    AdaGrad has no derivative at its start. `exact` is the result of `equations.solutions`.
    """
    run = partial(equations.euler_solutions, problems, method=method, hyper=Hyper(ETA))
    orders = {}
    for name, powers in {"order at eta": (0, 1), "order": (5, 6)}.items():
        hs = [ETA / 4**power for power in powers]
        ends = [run(number=round(HORIZON / h), h=h)[:, 1] for h in hs]
        errors = [jnp.linalg.norm(end - exact[:, -1, 0, 1], axis=-1) for end in ends]
        orders[name] = order(hs, errors)["order"]
    return orders


def method_orders(problems: Problem, methods: Sequence[str]) -> dict[str, Any]:
    """Solve the equations of the methods; return `euler_order` and `model_distances` of each."""
    times = jnp.linspace(0.0, HORIZON, POINTS)
    run = partial(equations.solutions, problems, hyper=Hyper(ETA), times=times)
    solved = {method: run(method=method) for method in methods}
    return {
        "euler": {method: euler_order(problems, method, exact) for method, exact in solved.items()},
        "equations": {method: model_distances(times, exact) for method, exact in solved.items()},
    }


def momentum_order(problems: Problem) -> dict[str, Any]:
    """Measure the order in eta of the error of SGDM's m after 5 steps, where h = eta.

    Momentum changes within 1 / (1 - beta1) steps, however small eta is.
    """
    etas, errors = [0.1 / 2**k for k in range(4)], []
    for eta in etas:
        settings = {"method": "sgdm", "hyper": Hyper(eta)}
        times = jnp.linspace(0.0, 5 * eta, POINTS)
        exact = equations.solutions(problems, times=times, **settings)[:, -1, 0, 0]
        stepped = equations.euler_solutions(problems, number=5, h=eta, **settings)[:, 0]
        errors.append(jnp.linalg.norm(stepped - exact, axis=-1))
    return order(etas, errors)


def federated_round(equation: Equation, local: Any, m: Array, model: Array) -> Array:
    """Take `local` steps with all clients, from the server's m and W; return the new m and W."""
    state = equations.initial(equation, model, m)
    return equations.observed(equation, equations.euler(equation, state, local))


@partial(over_problems, static=("name",))
def federated_error(problem: Problem, *, name: str, eta: Any, local: Any, rounds: Any) -> Array:
    """Return |W - W of the centralised method| after rounds of `local` steps of `FEDERATED`."""
    method, decomposition = FEDERATED[name]
    whole = equations.centralised(method, problem, Hyper(eta))
    parts = equations.decomposed(method, decomposition, problem, Hyper(eta))
    start = equations.initial(whole, problem.start)

    server = equations.observed(whole, start)
    server = lax.fori_loop(0, rounds, lambda _, at: federated_round(parts, local, *at), server)
    return jnp.linalg.norm(server[1] - equations.euler(whole, start, local * rounds).model)


def federated_orders(problems: Problem, name: str) -> dict[str, Any]:
    """Measure the orders in eta and T of `federated_error`, after one round and at a fixed time."""
    error = partial(federated_error, problems, name=name)

    def measured(x: Sequence[float], runs: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
        errors = [error(eta=eta, local=local, rounds=rounds) for eta, local, rounds in runs]
        return {"x": list(x)} | order(x, errors)

    etas = [0.04 / 2**k for k in range(4)]
    few, many, periods = [2, 4, 8], [64, 128, 256], [2, 4, 8, 16]
    less = [T - 1 for T in periods]
    return {
        "one round, eta": measured(etas, [(eta, 8, 1) for eta in etas]),
        "one round, T <= 8": measured(few, [(0.001, T, 1) for T in few]),
        "one round, T >= 64": measured(many, [(0.0001, T, 1) for T in many]),
        "fixed time, eta": measured(etas, [(eta, 8, round(1.28 / eta) // 8) for eta in etas]),
        "fixed time, T - 1": measured(less, [(0.01, T, 128 // T) for T in periods]),
    }


def nearer_after_rounds(problems: Problem, eta: float, rounds: int) -> dict[str, list[float]]:
    """Return the share of problems in which local momentum ends closer to SGDM than FedDA."""
    shares = {}
    for T in LOCAL_STEPS:
        error = partial(federated_error, problems, eta=eta, local=T, rounds=rounds)
        nearer = error(name="local momentum") < error(name="FedDA")
        shares[f"local nearer, T={T}"] = fits.share(nearer)
    return shares


def model_distances(times: Array, solved: Array) -> dict[str, Floats]:
    """Return the median |W - W centralised| of every decomposition over time."""
    models = np.asarray(solved)[:, :, :, 1]
    apart = np.median(np.linalg.norm(models[:, :, 1:] - models[:, :, :1], axis=-1), 0)
    return {"tau": np.asarray(times), **dict(zip(DECOMPOSITIONS, apart.T, strict=True))}


def solved_and_stepped(problems: Problem, method: str, rtol: float) -> dict[str, Any]:
    """Solve a method's equations up to the time 1 for one problem, and take 10 optimiser steps."""
    settings = {"method": method, "hyper": Hyper(ETA)}
    times = jnp.linspace(0.0, 1.0, 6)
    solved = equations.solutions(problems, times=times, rtol=rtol, **settings)
    steps = equations.euler_solutions(problems, number=10, h=ETA, **settings)
    last = solved[:, -1, 0, 1]
    return model_distances(times, solved) | {
        "eta": ETA,
        "optimiser": jnp.linalg.norm(steps[:, 1] - last),
        "moved": jnp.linalg.norm(last - problems.start),
        "rtol": rtol,
    }
