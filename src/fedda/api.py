"""The library's front door: `run` and `run_grid`, which check everything a user gives."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda import algorithms
from fedda.core import check_algorithm, tree
from fedda.core.algorithm import Algorithm
from fedda.core.task import ExampleWise, Plan, Task
from fedda.data.federation import Shards, checked_pair, from_clients
from fedda.data.streaming import Feed
from fedda.errors import LARGEST, InputError, check_whole_number, is_finite, shown, unknown
from fedda.models import Model
from fedda.simulate import check_problem
from fedda.simulate.cohort import SAMPLERS, Layout, automatic_chunk
from fedda.simulate.devices import everywhere, mesh_for
from fedda.simulate.grid import Batch, Begun, OnEvaluation, train_together
from fedda.simulate.result import Result, counted_on, taken_up, why_untrained
from fedda.simulate.train import Row, Setup, example, train


class GridPoint(NamedTuple):
    hyper: dict[str, float]
    seed: int
    result: Result


def run(
    algorithm: str | Algorithm,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards | Feed,
    loss: ExampleWise,
    *,
    seed: int = 0,
    start: Result | None = None,
    on_evaluation: Callable[[Row], object] | None = None,
    **settings: Any,
) -> Result:
    """Trains `model` with a federated algorithm and returns its parameters and history.

    `algorithm` is a name (`fedda algorithms` lists them) or a record of your own; `clients` holds
    one pair of arrays `(x, y)` for each client. `settings` are the keywords of `fedda.api.prepare`
    (`rounds`, `cohort`, `batch`, `local_work`, `test`, `metrics`, ...) and the algorithm's own
    hyper-parameters and options. A row of the history has the `round`; `train_loss`, the mean over
    the rounds since the row before of the mean loss their cohorts saw; `loss` and the metrics on
    the test set; and, since the start, the bytes sent, the uploads that were not finite, and the
    rounds skipped. `on_evaluation` is told every row as it comes; where it returns True, the run
    ends there. `start` is the result of an earlier call, after whose last round this one goes on
    for `rounds` more: with the same seed and settings, both come to what one longer call comes to.

    Raises:
        InputError: An argument is wrong, or every round was skipped, because no upload was finite
            or no client had examples.
    """
    setup, hyper = prepare(algorithm, model, clients, loss, **settings)
    check_seed(seed)
    hp = traced(hyper, model)
    first, before, history = 0, None, []
    if start is not None:
        before, history = taken_up(setup, hp, start), list(start.history)
        first = history[-1]["round"]
        setup = setup._replace(rounds=first + setup.rounds)
    for evaluation in train(setup, hp, [seed], first, before):
        row = evaluation.row if start is None else counted_on(start.history[-1], evaluation.row)
        history.append(row)
        if on_evaluation is not None and algorithms.plain(on_evaluation(row)) is True:
            break
    else:
        if why := why_untrained(history[-1]):
            raise InputError(why)
    state, memory = evaluation.run.state, evaluation.run.memory
    # A table of all clients may be large: the host keeps it, so that the device has room again.
    return Result(state, history, jax.device_get(memory) if setup.host_rounds is None else memory)


def run_grid(
    algorithm: str | Algorithm,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards | Feed,
    loss: ExampleWise,
    *,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int] = (0,),
    together: int | None = None,
    **settings: Any,
) -> list[GridPoint]:
    """Trains every combination of the grid's values and seeds, many at once in one program.

    As many runs are trained at a time as fit in memory, or `together` at most.
    """
    if "seed" in settings or "seed" in grid:
        raise InputError("run_grid has no seed. Give it a list of them, as in seeds=[0, 1].")
    if "on_evaluation" in settings:
        raise InputError(
            "run_grid has no on_evaluation: its runs are trained together, and the rows of each "
            "are in its result.history. Use run to be told of one run's rows as they come."
        )
    if "start" in settings:
        raise InputError(
            "run_grid has no start: its runs begin at round 0. Use run to continue one."
        )
    if not isinstance(grid, Mapping):
        raise InputError(
            f'grid must be a dictionary, as in {{"client_lr": [0.1, 1]}}, got {grid!r}.'
        )
    tried = {name: _values_to_try(name, values) for name, values in grid.items()}
    seeds = _values_to_try("seeds", seeds)
    for seed in seeds:
        check_seed(seed)
    if together is not None:
        check_whole_number("together", together, least=1)
    points = [
        (dict(zip(tried, values, strict=True)), seed)
        for values in itertools.product(*tried.values())
        for seed in seeds
    ]
    if len(points) < 2:
        raise InputError(f"run_grid trains at least two runs, got {len(points)}. Use run for one.")
    setup, base = prepare(algorithm, model, clients, loss, **settings)
    check_on_device(setup)
    label = algorithm if isinstance(algorithm, str) else "this algorithm"
    options = algorithms.options(algorithm) if isinstance(algorithm, str) else ()
    check_traced(grid, (*KEYWORDS, *options))
    hypers = [
        algorithms.hyper(label, setup.algorithm, base._asdict() | values) for values, _ in points
    ]
    found: list[GridPoint] = []
    for batch in train_grid(setup, hypers, [seed for _, seed in points], together):
        results = map(Result, batch.states(), batch.histories)
        here = points[batch.members.start : batch.members.stop]
        found += [GridPoint(*point, result) for point, result in zip(here, results, strict=True)]
    return found


def _values_to_try(name: str, values: Any) -> list[Any]:
    listed = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not listed:
        raise InputError(f"{name} must be a list of values to try, got {values!r}.")
    return [algorithms.plain(value) for value in listed]


def train_grid(
    setup: Setup,
    hypers: Sequence[Any],
    seeds: Sequence[int],
    together: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    begun: Begun | None = None,
) -> Iterator[Batch]:
    """Trains a run for each `Hyper` and seed, in batches; see `train_together`."""
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *hypers)
    hp = traced(stacked, setup.task.model)
    return train_together(setup, hp, seeds, together, on_evaluation, begun)


def check_on_device(setup: Setup) -> None:
    """Refuses client memory on the host, of which there would have to be one for each run."""
    if setup.host_rounds is not None:
        raise InputError(
            "run_grid keeps client memory on the device, and fedda sweep too; raise memory_gb to "
            "let them."
        )


def check_traced(names: Iterable[str], fixed: Iterable[str]) -> None:
    """Refuses to try several values of what is fixed when a program is compiled."""
    for name in names:
        if name in fixed:
            raise InputError(
                f"{name} is fixed when a program is compiled, so runs with several values of it "
                f"cannot be trained together. Run the grid once for each value of {name}."
            )


def prepare(
    algorithm: str | Algorithm,
    model: Model,
    clients: Sequence[tuple[Any, Any]] | Shards | Feed,
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
    late_every: int = 0,
    chunk: int | None = None,
    devices: int | None = 1,
    memory_gb: float = 4.0,
    sampling: str = "uniform",
    **chosen: Any,
) -> tuple[Setup, Any]:
    """Checks everything a user gives, and returns what `train` needs.

    Every round, `cohort` clients do `local_work` mini-batch steps (or epochs) on batches of `batch`
    examples. `stabilise` is the number of rounds at the end (or, below 1, their share) in which a
    client takes one step with the gradient of all its data. Evaluations are `eval_every` rounds
    apart; in the last 100 rounds (or half of them, if there are fewer than 200), which published
    results are means over, there is one every `late_every` rounds too, unless that is 0. If what
    all clients keep would take more than `memory_gb` on the device, it is kept on the host, for
    visited clients only.
    `sampling` names how cohorts are drawn. A cohort is spread over `devices`: None stands for as
    many as pay off. `chosen` holds hyper-parameters and options of the algorithm.
    """
    if not isinstance(model, Model):
        raise InputError(
            f"model must be a fedda.Model(init, apply), got {type(model).__name__}. "
            "fedda.models.from_nnx and from_equinox make one from a module."
        )
    if isinstance(algorithm, Algorithm):
        check_algorithm.check_parts(algorithm)
    record, hyper = algorithms.configure(algorithm, chosen, KEYWORDS)
    shards = clients if isinstance(clients, (Shards, Feed)) else from_clients(clients)
    test = None if test is None else checked_pair(test, "the test set")
    for name, value in (
        ("rounds", rounds),
        ("cohort", cohort),
        ("batch", batch),
        ("local_work", local_work),
        ("eval_every", eval_every),
        ("devices", 1 if devices is None else devices),
        ("chunk", cohort if chunk is None else chunk),
    ):
        check_whole_number(name, value, least=1)
    check_whole_number("late_every", late_every, least=0)
    if cohort > shards.num_clients:
        raise InputError(
            f"cohort must be at most the number of clients, which is {shards.num_clients}, got "
            f"{cohort}. Lower cohort or add clients."
        )
    for name, text, allowed in (
        ("local_unit", local_unit, ("steps", "epochs")),
        ("reduction", reduction, ("mean", "sum")),
        ("sampling", sampling, tuple(SAMPLERS)),
    ):
        if text not in allowed:
            raise unknown(f"value of {name}", text, allowed)
    visited = local_work * (batch if local_unit == "steps" else shards.max_count)
    if visited + batch > LARGEST:  # the last batch may be padded
        raise InputError(
            f"a client would visit {visited:,} examples in a round, expected fewer than 2**31. "
            "Lower local_work or batch."
        )
    full = last_rounds(stabilise, rounds)
    if isinstance(shards, Feed) and any(phase.everyone for phase in record.phases):
        raise InputError(
            "this algorithm asks every client in every round, so the data of all must be on the "
            "device, but this federation is brought to it cohort by cohort."
        )
    check_problem.check_measures(loss, metrics, test)
    check_problem.check_problem(model, loss, metrics, shards, test)
    mesh = mesh_for(devices, cohort, tree.size(model.shapes()))
    test = everywhere(test, mesh)
    task = Task(model, loss, Plan(batch, local_work, local_unit), tuple(metrics), reduction)
    if isinstance(algorithm, Algorithm):
        check_algorithm.check_work(record, traced(hyper, model), task, example(shards))
    host_rounds = _host_rounds(record, hyper, model, shards, cohort, memory_gb)
    if chunk is None:
        size = tree.nbytes(model.shapes())
        chunk = automatic_chunk(size, task.plan, np.asarray(shards.count), cohort, mesh)
    setup = Setup(
        record,
        task,
        shards,
        test,
        rounds,
        cohort,
        eval_every,
        full,
        late_every,
        Layout(chunk, mesh),
        SAMPLERS[sampling],
        host_rounds,
    )
    return setup, hyper


def last_rounds(stabilise: float, rounds: int) -> int:
    """How many rounds at the end take one full-batch step."""
    number = isinstance(stabilise, Real) and not isinstance(stabilise, bool)
    if (
        not number
        or not is_finite(stabilise)
        or not 0 <= stabilise <= rounds
        or (stabilise >= 1 and stabilise != int(stabilise))
    ):
        raise InputError(
            f"stabilise must be a share of the rounds below 1 or a whole number of rounds up to "
            f"{rounds}, got {shown(stabilise)}."
        )
    return round(stabilise * rounds) if stabilise < 1 else int(stabilise)


def _host_rounds(
    algorithm: Algorithm,
    hyper: Any,
    model: Model,
    shards: Shards | Feed,
    cohort: int,
    memory_gb: float,
) -> int | None:
    """For how many rounds the budget holds the memories of new cohorts; None: of everyone."""
    number = isinstance(memory_gb, Real) and not isinstance(memory_gb, bool)
    if not number or not is_finite(memory_gb) or not memory_gb > 0:
        raise InputError(f"memory_gb must be a positive finite number, got {shown(memory_gb)}.")
    one = tree.nbytes(jax.eval_shape(algorithm.memory, traced(hyper, model), model.shapes()))
    if one * shards.num_clients <= memory_gb * 1e9:
        return None
    if any(phase.everyone for phase in algorithm.phases):
        raise InputError(
            "this algorithm asks every client in every round, so all memories must fit on the "
            f"device: set memory_gb to at least {one * shards.num_clients / 1e9:.3g}."
        )
    return max(1, int(memory_gb * 1e9 / (one * cohort)))


KEYWORDS = tuple(
    name
    for function in (prepare, run)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def check_seed(seed: int) -> None:
    """Refuses what is no seed, or more than a random key can tell apart."""
    check_whole_number("seed", seed, least=0)


def traced(hyper: Any, model: Model) -> Any:
    """Hyper-parameters as arrays in the dtype of the parameters they will meet."""
    dtype = jnp.result_type(*jax.tree.leaves(model.shapes()))
    for name, domain in algorithms.domains(type(hyper)).items():
        for value in np.ravel(getattr(hyper, name)).tolist():
            used = float(np.asarray(value, dtype))
            if not domain.allows(used):
                raise InputError(
                    f"{name} must be {domain.words}, got {value!r}, which is {used:g} in {dtype}, "
                    "the type of the parameters. Keep those in float32, or choose another."
                )
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), hyper)
