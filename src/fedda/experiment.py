"""A configured run and its directory: the only place where all parts meet.

A run directory holds `config.toml` (resolved), `metrics.jsonl` (a line for each evaluation),
`checkpoints/` and, at the end, `summary.json`. Times are in the summary alone, so that a run which
was killed and resumed ends with exactly the lines of one that was not.
"""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

import fedda
from fedda import api, simulate, tasks, tree
from fedda import config as configs
from fedda.api import Result
from fedda.checkpoint import Checkpoints
from fedda.config import Config
from fedda.errors import InputError
from fedda.files import read_rows, write_whole
from fedda.simulate import Row

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint")


class Progress(NamedTuple):
    """What a person watching a run wants to know, given after every evaluation."""

    row: Row
    rounds: int
    metric: str


class Outcome(NamedTuple):
    result: Result
    summary: dict[str, Any]
    notes: list[str]  # what a person should know about how the run was continued


def run(
    config: Config, directory: Path, on_progress: Callable[[Progress], None] | None = None
) -> Outcome:
    """Trains one configuration in a new directory."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file. Give another --out.")
    # A kill in the first moment leaves nothing but a hidden part of a file.
    if directory.exists() and any(not path.name.startswith(".") for path in directory.iterdir()):
        raise InputError(
            f"{directory} is not empty. Give another --out, or continue that run with "
            f"fedda run --resume {directory}"
        )
    prepared = _prepare(config)  # before anything is written: it may be refused
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "config.toml", configs.dump(config))
    return _run(config, *prepared, directory, on_progress, resume=False)


def resume(
    directory: Path,
    changes: dict[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Continues the run of a directory from its newest whole checkpoint.

    `changes` may repeat the run's settings but not change them.
    """
    path = directory / "config.toml"
    if not path.exists():
        raise InputError(f"{directory} is not a run directory: it has no config.toml.")
    config = configs.resolve(configs.read(path))
    ours = config.flat()
    for name, value in (changes or {}).items():
        if name not in ours or ours[name] != value:
            raise InputError(
                f"{directory} is a run with {name} = {ours.get(name)!r}, got {value!r}. A resumed "
                "run keeps its configuration: start a new one with another --out."
            )
    return _run(config, *_prepare(config), directory, on_progress, resume=True)


def _prepare(config: Config) -> tuple[tasks.Problem, simulate.Setup, Any]:
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
        chunk=config.chunk or None,
        devices=config.devices,
        memory_gb=config.memory_gb,
        sampling=config.sampling,
        reduction=problem.reduction,
        **config.chosen,
    )
    api.check_seed(config.seed)
    return problem, setup, api.traced(hyper, problem.model)


class _Before(NamedTuple):
    """What earlier processes did of a run."""

    round: int = 0
    run: simulate.Run | None = None
    history: tuple[Row, ...] = ()
    total: float = 0.0  # seconds
    compile: float = 0.0
    notes: tuple[str, ...] = ()


def _before(
    setup: simulate.Setup, hp: Any, seed: int, directory: Path, checkpoints: Checkpoints
) -> _Before:
    """Reads back the newest whole checkpoint, and cuts the metrics to what it has seen."""
    log_path = directory / "metrics.jsonl"
    written = read_rows(log_path)
    notes = ["cut metrics.jsonl after its last whole line"] if written.rest else []
    found, damaged = checkpoints.newest_whole(simulate.start(setup, hp, [seed]), written.size)
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
    checkpoints = Checkpoints(directory / "checkpoints")
    before = _before(setup, hp, config.seed, directory, checkpoints) if resume else _Before()
    history, final = list(before.history), before.run

    def seconds() -> dict[str, float]:
        total, compiling = time.perf_counter() - started, compile_seconds() - compiled
        return {"total": before.total + total, "compile": before.compile + compiling}

    evaluations = 0
    with open(directory / "metrics.jsonl", "ab") as log:
        for evaluation in simulate.train(setup, hp, [config.seed], before.round, before.run):
            row = {name: _json_number(value) for name, value in evaluation.row.items()}
            log.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            history.append(row)
            evaluations += 1
            if evaluations % config.checkpoint_every == 0 or evaluation.round == config.rounds:
                log.flush()
                os.fsync(log.fileno())
                numbers = {"metrics_bytes": log.tell(), "seconds": seconds()}
                checkpoints.save(evaluation.round, evaluation.run, numbers)
            log.flush()
            if on_progress is not None:
                on_progress(Progress(row, config.rounds, metric))
            final = evaluation.run
    checkpoints.close()
    assert final is not None  # a run has at least one round, so an evaluation or a checkpoint
    last = history[-1]
    summary = {
        "algorithm": config.algorithm,
        "task": config.task,
        "seed": config.seed,
        "metric": metric,
        "higher_is_better": problem.higher_is_better,
        "rounds": config.rounds,
        "parameters": tree.size(final.state.params),
        "final": {name: last[name] for name in ("train_loss", *setup.task.measures)},
        "data": dict(problem.data),
        "seconds": seconds(),
        **{name: last[name] for name in simulate.TOTALS},
        "device": device(),
        "versions": versions(),
        "commit": commit(),
    }
    summary_path = directory / "summary.json"
    if before.round == config.rounds and summary_path.exists():
        summary = json.loads(summary_path.read_text())  # it names the versions that did the work
    else:
        if problem.final is not None:
            whole = simulate.evaluate_blocks(setup.task, final.state.params, problem.final())
            summary["whole_test_set"] = {k: _json_number(v) for k, v in whole.items()}
            summary["seconds"] = seconds()
        write_whole(summary_path, json.dumps(summary, indent=2) + "\n")
    return Outcome(Result(final.state, history), summary, list(before.notes))


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "fedda": fedda.__version__}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


@lru_cache
def commit() -> str:
    """The commit of the source tree this package runs from, if it runs from one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root)]
    try:
        head, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
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


_durations: list[float] = []


@lru_cache
def _listen_to_compiler() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            _durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)


def compile_seconds() -> float:
    """The seconds XLA has compiled for since this was first asked."""
    _listen_to_compiler()
    return math.fsum(_durations)
