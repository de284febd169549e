"""How long a round takes here, beside centralised training and what the machine can do at most.

Each program trains several rounds, as those between two evaluations are trained. Programs that are
compared take turns, so that whatever else the machine does slows all of them alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from fedda import api
from fedda.core import tree
from fedda.core.task import ExampleWise
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, num_rows, take_rows
from fedda.models import Model
from fedda.simulate import train as simulate
from fedda.simulate.devices import everywhere
from fedda_bench import machine

ALGORITHMS = ("fedavg", "fedda-sgdm")
REPETITION = 1.0  # seconds that a repetition takes at least, so that its start does not count
RATE = 1e-3  # of learning, which does not matter: small enough for nothing to become infinite


class Case(NamedTuple):
    """A round to be measured."""

    name: str
    model: Model
    central: Model  # the same model with the convolution that suits centralised training
    clients: Shards
    loss: ExampleWise
    batch: int
    steps: int  # of each client in a round
    cohort: int = 10
    rounds: int = simulate.LONGEST  # of one repetition, at most

    @property
    def examples(self) -> int:
        """The examples of a round."""
        return self.cohort * self.batch * self.steps


class Program(NamedTuple):
    """A compiled program that goes on from where it ended."""

    compile_seconds: float
    program_bytes: int | None  # on each device: what it is given, needs meanwhile and gives back
    seconds: Callable[[int], float]  # for so many rounds
    healthy: Callable[[], bool]  # whether nothing has become infinite so far


def federated(case: Case, algorithm: str) -> tuple[Program, Mesh | None]:
    """Rounds of a federated algorithm as `fedda run` does them, and the devices that share them."""
    setup, hyper = api.prepare(
        algorithm,
        case.model,
        case.clients,
        case.loss,
        rounds=case.rounds,
        eval_every=case.rounds,
        cohort=case.cohort,
        batch=case.batch,
        local_work=case.steps,
        devices=None,
        client_lr=RATE,
    )
    mesh = setup.layout.mesh
    hp = api.traced(hyper, case.model)
    start = simulate.start(setup, hp, [0])
    hp, key, run = everywhere((hp, random.key(0), start), mesh)
    span = next(simulate.host_work(setup, [0]))
    fixed = (setup.algorithm, setup.task, setup.layout, False)
    data = (span.shards, key, span.cohorts[0], None, 0)
    compiled, seconds = _compiled(lambda: simulate.segment(*fixed).lower(hp, run, *data, 1))

    def train(rounds: int) -> float:
        nonlocal run
        begin = time.perf_counter()
        run, _ = jax.block_until_ready(compiled(hp, run, *data, rounds))
        return time.perf_counter() - begin

    def healthy() -> bool:
        return int(run.skipped) == int(run.nonfinite) == 0

    return Program(seconds, _planned(compiled), train, healthy), mesh


def centralised(case: Case, mesh: Mesh | None) -> Program:
    """The floor: SGD on one model, with as many examples and steps as the rounds of a cohort."""
    size, total = case.cohort * case.batch, num_rows(case.clients.y)

    @partial(jax.jit, donate_argnums=0)
    def program(params: PyTree, columns: Any, key: Array, steps: Array) -> PyTree:
        def step(number: Array, params: PyTree) -> PyTree:
            own = random.fold_in(key, number)
            x, y = take_rows(columns, random.randint(own, (size,), 0, total))
            if mesh is not None:  # every device takes its share of the batch
                share = NamedSharding(mesh, PartitionSpec("clients"))
                x, y = lax.with_sharding_constraint((x, y), share)
            return tree.axpy(-RATE, central_gradient(case, params, x, y, own), params)

        return lax.fori_loop(0, steps, step, params)

    params = jax.jit(case.central.init)(random.key(0))
    columns = (case.clients.x, case.clients.y)
    params, columns, key = everywhere((params, columns, random.key(1)), mesh)
    compiled, seconds = _compiled(lambda: program.lower(params, columns, key, 1))

    def train(rounds: int) -> float:
        nonlocal params
        begin = time.perf_counter()
        params = jax.block_until_ready(compiled(params, columns, key, rounds * case.steps))
        return time.perf_counter() - begin

    return Program(seconds, _planned(compiled), train, lambda: bool(tree.all_finite(params)))


def central_gradient(case: Case, params: PyTree, x: Any, y: Any, key: Array) -> PyTree:
    """Of the mean loss of these examples, and of the model's penalty."""
    model = case.central

    def mean_loss(params: PyTree) -> Array:
        outputs = model.apply(params, x) if model.train is None else model.train(params, x, key)
        loss = case.loss(outputs, y).mean()
        return loss if model.penalty is None else loss + model.penalty(params)

    return jax.grad(mean_loss)(params)


def flops(case: Case) -> float | None:
    """The operations of a round's gradients in centralised training, as XLA counts them.

    They are counted before XLA optimises, so that every machine has the same number, and of one
    step, as XLA counts what is in a loop only once. Not every accelerator counts: the host does.
    """
    params = case.central.shapes()
    rows = jax.ShapeDtypeStruct((case.cohort * case.batch,), jnp.int32)
    columns = (case.clients.x, case.clients.y)
    batch = jax.eval_shape(take_rows, columns, rows)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        lowered = jax.jit(partial(central_gradient, case)).lower(params, *batch, random.key(0))
    analysis: Mapping[str, float] = lowered.cost_analysis() or {}
    return case.steps * analysis["flops"] if "flops" in analysis else None


def _compiled(lower: Callable[[], Lowered]) -> tuple[Compiled, float]:
    """The program, and the seconds that tracing and compiling it took."""
    begin = time.perf_counter()
    compiled = lower().compile()
    return compiled, time.perf_counter() - begin


def _planned(compiled: Compiled) -> int | None:
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    needed = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return int(needed - plan.alias_size_in_bytes)


def measure(case: Case, repetitions: int) -> dict[str, Any]:
    """A case: its size, what every program takes, and how they compare."""
    first, mesh = federated(case, ALGORITHMS[0])
    others = {name: federated(case, name)[0] for name in ALGORITHMS[1:]}
    programs = {"floor": centralised(case, mesh), ALGORITHMS[0]: first, **others}
    rounds = {name: enough(program, case.rounds) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, program in programs.items():
            times[name].append(program.seconds(rounds[name]) / rounds[name])
    for name, program in programs.items():
        if not program.healthy():
            raise RuntimeError(f"{case.name}: {name} came to numbers that are not finite.")
    operations = flops(case)
    middle = {name: statistics.median(each) for name, each in times.items()}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "parameters": tree.size(case.model.shapes()),
        "cohort": case.cohort,
        "batch": case.batch,
        "steps": case.steps,
        "examples_per_round": case.examples,
        "flops_per_round": operations,
        "devices": 1 if mesh is None else mesh.size,
        "programs": {
            name: {
                "seconds_per_round": {
                    "median": middle[name],
                    "min": min(times[name]),
                    "spread": max(times[name]) - min(times[name]),
                    "all": times[name],
                },
                "rounds_per_repetition": rounds[name],
                "examples_per_second": case.examples / middle[name],
                "flops_per_second": None if operations is None else operations / middle[name],
                "ratio_to_floor": middle[name] / middle["floor"],
                "compile_seconds": program.compile_seconds,
                "program_bytes": program.program_bytes,
            }
            for name, program in programs.items()
        },
        "fedda_to_fedavg": middle["fedda-sgdm"] / middle["fedavg"],
        "peak_bytes_so_far": {
            "device": stats.get("peak_bytes_in_use"),
            "host": machine.host_bytes(),
        },
    }


def enough(program: Program, most: int) -> int:
    """The rounds of a repetition; finding out warms the program up."""
    program.seconds(1)
    rounds = 1
    while rounds < most and (taken := program.seconds(rounds)) < REPETITION:
        rounds = min(most, max(2 * rounds, math.ceil(1.2 * rounds * REPETITION / taken)))
    return rounds


def with_shares(measured: dict[str, Any], most: Mapping[str, float]) -> dict[str, Any]:
    """A measured case, with what part of the machine's operations its programs get."""
    # The cores of a CPU have done the large product together.
    devices = 1 if jax.default_backend() == "cpu" else measured["devices"]
    peak = devices * most["flops_per_second"]

    def share(program: dict[str, Any]) -> dict[str, Any]:
        speed = program["flops_per_second"]
        return program | {"share_of_peak": None if speed is None else speed / peak}

    programs = {name: share(program) for name, program in measured["programs"].items()}
    return measured | {"programs": programs}
