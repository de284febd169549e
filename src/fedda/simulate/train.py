"""The simulator: rounds between two evaluations are one compiled program."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import Mesh, PartitionSpec

from fedda.core import round as core
from fedda.core import tree
from fedda.core.algorithm import Algorithm
from fedda.core.round import Traffic
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, num_rows, take_rows
from fedda.data.streaming import Block, Feed
from fedda.models import Model
from fedda.simulate.client_state import HostMemory
from fedda.simulate.cohort import Layout, Sampler, arrange, draw_cohort, padding, sum_over_clients
from fedda.simulate.devices import everywhere
from fedda.storage import interrupts

LONGEST = 1000  # rounds of one program
# How many programs of each kind stay in memory. On a CPU one takes up to 200 memory maps, and
# Linux allows a process 65,530 of them.
PROGRAMS = 64
AVERAGED = 100  # of the last rounds: what the papers' results are means over
Row = dict[str, Any]
TOTALS = ("bytes_down", "bytes_up", "nonfinite_clients", "skipped_rounds")  # of a row, cumulative


class Setup(NamedTuple):
    """Everything that stays the same during a run, or during many runs trained together."""

    algorithm: Algorithm
    task: Task
    shards: Shards | Feed
    test: tuple[Any, Any] | None
    rounds: int
    cohort: int
    eval_every: int
    stabilise: int  # of the rounds, how many at the end take one full-batch step instead
    late_every: int = 0  # as eval_every, in the rounds that results are means over
    layout: Layout = Layout()
    sample: Sampler = draw_cohort
    host_rounds: int | None = None  # client memory is on the host, fetched for so many rounds


class Run(NamedTuple):
    """Everything that changes during a run: one pytree, which is what a checkpoint holds."""

    state: Any
    memory: PyTree  # a row for each client, or a HostMemory
    nonfinite: Array
    skipped: Array


class Tally(NamedTuple):
    """Sums over rounds of the rounds' mean training losses, and of their training metrics."""

    loss: Array
    metrics: tuple[Array, ...]
    rounds: Array


class Evaluation(NamedTuple):
    round: int
    row: Row
    run: Run


class Span(NamedTuple):
    """Rounds that one program runs, and what the host has to bring for them."""

    first: int
    last: int  # the round after them
    cohorts: np.ndarray  # [seeds, rounds or more, clients]
    shards: Shards


def programs(function: Callable[..., Any], **options: Any) -> Callable[..., jax.stages.Wrapped]:
    """Compile `function` in two steps: `function(*fixed)` is a program, called with the rest.

    `jax.jit` with static arguments would keep every program for ever. This keeps the programs that
    were used last, so that a process may train any number of models.
    """

    @lru_cache(maxsize=PROGRAMS)
    @wraps(function)
    def program(*fixed: Any) -> jax.stages.Wrapped:
        return jax.jit(partial(function, *fixed), **options)

    return program


@programs
def begin(
    algorithm: Algorithm, model: Model, together: bool, clients: int, hp: Any, key: Array
) -> Run:
    """A run before its first round, with a table of memories for so many clients."""

    def one(hp: Any, key: Array) -> Run:
        params = model.init(random.fold_in(key, 0))
        kept = algorithm.memory(hp, params)
        table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *jnp.shape(leaf))), kept)
        return Run(algorithm.init(hp, params), table, jnp.int32(0), jnp.int32(0))

    return (jax.vmap(one) if together else one)(hp, key)


@partial(programs, donate_argnames="run")
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
    slots: Array | None,
    first: Array,
    rounds: Array,
) -> tuple[Run, Tally]:
    """Rounds `first` to `first + rounds`: one program for any number of them, for any `hp`.

    `slots` are the rows of the memory that belong to the cohorts, if these are not their ids.
    """

    def one(
        hp: Any, run: Run, key: Array, cohorts: Array, slots: Array | None
    ) -> tuple[Run, Tally]:
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
                None if slots is None else slots[number],
            )
            loss = info.seen.loss / jnp.maximum(info.seen.examples, 1)
            metrics = tuple(a / jnp.where(b > 0, b, 1) for a, b in info.seen.metrics)
            heard = (info.seen.examples > 0).astype(loss.dtype)
            more = Tally(loss, metrics, heard)
            return (
                Run(state, memory, run.nonfinite + info.nonfinite, run.skipped + info.skipped),
                tree.add(tally, more),
            )

        tally = Tally(jnp.zeros(()), (jnp.zeros(()),) * len(task.train_metrics), jnp.zeros(()))
        return lax.fori_loop(0, rounds, body, (run, tally))

    return (jax.vmap(one) if together else one)(hp, run, key, cohorts, slots)


@programs
def evaluate(
    task: Task, together: bool, mesh: Mesh | None, params: PyTree, x: Any, y: Any
) -> dict[str, Array]:
    """The loss and the metrics on a set of which every device of a mesh takes its share."""
    share = num_rows(y) if mesh is None else -(-num_rows(y) // mesh.size)
    # At a time: what stays in a processor's caches, or fills a GPU; and the last as many as others.
    batches = -(-share // (32 if jax.default_backend() == "cpu" else 512))
    batch = -(-share // batches)

    def part(params: PyTree, x: Any, y: Any) -> dict[str, tuple[Array, Array]]:
        first = lax.axis_index("clients").astype(jnp.result_type(int)) * share
        rows = jnp.minimum(first + jnp.arange(share), num_rows(y) - 1)
        mine = jnp.clip(num_rows(y) - first, 0, share)
        x, y = take_rows((x, y), rows)
        return lax.psum(task.sums(params, x, y, mine, batch), "clients")

    def one(params: PyTree) -> dict[str, Array]:
        if mesh is None:
            return task.evaluate(params, x, y, batch)
        whole = PartitionSpec()
        spread = jax.shard_map(part, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return {name: above / below for name, (above, below) in spread(params, x, y).items()}

    return (jax.vmap(one) if together else one)(params)


@programs
def _sums(task: Task, params: PyTree, block: Block) -> dict[str, tuple[Array, Array]]:
    return task.sums(params, *block)


def evaluate_blocks(task: Task, params: PyTree, blocks: Iterable[Block]) -> dict[str, float]:
    """As `evaluate`, of a set that is brought to the device in blocks; added up in float64."""
    total = dict.fromkeys(task.measures, np.zeros(2))
    for block in blocks:
        interrupts.check()
        for name, pair in jax.device_get(_sums(task)(params, block)).items():
            total[name] = total[name] + np.asarray(pair, np.float64)
    return {name: float(above / below) for name, (above, below) in total.items()}


def train(
    setup: Setup, hp: Any, seeds: Sequence[int], first: int = 0, run: Run | None = None
) -> Iterator[Evaluation]:
    """Trains, and yields at round 0 and at every evaluation.

    With one seed, `hp` holds numbers. With several, `hp` holds one number a seed, all runs are
    trained in one program and the values of a row are arrays. `first` and `run` continue an earlier
    run from its evaluation at round `first`, and yield only what comes after it. Do not use a
    yielded `run` after asking for the next one: its memory is reused.
    """
    algorithm, task, layout = setup.algorithm, setup.task, setup.layout
    together = len(seeds) > 1
    key = _keys(seeds)
    fresh = run is None
    if run is None:
        run = start(setup, hp, seeds)
    if layout.mesh is not None:  # placed once: else every segment would move and recompile
        on_host = run.memory if setup.host_rounds else None
        run = run._replace(memory=()) if setup.host_rounds else run
        hp, key, run = everywhere((hp, key, run), layout.mesh)
        run = run._replace(memory=on_host) if setup.host_rounds else run
    one = (hp, run.state.params)
    if together:
        one = tree.take(one, jnp.asarray(0))
    sent = core.traffic(algorithm, task, *one, example(setup.shards), setup.cohort)
    full_task = task._replace(plan=task.plan.full())
    switch = setup.rounds - setup.stabilise

    row = partial(_row, setup, together, sent)
    if fresh:
        yield Evaluation(0, row(0, run, None), run)
    tally = None
    queued: deque[Tally] = deque()
    spans = host_work(setup, seeds, first)
    span = next(spans, None)
    while span is not None:
        interrupts.check()
        chosen = span.cohorts if together else span.cohorts[0]
        visited, table, slots = None, run.memory, None
        if setup.host_rounds is not None:
            visited, table, slots = _fetch(run, chosen, span.last - span.first, setup)
        kind = task if span.first < switch else full_task
        new, more = segment(algorithm, kind, layout, together)(
            hp,
            run._replace(memory=table),
            span.shards,
            key,
            chosen,
            slots,
            span.first,
            span.last - span.first,
        )
        # The device works by itself now: meanwhile the host brings what the next rounds need.
        following = next(spans, None)
        if visited is not None:
            run.memory.put(visited, jax.device_get(new.memory))
            new = new._replace(memory=run.memory)
        run = new
        tally = more if tally is None else tree.add(tally, more)
        queued.append(more)
        if len(queued) > 2:  # or the host would run ahead, and fill the device with data
            jax.block_until_ready(queued.popleft())
        if is_evaluated(setup, span.last):
            yield Evaluation(span.last, row(span.last, run, tally), run)
            tally = None
        span = following


def _row(
    setup: Setup, together: bool, sent: Traffic, number: int, run: Run, tally: Tally | None
) -> Row:
    """What is reported after so many rounds; `tally` is of those since the row before."""
    names = ["train_loss", *(f"train_{each.__name__}" for each in setup.task.train_metrics)]
    values: Row = dict.fromkeys(names, np.nan)
    if tally is not None:
        sums = (tally.loss, *tally.metrics)
        values = {name: total / tally.rounds for name, total in zip(names, sums, strict=True)}
    if setup.test is not None:
        task, mesh = setup.task, setup.layout.mesh
        tests = evaluate(task, together, mesh)(run.state.params, *setup.test)
        values |= {name: tests[name] for name in task.measures}
    totals = (number * sent.down, number * sent.up, run.nonfinite, run.skipped)
    values |= dict(zip(TOTALS, totals, strict=True))
    arrays = [np.asarray(value) for value in jax.device_get(list(values.values()))]
    plain = [array if together and array.ndim else array.item() for array in arrays]
    return {"round": number, **dict(zip(values, plain, strict=True))}


def start(setup: Setup, hp: Any, seeds: Sequence[int]) -> Run:
    """A run, or several, before the first round."""
    algorithm, model, together = setup.algorithm, setup.task.model, len(seeds) > 1
    if setup.host_rounds is None:
        clients = setup.shards.num_clients
        return cast(Run, begin(algorithm, model, together, clients)(hp, _keys(seeds)))
    run = begin(algorithm, model, together, 0)(hp, _keys(seeds))
    return run._replace(memory=HostMemory(setup.algorithm.memory(hp, run.state.params)))


def averaged(rounds: int) -> int:
    """Over how many of the last rounds results are averaged: half of them where there are few."""
    return max(1, min(AVERAGED, rounds // 2))


def is_evaluated(setup: Setup, number: int) -> bool:
    """Whether there is an evaluation after so many rounds."""
    left = setup.rounds - number
    if number % setup.eval_every == 0 or left == 0:
        return True
    late = left <= averaged(setup.rounds)
    return setup.late_every > 0 and late and left % setup.late_every == 0


def padding_waste(setup: Setup, seed: int) -> dict[str, float]:
    """How much of the local work is padding, in a sample of a run's rounds; see `padding`."""
    plan, shards = setup.task.plan, setup.shards
    switch = setup.rounds - setup.stabilise
    rounds = (
        (
            setup.sample(seed, number, shards.num_clients, setup.cohort),
            plan if number < switch else plan.full(),
        )
        for number in range(0, setup.rounds, max(1, setup.rounds // 500))
    )
    return padding(setup.layout, rounds, np.asarray(shards.count))


def _keys(seeds: Sequence[int]) -> Array:
    keys = [random.key(seed) for seed in seeds]
    return jnp.stack(keys) if len(seeds) > 1 else keys[0]


def example(shards: Shards | Feed) -> Shards:
    """Data of the right shapes."""
    if isinstance(shards, Shards):
        return shards
    return shards.gather(np.array([int(np.argmax(shards.count > 0))]), slots=1)


def host_work(setup: Setup, seeds: Sequence[int], first: int = 0) -> Iterator[Span]:
    """The rounds from `first`, cut at evaluations and at the switch, with what they need."""
    switch = setup.rounds - setup.stabilise
    shards, mesh = setup.shards, setup.layout.mesh
    count = np.asarray(shards.count)
    # The rounds of one program at most: a size that does not depend on how many are asked for.
    width = longest = min(setup.eval_every, LONGEST)
    if isinstance(shards, Feed):
        width = longest = min(width, shards.rounds(len(seeds) * setup.cohort))
    elif mesh is not None:
        shards = everywhere(shards, mesh)
    if setup.host_rounds is not None:
        longest = min(width, setup.host_rounds)
    while first < setup.rounds:
        evaluation = next(n for n in itertools.count(first + 1) if is_evaluated(setup, n))
        last = min(first + longest, evaluation)
        if first < switch:
            last = min(last, switch)
        cohorts = np.zeros((len(seeds), width, setup.cohort), np.int32)
        for i, seed in enumerate(seeds):
            for number in range(first, last):
                drawn = setup.sample(seed, number, shards.num_clients, setup.cohort)
                cohorts[i, number - first] = arrange(drawn, count, setup.layout)
        here = shards
        if isinstance(shards, Feed):
            asked = np.unique(cohorts[:, : last - first])
            here = shards.gather(asked, slots=len(seeds) * width * setup.cohort)
            if mesh is not None:
                here = everywhere(here, mesh)
        assert isinstance(here, Shards)
        yield Span(first, last, cohorts, here)
        first = last


def _fetch(
    run: Run, cohorts: np.ndarray, rounds: int, setup: Setup
) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """The clients of these cohorts, a table of their memories, and the cohorts' rows in it."""
    assert setup.host_rounds is not None
    visited = np.unique(cohorts[:rounds])
    room = min(setup.host_rounds, len(cohorts)) * setup.cohort  # again one size
    table = run.memory.take(np.resize(visited, room))
    slots = np.searchsorted(visited, cohorts).astype(np.int32)
    return visited, table, np.minimum(slots, room - 1)
