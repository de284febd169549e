"""What a federated algorithm is: a record of pure functions over pytrees.

A round is a tuple of exchanges ("phases"). The server sees only the sum of the clients' uploads.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.core.tree import PyTree


class Domain(NamedTuple):
    """The numbers a hyper-parameter may be; checked where a user gives one, not in traced code."""

    words: str
    allows: Callable[[float], bool]


Positive = Annotated[float, Domain("a positive number", lambda value: value > 0)]
NonNegative = Annotated[float, Domain("zero or a positive number", lambda value: value >= 0)]
Decay = Annotated[float, Domain("a number in [0, 1)", lambda value: 0 <= value < 1)]


class Seen(NamedTuple):
    """What a person wants to see of local work, as sums over the examples it visited."""

    loss: Array
    examples: Array
    metrics: tuple[tuple[Array, Array], ...] = ()  # of each a sum, and what it is divided by


def nothing_seen() -> Seen:
    """What work tells that takes no local steps, or is not to tell of them."""
    return Seen(jnp.zeros(()), jnp.zeros(()))


def no_memory(hp: Any, params: PyTree) -> tuple[()]:
    """Most clients keep nothing from round to round."""
    return ()


def as_sent(sent: PyTree) -> PyTree:
    """Most uploads travel as they are."""
    return sent


class Phase(NamedTuple):
    """One exchange: the server sends, the asked clients work, the sum of uploads comes back."""

    send: Callable[[Any, Any], PyTree]  # (hp, state) -> message
    work: Callable[..., tuple[PyTree, PyTree, Seen]]
    # (hp, task, message, memory, shard, key) -> (upload, memory, seen), for one client
    merge: Callable[[Any, Any, PyTree], Any]  # (hp, state, total) -> state
    everyone: bool = False  # ask every client, not only this round's cohort
    opened: Callable[[PyTree], PyTree] = as_sent  # (what one client sent) -> what is added up
    secret: bool = False  # in a real federation, nobody else may know the client's key


class Algorithm(NamedTuple):
    """A federated algorithm: what changes a number is in `Hyper`, and nothing else is traced."""

    Hyper: Any  # a NamedTuple class of numbers with defaults, each annotated with its Domain
    init: Callable[[Any, PyTree], Any]  # (hp, params) -> server state, with a field `params`
    memory: Callable[[Any, PyTree], PyTree]  # (hp, params) -> what one client keeps; () if nothing
    phases: tuple[Phase, ...]
