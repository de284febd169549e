"""The library's front door: `run` and `run_grid`.

It also has what programs need that train step by step, such as a server.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax

from fedda.core.algorithm import Algorithm
from fedda.core.losses import as_measure, as_measures
from fedda.core.task import ExampleWise
from fedda.data.tabular import Federation
from fedda.errors import InputError, check_whole_number
from fedda.models import Model, as_model
from fedda.simulate import hosts, warnings
from fedda.simulate.devices import compile_cache
from fedda.simulate.evaluation import evaluated_clients
from fedda.simulate.grid import Part, grid_points, train_grid, values_to_try
from fedda.simulate.prepare import (
    check_seed,
    checked_setup,
    described,
    digests,
    last_rounds,
    prepare,
    traced,
)
from fedda.simulate.progress import GridProgress, Progress, Update, bars, grid_bar, run_bar
from fedda.simulate.result import GridPoint, Result
from fedda.simulate.run import ADVICE, train_run, why_untrained
from fedda.simulate.settings import CHANGEABLE, Clients, Test, Training
from fedda.simulate.train import Row
from fedda.storage.directory import RunDirectory
from fedda.storage.extend import extend
from fedda.storage.files import json_numbers
from fedda.storage.interrupts import Interrupted, stoppable

__all__ = [
    "CHANGEABLE",
    "check_seed",
    "grid_points",
    "last_rounds",
    "prepare",
    "run",
    "run_grid",
    "traced",
    "train_grid",
]

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
        test: A pair of arrays `(x, y)` to evaluate on; or a list of one pair for each client: the
            run is evaluated on all of them together. By default, the test examples of a
            federation.
        metrics: Functions of `(outputs, y)`, or names such as `"accuracy"`, to compute on the test
            set and report by their names.
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
        directory: Where to keep the settings, the metrics and checkpoints. If `run` is called again
            with the same directory, an interrupted run continues, and ends with exactly the
            numbers of an uninterrupted run; a finished run is read back, or extended if `rounds`
            is larger. The other settings, the data and the shapes of the model must be the same;
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
        `round`; `train_loss`, the mean training loss of the cohorts, averaged over the rounds
        since the previous row; `loss` and the metrics on the test set; and the totals since the
        first round: bytes sent, uploads that were not finite and rounds that were skipped.

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
    setup, values = checked_setup(training, hyper, OF_RUN)
    check_seed(seed)
    check_whole_number("checkpoint_every", checkpoint_every, least=1)
    if not isinstance(start, Result | None):
        raise InputError(
            f"start must be the result of an earlier run, got {type(start).__name__}. {ADVICE}"
        )
    path = Path(directory) if directory is not None and hosts.is_first() else None
    settings = described(training, setup, values, hyper) | {"seed": int(seed)}
    prepared = clients.preparation if isinstance(clients, Federation) else None
    identity: dict[str, Any] = {"checkpoint_every": int(checkpoint_every)}
    if path is not None:
        identity |= settings | digests(setup, start)
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
    """Show the progress of a call. A short call writes nothing to a log."""
    with bars(quiet=not progress or not hosts.is_first(), every=10.0, silent=10.0) as add:
        yield add(algorithm if isinstance(algorithm, str) else "your own")


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
        algorithm: As in `run`.
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
    tried = {name: values_to_try(name, values) for name, values in grid.items()}
    seeds = values_to_try("seeds", seeds)
    if together is not None:
        check_whole_number("together", together, least=1)
    setup, base = checked_setup(training, hyper, OF_GRID)
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
                    settings = described(training, setup, values, hyper) | {"seed": seed}
                    # Some runs of a grid are usually bad, so their warnings are not logged.
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
