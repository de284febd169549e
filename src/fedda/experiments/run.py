"""A run of the command: train a configuration of a task and an algorithm in a run directory.

If several processes train one run, only the first writes to the directory.
"""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedda import api, tasks
from fedda.core import tree
from fedda.reports.runs import SUMMARY
from fedda.simulate import devices, grid, hosts
from fedda.simulate import train as simulate
from fedda.simulate.evaluation import evaluate_blocks, evaluated_clients, metric_settings
from fedda.simulate.progress import Progress
from fedda.simulate.result import Result
from fedda.simulate.run import train_run
from fedda.simulate.settings import KEYWORDS
from fedda.simulate.train import Row
from fedda.storage.directory import RunDirectory
from fedda.storage.extend import extend
from fedda.storage.files import check_empty, json_numbers
from fedda.storage.snapshot import check_same, read_settings
from fedda.tasks import config as configs
from fedda.tasks.config import Config

OnProgress = Callable[[Progress | None], object]  # None: programs are compiled


class Outcome(NamedTuple):
    """A run that has finished.

    Attributes:
        result: The state and the history.
        summary: The content of `summary.json`.
        notes: Whether the run was resumed, and why checkpoints could not be written, if any failed.
    """

    result: Result
    summary: dict[str, Any]
    notes: list[str]


def run(config: Config, directory: Path, on_progress: OnProgress | None = None) -> Outcome:
    """Train one configuration in a new directory."""

    def prepared() -> Prepared:
        if hosts.is_first():
            resume = f"continue that run with fedda run --resume {directory}"
            check_empty(directory, f"Give another --out, or {resume}")
        return prepare(config)

    return train(config, hosts.agreed(prepared), directory, on_progress)


def resume(
    directory: Path, given: dict[str, Any] | None = None, on_progress: OnProgress | None = None
) -> Outcome:
    """Continue the run of a directory from its newest checkpoint.

    Args:
        directory: The directory.
        given: Settings. They must be those of the run, except for the number of devices, the
            interval of checkpoints, and the number of rounds, which may grow.
        on_progress: Called with None before programs are compiled, then after every evaluation.
    """

    def settings() -> bytes:
        written, new = read_settings(directory), configs.with_file(given or {})
        changeable = (*api.CHANGEABLE, "rounds")
        configs.check_names(new | written)
        check_same(directory, written, written | new, changeable)
        changed = {name: value for name, value in new.items() if name in changeable}
        return configs.dump(configs.resolve(written | changed)).encode()

    config = configs.resolve(tomllib.loads(hosts.from_first(settings).decode()))
    return train(config, hosts.agreed(lambda: prepare(config)), directory, on_progress)


class Prepared(NamedTuple):
    """The problem, the program and the hyper-parameters of a configuration."""

    problem: tasks.Problem
    setup: simulate.Setup
    hp: Any


def prepare(config: Config) -> Prepared:
    """Load and check the problem and the algorithm of a configuration."""
    problem = tasks.load(config)
    shared = {name: getattr(config, name) for name in KEYWORDS if name in configs.FIELDS}
    setup, hyper = api.prepare(
        config.method,
        problem.model,
        problem.shards,
        problem.loss,
        test=problem.test,
        metrics=problem.metrics,
        reduction=problem.reduction,
        **shared | {"chunk": config.chunk or None, "devices": config.devices or None},
        **config.chosen,
    )
    api.check_seed(config.seed)
    if config.per_client and problem.test_clients is not None:
        setup = setup._replace(test_clients=problem.test_clients())
    setup = setup._replace(names=problem.names)
    return Prepared(problem, setup, api.traced(hyper, problem.model))


def compile_ahead(config: Config) -> None:
    """Compile the programs of a configuration, for a `train` later in this process."""
    _, setup, hp = prepare(config)
    if setup.host_rounds is None:
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], hp)
        grid.compile_batch(setup, stacked, [config.seed], size=1)


def train(
    config: Config, prepared: Prepared, directory: Path, on_progress: OnProgress | None = None
) -> Outcome:
    """Train a configuration, in a new directory or in the directory of the same run."""
    problem, setup, hp = prepared
    metric = problem.metrics[0].__name__

    def show(row: Row) -> None:
        if on_progress is not None:
            on_progress(Progress(json_numbers(row), config.rounds, metric))

    def opened() -> RunDirectory:
        path = directory if hosts.is_first() else None
        if path is not None:
            extend(path, config.flat(), api.CHANGEABLE)
        return RunDirectory(path, config.flat(), api.CHANGEABLE)

    with hosts.agreed(opened) as kept:
        result = train_run(
            setup,
            hp,
            config.seed,
            kept,
            settings=config.flat() | metric_settings(problem.metrics),
            preparation=problem.preparation,
            checkpoint_every=config.checkpoint_every,
            on_compile=lambda: on_progress is not None and on_progress(None),
            on_evaluation=show,
        )
        if config.per_client:
            clients = evaluated_clients(setup, result.params)
            result = dataclasses.replace(result, per_client=clients)

        def summary() -> dict[str, Any]:
            if not hosts.is_first():
                return {}
            return kept.finish(lambda: _summary(config, prepared, result), SUMMARY)

        found = hosts.agreed(summary)
    if kept.resumed_at is not None:
        kept.notes.append(f"continued from round {kept.resumed_at}")
    kept.notes.extend(result.warnings)
    return Outcome(result, found, kept.notes)


def _summary(config: Config, prepared: Prepared, result: Result) -> dict[str, Any]:
    problem, setup, _ = prepared
    last, mesh = result.history[-1], setup.layout.mesh
    final = json_numbers({name: last[name] for name in ("train_loss", *setup.task.measures)})
    summary = {
        "algorithm": config.algorithm,
        "task": config.task,
        "seed": config.seed,
        "metric": problem.metrics[0].__name__,
        "higher_is_better": problem.higher_is_better,
        "rounds": config.rounds,
        "parameters": tree.size(problem.model.shapes()),
        "final": final,
        "data": dict(problem.data),
        **{name: last[name] for name in simulate.TOTALS},
        "precision": config.precision,
        "padding_waste": simulate.padding_waste(setup, config.seed),
        "clients_per_chunk": setup.layout.places(setup.cohort)[2],
        "narrow_programs": list(
            setup.layout.widths
        ),  # each for clients of up to that many examples
        "devices": 1 if mesh is None else mesh.size,
        "processes": jax.process_count(),
        "warnings": list(result.warnings),
    }
    if result.per_client is not None:
        summary["per_client"] = result.per_client.to_json()
    if problem.final is not None:
        params = devices.here(result.params)
        whole = evaluate_blocks(setup.task, params, problem.final())
        summary["whole_test_set"] = json_numbers(whole)
    return summary
