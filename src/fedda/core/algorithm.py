"""The definition of a federated algorithm: a record of pure functions over pytrees.

A round is a tuple of exchanges ("phases"). The server sees only the sum of the clients' uploads.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from fedda.core.tree import PyTree


class Domain(NamedTuple):
    """The allowed values of a hyper-parameter. A user's value is checked against them."""

    description: str
    allows: Callable[[float], bool]


Positive = Annotated[float, Domain("a positive number", lambda value: value > 0)]
NonNegative = Annotated[float, Domain("zero or a positive number", lambda value: value >= 0)]
Decay = Annotated[float, Domain("a number in [0, 1)", lambda value: 0 <= value < 1)]


class Hyper(Protocol):
    """Hyper-parameter values: an instance of an algorithm's `Hyper` class."""

    def _asdict(self) -> dict[str, Any]: ...


class ServerState(Protocol):
    """The server's state between rounds: a pytree with a field `params`, the model's parameters."""

    @property
    def params(self) -> PyTree: ...


class Seen(NamedTuple):
    """Training statistics of one client, summed over the examples of its local steps."""

    loss: Array
    examples: Array
    metrics: tuple[tuple[Array, Array], ...] = ()  # (numerator, denominator) of each metric


def nothing_seen() -> Seen:
    """Return the statistics of a phase without local training."""
    return Seen(loss=jnp.zeros(()), examples=jnp.zeros(()))


def no_memory(hp: Any, params: PyTree) -> tuple[()]:
    """Return the empty memory of a client that keeps nothing between rounds."""
    return ()


class Phase(NamedTuple):
    """One exchange of a round: the server sends, the clients work, the server merges the sum.

    Attributes:
        send: `(hp, state) -> message`, on the server.
        work: `(hp, task, message, memory, shard, key) -> (upload, memory, seen)`, on one client.
        merge: `(hp, state, total) -> state`, on the server. `total` is the sum of the uploads.
        decode: `(upload) -> upload`, on the server, applied to each upload before the sum. `None`
            adds the uploads as they arrive.
        sum_only: Whether only the sum of the uploads is private. The server must then not use
            a single upload for anything else.
        secret: Whether a deployed client must draw its random key itself and keep it secret.
    """

    send: Callable[[Any, Any], PyTree]
    work: Callable[..., tuple[PyTree, PyTree, Seen]]
    merge: Callable[[Any, Any, PyTree], ServerState]
    decode: Callable[[PyTree], PyTree] | None = None
    sum_only: bool = False
    secret: bool = False

    def decoded(self, sent: PyTree) -> PyTree:
        """Return one client's upload after `decode`, ready for the sum."""
        return sent if self.decode is None else self.decode(sent)


class Algorithm(NamedTuple):
    """A federated algorithm, as a record of pure functions.

    Hyper-parameters are traced values, so one compiled program serves a whole sweep. Everything
    else about the algorithm is fixed when the program is compiled.

    Attributes:
        Hyper: A NamedTuple class of numbers. Each field has a default and is annotated with its
            `Domain`, such as `Positive`.
        init: `(hp, params) -> state`, the server's state before the first round.
        memory: `(hp, params) -> memory`, a client's memory before its first round. Leave it out
            if clients keep nothing between rounds.
        phases: The exchanges of one round, in order.

    Example:
        Each client uploads its gradient, and the server takes one step along the mean.

        >>> from typing import NamedTuple
        >>> import fedda
        >>> from fedda.core import local, tree
        >>> from fedda.core.algorithm import Positive, nothing_seen
        >>> class Hyper(NamedTuple):
        ...     lr: Positive = 0.1
        >>> class State(NamedTuple):
        ...     params: tree.PyTree
        >>> def work(hp, task, message, memory, shard, key):
        ...     gradient = task.full_gradient(message, shard, key)
        ...     return local.weighted(shard, gradient), memory, nothing_seen()
        >>> def merge(hp, state, total):
        ...     return State(tree.axpy(-hp.lr, local.mean(total), state.params))
        >>> gradient_descent = fedda.Algorithm(
        ...     Hyper=Hyper,
        ...     init=lambda hp, params: State(params),
        ...     phases=(fedda.Phase(send=lambda hp, state: state.params, work=work, merge=merge),),
        ... )

        The record runs like a named algorithm.

        >>> import numpy as np
        >>> clients = [(np.ones((n, 1)), np.full((n, 1), 3.0)) for n in (1, 4)]
        >>> result = fedda.run(
        ...     gradient_descent,
        ...     fedda.models.linear(features=1, classes=1),
        ...     clients,
        ...     fedda.losses.squared_error,
        ...     cohort=2,
        ...     lr=0.2,
        ... )
        >>> round(float(result.params["out"]["kernel"][0, 0] + result.params["out"]["bias"][0]), 3)
        3.0
    """

    Hyper: type[Any]
    init: Callable[[Any, PyTree], ServerState]
    memory: Callable[[Any, PyTree], PyTree] = no_memory
    phases: tuple[Phase, ...] = ()
