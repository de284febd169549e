"""Many runs of one algorithm, trained together: as many at a time as fit in memory.

All batches have one size, so that one compiled program serves them all; the last is filled up with
repeats that are thrown away. How much memory a batch needs is read off the compiled program before
it runs. A batch that runs out of memory all the same is halved and tried again.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.sharding import NamedSharding, PartitionSpec

from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.data.streaming import Feed
from fedda.errors import InputError
from fedda.simulate import train as simulate
from fedda.simulate.train import Row, Setup
from fedda.storage import interrupts

SHARE = 0.75  # of the free memory; the rest is for what the compiler does not see
CPU_ROOM = 1e9  # bytes; runs that fill a processor's caches many times over gain nothing by more
IN_FLIGHT = 3  # programs whose data a fed device holds at once

T = TypeVar("T")


class Batch(NamedTuple):
    """Finished runs that were trained in one program."""

    members: range  # which of all runs these are
    histories: list[list[Row]]  # of each of them
    state: Any  # stacked over the members, and over fillers that are to be thrown away
    size: int  # of the program: members and fillers
    seconds: float  # without compilation

    def states(self) -> list[Any]:
        """The server's state of each member, on the host, so that the device has room again."""
        whole = jax.device_get(self.state)
        count = len(self.members)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], whole) for i in range(count)]


class Part(NamedTuple):
    """A batch as far as it came."""

    round: int
    run: Any  # stacked over members and fillers
    rows: list[Row]
    seconds: float  # without compilation


OnEvaluation = Callable[[range, Part], object]
Begun = Callable[[range, PyTree], Part | None]


def train_together(
    setup: Setup,
    hypers: Any,
    seeds: Sequence[int],
    together: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    begun: Begun | None = None,
) -> Iterator[Batch]:
    """Trains one run for each seed, with its own numbers out of `hypers`, in batches.

    At most `together` runs are trained at a time or, if that is None, as many as fit in memory; on
    a CPU, where more are not faster, in a gigabyte of it. `on_evaluation` is told which runs have
    come how far; do not use a part after that, for its memory is reused. `begun` is told which
    runs begin, and the shapes of what they hold, and says how far they had come before, if at all.
    """
    count, first, compiled = len(seeds), 0, 0
    room = math.inf if together else _room(setup)
    size = _evened(count, together or int(min(count, room // _least(setup, hypers))))
    while first < count:
        if size != compiled:
            program = _unless_out_of_memory(_compile, setup, hypers, seeds, size)
            needed = math.inf if program is None else program
            if needed > room and size > 1:
                fits = size // 2 if program is None else int(size * room / needed)
                size = _evened(count - first, min(fits, size - 1))
                continue
            compiled = size
        batch = _unless_out_of_memory(
            _train, setup, hypers, seeds, first, size, on_evaluation, begun
        )
        if batch is not None:
            yield batch
            first = batch.members.stop
        elif size > 1:
            size = _evened(count - first, size // 2)
        else:
            raise InputError(
                "one run alone needs more memory than the device has: lower chunk, so that fewer "
                "clients of a cohort are worked on at a time, or lower cohort or batch."
            )


def _evened(count: int, most: int) -> int:
    """The size of batches of at most `most` runs, as few as there can be, with few fillers."""
    batches = -(-count // max(1, most))
    return -(-count // batches)


def _unless_out_of_memory(function: Callable[..., T], *arguments: Any) -> T | None:
    """None where the device's memory was not enough: all that was allocated is free again."""
    try:
        return function(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _train(
    setup: Setup,
    hypers: Any,
    seeds: Sequence[int],
    first: int,
    size: int,
    on_evaluation: OnEvaluation | None,
    begun: Begun | None,
) -> Batch:
    started = time.perf_counter()
    numbers = np.minimum(np.arange(first, first + size), len(seeds) - 1)
    members = range(first, min(first + size, len(seeds)))
    before = None if begun is None else begun(members, _shapes(setup, hypers, size))
    part = before or Part(0, None, [], 0.0)
    started -= part.seconds
    evaluations = simulate.train(
        setup, _some(hypers, numbers), [seeds[i] for i in numbers], part.round, part.run
    )
    for evaluation in evaluations:
        part.rows.append(evaluation.row)
        seconds = time.perf_counter() - started
        part = Part(evaluation.round, evaluation.run, part.rows, seconds)
        if on_evaluation is not None:
            on_evaluation(members, part)
    histories = [[_member(row, i) for row in part.rows] for i in range(len(members))]
    state = part.run.state
    if size == 1:
        state = jax.tree.map(lambda leaf: leaf[None], state)
    return Batch(members, histories, state, size, part.seconds)


def _some(hypers: Any, numbers: np.ndarray) -> Any:
    """The hyper-parameters of these runs, as `simulate.train` takes them."""
    chosen = numbers if len(numbers) > 1 else numbers[0]
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[chosen]), hypers)


def _member(row: Row, i: int) -> Row:
    return {name: value if np.ndim(value) == 0 else value[i].item() for name, value in row.items()}


# ------------------------------------------------------------------------------------------ memory


def _compile(setup: Setup, hypers: Any, seeds: Sequence[int], size: int) -> int:
    """Compiles what trains so many runs, which `train` will find; the bytes it needs at once.

    Data that stay on the device are not counted: they are there already.
    """
    algorithm, task, layout = setup.algorithm, setup.task, setup.layout
    together = size > 1
    hp, key = _some(hypers, np.arange(size)), _keys(size)
    clients = setup.shards.num_clients
    simulate.begin(algorithm, task.model, together, clients).lower(hp, key).compile()
    run = _shapes(setup, hypers, size)
    span = next(simulate.host_work(setup, seeds[:size]))
    if layout.mesh is not None:
        hp, key, run = _placed((hp, key, run), NamedSharding(layout.mesh, PartitionSpec()))
    cohorts = span.cohorts if together else span.cohorts[0]
    kinds = [task] if setup.stabilise < setup.rounds else []
    if setup.stabilise:
        kinds.append(task._replace(plan=task.plan.full()))
    programs = [
        simulate.segment(algorithm, kind, layout, together).lower(
            hp, run, span.shards, key, cohorts, None, 0, 1
        )
        for kind in kinds
    ]
    if setup.test is not None:
        params = run.state.params
        programs.append(simulate.evaluate(task, together, layout.mesh).lower(params, *setup.test))
    working = 0
    for program in programs:
        interrupts.check()
        sizes = program.compile().memory_analysis()
        if sizes is not None:  # not every backend says
            own = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            working = max(working, sizes.temp_size_in_bytes + own)
    brought = IN_FLIGHT * tree.nbytes(span.shards) if isinstance(setup.shards, Feed) else 0
    held = tree.nbytes((run, run.state))  # of this batch, and what is left of the one before
    return int(working + held + brought)


def _keys(size: int) -> PyTree:
    return jax.eval_shape(lambda: random.split(random.key(0), size) if size > 1 else random.key(0))


def _shapes(setup: Setup, hypers: Any, size: int) -> PyTree:
    """Those of so many runs."""
    clients = setup.shards.num_clients
    begin = simulate.begin(setup.algorithm, setup.task.model, size > 1, clients)
    return jax.eval_shape(begin, _some(hypers, np.arange(size)), _keys(size))


def _placed(shapes: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def _least(setup: Setup, hypers: Any) -> int:
    """The bytes no run can do without, lest a program be compiled that is far too large."""
    run = _shapes(setup, hypers, 1)
    devices = 1 if setup.layout.mesh is None else setup.layout.mesh.size
    working = min(setup.layout.chunk or setup.cohort, -(-setup.cohort // devices))
    return tree.nbytes(run) + 2 * working * tree.nbytes(run.state.params)  # and gradients


def _room(setup: Setup) -> float:
    """The bytes that a batch may take on each device."""
    mesh = setup.layout.mesh
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return min(SHARE * free_memory.of_host(), CPU_ROOM) / len(devices)
    return SHARE * free_memory.of_devices(devices)
