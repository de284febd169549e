"""The simulator: rounds between two evaluations are one compiled program."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import NamedSharding, PartitionSpec

from fedda import core, tree
from fedda.cohort import Layout, draw_cohort, sum_over_clients
from fedda.core import Algorithm
from fedda.data.shards import Shards
from fedda.models import Model
from fedda.task import Plan, Task
from fedda.tree import PyTree

Row = dict[str, Any]
TOTALS = ("bytes_down", "bytes_up", "nonfinite_clients", "skipped_rounds")  # of a row, cumulative


class Setup(NamedTuple):
    """Everything that stays the same during a run, or during many runs trained together."""

    algorithm: Algorithm
    task: Task
    shards: Shards
    test: tuple[Any, Any] | None
    rounds: int
    cohort: int
    eval_every: int
    stabilise: int  # of the rounds, how many at the end take one full-batch step instead
    layout: Layout = Layout()


class Run(NamedTuple):
    """Everything that changes during a run: one pytree, which is what a checkpoint holds."""

    state: Any
    memory: PyTree
    nonfinite: Array
    skipped: Array


class Tally(NamedTuple):
    """Sums over rounds of the rounds' mean training losses."""

    loss: Array
    rounds: Array


class Evaluation(NamedTuple):
    round: int
    row: Row
    run: Run


@partial(jax.jit, static_argnames=("algorithm", "model", "together"))
def begin(
    algorithm: Algorithm, model: Model, together: bool, hp: Any, key: Array, clients: Array
) -> Run:
    """A run before its first round. `clients` has one entry a client; only its length is used."""

    def one(hp: Any, key: Array) -> Run:
        params = model.init(random.fold_in(key, 0))
        kept = algorithm.memory(hp, params)
        table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients.size, *leaf.shape)), kept)
        return Run(algorithm.init(hp, params), table, jnp.int32(0), jnp.int32(0))

    return (jax.vmap(one) if together else one)(hp, key)


@partial(
    jax.jit,
    static_argnames=("algorithm", "task", "layout", "together"),
    donate_argnames=("run",),
)
def segment(
    algorithm: Algorithm,
    task: Task,
    layout: Layout,
    together: bool,
    hp: Any,
    run: Run,
    shards: Shards,
    key: Array,
    cohorts: Array,
    first: Array,
    rounds: Array,
) -> tuple[Run, Tally]:
    """Rounds `first` to `first + rounds`: one program for any number of them, for any `hp`."""

    def one(hp: Any, run: Run, key: Array, cohorts: Array) -> tuple[Run, Tally]:
        def body(number: Array, loop: tuple[Run, Tally]) -> tuple[Run, Tally]:
            run, tally = loop
            state, memory, info = core.one_round(
                algorithm,
                task,
                partial(sum_over_clients, layout),
                hp,
                run.state,
                run.memory,
                shards,
                cohorts[number],
                random.fold_in(random.fold_in(key, 1), first + number),
            )
            loss = info.seen.loss / jnp.maximum(info.seen.examples, 1)
            heard = jnp.minimum(info.seen.examples, 1)
            return (
                Run(state, memory, run.nonfinite + info.nonfinite, run.skipped + info.skipped),
                Tally(tally.loss + loss, tally.rounds + heard),
            )

        tally = Tally(jnp.zeros(()), jnp.zeros(()))
        return lax.fori_loop(0, rounds, body, (run, tally))

    return (jax.vmap(one) if together else one)(hp, run, key, cohorts)


@partial(jax.jit, static_argnames=("task", "together"))
def evaluate(task: Task, together: bool, params: PyTree, x: Any, y: Any) -> dict[str, Array]:
    if together:
        return jax.vmap(lambda params: task.evaluate(params, x, y))(params)
    return task.evaluate(params, x, y)


def train(
    setup: Setup, hp: Any, seeds: Sequence[int], first: int = 0, run: Run | None = None
) -> Iterator[Evaluation]:
    """Trains, and yields at round 0 and at every evaluation.

    With one seed, `hp` holds numbers. With several, `hp` holds one number a seed, all runs are
    trained in one program and the values of a row are arrays. `first` and `run` continue an earlier
    run from its evaluation at round `first`, and yield only what comes after it. Do not use a
    yielded `run` after asking for the next one: its memory is reused.
    """
    algorithm, task, shards, layout = setup.algorithm, setup.task, setup.shards, setup.layout
    together = len(seeds) > 1
    keys = [random.key(seed) for seed in seeds]
    key = jnp.stack(keys) if together else keys[0]
    fresh = run is None
    if run is None:
        run = begin(algorithm, task.model, together, hp, key, shards.count)
    if layout.mesh is not None:  # placed once: else every segment would move and recompile
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        hp, key, shards, run = jax.device_put((hp, key, shards, run), everywhere)
    one = (hp, run.state.params)
    if together:
        one = tree.take(one, jnp.asarray(0))
    sent = core.traffic(algorithm, task, *one, shards, setup.cohort)
    full_task = task._replace(plan=Plan(task.plan.batch, unit="full"))
    switch = setup.rounds - setup.stabilise

    def row(number: int, run: Run, tally: Tally | None) -> Row:
        values: Row = {"train_loss": np.nan if tally is None else tally.loss / tally.rounds}
        if setup.test is not None:
            tests = evaluate(task, together, run.state.params, *setup.test)
            values |= {name: tests[name] for name in task.measures}
        totals = (number * sent.down, number * sent.up, run.nonfinite, run.skipped)
        values |= dict(zip(TOTALS, totals, strict=True))
        arrays = [np.asarray(value) for value in jax.device_get(list(values.values()))]
        plain = [array if together and array.ndim else array.item() for array in arrays]
        return {"round": number, **dict(zip(values, plain, strict=True))}

    if fresh:
        yield Evaluation(0, row(0, run, None), run)
    while first < setup.rounds:
        last = min(first - first % setup.eval_every + setup.eval_every, setup.rounds)
        tally = None
        for begin_round, end_round, part in (
            (first, min(last, switch), task),
            (max(first, switch), last, full_task),
        ):
            if begin_round >= end_round:
                continue
            cohorts = np.zeros((len(seeds), setup.eval_every, setup.cohort), np.int32)
            for i, seed in enumerate(seeds):
                for number in range(begin_round, end_round):
                    cohorts[i, number - begin_round] = draw_cohort(
                        seed, number, shards.num_clients, setup.cohort
                    )
            run, more = segment(
                algorithm,
                part,
                layout,
                together,
                hp,
                run,
                shards,
                key,
                cohorts if together else cohorts[0],
                begin_round,
                end_round - begin_round,
            )
            tally = more if tally is None else tree.add(tally, more)
        yield Evaluation(last, row(last, run, tally), run)
        first = last


def empty_run(setup: Setup, hp: Any) -> Run:
    """The shapes of a run, for reading one back."""
    begin_one = partial(begin, setup.algorithm, setup.task.model, False)
    return jax.eval_shape(begin_one, hp, random.key(0), setup.shards.count)
