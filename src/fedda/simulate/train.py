"""The simulator: the rounds between two evaluations are one compiled program."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import Mesh, PartitionSpec

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Hyper, ServerState
from fedda.core.round import one_round, traffic
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, num_rows, take_rows
from fedda.data.streaming import Feed
from fedda.models import Model
from fedda.simulate.client_state import HostMemory
from fedda.simulate.cohort import (
    Layout,
    Sampler,
    arrange,
    draw_cohort,
    slots_of,
    sum_over_clients,
    work_of,
)
from fedda.simulate.devices import everywhere
from fedda.storage import interrupts

LONGEST = 1000  # rounds of one program
# How many programs stay in memory. On a CPU one takes up to 200 memory maps, and Linux allows a
# process 65,530 of them.
PROGRAMS = 192
AVERAGED = 100  # rounds at the end of a run, over which the papers average their results
Row = dict[str, Any]  # what is reported at an evaluation
TOTALS = ("bytes_down", "bytes_up", "nonfinite_clients", "skipped_rounds")  # of a row, cumulative


class Setup(NamedTuple):
    """Everything that stays the same during a run, or during many runs trained together.

    Attributes:
        algorithm: The algorithm.
        task: What is learnt, and how much local work a client does.
        shards: The clients' examples.
        test: The test set `(x, y)`, if there is one.
        rounds: The number of rounds.
        cohort: The number of clients of a round.
        eval_every: The number of rounds between evaluations.
        stabilise: The number of rounds at the end in which clients take one full-batch step.
        late_every: As `eval_every`, in the rounds that results are averaged over; 0: no more often.
        layout: How a cohort is laid out over chunks and devices.
        sample: How cohorts are drawn.
        host_rounds: For how many rounds client memory is fetched from the host; `None` if all of it
            is on the device.
        test_clients: The test examples of each client, if the test set is divided among them.
        names: The names of the clients, if they have some.
    """

    algorithm: Algorithm
    task: Task
    shards: Shards | Feed
    test: tuple[Any, Any] | None
    rounds: int
    cohort: int
    eval_every: int
    stabilise: int
    late_every: int = 0
    layout: Layout = Layout()
    sample: Sampler = draw_cohort
    host_rounds: int | None = None
    test_clients: Shards | None = None
    names: Sequence[str] = ()

    def task_of(self, number: int) -> Task:
        """Return the task of a round: in the last ones, clients take one full-batch step."""
        full = number >= self.rounds - self.stabilise
        return self.task._replace(plan=self.task.plan.full()) if full else self.task


class Run(NamedTuple):
    """Everything that changes during a run: one pytree, which a checkpoint holds."""

    state: ServerState
    memory: PyTree  # a row for each client, or a HostMemory
    nonfinite: Array
    skipped: Array


class Tally(NamedTuple):
    """Sums over rounds of the rounds' mean training losses and training metrics."""

    loss: Array
    metrics: tuple[Array, ...]
    rounds: Array


class Evaluation(NamedTuple):
    """A run after some rounds, and what is reported about it."""

    round: int
    row: Row
    run: Run


class Span(NamedTuple):
    """Rounds that one program runs, and the data that the host brings for them."""

    first: int
    last: int  # the round after them
    cohorts: np.ndarray  # [rounds or more, clients]; of several runs, [runs, rounds or more, ...]
    shards: Shards
    slots: np.ndarray | None = None  # rows of the memory for the cohorts, if not the client ids


@lru_cache(maxsize=PROGRAMS)
def _program(function: Callable[..., Any], donated: str | None, *fixed: Any) -> jax.stages.Wrapped:
    return jax.jit(partial(function, *fixed), donate_argnames=donated)


def programs(
    function: Callable[..., Any], donated: str | None = None
) -> Callable[..., jax.stages.Wrapped]:
    """Compile `function` in two steps: `function(*fixed)` is a program, called with the rest.

    `jax.jit` with static arguments would keep every program for ever. This keeps the programs that
    were used last, so that a process may train any number of models.
    """

    @wraps(function)
    def program(*fixed: Any) -> jax.stages.Wrapped:
        return _program(function, donated, *fixed)

    return program


@programs
def initial(model: Model, together: bool, key: Array) -> PyTree:
    """Return the parameters before the first round: one program for all algorithms."""

    def one(key: Array) -> PyTree:
        return model.init(random.fold_in(key, 0))

    return (jax.vmap(one) if together else one)(key)


@programs
def begin(algorithm: Algorithm, together: bool, clients: int, hp: Hyper, params: PyTree) -> Run:
    """Return a run before its first round, with a table of memories for this number of clients."""

    def one(hp: Hyper, params: PyTree) -> Run:
        kept = algorithm.memory(hp, params)
        table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *jnp.shape(leaf))), kept)
        state = algorithm.init(hp, params)
        return Run(state, memory=table, nonfinite=jnp.int32(0), skipped=jnp.int32(0))

    return (jax.vmap(one) if together else one)(hp, params)


@partial(programs, donated="run")
def segment(
    algorithm: Algorithm,
    task: Task,
    layout: Layout,
    together: bool,
    hp: Hyper,
    run: Run,
    key: Array,
    span: Span,
) -> tuple[Run, Tally]:
    """Train the rounds of a span: one program for any number of them, and for any `hp`."""

    def one(hp: Hyper, run: Run, key: Array, cohorts: Any, slots: Any) -> tuple[Run, Tally]:
        def body(number: Array, loop: tuple[Run, Tally]) -> tuple[Run, Tally]:
            run, tally = loop
            state, memory, info = one_round(
                algorithm,
                task,
                partial(sum_over_clients, layout, axis="runs" if together else None),
                hp=hp,
                state=run.state,
                memory=run.memory,
                shards=span.shards,
                cohort=cohorts[number],
                key=random.fold_in(random.fold_in(key, 1), span.first + number),
                slots=None if slots is None else slots[number],
            )
            loss = info.seen.loss / jnp.maximum(info.seen.examples, 1)
            metrics = tuple(a / jnp.where(b > 0, b, 1) for a, b in info.seen.metrics)
            trained = (info.seen.examples > 0).astype(loss.dtype)
            nonfinite, skipped = run.nonfinite + info.nonfinite, run.skipped + info.skipped
            tally = tree.add(tally, Tally(loss, metrics, rounds=trained))
            return Run(state, memory, nonfinite, skipped), tally

        tally = Tally(jnp.zeros(()), (jnp.zeros(()),) * len(task.train_metrics), jnp.zeros(()))
        return lax.fori_loop(0, span.last - span.first, body, (run, tally))

    trained = jax.vmap(one, axis_name="runs") if together else one
    return trained(hp, run, key, span.cohorts, span.slots)


@programs
def evaluate(
    task: Task, together: bool, mesh: Mesh | None, params: PyTree, x: Any, y: Any
) -> dict[str, Array]:
    """Return the loss and the metrics on a test set, of which every device takes its share."""
    share = num_rows(y) if mesh is None else -(-num_rows(y) // mesh.size)
    # A batch stays in a processor's caches, or fills a GPU. The last is as large as the others.
    batches = -(-share // (32 if jax.default_backend() == "cpu" else 512))
    batch = -(-share // batches)

    def part(params: PyTree, x: Any, y: Any) -> dict[str, tuple[Array, Array]]:
        first = lax.axis_index("clients").astype(jnp.result_type(int)) * share
        rows = jnp.minimum(first + jnp.arange(share), num_rows(y) - 1)
        count = jnp.clip(num_rows(y) - first, 0, share)
        x, y = take_rows((x, y), rows)
        return lax.psum(task.sums(params, x, y, count, batch), "clients")

    def one(params: PyTree) -> dict[str, Array]:
        if mesh is None:
            return task.evaluate(params, x, y, batch)
        whole = PartitionSpec()
        spread = jax.shard_map(part, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return {name: above / below for name, (above, below) in spread(params, x, y).items()}

    return (jax.vmap(one) if together else one)(params)


def train(
    setup: Setup, hp: Hyper, seeds: Sequence[int], first: int = 0, run: Run | None = None
) -> Iterator[Evaluation]:
    """Train, and yield at round 0 and at every evaluation.

    Do not use a yielded `run` after asking for the next one: its memory is reused.

    Args:
        setup: What stays the same during the run.
        hp: The hyper-parameters. With several seeds, each holds one number for every seed.
        seeds: One seed for each run. Several runs are trained in one program, and the values of
            their rows are arrays.
        first: The round from which to continue an earlier run.
        run: That run at its evaluation at round `first`; only later evaluations are yielded.
    """
    algorithm, task, mesh = setup.algorithm, setup.task, setup.layout.mesh
    together, on_host = len(seeds) > 1, setup.host_rounds is not None
    key, fresh = _keys(seeds), run is None
    run = start(setup, hp, seeds) if run is None else run
    if mesh is not None:  # placed once: else every segment would move and recompile
        memory = run.memory
        hp, key, run = everywhere((hp, key, run._replace(memory=()) if on_host else run), mesh)
        run = run._replace(memory=memory) if on_host else run
    one = (hp, run.state.params)
    if together:
        one = tree.take(one, jnp.asarray(0))
    bytes_a_client = traffic(algorithm, task, *one, example(setup.shards))
    row = partial(_row, setup, together, tuple(setup.cohort * number for number in bytes_a_client))
    spans = host_work(setup, seeds, first)
    span = next(spans, None)
    if span is not None:  # compile first: then the time between two evaluations is that of rounds
        interrupts.check()
        _, table, slots = _fetch(setup, run, span) if on_host else (None, run.memory, None)
        program = segment(algorithm, setup.task_of(first), setup.layout, together)
        program.lower(hp, run._replace(memory=table), key, span._replace(slots=slots)).compile()
    if fresh:
        interrupts.check()
        yield Evaluation(0, row(0, run, None), run)
    tally = None
    queued: deque[Tally] = deque()
    while span is not None:
        interrupts.check(whole=tally is None)
        visited, table, slots = _fetch(setup, run, span) if on_host else (None, run.memory, None)
        program = segment(algorithm, setup.task_of(span.first), setup.layout, together)
        new, more = program(hp, run._replace(memory=table), key, span._replace(slots=slots))
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
    setup: Setup, together: bool, sent: tuple[int, ...], number: int, run: Run, tally: Tally | None
) -> Row:
    """Return the report after `number` rounds; `tally` has the sums since the previous one."""
    names = ["train_loss", *(f"train_{metric.__name__}" for metric in setup.task.train_metrics)]
    values: Row = dict.fromkeys(names, np.nan)
    if tally is not None:
        sums = (tally.loss, *tally.metrics)
        values = {name: total / tally.rounds for name, total in zip(names, sums, strict=True)}
    if setup.test is not None:
        tests = evaluate(setup.task, together, setup.layout.mesh)(run.state.params, *setup.test)
        values |= {name: tests[name] for name in setup.task.measures}
    totals = (*(number * size for size in sent), run.nonfinite, run.skipped)
    values |= dict(zip(TOTALS, totals, strict=True))
    arrays = [np.asarray(value) for value in jax.device_get(list(values.values()))]
    plain = [array if together and array.ndim else array.item() for array in arrays]
    return {"round": number, **dict(zip(values, plain, strict=True))}


def start(setup: Setup, hp: Hyper, seeds: Sequence[int]) -> Run:
    """Return a run, or several, before the first round."""
    on_host = setup.host_rounds is not None
    clients = 0 if on_host else setup.shards.num_clients
    together = len(seeds) > 1
    params = initial(setup.task.model, together)(_keys(seeds))
    run: Run = begin(setup.algorithm, together, clients)(hp, params)
    if on_host:
        run = run._replace(memory=HostMemory(setup.algorithm.memory(hp, run.state.params)))
    return run


def averaged(rounds: int) -> int:
    """Return the number of rounds at the end to average over: half of all if there are few."""
    return max(1, min(AVERAGED, rounds // 2))


def is_evaluated(setup: Setup, number: int) -> bool:
    """Return whether there is an evaluation after this number of rounds."""
    left, every = setup.rounds - number, setup.late_every
    late = every > 0 and left <= averaged(setup.rounds) and left % every == 0
    return number % setup.eval_every == 0 or left == 0 or late


def padding_waste(setup: Setup, seed: int) -> dict[str, float]:
    """Return the share of the computed examples that do not count, in a sample of a run's rounds.

    Some fill up a client's last batch. The rest, also returned by itself as `unequal_clients`, are
    batches of clients that wait for the largest of their chunk, and of places that no client has.
    """
    layout, shards = setup.layout, setup.shards
    count = np.asarray(shards.count)
    devices, chunks, chunk = layout.places(setup.cohort)
    sizes = np.zeros(devices * chunks * chunk, np.int64)  # 0 where there is no client
    examples = needed = slots = computed = 0
    for number in range(0, setup.rounds, max(1, setup.rounds // 500)):
        cohort = setup.sample(seed, number, shards.num_clients, setup.cohort)
        sizes[: setup.cohort] = count[arrange(cohort, count, layout)]
        plan = setup.task_of(number).plan
        work, largest = work_of(plan, sizes), sizes.reshape(-1, chunk).max(1)
        computed += chunk * int(work_of(plan, largest).computed.sum())
        slots += chunk * int(slots_of(plan, largest, (*layout.widths, shards.max_count)).sum())
        examples, needed = examples + int(work.examples.sum()), needed + int(work.batches.sum())
    return {"total": 1 - examples / slots, "unequal_clients": 1 - needed / computed}


def _keys(seeds: Sequence[int]) -> Array:
    keys = [random.key(seed) for seed in seeds]
    return jnp.stack(keys) if len(seeds) > 1 else keys[0]


def example(shards: Shards | Feed) -> Shards:
    """Return data of the right shapes."""
    if isinstance(shards, Shards):
        return shards
    return shards.gather(np.array([int(np.argmax(shards.count > 0))]), slots=1)


def host_work(setup: Setup, seeds: Sequence[int], first: int = 0) -> Iterator[Span]:
    """Cut the rounds from `first` at evaluations and at the last rounds; bring what they need."""
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
        last = min(first + longest, evaluation, switch if first < switch else setup.rounds)
        cohorts = np.zeros((len(seeds), width, setup.cohort), np.int32)
        for i, seed in enumerate(seeds):
            for number in range(first, last):
                drawn = setup.sample(seed, number, shards.num_clients, setup.cohort)
                cohorts[i, number - first] = arrange(drawn, count, setup.layout)
        here = shards
        if isinstance(here, Feed):
            asked = np.unique(cohorts[:, : last - first])
            here = here.gather(asked, slots=len(seeds) * width * setup.cohort)
            here = here if mesh is None else everywhere(here, mesh)
        yield Span(first, last, cohorts if len(seeds) > 1 else cohorts[0], here)
        first = last


def _fetch(setup: Setup, run: Run, span: Span) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """Return the clients of a span, a table of their memories, and the cohorts' rows in it."""
    assert setup.host_rounds is not None
    visited = np.unique(span.cohorts[: span.last - span.first])
    room = min(setup.host_rounds, len(span.cohorts)) * setup.cohort  # again one size
    table = run.memory.take(np.resize(visited, room))
    slots = np.searchsorted(visited, span.cohorts).astype(np.int32)
    return visited, table, np.minimum(slots, room - 1)
