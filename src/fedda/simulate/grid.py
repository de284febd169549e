"""Many runs of one algorithm, trained together: as many at a time as fit in memory.

All batches of runs have one size, so that one compiled program serves them all; the last is filled
up with repeats that are thrown away. How much memory a batch needs is read off the compiled program
before it runs. A batch that runs out of memory all the same is halved and tried again.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax import random
from jax.sharding import NamedSharding, PartitionSpec

from fedda.core import tree
from fedda.core.algorithm import Hyper, ServerState
from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.data.streaming import Feed
from fedda.errors import InputError
from fedda.simulate.train import Row, Run, Setup, begin, evaluate, host_work, segment, train
from fedda.storage import interrupts

SHARE = 0.75  # of the free memory; the rest is for what the compiler does not see
CPU_ROOM = 1e9  # bytes; runs that fill a processor's caches many times over gain nothing by more
IN_FLIGHT = 3  # programs whose data a device holds at once, if the host brings them

T = TypeVar("T")


class Batch(NamedTuple):
    """Finished runs that were trained in one program."""

    members: range  # which of all runs these are
    histories: list[list[Row]]  # one for each member
    state: ServerState  # stacked over the members, and over repeats that are thrown away
    size: int  # the number of members and repeats
    seconds: float  # without compilation

    def states(self) -> list[ServerState]:
        """Return the server's state of each member, on the host, to make room on the device."""
        whole = jax.device_get(self.state)
        return [tree.take(whole, i) for i in range(len(self.members))]


class Part(NamedTuple):
    """Progress of a batch of runs that has not finished."""

    round: int
    run: Run | None  # stacked over members and repeats
    rows: list[Row]
    seconds: float  # without compilation


OnEvaluation = Callable[[range, Part], object]
Begun = Callable[[range, PyTree], Part | None]


def train_together(
    setup: Setup,
    hypers: Hyper,
    seeds: Sequence[int],
    together: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    begun: Begun | None = None,
) -> Iterator[Batch]:
    """Train one run for each seed, in batches.

    Args:
        setup: What all runs have in common.
        hypers: The hyper-parameters; each holds one number for every seed.
        seeds: The seeds.
        together: The largest number of runs to train at a time. By default as many as fit in
            memory or, on a CPU, where more are not faster, in a gigabyte of it.
        on_evaluation: Called with the members of a batch and its progress at each evaluation. Do
            not use the progress after that, for its memory is reused.
        begun: Called with the members of a batch and the shapes of their run before they start.
            Returns their earlier progress, if there is any.

    Yields:
        The finished batches, in order.

    Raises:
        InputError: One run alone needs more memory than the device has.
    """
    count, first, compiled = len(seeds), 0, 0
    room = math.inf if together else _room(setup)
    size = _even_size(count, together or int(min(count, room // _least(setup, hypers))))
    while first < count:
        if size != compiled:
            needed = _unless_out_of_memory(partial(_compile, setup, hypers, seeds, size))
            if size > 1 and (needed is None or needed > room):
                fits = size // 2 if needed is None else int(size * room / needed)
                size = _even_size(count - first, min(fits, size - 1))
                continue
            compiled = size
        members = range(first, min(first + size, count))
        numbers = np.minimum(np.arange(first, first + size), count - 1)
        hp, batch_seeds = _some(hypers, numbers), [seeds[i] for i in numbers]
        before = begun and begun(members, _shapes(setup, hypers, size))
        report = on_evaluation and partial(on_evaluation, members)
        end = _unless_out_of_memory(partial(_train, setup, hp, batch_seeds, before, report))
        if end is not None:
            assert end.run is not None
            state = end.run.state
            if size == 1:
                state = jax.tree.map(lambda leaf: leaf[None], state)
            histories = [[_member(row, i) for row in end.rows] for i in range(len(members))]
            yield Batch(members, histories, state, size=size, seconds=end.seconds)
            first = members.stop
        elif size > 1:
            size = _even_size(count - first, size // 2)
        else:
            raise InputError(
                "one run alone needs more memory than the device has: lower chunk, so that fewer "
                "clients of a cohort are worked on at a time, or lower cohort or batch."
            )


def _even_size(count: int, most: int) -> int:
    """Return the size of batches of at most `most` runs, as few as there can be."""
    batches = -(-count // max(1, most))
    return -(-count // batches)


def _unless_out_of_memory(function: Callable[[], T]) -> T | None:
    """Call a function; return `None` if the device's memory is not enough, free again by then."""
    try:
        return function()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _train(
    setup: Setup,
    hp: Hyper,
    seeds: Sequence[int],
    before: Part | None,
    report: Callable[[Part], object] | None,
) -> Part:
    """Train a batch to its end."""
    part = before or Part(round=0, run=None, rows=[], seconds=0.0)
    started = time.perf_counter() - part.seconds
    for evaluation in train(setup, hp, seeds, part.round, part.run):
        rows, seconds = [*part.rows, evaluation.row], time.perf_counter() - started
        part = Part(evaluation.round, evaluation.run, rows, seconds)
        if report is not None:
            report(part)
    return part


def _some(hypers: Hyper, numbers: np.ndarray) -> Hyper:
    """Return the hyper-parameters of these runs, as `train` takes them."""
    chosen = numbers if len(numbers) > 1 else numbers[0]
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[chosen]), hypers)


def _member(row: Row, i: int) -> Row:
    return {name: value if np.ndim(value) == 0 else value[i].item() for name, value in row.items()}


# ------------------------------------------------------------------------------------------ memory


def _compile(setup: Setup, hypers: Hyper, seeds: Sequence[int], size: int) -> int:
    """Compile the programs of a batch, which `train` will find; return the bytes it needs at once.

    Data that stay on the device are not counted: they are there already.
    """
    algorithm, layout, together = setup.algorithm, setup.layout, size > 1
    arguments = (_some(hypers, np.arange(size)), _keys(size))
    begin(algorithm, setup.task.model, together, setup.shards.num_clients).lower(
        *arguments
    ).compile()
    hp, key, run = (*arguments, _shapes(setup, hypers, size))
    span = next(host_work(setup, seeds[:size]))
    if layout.mesh is not None:
        place = NamedSharding(layout.mesh, PartitionSpec())
        hp, key, run = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            (hp, key, run),
        )
    programs = [
        segment(algorithm, task, layout, together).lower(hp, run, key, span)
        for task in {setup.task_of(0), setup.task_of(setup.rounds - 1)}
    ]
    if setup.test is not None:
        test = evaluate(setup.task, together, layout.mesh)
        programs.append(test.lower(run.state.params, *setup.test))
    working = 0
    for program in programs:
        interrupts.check()
        sizes = program.compile().memory_analysis()
        if sizes is not None:  # not every backend says
            output = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            working = max(working, sizes.temp_size_in_bytes + output)
    brought = IN_FLIGHT * tree.nbytes(span.shards) if isinstance(setup.shards, Feed) else 0
    held = tree.nbytes((run, run.state))  # of this batch, and what is left of the one before
    return int(working + held + brought)


def _keys(size: int) -> PyTree:
    return jax.eval_shape(lambda: random.split(random.key(0), size) if size > 1 else random.key(0))


def _shapes(setup: Setup, hypers: Hyper, size: int) -> Run:
    """Return the shapes of a batch of runs."""
    program = begin(setup.algorithm, setup.task.model, size > 1, setup.shards.num_clients)
    return jax.eval_shape(program, _some(hypers, np.arange(size)), _keys(size))


def _least(setup: Setup, hypers: Hyper) -> int:
    """Return the bytes no run can do without, lest a program be compiled that is far too large."""
    run = _shapes(setup, hypers, 1)
    devices = 1 if setup.layout.mesh is None else setup.layout.mesh.size
    working = min(setup.layout.chunk or setup.cohort, -(-setup.cohort // devices))
    return tree.nbytes(run) + 2 * working * tree.nbytes(run.state.params)  # and gradients


def _room(setup: Setup) -> float:
    """Return the bytes that a batch may take on each device."""
    mesh = setup.layout.mesh
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return min(SHARE * free_memory.of_host(), CPU_ROOM) / len(devices)
    return SHARE * free_memory.of_devices(devices)
