"""The simulator: cohorts are drawn, rounds between two evaluations are one compiled program.

`train` is the loop; `run` and `run_grid` are the library's front door to it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedda import algorithms, core, tree
from fedda.core import Algorithm
from fedda.data.shards import Shards, check_finite, check_labels, from_clients
from fedda.errors import InputError, unknown
from fedda.losses import cross_entropy
from fedda.models import Model
from fedda.task import ExampleWise, Plan, Task
from fedda.tree import PyTree

Row = dict[str, Any]
TOTALS = ("bytes_down", "bytes_up", "nonfinite_clients", "skipped_rounds")  # of a row, cumulative


class Layout(NamedTuple):
    """How a cohort is laid out; results depend on it only by rounding."""

    chunk: int | None = None  # clients worked on together; None: all that are on one device
    mesh: Mesh | None = None  # devices with one axis "clients"; None: one device


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


def sum_over_clients(
    layout: Layout, work: Callable[..., tuple[PyTree, PyTree]], shared: PyTree, own: PyTree
) -> tuple[PyTree, PyTree]:
    """Maps `work(shared, own[i])` over clients: the sum of the first results, all of the second.

    Clients of a chunk are one vmap; chunks follow one another with a running sum; every device has
    its share of the cohort. Slots that fill the last chunk ask an absent client.
    """
    asked = jax.tree.leaves(own)[0].shape[0]
    devices = 1 if layout.mesh is None else layout.mesh.size
    chunk = min(layout.chunk or asked, -(-asked // devices))
    filler = -asked % (devices * chunk)
    clients, memory = own
    padded = (
        jnp.pad(clients, (0, filler), constant_values=np.iinfo(clients.dtype).max),
        jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, filler)] + [(0, 0)] * (leaf.ndim - 1)), memory
        ),
    )

    def together(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        parts, kept = jax.vmap(work, (None, 0))(shared, own)
        return tree.sum_leading(parts), kept

    def here(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), own)
        count = jax.tree.leaves(chunks)[0].shape[0]
        if count == 1:
            return together(shared, own)
        shape, _ = jax.eval_shape(together, shared, tree.take(chunks, jnp.asarray(0)))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

        def body(total: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
            part, kept = together(shared, own)
            return tree.add(total, part), kept

        total, kept = lax.scan(body, zero, chunks)
        return total, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)

    def everywhere(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        total, kept = here(shared, own)
        return lax.psum(total, "clients"), kept

    if layout.mesh is None:
        total, kept = here(shared, padded)
    else:
        everyone, split = PartitionSpec(), PartitionSpec("clients")
        total, kept = jax.shard_map(
            everywhere,
            mesh=layout.mesh,
            in_specs=(everyone, split),
            out_specs=(everyone, split),
            check_vma=False,
        )(shared, padded)
    return total, jax.tree.map(lambda leaf: leaf[:asked], kept)


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


def draw_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """The clients of a round, uniformly without replacement, independent of all other rounds."""
    rng = np.random.default_rng((seed, round_number))
    return rng.choice(population, size, replace=False).astype(np.int32)


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


class Result(NamedTuple):
    """A finished run: the server's state, and one row for each evaluation."""

    state: Any
    history: list[Row]

    @property
    def params(self) -> PyTree:
        return self.state.params


class GridPoint(NamedTuple):
    hyper: dict[str, float]
    seed: int
    result: Result


def run(
    algorithm: str,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards,
    loss: ExampleWise,
    *,
    seed: int = 0,
    on_evaluation: Callable[[Row], None] | None = None,
    **settings: Any,
) -> Result:
    """Trains `model` with a federated algorithm and returns its parameters and history.

    `clients` holds one pair of arrays `(x, y)` for each client. `settings` are those of `prepare`
    and the algorithm's own hyper-parameters and options (`fedda algorithms NAME` lists them).
    """
    setup, hyper = prepare(algorithm, model, clients, loss, **settings)
    history = []
    for evaluation in train(setup, traced(hyper, model), [seed]):
        history.append(evaluation.row)
        if on_evaluation is not None:
            on_evaluation(evaluation.row)
    return Result(evaluation.run.state, history)


def run_grid(
    algorithm: str,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards,
    loss: ExampleWise,
    *,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int] = (0,),
    **settings: Any,
) -> list[GridPoint]:
    """Trains every combination of the grid's values and seeds, all in one compiled program."""
    points = [
        (dict(zip(grid, values, strict=True)), seed)
        for values in itertools.product(*grid.values())
        for seed in seeds
    ]
    if len(points) < 2:
        raise InputError(f"run_grid trains at least two runs, got {len(points)}. Use run for one.")
    setup, base = prepare(algorithm, model, clients, loss, **settings)
    hypers = [
        algorithms.hyper(algorithm, setup.algorithm, base._asdict() | values)
        for values, _ in points
    ]
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *hypers)
    evaluations = train(setup, traced(stacked, model), [seed for _, seed in points])
    rows = [(evaluation.row, final := evaluation.run.state)[0] for evaluation in evaluations]
    return [
        GridPoint(
            values,
            seed,
            Result(
                tree.take(final, jnp.asarray(i)),
                [
                    {k: v if np.ndim(v) == 0 else v[i].item() for k, v in row.items()}
                    for row in rows
                ],
            ),
        )
        for i, (values, seed) in enumerate(points)
    ]


def prepare(
    algorithm: str,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards,
    loss: ExampleWise,
    *,
    test: tuple[Any, Any] | None = None,
    metrics: Sequence[ExampleWise] = (),
    rounds: int = 100,
    cohort: int = 10,
    batch: int = 20,
    local_work: int = 5,
    local_unit: Literal["steps", "epochs"] = "steps",
    reduction: Literal["mean", "sum"] = "mean",
    stabilise: float = 0,
    eval_every: int = 10,
    chunk: int | None = None,
    devices: int = 1,
    **chosen: Any,
) -> tuple[Setup, Any]:
    """Checks everything a user gives, and returns what `train` needs.

    Every round, `cohort` clients do `local_work` mini-batch steps (or epochs) on batches of `batch`
    examples. `stabilise` is the number of rounds at the end (or, below 1, their share) in which a
    client takes one step with the gradient of all its data. `chosen` holds hyper-parameters and
    options of the algorithm.
    """
    record, hyper = algorithms.configure(algorithm, chosen)
    shards = clients if isinstance(clients, Shards) else from_clients(clients)
    for name, value in (
        ("rounds", rounds),
        ("cohort", cohort),
        ("batch", batch),
        ("local_work", local_work),
        ("eval_every", eval_every),
        ("devices", devices),
        ("chunk", cohort if chunk is None else chunk),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if cohort > shards.num_clients:
        raise InputError(
            f"cohort must be at most the number of clients, which is {shards.num_clients}, got "
            f"{cohort}. Lower cohort or add clients."
        )
    for name, text, allowed in (
        ("local_unit", local_unit, ("steps", "epochs")),
        ("reduction", reduction, ("mean", "sum")),
    ):
        if text not in allowed:
            raise unknown(f"value of {name}", text, allowed)
    if not 0 <= stabilise <= rounds or (stabilise >= 1 and stabilise != int(stabilise)):
        raise InputError(
            f"stabilise must be a share of the rounds below 1 or a whole number of rounds up to "
            f"{rounds}, got {stabilise!r}."
        )
    if devices > jax.device_count():
        raise InputError(
            f"devices must be at most {jax.device_count()}, as many as JAX sees, got {devices}."
        )
    _check_examples(model, loss, shards, test)
    task = Task(model, loss, Plan(batch, local_work, local_unit), tuple(metrics), reduction)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",)) if devices > 1 else None
    last_rounds = round(stabilise * rounds) if stabilise < 1 else int(stabilise)
    setup = Setup(
        record, task, shards, test, rounds, cohort, eval_every, last_rounds, Layout(chunk, mesh)
    )
    return setup, hyper


def _check_examples(
    model: Model, loss: ExampleWise, shards: Shards, test: tuple[Any, Any] | None
) -> None:
    """Refuses a test set that is not finite, and class labels the model has no output for."""
    if test is not None:
        for name, values in zip(("x", "y"), test, strict=True):
            check_finite(np.asarray(values), f"{name} of the test set")
    if loss is not cross_entropy:
        return
    one = jax.eval_shape(lambda x: x[:1], shards.x)
    params = jax.eval_shape(model.init, random.key(0))
    num_classes = jax.eval_shape(model.apply, params, one).shape[-1]
    labels, start, count = (np.asarray(each) for each in (shards.y, shards.start, shards.count))
    for client in range(shards.num_clients):
        rows = slice(start[client], start[client] + count[client])
        check_labels(labels[rows], num_classes, f"y of client {client}")
    if test is not None:
        check_labels(np.asarray(test[1]), num_classes, "y of the test set")


def traced(hyper: Any, model: Model) -> Any:
    """Hyper-parameters as arrays in the dtype of the parameters they will meet."""
    params = jax.eval_shape(model.init, random.key(0))
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), hyper)
