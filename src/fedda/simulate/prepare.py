"""Check the arguments of a run, and prepare what is trained."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

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
from fedda.simulate.check_problem import check_problem
from fedda.simulate.cohort import SAMPLERS, Layout, automatic_chunk, with_widths
from fedda.simulate.devices import everywhere, mesh_for
from fedda.simulate.evaluation import metric_settings
from fedda.simulate.result import Result
from fedda.simulate.settings import (
    KEYWORDS,
    Clients,
    Training,
    checked_plan,
    host_rounds,
    test_of_clients,
)
from fedda.simulate.train import Setup, example
from fedda.storage.checkpoint import digest


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
    return checked_setup(given, settings, ())


def checked_setup(
    given: Training, hyper: Mapping[str, Any], other_keywords: Iterable[str]
) -> tuple[Setup, Any]:
    """Check settings and hyper-parameters, as `prepare` does.

    Args:
        given: The settings, with the model, the loss and the metrics as functions.
        hyper: The algorithm's own settings.
        other_keywords: Names that the error for an unknown setting may suggest, too.
    """
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
    """Return the number of rounds at the end that take one full-batch step."""
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
    """Raise an `InputError` unless a seed is a whole number that a random key can hold."""
    check_whole_number("seed", seed, least=0)


def traced(hyper: Any, model: Model) -> Any:
    """Return hyper-parameters as arrays of the dtype of the model's parameters."""
    dtype = jnp.result_type(*jax.tree.leaves(model.shapes()))
    for name, domain in domains(type(hyper)).items():
        for value in np.ravel(getattr(hyper, name)).tolist():
            used = float(np.asarray(value, dtype))
            if not domain.allows(used):
                raise InputError(
                    f"{name} must be {domain.description}, got {value!r}, which is {used:g} in "
                    f"{dtype}, the type of the parameters. Keep the parameters in float32, or "
                    f"change {name}."
                )
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), hyper)


def described(
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


def digests(setup: Setup, start: Result | None) -> dict[str, Any]:
    """Return the checksums of the data that must be the same for a run to be resumed."""
    shards, test = setup.shards, setup.test
    begun = None if start is None else (start.state, start.history, start.memory)
    return {
        "data": digest(shards if isinstance(shards, Shards) else np.asarray(shards.count)),
        "test": None if test is None else digest(test),
        "start": None if begun is None else digest(begun),
    }
