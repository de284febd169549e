"""Train many runs of one algorithm together, in batches that fit into memory.

All batches have the same size, so that one compiled program serves them all. The last batch is
padded with copies of a run, whose results are dropped. The memory that a batch needs is read from
the compiled program before it runs. If a batch still runs out of memory, its size is halved.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import random
from jax.sharding import NamedSharding, PartitionSpec

from fedda import algorithms
from fedda.algorithms.registry import plain
from fedda.core import tree
from fedda.core.algorithm import Algorithm, Hyper, ServerState
from fedda.core.tree import PyTree
from fedda.data import memory as free_memory
from fedda.data.streaming import Feed
from fedda.errors import InputError
from fedda.simulate.prepare import check_seed, traced
from fedda.simulate.settings import KEYWORDS
from fedda.simulate.train import (
    Row,
    Run,
    Setup,
    begin,
    evaluate,
    host_work,
    initial,
    segment,
    train,
)
from fedda.storage import interrupts

SHARE = 0.75  # the share of free memory to use; the compiler's estimate does not cover everything
CPU_ROOM = 1e9  # bytes; on a CPU, larger batches are not faster
IN_FLIGHT = 3  # the number of programs whose streamed data a device holds at the same time

T = TypeVar("T")


class Batch(NamedTuple):
    """Finished runs that were trained in one program."""

    members: range  # the numbers of these runs
    histories: list[list[Row]]  # one history for each run
    state: ServerState  # stacked over the runs and the padding
    size: int  # the number of runs and padding
    seconds: float  # without compilation

    def states(self) -> list[ServerState]:
        """Return the server's state of each run, in host memory."""
        stacked = jax.device_get(self.state)
        return [tree.take(stacked, i) for i in range(len(self.members))]


class Part(NamedTuple):
    """Progress of a batch of runs that has not finished."""

    round: int
    run: Run | None  # stacked over the runs and the padding
    rows: list[Row]
    seconds: float  # without compilation


OnEvaluation = Callable[[range, Part], object]
Begun = Callable[[range, PyTree], Part | None]


def train_grid(
    setup: Setup,
    hypers: Sequence[Hyper],
    seeds: Sequence[int],
    together: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    begun: Begun | None = None,
) -> Iterator[Batch]:
    """Train a run for each `Hyper` and seed, in batches.

    Args:
        setup: The settings that all runs share.
        hypers: The hyper-parameters of each run.
        seeds: The seed of each run.
        together: The largest number of runs in a batch. By default as many as fit in memory. On
            a CPU the default is limited to 1 GB, because larger batches are not faster there.
        on_evaluation: Called at each evaluation with the numbers of the runs in a batch and the
            batch's progress. Its memory is reused afterwards.
        begun: Called before a batch starts, with the numbers of its runs and the shapes of their
            state. Returns the progress of an interrupted batch, or None.

    Yields:
        The finished batches, in order.

    Raises:
        InputError: A single run needs more memory than the device has; or client memory is on the
            host, where there would have to be one for each run.
    """
    if setup.host_rounds is not None:
        raise InputError(
            "run_grid and fedda sweep keep client memory on the device, but memory_gb is too small "
            "for it. Raise memory_gb."
        )
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *hypers)
    hps = traced(stacked, setup.task.model)
    count, first, compiled = len(seeds), 0, 0
    room = math.inf if together else _room(setup)
    size = _even_size(count, together or int(min(count, room // _least(setup, hps))))
    while first < count:
        if size != compiled:
            needed = _unless_out_of_memory(partial(compile_batch, setup, hps, seeds, size))
            if size > 1 and (needed is None or needed > room):
                fits = size // 2 if needed is None else int(size * room / needed)
                size = _even_size(count - first, min(fits, size - 1))
                continue
            compiled = size
        members = range(first, min(first + size, count))
        numbers = np.minimum(np.arange(first, first + size), count - 1)
        hp, batch_seeds = _some(hps, numbers), [seeds[i] for i in numbers]
        before = begun and begun(members, _shapes(setup, hps, size))
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
                "a single run needs more memory than the device has. Lower chunk, so that fewer "
                "clients are computed together, or lower cohort or batch."
            )


def _even_size(count: int, most: int) -> int:
    """Return the batch size with the fewest batches of at most `most` runs."""
    batches = -(-count // max(1, most))
    return -(-count // batches)


def _unless_out_of_memory(function: Callable[[], T]) -> T | None:
    """Return the result of a function, or `None` if it runs out of device memory."""
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
    """Train a batch to the last round."""
    part = before or Part(round=0, run=None, rows=[], seconds=0.0)
    started = time.perf_counter() - part.seconds
    for evaluation in train(setup, hp, seeds, part.round, part.run):
        rows, seconds = [*part.rows, evaluation.row], time.perf_counter() - started
        part = Part(evaluation.round, evaluation.run, rows, seconds)
        if report is not None:
            report(part)
    return part


def _some(hypers: Hyper, numbers: np.ndarray) -> Hyper:
    """Return the hyper-parameters of some runs, in the form that `train` expects."""
    chosen = numbers if len(numbers) > 1 else numbers[0]
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[chosen]), hypers)


def _member(row: Row, i: int) -> Row:
    return {name: value if np.ndim(value) == 0 else value[i].item() for name, value in row.items()}


# ------------------------------------------------------------------------------------------ memory


def compile_batch(setup: Setup, hypers: Hyper, seeds: Sequence[int], size: int) -> int:
    """Compile the programs of a batch for `train`, and return the memory they need in bytes.

    Data that are already on the device are not counted.
    """
    algorithm, layout, together = setup.algorithm, setup.layout, size > 1
    hp, key, run = _some(hypers, np.arange(size)), _keys(size), _shapes(setup, hypers, size)
    initial(setup.task.model, together).lower(key).compile()
    begin(algorithm, together, setup.shards.num_clients).lower(hp, run.state.params).compile()
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
        if sizes is not None:  # some backends return no analysis
            output = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            working = max(working, sizes.temp_size_in_bytes + output)
    streamed = IN_FLIGHT * tree.nbytes(span.shards) if isinstance(setup.shards, Feed) else 0
    held = tree.nbytes((run, run.state))  # this batch, and the state of the previous batch
    return int(working + held + streamed)


def _keys(size: int) -> PyTree:
    return jax.eval_shape(lambda: random.split(random.key(0), size) if size > 1 else random.key(0))


def _shapes(setup: Setup, hypers: Hyper, size: int) -> Run:
    """Return the shapes of a batch of runs."""
    params = jax.eval_shape(initial(setup.task.model, size > 1), _keys(size))
    program = begin(setup.algorithm, size > 1, setup.shards.num_clients)
    shapes: Run = jax.eval_shape(program, _some(hypers, np.arange(size)), params)
    return shapes


def _least(setup: Setup, hypers: Hyper) -> int:
    """Return a lower bound of a run's memory, so that no far too large program is compiled."""
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


def values_to_try(name: str, values: Any) -> list[Any]:
    """Return the values of one setting as a list. Raise an `InputError` if they are none."""
    listed = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not listed:
        raise InputError(f"{name} must be a list of values to try, got {values!r}.")
    return [plain(value) for value in listed]


def grid_points(
    name: str,
    record: Algorithm,
    base: Mapping[str, float],
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
) -> list[tuple[Any, int]]:
    """Return the `Hyper` of every combination of the grid's values, with every seed.

    Args:
        name: The name of the algorithm.
        record: The algorithm.
        base: The hyper-parameters that all runs share.
        grid: The values of others.
        seeds: The seeds of each combination.

    Raises:
        InputError: A value is wrong; or runs with several values of it are different programs.
    """
    options = algorithms.options(name) if name in algorithms.names() else ()
    for fixed in grid.keys() & {*KEYWORDS, *options}:
        raise InputError(
            f"{fixed} is fixed when a program is compiled, so runs with several values of it "
            f"cannot be trained together. Run the grid once for each value of {fixed}."
        )
    for seed in seeds:
        check_seed(seed)
    hypers = [
        algorithms.hyper(name, record, {**base, **dict(zip(grid, values, strict=True))})
        for values in itertools.product(*grid.values())
    ]
    return list(itertools.product(hypers, seeds))
