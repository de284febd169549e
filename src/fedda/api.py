"""The library's front door: `run` and `run_grid`, which check everything a user gives."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda import algorithms
from fedda.algorithms.registry import domains, plain
from fedda.core import check_structure, tree
from fedda.core.algorithm import Algorithm
from fedda.core.losses import as_measure, as_measures
from fedda.core.task import ExampleWise, Task
from fedda.data.federation import Shards, checked_pair, from_clients, num_rows
from fedda.data.streaming import Feed
from fedda.data.tabular import Federation
from fedda.errors import InputError, check_whole_number, is_finite, shown
from fedda.models import Model, as_model, recipe_of
from fedda.simulate import hosts, warnings
from fedda.simulate.check_problem import check_problem
from fedda.simulate.cohort import SAMPLERS, Layout, automatic_chunk, with_widths
from fedda.simulate.devices import compile_cache, everywhere, mesh_for
from fedda.simulate.evaluation import evaluated_clients, metric_settings
from fedda.simulate.grid import Batch, Begun, OnEvaluation, Part, train_together
from fedda.simulate.progress import GridProgress, Progress, Update, bars, grid_bar, run_bar
from fedda.simulate.result import Result
from fedda.simulate.run import ADVICE, train_run, why_untrained
from fedda.simulate.settings import (
    KEYWORDS,
    Clients,
    Test,
    Training,
    checked_plan,
    host_rounds,
    test_of_clients,
)
from fedda.simulate.train import Row, Setup, example
from fedda.storage.checkpoint import digest
from fedda.storage.directory import RunDirectory
from fedda.storage.extend import extend
from fedda.storage.files import json_numbers
from fedda.storage.interrupts import Interrupted, stoppable

log = logging.getLogger("fedda")


# The other keywords, which a person may have misspelt.
OF_RUN = (
    "seed",
    "per_client",
    "directory",
    "checkpoint_every",
    "start",
    "on_evaluation",
    "progress",
)
OF_GRID = ("grid", "seeds", "together", "progress")

CHANGEABLE = ("devices", "checkpoint_every")  # settings that a resumed run may change


class GridPoint(NamedTuple):
    """One run of a grid: its hyper-parameters, its seed and its result."""

    hyper: dict[str, float]
    seed: int
    result: Result


@stoppable
@compile_cache()
def run(
    algorithm: str | Algorithm,
    model: Model | object,
    clients: Clients,
    loss: ExampleWise | str,
    *,
    test: Test | None = None,
    metrics: Sequence[ExampleWise | str] = (),
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
    seed: int = 0,
    per_client: bool = False,
    directory: str | PathLike[str] | None = None,
    checkpoint_every: int = 5,
    start: Result | None = None,
    on_evaluation: Callable[[Row], object] | None = None,
    progress: bool = True,
    **hyper: float | str,
) -> Result:
    """Train a model with a federated algorithm.

    In every round, `cohort` clients each take `local_work` steps on mini-batches of their own
    examples, and the server merges what they upload.

    Args:
        algorithm: The name of an algorithm (`fedda algorithms` lists them), or your own record.
        model: A `fedda.Model`, or a module of PyTorch, Flax NNX or Equinox, whose weights the run
            starts from.
        clients: A federation (`fedda.federation` makes one), or one pair of arrays `(x, y)` for
            each client, of any number of examples: a list, or a dictionary by client name.
        loss: A function of `(outputs, y)` that gives one number for each example; or the name of
            one in `fedda.losses`, such as `"cross_entropy"`; or a loss module of PyTorch.
        test: A pair of arrays `(x, y)` to evaluate on; or a list of one pair for each client, on
            all of which together the run is evaluated. By default, the test examples of a
            federation.
        metrics: Functions of `(outputs, y)`, or names such as `"accuracy"`, to report on the test
            set by their names.
        rounds: The number of rounds.
        cohort: The number of clients in a round.
        batch: The number of examples in a mini-batch.
        local_work: The number of steps, or epochs, that a client takes in a round.
        local_unit: What `local_work` counts: `"steps"` or `"epochs"`.
        reduction: Whether the loss of a mini-batch is the `"mean"` or the `"sum"` over its
            examples. With `"sum"`, a full-batch step counts at most `batch` examples.
        stabilise: The number of rounds at the end (or, below 1, their share) in which a client
            takes one step with the gradient of all its examples.
        eval_every: The number of rounds between evaluations.
        late_every: As `eval_every`, in the last 100 rounds (or half of them, if there are fewer
            than 200), which published results average. 0 adds no evaluations.
        chunk: The number of clients to compute together. None chooses what suits the device.
        devices: The number of devices that share a cohort. None takes as many as pay off.
        memory_gb: The device memory for what all clients keep between rounds. If they need more,
            it is kept on the host, for visited clients only.
        sampling: How cohorts are drawn: `"uniform"`, or as in published experiments `"fedopt"` or
            `"tff21"`.
        seed: The seed of everything random.
        per_client: Whether to evaluate every client after the last round, for `Result.per_client`:
            on its own test examples if `test` has some for each client, else on the examples that
            it is trained with.
        directory: Where to keep the settings, the metrics and checkpoints. Called again with the
            same directory, an interrupted run continues, and ends with exactly the numbers of one
            that was not interrupted; a finished run is read back; with more `rounds`, it is
            extended. The other settings, the data and the shapes of the model must be the same;
            a change inside a function is not noticed. None keeps everything in memory.
        checkpoint_every: The number of evaluations between checkpoints in `directory`.
        start: The result of an earlier call, to continue for `rounds` more. Running 100 rounds
            twice gives the same result as running 200 rounds once.
        on_evaluation: Called with each new row of the history. Return True to end the run.
        progress: Whether to show progress: a bar in a terminal, a line in a notebook, elsewhere a
            line on standard error every ten seconds or more.
        **hyper: Hyper-parameters and options of the algorithm, such as `client_lr`.

    Returns:
        The server's state with the parameters, and the history. A row of the history has the
        `round`; `train_loss`, the mean over the rounds since the row before of the mean loss that
        their cohorts saw; `loss` and the metrics on the test set; and, since the first round, the
        bytes sent, the uploads that were not finite and the rounds that were skipped.

    Raises:
        InputError: An argument is wrong; or `directory` is in use, damaged or holds another run;
            or every round was skipped, because no upload was finite or no client had examples.
        Interrupted: Ctrl-C was pressed. The run goes on to its next evaluation, or to the end of a
            compilation, and writes a checkpoint if it has a directory. The error has the `result`
            so far. A second Ctrl-C stops the run as soon as JAX returns, without a result.

    Example:
        >>> import fedda, jax.numpy as jnp, numpy as np
        >>> clients = [(np.ones((n, 2)), np.full((n, 1), 3.0)) for n in (1, 5, 20)]
        >>> model = fedda.Model(
        ...     init=lambda key: {"w": jnp.zeros((2, 1))}, apply=lambda params, x: x @ params["w"]
        ... )
        >>> result = fedda.run("fedavg", model, clients, fedda.losses.squared_error, cohort=2)
        >>> result.history[-1]["round"]
        100
        >>> print(f"{model.apply(result.params, np.ones((1, 2))).item():.3f}")
        3.000
    """
    model, loss, metrics = as_model(model), as_measure(loss), as_measures(metrics)
    given = locals()  # all arguments, by name
    training = Training(**{name: given[name] for name in Training._fields})
    setup, values = _prepare(training, hyper, OF_RUN)
    check_seed(seed)
    check_whole_number("checkpoint_every", checkpoint_every, least=1)
    if not isinstance(start, Result | None):
        raise InputError(
            f"start must be the result of an earlier run, got {type(start).__name__}. {ADVICE}"
        )
    path = Path(directory) if directory is not None and hosts.is_first() else None
    settings = _settings(training, setup, values, hyper) | {"seed": int(seed)}
    prepared = clients.preparation if isinstance(clients, Federation) else None
    identity: dict[str, Any] = {"checkpoint_every": int(checkpoint_every)}
    if path is not None:
        identity |= settings | _digests(setup, start)
        identity |= {"preparation": None if prepared is None else prepared.to_json()}
    hp = traced(values, model)

    def opened() -> RunDirectory:
        if path is not None:
            extend(path, identity, CHANGEABLE)
        return RunDirectory(path, identity, CHANGEABLE)

    def last_round() -> int:
        return rounds + (0 if start is None else int(start.history[-1]["round"]))

    with hosts.agreed(opened) as kept, _bar(algorithm, progress) as bar:
        tell = run_bar(bar)
        measures = (
            []
            if setup.test is None
            else [metric.__name__ for metric in setup.task.metrics] or ["loss"]
        )

        def report(row: Row) -> object:
            tell(Progress(row, last_round(), measures[0] if measures else None))
            return None if on_evaluation is None else on_evaluation(row)

        result = train_run(
            setup,
            hp,
            seed,
            kept,
            settings=settings,
            preparation=prepared,
            start=start,
            checkpoint_every=checkpoint_every,
            on_compile=lambda: tell(None),
            on_evaluation=report,
            on_warning=_warn if hosts.is_first() else lambda text: None,
        )
        if per_client:
            evaluated = evaluated_clients(setup, result.params)
            result = dataclasses.replace(result, per_client=evaluated)
        last = result.history[-1]
        if path is not None:
            found = {"final": json_numbers(last), "warnings": list(result.warnings)}
            clients_too = (
                {} if result.per_client is None else {"per_client": result.per_client.to_json()}
            )
            kept.finish(lambda: identity | found | clients_too)
    if kept.resumed_at is not None:
        log.info("%s: continued from round %d", path, kept.resumed_at)
    for note in kept.notes:
        log.warning("%s: %s", path, note)
    if last["round"] == last_round() and (why := why_untrained(last)):
        raise InputError(why)
    if setup.host_rounds is not None:
        return result
    # A table of all clients may be large: the host keeps it, so that the device has room again.
    return dataclasses.replace(result, memory=jax.device_get(result.memory))


def _warn(text: str) -> None:
    log.warning("fedda: %s", text)


@contextmanager
def _bar(algorithm: str | Algorithm, progress: bool) -> Iterator[Update]:
    """Show the progress of a call, which says nothing in a log if it is short."""
    with bars(quiet=not progress or not hosts.is_first(), every=10.0, silent=10.0) as add:
        yield add(algorithm if isinstance(algorithm, str) else "your own")


def _settings(
    training: Training, setup: Setup, values: Any, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a run as plain values, with all defaults."""
    algorithm, task = training.algorithm, setup.task
    known = algorithms.options(algorithm) if isinstance(algorithm, str) else {}
    given = {name: plain(value) for name, value in training._asdict().items()}
    if isinstance(training.clients, Federation) and training.clients.classes:
        given["classes"] = list(map(plain, training.clients.classes))
    return given | {
        "algorithm": algorithm if isinstance(algorithm, str) else "your own",
        **{name: chosen.get(name, choices[0]) for name, choices in known.items()},
        **values._asdict(),
        "model": [" ".join(named) for named in tree.types("", task.model.shapes()).items()],
        "built_in_model": recipe_of(task.model),
        "clients": setup.shards.num_clients,
        "loss": getattr(task.loss, "__name__", "loss"),
        "test": None if setup.test is None else num_rows(setup.test[1]),
        **metric_settings(task.metrics),
    }


def _digests(setup: Setup, start: Result | None) -> dict[str, Any]:
    """Return the checksums of the data that must be the same for a run to be resumed."""
    shards, test = setup.shards, setup.test
    begun = None if start is None else (start.state, start.history, start.memory)
    return {
        "data": digest(shards if isinstance(shards, Shards) else np.asarray(shards.count)),
        "test": None if test is None else digest(test),
        "start": None if begun is None else digest(begun),
    }


@stoppable
@compile_cache()
def run_grid(
    algorithm: str | Algorithm,
    model: Model | object,
    clients: Clients,
    loss: ExampleWise | str,
    *,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int] = (0,),
    together: int | None = None,
    test: Test | None = None,
    metrics: Sequence[ExampleWise | str] = (),
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
    progress: bool = True,
    **hyper: float | str,
) -> list[GridPoint]:
    """Train every combination of hyper-parameters and seeds, many at once in one program.

    Args:
        algorithm: As in `run`, and so are all arguments that are not listed here.
        model: As in `run`.
        clients: As in `run`.
        loss: As in `run`.
        grid: The values to try of each hyper-parameter, by name.
        seeds: The seeds to train every combination with.
        together: The number of runs to train at a time. None takes as many as fit in memory.
        test: As in `run`.
        metrics: As in `run`.
        rounds: As in `run`.
        cohort: As in `run`.
        batch: As in `run`.
        local_work: As in `run`.
        local_unit: As in `run`.
        reduction: As in `run`.
        stabilise: As in `run`.
        eval_every: As in `run`.
        late_every: As in `run`.
        chunk: As in `run`.
        devices: As in `run`.
        memory_gb: As in `run`.
        sampling: As in `run`.
        progress: As in `run`.
        **hyper: The hyper-parameters and options that all runs share.

    Returns:
        One point for each combination and seed, in the order of the grid.

    Raises:
        InputError: An argument is wrong.
        Interrupted: Ctrl-C was pressed, as in `run`. Its `result` is a list of the points that had
            finished.

    Example:
        >>> import fedda, jax.numpy as jnp, numpy as np
        >>> clients = [(np.ones((n, 2)), np.full((n, 1), 3.0)) for n in (1, 5, 20)]
        >>> model = fedda.Model(
        ...     init=lambda key: {"w": jnp.zeros((2, 1))}, apply=lambda params, x: x @ params["w"]
        ... )
        >>> points = fedda.run_grid(
        ...     "fedavg",
        ...     model,
        ...     clients,
        ...     fedda.losses.squared_error,
        ...     grid={"client_lr": [0.01, 0.1]},
        ...     cohort=2,
        ... )
        >>> min(points, key=lambda point: point.result.history[-1]["train_loss"]).hyper
        {'client_lr': 0.1}
    """
    model, loss, metrics = as_model(model), as_measure(loss), as_measures(metrics)
    given = locals()  # all arguments, by name
    training = Training(**{name: given[name] for name in Training._fields})
    if not isinstance(grid, Mapping):
        raise InputError(
            f'grid must be a dictionary, as in {{"client_lr": [0.1, 1]}}, got {grid!r}.'
        )
    tried = {name: _values_to_try(name, values) for name, values in grid.items()}
    seeds = _values_to_try("seeds", seeds)
    if together is not None:
        check_whole_number("together", together, least=1)
    setup, base = _prepare(training, hyper, OF_GRID)
    label = algorithm if isinstance(algorithm, str) else "this algorithm"
    points = grid_points(label, setup.algorithm, base._asdict(), tried, seeds)
    if len(points) < 2:
        raise InputError(f"run_grid trains at least two runs, got {len(points)}. Use run for one.")
    about_data = warnings.about_data(setup.shards)
    for warning in about_data:
        _warn(warning)
    found: list[GridPoint] = []
    hypers, every_seed = zip(*points, strict=True)
    with _bar(algorithm, progress) as bar:
        tell = grid_bar(bar)
        tell(None)

        def report(members: range, part: Part) -> None:
            counts = (len(points), len(members), part.round, rounds)
            tell(GridProgress(members.start, *counts))

        try:
            for trained in train_grid(setup, hypers, every_seed, together, report):
                for member, state, history in zip(
                    trained.members, trained.states(), trained.histories, strict=True
                ):
                    values, seed = points[member]
                    chosen = {name: getattr(values, name) for name in grid}
                    settings = _settings(training, setup, values, hyper) | {"seed": seed}
                    # Of the runs of a grid, some are bad: their warnings are not logged.
                    about_run = warnings.about_run(setup, history[-1])
                    result = Result(
                        state=state,
                        history=history,
                        settings=settings,
                        model=model,
                        warnings=[*about_data, *about_run],
                    )
                    found.append(GridPoint(chosen, seed, result))
        except Interrupted as stop:
            stop.result = found
            raise
    return found


def _values_to_try(name: str, values: Any) -> list[Any]:
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


def train_grid(
    setup: Setup,
    hypers: Sequence[Any],
    seeds: Sequence[int],
    together: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    begun: Begun | None = None,
) -> Iterator[Batch]:
    """Train a run for each `Hyper` and seed, in batches; see `train_together`.

    Raises:
        InputError: Client memory is on the host, where there would have to be one for each run.
    """
    if setup.host_rounds is not None:
        raise InputError(
            "run_grid keeps client memory on the device, and fedda sweep too; raise memory_gb to "
            "let them."
        )
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *hypers)
    hp = traced(stacked, setup.task.model)
    return train_together(setup, hp, seeds, together, on_evaluation, begun)


def prepare(
    algorithm: str | Algorithm,
    model: Model | object,
    clients: Clients,
    loss: ExampleWise | str,
    **settings: Any,
) -> tuple[Setup, Any]:
    """Check everything that a run is made of.

    Args:
        algorithm: As in `run`.
        model: As in `run`.
        clients: As in `run`.
        loss: As in `run`.
        **settings: The other fields of `Training`, and the algorithm's own settings.

    Returns:
        What stays the same during the run, and the hyper-parameters; see `traced`.
    """
    training = {name: settings.pop(name) for name in Training._fields if name in settings}
    training["metrics"] = as_measures(training.get("metrics", ()))
    given = Training(algorithm, as_model(model), clients, as_measure(loss), **training)
    return _prepare(given, settings, ())


def _prepare(
    given: Training, hyper: Mapping[str, Any], other_keywords: Iterable[str]
) -> tuple[Setup, Any]:
    model, loss, cohort = given.model, given.loss, given.cohort
    if isinstance(given.algorithm, Algorithm):
        check_structure.check_parts(given.algorithm)
    record, values = algorithms.configure(given.algorithm, hyper, (*KEYWORDS, *other_keywords))
    clients, test = given.clients, given.test
    if isinstance(clients, Federation):
        if test is None and any(len(y) for _, y in clients.test):
            test = clients.test
        clients = dict(zip(clients.names, clients.clients, strict=True))
    shards = clients if isinstance(clients, (Shards, Feed)) else from_clients(clients)
    of_clients = test_of_clients(test, shards.num_clients)
    if of_clients is not None:
        test = (of_clients.x, of_clients.y)
    test = None if test is None else checked_pair(test, "the test set")
    plan = checked_plan(given, shards)
    full_rounds = last_rounds(given.stabilise, given.rounds)
    check_problem(model, loss, given.metrics, shards, test)
    mesh = mesh_for(given.devices, cohort, tree.size(model.shapes()))
    task = Task(model, loss, plan, tuple(given.metrics), given.reduction)
    hp = traced(values, model)
    kept = tree.nbytes(jax.eval_shape(record.memory, hp, model.shapes()))
    if isinstance(given.algorithm, Algorithm):
        check_structure.check_work(record, hp, task, example(shards))
    chunk = given.chunk
    if chunk is None:
        size = tree.nbytes(model.shapes())
        chunk = automatic_chunk(size, plan, np.asarray(shards.count), cohort, mesh)
    setup = Setup(
        algorithm=record,
        task=task,
        shards=shards,
        test=everywhere(test, mesh),
        rounds=given.rounds,
        cohort=cohort,
        eval_every=given.eval_every,
        stabilise=full_rounds,
        late_every=given.late_every,
        layout=with_widths(Layout(chunk, mesh), plan, np.asarray(shards.count), cohort),
        sample=SAMPLERS[given.sampling],
        host_rounds=host_rounds(given, kept, shards.num_clients),
        test_clients=of_clients,
        names=list(map(str, clients)) if isinstance(clients, Mapping) else (),
    )
    return setup, values


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


def check_seed(seed: int) -> None:
    """Refuses what is no seed, or more than a random key can tell apart."""
    check_whole_number("seed", seed, least=0)


def traced(hyper: Any, model: Model) -> Any:
    """Hyper-parameters as arrays in the dtype of the parameters they will meet."""
    dtype = jnp.result_type(*jax.tree.leaves(model.shapes()))
    for name, domain in domains(type(hyper)).items():
        for value in np.ravel(getattr(hyper, name)).tolist():
            used = float(np.asarray(value, dtype))
            if not domain.allows(used):
                raise InputError(
                    f"{name} must be {domain.description}, got {value!r}, which is {used:g} in "
                    f"{dtype}, the type of the parameters. Keep those in float32, or change it."
                )
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), hyper)
