"""What a run came to, and how another goes on from there."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda.core import tree
from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.simulate.client_state import HostMemory
from fedda.simulate.train import Row, Run, Setup, begin


class Result(NamedTuple):
    """A run as far as it came: the server's state, and one row for each evaluation."""

    state: Any
    history: list[Row]
    memory: Any = ()  # what clients keep between rounds; runs trained together leave it out

    @property
    def params(self) -> PyTree:
        return self.state.params


def taken_up(setup: Setup, hp: Any, start: Result) -> Run:
    """The run that a result is of, copied: a program reuses the memory of what it is given."""
    instead = (
        "To begin with parameters alone, give model._replace(init=lambda key: params) as model."
    )
    if not isinstance(start, Result):
        raise InputError(
            f"start must be the result of an earlier run, got {type(start).__name__}. {instead}"
        )
    on_host = setup.host_rounds is not None
    if on_host != isinstance(start.memory, HostMemory):
        raise InputError(
            f"what clients keep is on the {'host' if on_host else 'device'} with this memory_gb, "
            "and start does not have it there. Give the memory_gb that start was made with."
        )
    rows = 1 if on_host else setup.shards.num_clients
    begun = begin(setup.algorithm, setup.task.model, False, rows)
    like = jax.eval_shape(begun, hp, jax.random.key(0))
    kept = start.memory.take(np.zeros(1, int)) if on_host else start.memory
    found, wanted = (
        tree.types("state", state) | tree.types("memory", memory)
        for state, memory in ((start.state, kept), (like.state, like.memory))
    )
    for path in {**wanted, **found}:
        if found.get(path) != wanted.get(path):
            raise InputError(
                "start is of another algorithm, model or federation, or of run_grid, which leaves "
                f"out what clients keep: in it {path} is {found.get(path, 'absent')}, here "
                f"{wanted.get(path, 'absent')}. {instead}"
            )
    last = start.history[-1]
    return Run(
        _copied(start.state, like.state),
        jax.tree.map(np.array, start.memory) if on_host else _copied(start.memory, like.memory),
        jnp.int32(last["nonfinite_clients"]),
        jnp.int32(last["skipped_rounds"]),
    )


def why_untrained(row: Row) -> str | None:
    """Return why a run has trained nothing, if it skipped every round up to this row."""
    if not 0 < row["round"] == row["skipped_rounds"]:
        return None
    told = f"nothing was trained: all {row['round']} rounds were skipped"
    if not row["nonfinite_clients"]:
        return f"{told}, as no client of their cohorts had examples. Raise cohort, or add data."
    return (
        f"{told}, as uploads were not finite ({row['nonfinite_clients']} in all). Lower client_lr "
        "or server_lr, and check that the loss is finite on these data."
    )


def _copied(x: PyTree, like: PyTree) -> PyTree:
    """The numbers of one tree in the structure of another, whose classes may be defined anew."""
    leaves = [jnp.array(np.asarray(leaf)) for leaf in jax.tree.leaves(x)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def counted_on(last: Row, row: Row) -> Row:
    """The row with the bytes of a continued run: a round may have sent others before."""
    sent = {
        name: last[name] + row[name] // row["round"] * (row["round"] - last["round"])
        for name in ("bytes_down", "bytes_up")
    }
    return row | sent
