"""Everything that `fedda theory` measures, as one record of plain numbers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda_reproduction.theory import deviation, exact, fits, flows, growth, orders, ratios
from fedda_reproduction.theory.flows import METHODS, Hyper
from fedda_reproduction.theory.problems import (
    FAMILIES,
    Problem,
    classifier,
    curvature,
    draw,
    gradient_bounds,
    network,
)


class Plan(NamedTuple):
    """How much is measured."""

    problems: int
    seed: int = 0
    rounds: int = 60  # of F1
    methods: tuple[str, ...] = METHODS  # whose equations are solved
    families: tuple[str, ...] = ("convex quadratic", "indefinite quadratic", "logistic")  # theirs
    solved: int = 50  # at most so many problems of each are solved to high order
    etas: tuple[float, ...] = (0.01, 0.1, 1.0)
    betas: tuple[float, ...] = (0.5, 0.9, 0.99)
    clients: tuple[int, ...] = (2, 4, 16)
    late: int = 400  # steps of the long runs
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)  # eta of F4
    partitions: int = 10  # of the digits
    network_etas: tuple[float, ...] = (0.03, 0.1, 0.3)
    ratio_rounds: int = 200  # of F13
    ratio_steps: tuple[int, ...] = (1, 2, 5, 10, 20)
    ratio_clients: tuple[str, ...] = (ratios.EVERYBODY, ratios.COHORTS)
    learn: bool = True  # whether the network is measured: compiling it takes half a minute


def quick(problems: int, seed: int) -> Plan:
    """To see that everything works."""
    return Plan(
        min(problems, 20),
        seed,
        rounds=50,
        methods=("sgdm",),
        families=("indefinite quadratic",),
        solved=5,
        etas=(0.1,),
        betas=(0.9,),
        clients=(4,),
        rates=(0.1,),
        ratio_rounds=20,
        ratio_steps=(1, 5),
        ratio_clients=(ratios.EVERYBODY,),
        learn=False,
    )


# The network's gradients have jumps, which no order can pass in long steps. With 1e-3 the distance
# of the optimiser, which is small, is not yet right to two digits.
NETWORK_RTOL = 1e-4
STARTS: Mapping[str, int] = {"zero": 0, "warm": deviation.WARM}  # of the momentum: steps before


def run(plan: Plan, tell: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """All measurements, in float64, rounded to four digits."""
    with flows.in_float64():
        found = {}
        for name, part in (
            ("exact", _exact),
            ("orders", _orders),
            ("deviation", _deviation),
            ("growth", _growth),
            ("ratios", _ratios),
            ("network", _network),
        ):
            if name == "network" and not plan.learn:
                continue
            tell(name)
            found[name] = part(plan)
    return fits.rounded({"plan": plan._asdict(), **found})


def _some(problems: Problem, number: int) -> Problem:
    return jax.tree.map(lambda leaf: leaf[:number], problems)


def _exact(plan: Plan) -> dict[str, Any]:
    tasks = {"logistic": classifier(5, plan.seed)}
    if plan.learn:
        tasks["cnn"] = network(4, 20, plan.seed)
    return {
        "precise": {
            name: exact.precise(name, draw(name, plan.problems, 4, plan.seed), plan.methods)
            for name in plan.families
        },
        "f1": {
            name: {method: exact.f1(method, task, plan.rounds) for method in exact.SETTINGS}
            for name, task in tasks.items()
        },
        "f2": {name: exact.f2(task) for name, task in tasks.items()},
    }


def _orders(plan: Plan) -> dict[str, Any]:
    euler: dict[str, Any] = {}
    solved: dict[str, Any] = {}
    optimiser, federated = {}, {}
    times = jnp.linspace(0.0, orders.HORIZON, orders.POINTS)
    rounds = []
    for name in plan.families:
        gradient = FAMILIES[name].gradient
        problems = draw(name, plan.problems, 4, plan.seed)
        few = _some(problems, plan.solved)
        euler[name], solved[name] = {}, {}
        for method in plan.methods:
            flowed = orders.solutions(gradient, method, few, orders.ETA, times, 0.9)
            euler[name][method] = orders.of_euler(gradient, method, few, flowed)
            solved[name][method] = _apart(times, flowed)
        optimiser[name] = {
            method: orders.of_optimiser(gradient, method, few)
            for method in ("gd", "sgdm")
            if method in plan.methods
        }
        federated[name] = {
            each: orders.of_federated(gradient, each, problems) for each in orders.FEDERATED
        }
        rounds += [
            {"family": name, "eta": eta, "T": local, "rounds": 10}
            | orders.after_rounds(gradient, problems, eta, local, 10)
            for eta in plan.etas
            for local in deviation.ROUNDS
        ]
    return {
        "euler": euler,
        "optimiser": optimiser,
        "equations": solved,
        "federated": federated,
        "after rounds": rounds,
    }


def _apart(times: Any, flowed: Any) -> dict[str, Any]:
    """Median distances of the decompositions' models from the centralised solution's."""
    models = np.asarray(flowed)[:, :, :, 1]
    apart = np.median(np.linalg.norm(models[:, :, 1:] - models[:, :, :1], axis=-1), 0)
    return {"tau": np.asarray(times), **dict(zip(flows.KINDS, apart.T, strict=True))}


def _deviation(plan: Plan) -> dict[str, Any]:
    grid, late, bound, curves, alike = [], [], [], {}, {}
    for name in FAMILIES:
        for clients in plan.clients:
            problems = draw(name, plan.problems, clients, plan.seed)
            for eta, beta, start in (
                (eta, beta, start) for eta in plan.etas for beta in plan.betas for start in STARTS
            ):
                long = clients == 4
                number = plan.late if long else deviation.ROUNDS[-1]
                found, first = map(
                    np.asarray,
                    deviation.of_family(name, problems, eta, beta, STARTS[start], number),
                )
                setting = {
                    "family": name,
                    "eta": eta,
                    "beta": beta,
                    "clients": clients,
                    "start": start,
                }
                grid.append(setting | deviation.within_a_round(found))
                if long:
                    late.append(setting | deviation.beyond_a_round(found, eta))
                    if (eta, beta, start) == (0.1, 0.9, "warm"):
                        t = np.unique(np.geomspace(2, plan.late, 40).round().astype(int))
                        curves[name] = deviation.curves(found, t)
                    slope = FAMILIES[name].slope
                    if slope is not None:
                        limit = gradient_bounds(slope, problems)
                        bound.append(setting | deviation.over_bound(found, first, limit, eta))
        same = deviation.alike(draw(name, plan.problems, 4, plan.seed))
        found = np.asarray(deviation.of_family(name, same, 0.1, 0.9, 0, plan.late)[0])
        alike[name] = {
            measure: found[:, index, 10].max() if index == 0 else found[:, index, 10].min()
            for index, measure in enumerate(deviation.MEASURES[:2])
        }
    return {"grid": grid, "late": late, "bound": bound, "alike at T=10": alike, "curves": curves}


def _growth(plan: Plan) -> list[dict[str, Any]]:
    problems = draw("indefinite quadratic", min(plan.problems, plan.solved), 4, plan.seed)
    return [growth.measure(problems, eta, 0.9) for eta in plan.rates]


def _ratios(plan: Plan) -> dict[str, Any]:
    return ratios.measure(plan.ratio_clients, plan.ratio_steps, plan.ratio_rounds, plan.seed)


def _network(plan: Plan) -> dict[str, Any]:
    """F3 on the network, and the solutions of its equations on the first partition."""
    tasks = [network(4, 20, plan.seed + number) for number in range(plan.partitions)]
    gradient = tasks[0].gradient  # the same for all, but compiled once

    @jax.jit
    def of_round(problem: Problem, eta: Any, warm: Any) -> Any:
        return deviation.trajectories(gradient, problem, Hyper(eta), warm, deviation.ROUNDS[-1])[0]

    rows, curves = [], {}
    for eta in plan.network_etas:
        for start, warm in STARTS.items():
            found = np.stack([np.asarray(of_round(task.problem, eta, warm)) for task in tasks])
            rows.append({"eta": eta, "beta": 0.9, "start": start} | deviation.within_a_round(found))
            curves[f"eta {eta}, {start}"] = deviation.curves(found, np.arange(2, found.shape[-1]))
    bend = jax.jit(lambda problem: curvature(gradient, problem))
    result: dict[str, Any] = {
        "parameters": tasks[0].problem.start.size,
        "curvature": fits.spread([float(bend(task.problem)) for task in tasks]),
        "grid": rows,
        "curves": curves,
    }
    one = jax.tree.map(lambda leaf: leaf[None], tasks[0].problem)
    times = jnp.linspace(0.0, 1.0, 6)
    result["equations"] = {}
    for method in ("gd", "sgdm"):
        eta = 0.1
        flowed = orders.solutions(gradient, method, one, eta, times, 0.9, NETWORK_RTOL)
        steps = orders.stepped(gradient, method, one, eta, 10, eta)
        euler = jnp.linalg.norm(steps[0, 1] - flowed[0, -1, 0, 1])
        moved = jnp.linalg.norm(flowed[0, -1, 0, 1] - tasks[0].problem.start)
        result["equations"][method] = _apart(times, flowed) | {
            "eta": eta,
            "optimiser": float(euler),
            "moved": float(moved),
            "rtol": NETWORK_RTOL,
        }
    return result
