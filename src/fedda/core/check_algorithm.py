"""Refuses a user's own `Algorithm` that a round could not call."""

import inspect
from typing import Any, get_type_hints

import jax
from jax import random

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Domain, Phase, Seen
from fedda.core.round import merged
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards
from fedda.errors import InputError


def check_parts(record: Algorithm) -> None:
    """Refuses a record whose parts are not what a round calls."""
    if not inspect.isclass(record.Hyper) or not hasattr(record.Hyper, "_field_defaults"):
        raise InputError(
            f"Hyper of an Algorithm must be a NamedTuple class, got {record.Hyper!r}. "
            "class Hyper(NamedTuple): client_lr: fedda.core.round.Positive = 0.1 is one."
        )
    Hyper: Any = record.Hyper
    hints = get_type_hints(Hyper, include_extras=True)
    for name in Hyper._fields:
        domain = getattr(hints.get(name), "__metadata__", (None,))[0]
        if not isinstance(domain, Domain) or name not in Hyper._field_defaults:
            raise InputError(
                f"{name} of Hyper must have a default and say which numbers it may be, got "
                f"{hints.get(name)!r}. Write {name}: fedda.core.round.Positive = 0.1 or the like."
            )
    phases = record.phases
    if type(phases) is not tuple or not phases or not all(isinstance(p, Phase) for p in phases):
        raise InputError(
            "phases of an Algorithm must be a tuple of fedda.Phase, as in "
            f"(fedda.Phase(send, work, merge),), got {phases!r}."
        )
    functions = {name: getattr(record, name) for name in ("init", "memory")}
    for number, phase in enumerate(phases):
        for name in ("send", "work", "merge", "opened"):
            functions[f"{name} of phase {number}"] = getattr(phase, name)
    for name, function in functions.items():
        if not callable(function):
            raise InputError(f"{name} of an Algorithm must be a function, got {function!r}.")


def check_work(record: Algorithm, hyper: Any, task: Task, shards: Shards) -> None:
    """Refuses functions of a record that do not give what a round needs; nothing is run."""

    def exchange(hp: Any, params: PyTree, shards: Shards) -> None:
        state = before = record.init(hp, params)
        own = record.memory(hp, params)
        if not hasattr(state, "params"):
            raise InputError(
                f"init of an Algorithm must give a state with a field params, got "
                f"{type(state).__name__}. A NamedTuple with params: PyTree is one."
            )
        for number, phase in enumerate(record.phases):
            message = phase.send(hp, state)
            found = phase.work(hp, task, message, own, shards.shard(0), random.key(0))
            given = found if isinstance(found, (tuple, list)) else [found]
            if len(given) != 3 or not isinstance(given[2], Seen):
                kinds = ", ".join(type(each).__name__ for each in given)
                raise InputError(
                    f"work of phase {number} gave {len(given)} values ({kinds}); it must return "
                    "(upload, memory, fedda.core.round.Seen(loss, examples))."
                )
            upload, kept, _ = found
            _check_alike(f"work of phase {number}", "memory", kept, own)
            state = merged(phase, hp, before, state, tree.widen(phase.opened(upload)))
        _check_alike("the last merge", "state", state, before)

    jax.eval_shape(exchange, hyper, task.model.shapes(), shards)


def _check_alike(maker: str, name: str, got: PyTree, expected: PyTree) -> None:
    """Refuses what would be broadcast or cast in silence when it takes the other's place."""
    found, wanted = (
        tree.types(name, each) | {"the structure": str(jax.tree.structure(each))}
        for each in (got, expected)
    )
    for path in {**wanted, **found}:
        of_found, of_wanted = (types.get(path, "absent") for types in (found, wanted))
        if of_found != of_wanted:
            raise InputError(
                f"{maker} must give a {name} of the same types and shapes as at the start: there "
                f"{path} is {of_wanted}, here {of_found}."
            )
