"""A configured run and its directory: the only place where all parts meet.

A run directory holds `config.toml` (resolved), `metrics.jsonl` (a line for each evaluation),
`checkpoints/` and, at the end, `summary.json`. Times are in the summary alone, so that a run which
was killed and resumed ends with exactly the lines of one that was not. Of several processes that
train one run, only the first has the directory.
"""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Callable
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

import fedda
from fedda import api, tasks
from fedda.core import tree
from fedda.errors import InputError, unknown
from fedda.models import PRECISIONS
from fedda.report.runs import SUMMARY
from fedda.simulate import devices, hosts
from fedda.simulate import train as simulate
from fedda.simulate.result import Result
from fedda.simulate.train import Row
from fedda.storage.files import EVALUATION, append, json_numbers, read_json, read_rows, write_whole
from fedda.tasks import config as configs
from fedda.tasks.config import Config

if TYPE_CHECKING:
    from fedda.storage.checkpoint import Checkpoints  # imported late, for Orbax takes its time

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint")


class Progress(NamedTuple):
    """What a person watching a run wants to know, given after every evaluation."""

    row: Row
    rounds: int
    metric: str


class Outcome(NamedTuple):
    result: Result
    summary: dict[str, Any]
    notes: list[str]  # what a person should know about how the run was continued or kept


def run(
    config: Config, directory: Path, on_progress: Callable[[Progress], None] | None = None
) -> Outcome:
    """Trains one configuration in a new directory."""
    prepared = hosts.agreed(lambda: _begin(config, directory))
    return _run(config, *prepared, directory, on_progress, resume=False)


def _begin(config: Config, directory: Path) -> "Prepared":
    if not hosts.is_first():
        return prepare(config)
    check_new(directory, f"continue that run with fedda run --resume {directory}")
    prepared = prepare(config)  # before anything is written: it may be refused
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "config.toml", configs.dump(config))
    return prepared


def check_new(directory: Path, instead: str) -> None:
    """Refuses a directory that holds anything; a person is told what to do `instead`."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file. Give another --out.")
    # A kill in the first moment leaves nothing but a hidden part of a file.
    if directory.exists() and any(not path.name.startswith(".") for path in directory.iterdir()):
        raise InputError(f"{directory} is not empty. Give another --out, or {instead}")


def resume(
    directory: Path,
    given: dict[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Continues the run of a directory from its newest whole checkpoint.

    `given` may repeat the run's settings but not change them, except for the number of devices, as
    the next machine may have another, and how often a checkpoint is kept from now on.
    """
    text = hosts.from_first(lambda: _config_of(directory).encode()).decode()
    free = ("devices", "checkpoint_every")
    changed = {name: value for name, value in (given or {}).items() if name in free}
    config = configs.resolve(tomllib.loads(text) | changed)
    ours = config.flat()
    for name, value in (given or {}).items():
        if name not in ours or ours[name] != value:
            raise InputError(
                f"{directory} is a run with {name} = {ours.get(name)!r}, got {value!r}. A resumed "
                "run keeps its configuration: start a new one with another --out."
            )
    prepared = hosts.agreed(lambda: prepare(config))
    return _run(config, *prepared, directory, on_progress, resume=True)


def _config_of(directory: Path) -> str:
    path = directory / "config.toml"
    if not path.exists():
        raise InputError(f"{directory} is not a run directory: it has no config.toml.")
    return configs.dump(configs.resolve(configs.read(path)))


def check_precision(precision: str) -> None:
    """Refuses a precision that there is none of, before any data are looked for."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)


class Prepared(NamedTuple):
    problem: tasks.Problem
    setup: simulate.Setup
    hp: Any


def prepare(config: Config) -> Prepared:
    """Loads what a configuration names, and checks all of it."""
    problem = tasks.load(config)
    setup, hyper = api.prepare(
        config.algorithm,
        problem.model,
        problem.shards,
        problem.loss,
        test=problem.test,
        metrics=problem.metrics,
        rounds=config.rounds,
        cohort=config.cohort,
        batch=config.batch,
        local_work=config.local_work,
        local_unit=config.local_unit,  # type: ignore[arg-type]  # checked by prepare
        stabilise=config.stabilise,
        eval_every=config.eval_every,
        late_every=config.late_every,
        chunk=config.chunk or None,
        devices=config.devices or None,
        memory_gb=config.memory_gb,
        sampling=config.sampling,
        reduction=problem.reduction,
        **config.chosen,
    )
    api.check_seed(config.seed)
    return Prepared(problem, setup, api.traced(hyper, problem.model))


class _Before(NamedTuple):
    """What was done of a run before this process, or these processes, took it up."""

    round: int = 0
    run: simulate.Run | None = None
    history: tuple[Row, ...] = ()
    total: float = 0.0  # seconds
    compile: float = 0.0
    notes: tuple[str, ...] = ()


def _read_back(start: simulate.Run, directory: Path, checkpoints: "Checkpoints") -> _Before:
    """Reads the newest whole checkpoint, and cuts the metrics to what it has seen."""
    log_path = directory / "metrics.jsonl"
    written = read_rows(log_path, EVALUATION)
    notes = ["cut metrics.jsonl after its last whole line"] if written.rest else []
    found, damaged = checkpoints.newest_whole(start, written.size)
    before, size = _Before(), 0
    if found is not None:
        history = tuple(row for row in written.rows if row["round"] <= found.round)
        before = _Before(found.round, found.run, history, **found.numbers["seconds"])
        size = found.numbers["metrics_bytes"]
    checkpoints.drop_after(-1 if found is None else found.round)
    with open(log_path, "ab") as log:
        log.truncate(size)
    notes += [*damaged, f"continued from round {before.round}"]
    return before._replace(notes=tuple(notes))


def _before(start: simulate.Run, directory: Path, checkpoints: "Checkpoints | None") -> _Before:
    """What the first process reads back, in all of them."""
    before = hosts.agreed(
        lambda: _read_back(start, directory, checkpoints) if checkpoints else _Before()
    )
    if jax.process_count() == 1:
        return before
    own = [np.asarray(leaf) for leaf in jax.tree.leaves(before.run)]
    words = before._replace(run=[leaf.shape for leaf in own])  # type: ignore[arg-type]
    told = json.loads(hosts.from_first(lambda: json.dumps(words._asdict()).encode()))
    like, structure = jax.tree.flatten(start)
    leaves = []
    for number, shape in enumerate(told.pop("run")):
        data = hosts.from_first(own[number].tobytes if own else bytes)
        leaves.append(np.frombuffer(data, like[number].dtype).reshape(shape))
    run = jax.tree.unflatten(structure, leaves) if leaves else None
    return _Before(**told)._replace(run=run)


def _run(
    config: Config,
    problem: tasks.Problem,
    setup: simulate.Setup,
    hp: Any,
    directory: Path,
    on_progress: Callable[[Progress], None] | None,
    resume: bool,
) -> Outcome:
    started, compiled = time.perf_counter(), compile_seconds()
    metric = problem.metrics[0].__name__
    first, checkpoints, before = hosts.is_first(), None, _Before()
    if resume:
        checkpoints = _checkpoints(directory) if first else None
        try:
            before = _before(simulate.start(setup, hp, [config.seed]), directory, checkpoints)
        except BaseException:
            if checkpoints is not None:
                checkpoints.close()
            raise
    history, final, notes = list(before.history), before.run, list(before.notes)

    def seconds() -> dict[str, float]:
        total, compiling = time.perf_counter() - started, compile_seconds() - compiled
        return {"total": before.total + total, "compile": before.compile + compiling}

    evaluations = 0
    try:
        with FileIO(directory / "metrics.jsonl" if first else os.devnull, "a") as log:
            for evaluation in simulate.train(setup, hp, [config.seed], before.round, before.run):
                row = json_numbers(evaluation.row)
                history.append(row)
                evaluations += 1
                due = first and (
                    evaluations % config.checkpoint_every == 0 or evaluation.round == config.rounds
                )
                append(log, json.dumps(row, allow_nan=False).encode() + b"\n", sync=due)
                if due:
                    numbers = {"metrics_bytes": log.tell(), "seconds": seconds()}
                    checkpoints = checkpoints or _checkpoints(directory)
                    notes += checkpoints.save(evaluation.round, evaluation.run, numbers)
                if on_progress is not None:
                    on_progress(Progress(row, config.rounds, metric))
                final = evaluation.run
    finally:  # interrupted or not, the last checkpoint is written to its end
        if checkpoints is not None:
            notes += checkpoints.close()
    assert final is not None  # a run has at least one round, so an evaluation or a checkpoint
    summary = _summary(config, problem, setup, history[-1], seconds())
    summary_path = directory / "summary.json"

    def finish() -> None:
        nonlocal summary
        if not first:
            return
        if before.round == config.rounds and summary_path.exists():
            summary = _written_summary(summary_path)  # of the versions that did the work
            return
        if problem.final is not None:
            params = devices.here(final.state.params)
            whole = simulate.evaluate_blocks(setup.task, params, problem.final())
            summary["whole_test_set"] = json_numbers(whole)
            summary["seconds"] = seconds()
        write_whole(summary_path, json.dumps(summary, indent=2) + "\n")

    hosts.agreed(finish)
    return Outcome(Result(final.state, history), summary, notes)


def _written_summary(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path, SUMMARY)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}. Delete it, and resume the run once more: it is written "
            "again."
        ) from error
    return found


def _summary(
    config: Config,
    problem: tasks.Problem,
    setup: simulate.Setup,
    last: Row,
    seconds: dict[str, float],
) -> dict[str, Any]:
    mesh = setup.layout.mesh
    return {
        "algorithm": config.algorithm,
        "task": config.task,
        "seed": config.seed,
        "metric": problem.metrics[0].__name__,
        "higher_is_better": problem.higher_is_better,
        "rounds": config.rounds,
        "parameters": tree.size(problem.model.shapes()),
        "final": {name: last[name] for name in ("train_loss", *setup.task.measures)},
        "data": dict(problem.data),
        "seconds": seconds,
        **{name: last[name] for name in simulate.TOTALS},
        "precision": config.precision,
        "device": device(),
        "padding_waste": simulate.padding_waste(setup, config.seed),
        "devices": 1 if mesh is None else mesh.size,  # that were used
        "processes": jax.process_count(),
        "versions": versions(),
        "commit": commit(),
    }


def _checkpoints(directory: Path) -> "Checkpoints":
    """Loads Orbax, which takes long, only when a checkpoint is read or written."""
    from fedda.storage.checkpoint import Checkpoints

    return Checkpoints(directory / "checkpoints")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "fedda": fedda.__version__}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


@lru_cache
def commit() -> str:
    """The commit of the source tree this package runs from, if it runs from one.

    It is `-dirty` if what decides numbers differs from the commit: results beside it do not.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root)]
    status = ["status", "--porcelain", "--", "src", "pyproject.toml"]
    try:
        head, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout
            for words in (["rev-parse", "HEAD"], status)
        )
        return head.strip() + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    found = jax.devices()
    kind = f"{len(found)} x {found[0].device_kind}"
    if found[0].platform != "cpu":
        return kind
    return f"{kind} ({os.cpu_count()} cores, {platform.machine()})"


_compiling: list[tuple[float, float]] = []  # from when to when, in the order in which they ended


@lru_cache
def _listen_to_compiler() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):  # tracing, lowering, and what XLA does
            return
        end = time.perf_counter()
        start = end - duration_secs
        while _compiling and _compiling[-1][0] >= start:  # it was a part of this
            _compiling.pop()
        _compiling.append((start, end))

    jax.monitoring.register_event_duration_secs_listener(listener)


def compile_seconds() -> float:
    """The seconds JAX has traced and XLA has compiled for since this was first asked."""
    _listen_to_compiler()
    return math.fsum(end - start for start, end in _compiling)
