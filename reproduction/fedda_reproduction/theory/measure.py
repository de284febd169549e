"""All measurements of `fedda theory`, as one record of plain numbers."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedda_reproduction.theory import adam_ratios, convergence, deviation, fits, problems
from fedda_reproduction.theory.equations import LOCAL_STEPS, METHODS, Hyper
from fedda_reproduction.theory.identities import SETTINGS, f1, f2, precise
from fedda_reproduction.theory.problems import FAMILIES, draw


class Plan(NamedTuple):
    """How much to measure."""

    problems: int  # random problems of each family
    seed: int = 0
    rounds: int = 60  # of F1
    methods: tuple[str, ...] = METHODS  # whose equations are solved
    families: tuple[str, ...] = ("convex quadratic", "indefinite quadratic", "logistic")  # solved
    solved: int = 50  # problems of each family that are solved to high order, at most
    etas: tuple[float, ...] = (0.01, 0.1, 1.0)
    betas: tuple[float, ...] = (0.5, 0.9, 0.99)
    clients: tuple[int, ...] = (2, 4, 16)
    late: int = 400  # steps of the long runs
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)  # eta of F4
    partitions: int = 10  # of the digits; 0: do not measure the network, which is slow to compile
    ratio_rounds: int = 200  # of F13
    ratio_steps: tuple[int, ...] = (1, 2, 5, 10, 20)


def quick(problems: int, seed: int) -> Plan:
    """Return a small plan, to see that everything works."""
    return Plan(
        problems=min(problems, 20),
        seed=seed,
        methods=("sgdm",),
        families=("indefinite quadratic",),
        solved=5,
        clients=(4,),
        partitions=0,
        ratio_rounds=20,
        ratio_steps=(1, 5),
    )


# The network's gradients have jumps, which no order can pass in long steps. With 1e-3 the distance
# of the optimiser, which is small, is not yet right to two digits.
NETWORK_RTOL = 1e-4


def run(plan: Plan, on_stage: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Measure everything in float64.

    Args:
        plan: How much to measure.
        on_stage: Called with the name of each part before it begins.

    Returns:
        The record: plain numbers of four significant digits, None for infinity.
    """
    parts = {
        "exact": _identities,
        "orders": _orders,
        "deviation": _deviation,
        "growth": _growth,
        "ratios": _ratios,
    } | ({"network": _network} if plan.partitions else {})
    record: dict[str, Any] = {"plan": plan._asdict()}
    with jax.enable_x64(True):
        for name, part in parts.items():
            on_stage(name)
            record[name] = part(plan)
    return rounded(record)


def rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record as plain lists and dictionaries, rounded to four significant digits."""

    def four_digits(number: str) -> float:
        return float(f"{float(number):.4g}")

    text = json.dumps(record, default=lambda array: array.tolist())
    return json.loads(text, parse_float=four_digits, parse_constant=lambda infinity: None)


def json_text(record: dict[str, Any]) -> str:
    """Return the record as JSON with one line for each row of a table, so that diffs are short."""
    text = json.dumps(record, indent=1, allow_nan=False)
    rows = re.compile(r"{[^{}]*}|\[[^][{}]*]")  # without other rows inside
    return rows.sub(lambda row: re.sub(r"\n *", " ", row[0]), text) + "\n"


def _identities(plan: Plan) -> dict[str, Any]:
    tasks = {"logistic": problems.logistic_task(5, plan.seed)}
    if plan.partitions:
        tasks["cnn"] = problems.network_tasks(1, plan.seed)[0]
    drawn = {name: draw(name, plan.problems, 4, plan.seed) for name in plan.families}
    return {
        "precise": {
            name: {method: precise(family, method=method).max() for method in plan.methods}
            for name, family in drawn.items()
        },
        "f1": {
            name: {method: f1(method, task, plan.rounds) for method in SETTINGS}
            for name, task in tasks.items()
        },
        "f2": {name: f2(task) for name, task in tasks.items()},
    }


def _orders(plan: Plan) -> dict[str, Any]:
    record = {}
    for name in plan.families:
        drawn = draw(name, plan.problems, 4, plan.seed)
        few = jax.tree.map(lambda leaf: leaf[: plan.solved], drawn)
        record[name] = convergence.method_orders(few, plan.methods) | {
            "momentum after 5 steps": convergence.momentum_order(few),
            "federated": {
                method: convergence.federated_orders(drawn, method)
                for method in convergence.FEDERATED
            },
            "after rounds": [
                {"eta": eta, "rounds": 10} | convergence.nearer_after_rounds(drawn, eta, rounds=10)
                for eta in plan.etas
            ],
        }
    return record


def _deviation(plan: Plan) -> dict[str, Any]:
    grid, late, bound, curves, alike = [], [], [], {}, {}
    for name, clients in itertools.product(FAMILIES, plan.clients):
        drawn, slope = draw(name, plan.problems, clients, plan.seed), FAMILIES[name].slope
        number = plan.late if clients == 4 else LOCAL_STEPS[-1]
        for eta, beta, start in itertools.product(plan.etas, plan.betas, deviation.STARTS):
            measured = deviation.momentum_distances(
                drawn, hyper=Hyper(eta, beta), warm=deviation.STARTS[start], number=number
            )
            distances, first = map(np.asarray, measured)
            setting = {"family": name, "eta": eta, "beta": beta, "clients": clients, "start": start}
            grid.append(setting | deviation.within_a_round(distances))
            if clients != 4:
                continue
            late.append(setting | deviation.beyond_a_round(distances, eta))
            if (eta, beta, start) == (0.1, 0.9, "warm"):
                t = np.unique(np.geomspace(2, plan.late, 40).round().astype(int))
                curves[name] = deviation.curves(distances, t)
            if slope is not None:
                limits = problems.gradient_bounds(slope, drawn)
                bound.append(setting | deviation.over_bound(distances, first, limits, eta))
        if clients == 4:
            same, hyper = deviation.alike(drawn), Hyper(0.1, 0.9)
            distances = deviation.momentum_distances(same, hyper=hyper, warm=0, number=10)[0]
            local, decoupled = distances[:, 0, 10].max(), distances[:, 1, 10].min()
            alike[name] = {"local": local, "decoupled": decoupled}
    return {"grid": grid, "late": late, "bound": bound, "alike at T=10": alike, "curves": curves}


def _growth(plan: Plan) -> list[dict[str, Any]]:
    drawn = draw("indefinite quadratic", min(plan.problems, plan.solved), 4, plan.seed)
    return [deviation.growth_rates(drawn, eta, 0.9) for eta in plan.rates]


def _ratios(plan: Plan) -> dict[str, Any]:
    return adam_ratios.measure(plan.ratio_steps, plan.ratio_rounds, plan.seed)


def _network(plan: Plan) -> dict[str, Any]:
    """Measure F3 on the network, and solve its equations on the first partition."""
    tasks = problems.network_tasks(plan.partitions, plan.seed)
    # One by one: a convolution with weights of several networks at once is slow.
    batches = [jax.tree.map(lambda leaf: leaf[None], task.problem) for task in tasks]
    grid, curves, bend = [], {}, jax.jit(problems.curvature)
    for eta, (start, warm) in itertools.product((0.03, 0.1, 0.3), deviation.STARTS.items()):
        settings = {"hyper": Hyper(eta), "warm": warm, "number": LOCAL_STEPS[-1]}
        measured = [deviation.momentum_distances(batch, **settings)[0] for batch in batches]
        distances = np.concatenate(measured)
        setting = {"eta": eta, "beta": 0.9, "start": start}
        grid.append(setting | deviation.within_a_round(distances))
        curves[f"eta {eta}, {start}"] = deviation.curves(distances, np.arange(2, 21))
    return {
        "parameters": tasks[0].problem.start.size,
        "curvature": fits.quantiles([bend(task.problem) for task in tasks]),
        "grid": grid,
        "curves": curves,
        "equations": {
            method: convergence.solved_and_stepped(batches[0], method, NETWORK_RTOL)
            for method in ("gd", "sgdm")
        },
    }
