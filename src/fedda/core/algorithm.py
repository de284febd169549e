"""The definition of a federated algorithm: a record of pure functions over pytrees.

A round is a tuple of exchanges ("phases"). The server sees only the sum of the clients' uploads.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from fedda.core.tree import PyTree


class Domain(NamedTuple):
    """The values that a hyper-parameter may have, checked where a user gives one."""

    description: str
    allows: Callable[[float], bool]


Positive = Annotated[float, Domain("a positive number", lambda value: value > 0)]
NonNegative = Annotated[float, Domain("zero or a positive number", lambda value: value >= 0)]
Decay = Annotated[float, Domain("a number in [0, 1)", lambda value: 0 <= value < 1)]


class Hyper(Protocol):
    """Hyper-parameters: an instance of the `Hyper` of an algorithm, a NamedTuple of numbers."""

    def _asdict(self) -> dict[str, Any]: ...


class ServerState(Protocol):
    """What the server keeps between rounds: a pytree with the model's parameters among it."""

    @property
    def params(self) -> PyTree: ...


class Seen(NamedTuple):
    """Training statistics of one client, as sums over the examples of its local steps."""

    loss: Array
    examples: Array
    metrics: tuple[tuple[Array, Array], ...] = ()  # (numerator, denominator) of each metric


def nothing_seen() -> Seen:
    """Return the statistics of a phase without local training."""
    return Seen(loss=jnp.zeros(()), examples=jnp.zeros(()))


def no_memory(hp: Any, params: PyTree) -> tuple[()]:
    """Return the memory of clients that keep nothing between rounds."""
    return ()


class Phase(NamedTuple):
    """One exchange: the server sends a message, the cohort works, the sum of uploads comes back.

    Attributes:
        send: `(hp, state) -> message`, at the server.
        work: `(hp, task, message, memory, shard, key) -> (upload, memory, seen)`, at one client.
        merge: `(hp, state, total) -> state`, at the server; `total` is the sum of the uploads.
        decode: What the server makes of one client's upload before it is added to the sum; `None`
            if uploads are added as they are.
        sum_only: The privacy of an upload holds in the sum alone: nothing else may be done to it.
        secret: In a real federation, nobody else may know the client's random key.
    """

    send: Callable[[Any, Any], PyTree]
    work: Callable[..., tuple[PyTree, PyTree, Seen]]
    merge: Callable[[Any, Any, PyTree], ServerState]
    decode: Callable[[PyTree], PyTree] | None = None
    sum_only: bool = False
    secret: bool = False

    def decoded(self, sent: PyTree) -> PyTree:
        """Return one client's upload as it is added to the sum."""
        return sent if self.decode is None else self.decode(sent)


class Algorithm(NamedTuple):
    """A federated algorithm: what changes a number is in `Hyper`, and nothing else is traced.

    Attributes:
        Hyper: A NamedTuple class of numbers with defaults, each annotated with its `Domain`.
        init: `(hp, params) -> state`, the server's state before the first round.
        memory: `(hp, params) -> memory`, what a client keeps before its first visit; `()` if
            clients keep nothing between rounds.
        phases: The exchanges of one round, in their order.
    """

    Hyper: type[Any]
    init: Callable[[Any, PyTree], ServerState]
    memory: Callable[[Any, PyTree], PyTree] = no_memory
    phases: tuple[Phase, ...] = ()
