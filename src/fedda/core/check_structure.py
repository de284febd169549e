"""Check the structure of an `Algorithm` that a user has written, before every run.

Nothing is computed. `fedda.testing.check_algorithm` checks what an algorithm computes.
"""

from typing import Any, get_type_hints

import jax
from jax import random

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Domain, Hyper, Phase, Seen
from fedda.core.round import merged
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards
from fedda.errors import InputError


def check_parts(record: Algorithm) -> None:
    """Check the types of an algorithm's fields.

    Raises:
        InputError: `Hyper` is not a NamedTuple class of numbers with defaults and domains, `phases`
            is not a tuple of phases, or another field is not a function.
    """
    Hyper: Any = record.Hyper
    if not callable(Hyper) or not hasattr(Hyper, "_field_defaults"):
        raise InputError(
            f"Hyper of an Algorithm must be a NamedTuple class, got {Hyper!r}. "
            "Example: class Hyper(NamedTuple): client_lr: fedda.core.algorithm.Positive = 0.1."
        )
    hints = get_type_hints(Hyper, include_extras=True)
    for name in Hyper._fields:
        domain = getattr(hints.get(name), "__metadata__", (None,))[0]
        if not isinstance(domain, Domain) or name not in Hyper._field_defaults:
            raise InputError(
                f"{name} of Hyper must have a default and a domain of allowed numbers, got "
                f"{hints.get(name)!r}. Example: {name}: fedda.core.algorithm.Positive = 0.1."
            )
    phases = record.phases
    if type(phases) is not tuple or not phases or not all(isinstance(p, Phase) for p in phases):
        raise InputError(
            "phases of an Algorithm must be a tuple of fedda.Phase, as in "
            f"(fedda.Phase(send, work, merge),), got {phases!r}."
        )
    functions = {name: getattr(record, name) for name in ("init", "memory")}
    for number, phase in enumerate(phases):
        for name in ("send", "work", "merge"):
            functions[f"{name} of phase {number}"] = getattr(phase, name)
    for name, function in functions.items():
        if not callable(function):
            raise InputError(f"{name} of an Algorithm must be a function, got {function!r}.")


def check_work(record: Algorithm, hyper: Hyper, task: Task, shards: Shards) -> None:
    """Check the types and shapes that an algorithm's functions return. Nothing is computed.

    Raises:
        InputError: A function returns the wrong kind of value, or a round changes the shapes or
            types of the state or the memory. JAX would broadcast or cast these silently.
    """

    def one_round(hp: Hyper, params: PyTree, shards: Shards) -> None:
        state = before = record.init(hp, params)
        memory = record.memory(hp, params)
        if not hasattr(state, "params"):
            raise InputError(
                f"init of an Algorithm must return a state with a field params, got "
                f"{type(state).__name__}. Example: a NamedTuple with the field params: PyTree."
            )
        for number, phase in enumerate(record.phases):
            message = phase.send(hp, state)
            results = phase.work(hp, task, message, memory, shards.shard(0), random.key(0))
            values = results if isinstance(results, (tuple, list)) else [results]
            if len(values) != 3 or not isinstance(values[2], Seen):
                kinds = ", ".join(type(value).__name__ for value in values)
                raise InputError(
                    f"work of phase {number} returned {len(values)} values ({kinds}), expected "
                    "(upload, memory, fedda.core.algorithm.Seen(loss, examples))."
                )
            _check_alike(f"work of phase {number}", "memory", values[1], memory)
            state = merged(phase, hp, before, state, tree.widen(phase.decoded(values[0])))
        _check_alike("the last merge", "state", state, before)

    jax.eval_shape(one_round, hyper, task.model.shapes(), shards)


def _check_alike(function: str, name: str, got: PyTree, expected: PyTree) -> None:
    after, before = (
        tree.types(name, values) | {"the structure": str(jax.tree.structure(values))}
        for values in (got, expected)
    )
    for path in {**before, **after}:
        if after.get(path) != before.get(path):
            raise InputError(
                f"{function} must return a {name} with the types and shapes of the initial one: "
                f"{path} was {before.get(path, 'absent')}, now it is {after.get(path, 'absent')}."
            )
