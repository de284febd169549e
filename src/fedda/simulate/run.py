"""One run from its first round to its last: trained, logged, checkpointed and resumed."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedda.algorithms.registry import plain
from fedda.data.preparation import Preparation
from fedda.simulate import hosts, warnings
from fedda.simulate import train as simulate
from fedda.simulate.result import Result
from fedda.simulate.train import Row, Run, Setup
from fedda.storage import interrupts
from fedda.storage.checkpoint import on_host, restored
from fedda.storage.directory import RunDirectory


def train_run(
    setup: Setup,
    hp: Any,
    seed: int,
    kept: RunDirectory,
    *,
    settings: Mapping[str, Any],
    preparation: Preparation | None = None,
    start: Result | None = None,
    checkpoint_every: int = 5,
    on_compile: Callable[[], object] = lambda: None,
    on_evaluation: Callable[[Row], object] | None = None,
    on_warning: Callable[[str], object] = lambda text: None,
) -> Result:
    """Train a run to its end, from the newest checkpoint if its directory has one.

    Args:
        setup: What stays the same during the run.
        hp: The hyper-parameters, as arrays.
        seed: The seed of everything random.
        kept: The directory of the run.
        settings: The settings of the run, for the result.
        preparation: How the examples were made of a table, for the result.
        start: An earlier result, to continue for `setup.rounds` more.
        checkpoint_every: The number of evaluations between checkpoints. There is one at the end.
        on_compile: Called before programs are compiled, if there is anything left to train.
        on_evaluation: Called with each new row. If it returns True, the run ends there.
        on_warning: Called with each warning, about the data before the first round. They are
            `warnings` of the result, too.

    Returns:
        The result of all rounds, also of those that earlier processes did.

    Raises:
        Interrupted: A signal came. If that was after an evaluation, a checkpoint was written and
            the error has the result.
    """
    first, run = 0, None
    about_data = warnings.about_data(setup.shards)
    for warning in about_data:
        on_warning(warning)
    if start is not None:
        run = _continued(setup, hp, seed, start)
        first = start.history[-1]["round"]
        setup = setup._replace(rounds=first + setup.rounds)
    found = kept.read_back(lambda: _like(setup, hp, seed), hosts.from_first)
    if found is not None:
        first, run = found.round, found.run
    elif start is not None:
        for row in start.history:
            kept.log(row)

    def result() -> Result:
        assert run is not None  # a run has at least one round, so an evaluation or a checkpoint
        return Result(
            state=jax.tree.map(jnp.asarray, run.state),
            history=[_with_nan(row) for row in kept.history],
            memory=run.memory,
            settings=dict(settings),
            model=setup.task.model,
            preparation=preparation,
            warnings=about_data,
        )

    # A run that has been given more rounds since is not finished.
    ends = {"finished": True, "rounds": setup.rounds}
    saved, unfinished = first, found is None or found.progress != ends
    if unfinished:
        on_compile()
    try:
        for evaluation in simulate.train(setup, hp, [seed], first, run) if unfinished else ():
            row, run, first = evaluation.row, evaluation.run, evaluation.round
            kept.log(row if start is None else _counted_on(start.history[-1], row))
            ended = first == setup.rounds
            if ended or len(kept.history) % checkpoint_every == 0:
                kept.save(first, run, ends | {"finished": ended})
                saved = first
            row = _with_nan(kept.history[-1])
            if on_evaluation is not None and plain(on_evaluation(row)) is True and not ended:
                kept.save(first, run, ends)
                break
    except interrupts.Interrupted as stop:
        if stop.whole and run is not None:
            if saved < first:
                kept.save(first, run, ends | {"finished": False})
            stop.result = result()
        raise
    ended_with = result()
    about_run = warnings.about_run(setup, ended_with.history[-1])
    for warning in about_run:
        on_warning(warning)
    return dataclasses.replace(ended_with, warnings=[*about_data, *about_run])


def _with_nan(row: Row) -> Row:
    """Return a row as it was before JSON, in which numbers that are not finite are null."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def _like(setup: Setup, hp: Any, seed: int) -> Run:
    """Return the structure, types and shapes of a run."""
    if setup.host_rounds is not None:
        return simulate.start(setup, hp, [seed])
    shapes: Run = jax.eval_shape(lambda: simulate.start(setup, hp, [seed]))
    return shapes


def why_untrained(row: Row) -> str | None:
    """Return why a run has trained nothing, if it skipped every round up to this row."""
    if not 0 < row["round"] == row["skipped_rounds"]:
        return None
    skipped = f"nothing was trained: all {row['round']} rounds were skipped"
    if not row["nonfinite_clients"]:
        return f"{skipped}, as no client of their cohorts had examples. Raise cohort, or add data."
    return (
        f"{skipped}, as uploads were not finite ({row['nonfinite_clients']} in all). Lower "
        "client_lr or server_lr, and check that the loss is finite on these data. It is not finite "
        "if, for example, an embedding has fewer rows than the data have words."
    )


# ------------------------------------------------------------------- to continue an earlier result

ADVICE = (
    "To begin with parameters alone, give model._replace(init=lambda key: params) as model. "
    "Results of run_grid lack what clients keep, the memory."
)


def _continued(setup: Setup, hp: Any, seed: int, start: Result) -> Run:
    """Return the run of a result, copied: a program reuses the memory of what it is given."""
    counts = [
        jnp.int32(start.history[-1][name]) for name in ("nonfinite_clients", "skipped_rounds")
    ]
    arrays = on_host(Run(start.state, start.memory, *counts))
    copies = {name: array.copy() for name, array in arrays.items()}
    run: Run = restored(copies, _like(setup, hp, seed), "start", ADVICE)
    return run


def _counted_on(last: Row, row: Row) -> Row:
    """Return the row with all bytes of a continued run. Its earlier rounds may have sent others."""
    sent = {
        name: last[name] + row[name] // row["round"] * (row["round"] - last["round"])
        for name in ("bytes_down", "bytes_up")
    }
    return row | sent
