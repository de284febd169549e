"""Time a round, centralised training on as many examples, and their share of the machine's peak.

Each program trains several rounds, as those between two evaluations are trained. Programs that are
compared take turns, so that other work on the machine slows all of them alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from fedda import api
from fedda.core import tree
from fedda.core.task import ExampleWise
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, num_rows, take_rows
from fedda.models import Model, with_precision
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.devices import everywhere, mesh_for
from fedda.simulate.train import LONGEST, host_work, segment, start

ALGORITHMS = ("fedavg", "fedda-sgdm")
REPETITION = 1.0  # least seconds of a repetition, so that the start of a program does not count
TIMES = 4  # that an operation of the machine's peak is done in one program
RATE = 1e-3  # learning rate; small enough for nothing to become infinite


class Case(NamedTuple):
    """A round to measure."""

    model: Model
    central: Model  # the same model with the convolution that suits centralised training
    clients: Shards
    loss: ExampleWise
    batch: int
    steps: int  # local steps of each client; with `sizes`, those of the floor
    cohort: int = 10
    rounds: int = LONGEST  # of one repetition, at most
    sizes: str | None = None  # of unequal clients, which take one epoch; None: clients are equal


class Program(NamedTuple):
    """A compiled program; each call continues from where the last one ended."""

    compile_seconds: float
    program_bytes: int | None  # on each device: arguments, results and temporary memory
    seconds: Callable[[int], float]  # train this number of rounds; return the seconds it took


def federated(case: Case, algorithm: str) -> Program:
    """Return rounds of a federated algorithm, as `fedda run` does them."""
    settings: dict[str, Any] = {"rounds": case.rounds, "eval_every": case.rounds, "devices": None}
    settings |= {"cohort": case.cohort, "batch": case.batch, "client_lr": RATE}
    work = {"local_work": case.steps} if case.sizes is None else {"local_unit": "epochs"}
    settings |= {"local_work": 1} | work
    setup, hyper = api.prepare(algorithm, case.model, case.clients, case.loss, **settings)
    hp = api.traced(hyper, case.model)
    initial = (hp, random.key(0), start(setup, hp, [0]))
    hp, key, run = everywhere(initial, setup.layout.mesh)
    span = next(host_work(setup, [0]))
    program = segment(setup.algorithm, setup.task, setup.layout, False)
    return _program(
        lambda: program.lower(hp, run, key, span),
        start=run,
        step=lambda compiled, run, rounds: compiled(hp, run, key, span._replace(last=rounds))[0],
    )


def centralised(case: Case, mesh: Mesh | None) -> Program:
    """Return the floor: SGD on one model, with as many examples and steps as a cohort's rounds."""
    size, total = case.cohort * case.batch, num_rows(case.clients.y)

    @partial(jax.jit, donate_argnums=0)
    def program(params: PyTree, columns: Any, key: Array, steps: Array) -> PyTree:
        def step(number: Array, params: PyTree) -> PyTree:
            step_key = random.fold_in(key, number)
            x, y = take_rows(columns, random.randint(step_key, (size,), 0, total))
            if mesh is not None:  # every device takes its share of the batch
                share = NamedSharding(mesh, PartitionSpec("clients"))
                x, y = lax.with_sharding_constraint((x, y), share)
            return tree.axpy(-RATE, central_gradient(case, params, x, y, step_key), params)

        return lax.fori_loop(0, steps, step, params)

    params = jax.jit(case.central.init)(random.key(0))
    columns = (case.clients.x, case.clients.y)
    params, columns, key = everywhere((params, columns, random.key(1)), mesh)
    return _program(
        lambda: program.lower(params, columns, key, 1),
        start=params,
        step=lambda compiled, params, rounds: compiled(params, columns, key, rounds * case.steps),
    )


def _program(
    lower: Callable[[], Lowered], *, start: Any, step: Callable[[Compiled, Any, int], Any]
) -> Program:
    """Compile a program that takes its state some rounds further, and time every call."""
    begin = time.perf_counter()
    compiled = lower().compile()
    compile_seconds, state = time.perf_counter() - begin, start
    planned = None
    if plan := compiled.memory_analysis():
        planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
        planned -= plan.alias_size_in_bytes

    def seconds(rounds: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(step(compiled, state, rounds))
        return time.perf_counter() - begin

    return Program(compile_seconds=compile_seconds, program_bytes=planned, seconds=seconds)


def central_gradient(case: Case, params: PyTree, x: Any, y: Any, key: Array) -> PyTree:
    """Return the gradient of the mean loss of these examples and of the model's penalty."""
    model = case.central

    def mean_loss(params: PyTree) -> Array:
        outputs = model.apply(params, x) if model.train is None else model.train(params, x, key)
        loss = case.loss(outputs, y).mean()
        return loss if model.penalty is None else loss + model.penalty(params)

    return jax.grad(mean_loss)(params)


def flops(case: Case) -> float | None:
    """Return the operations of a round's gradients in centralised training, as XLA counts them.

    They are counted before XLA optimises, so that every machine has the same number, and of one
    step, as XLA counts what is in a loop only once. Not every accelerator counts: the host does.
    """
    rows = jax.ShapeDtypeStruct((case.cohort * case.batch,), jnp.int32)
    batch = jax.eval_shape(take_rows, (case.clients.x, case.clients.y), rows)
    arguments = (case.central.shapes(), *batch, random.key(0))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        lowered = jax.jit(partial(central_gradient, case)).lower(*arguments)
    analysis: Mapping[str, float] = lowered.cost_analysis() or {}
    return case.steps * analysis["flops"] if "flops" in analysis else None


def measure(case: Case, repetitions: int, peak: float) -> dict[str, Any]:
    """Return the size of a case, the timings of every program, and how they compare.

    `peak` is the most operations per second of one device, or of all cores of a CPU.
    """
    mesh = mesh_for(None, case.cohort, tree.size(case.model.shapes()))
    programs = {"floor": centralised(case, mesh)}
    programs |= {name: federated(case, name) for name in ALGORITHMS}
    rounds = {name: enough(program, case.rounds) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, program in programs.items():
            times[name].append(program.seconds(rounds[name]) / rounds[name])
    devices = 1 if mesh is None else mesh.size
    floor_examples, operations = case.cohort * case.batch * case.steps, flops(case)
    examples = {name: examples_of(case, rounds[name]) for name in ALGORITHMS}
    examples["floor"] = floor_examples
    most = peak if jax.default_backend() == "cpu" else devices * peak
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    rates = {name: examples[name] / seconds for name, seconds in middle.items()}
    speeds = {name: operations and operations / floor_examples * rates[name] for name in rates}
    return {
        "parameters": tree.size(case.model.shapes()),
        "cohort": case.cohort,
        "batch": case.batch,
        "steps": case.steps,
        "sizes": case.sizes,
        "examples_per_round": floor_examples,
        "flops_per_round": operations,
        "devices": devices,
        "programs": {
            name: {
                "seconds_per_round": {
                    "median": middle[name],
                    "min": min(times[name]),
                    "spread": max(times[name]) - min(times[name]),
                    "all": times[name],
                },
                "rounds_per_repetition": rounds[name],
                "examples_per_second": rates[name],
                "flops_per_second": speeds[name],
                "share_of_peak": (speed := speeds[name]) and speed / most,
                "ratio_to_floor": rates["floor"] / rates[name],  # of the time for an example
                "compile_seconds": program.compile_seconds,
                "program_bytes": program.program_bytes,
            }
            for name, program in programs.items()
        },
        "fedda_to_fedavg": middle["fedda-sgdm"] / middle["fedavg"],
    }


def examples_of(case: Case, rounds: int) -> float:
    """Return the mean number of examples in the first rounds."""
    if case.sizes is None:
        return float(case.cohort * case.batch * case.steps)
    count = np.asarray(case.clients.count)
    drawn = (draw_cohort(0, number, len(count), case.cohort) for number in range(rounds))
    return float(np.mean([count[cohort].sum() for cohort in drawn]))


def enough(program: Program, most: int) -> int:
    """Return the number of rounds of a repetition. Measuring it warms the program up."""
    program.seconds(1)
    rounds = 1
    while rounds < most and (seconds := program.seconds(rounds)) < REPETITION:
        rounds = min(most, max(2 * rounds, math.ceil(1.2 * rounds * REPETITION / seconds)))
    return rounds


def machine_peak(precision: str, repetitions: int) -> dict[str, float]:
    """Measure the peak of a device: operations of a large matrix product, bytes of a large copy."""
    side, length = (2048, 2**25) if jax.default_backend() == "cpu" else (8192, 2**28)
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    product = with_precision(Model(random.key, lambda matrix, x: x @ matrix), precision)
    matrix, array = np.full((side, side), 1 / side, dtype), np.zeros(length, np.float32)

    def multiply(x: Array, matrix: Array) -> Array:
        return product.apply(matrix, x).astype(dtype)

    return {
        "flops_per_second": 2 * side**3 / _fastest(repetitions, multiply, matrix, matrix),
        "bytes_per_second": 2 * array.nbytes / _fastest(repetitions, lambda x: x + 1, array),
    }


def _fastest(repetitions: int, function: Callable[..., Array], x: Any, *others: Any) -> float:
    """Return the fewest seconds that x <- function(x, *others) takes."""

    # Several times in one program and in place: else starting it, and finding new memory, counts.
    @partial(jax.jit, donate_argnums=0)
    def program(x: Array, times: Array, *others: Array) -> Array:
        return lax.fori_loop(0, times, lambda _, x: function(x, *others), x)

    x, others = jax.device_put((x, others))
    seconds = []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        x = jax.block_until_ready(program(x, TIMES, *others))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]) / TIMES  # the first was compiled
