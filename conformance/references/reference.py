"""What a reference is, and how it is run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from conformance.problem import Array, Visit

State = dict[str, Any]  # arrays and numbers by name; `params` is the model


class Reference(NamedTuple):
    """An algorithm, written from its equations.

    Attributes:
        start: `(W, clients, **settings) -> state`, before the first round of a federation with
            this number of clients.
        one_round: `(state, visits, **settings) -> state`, one round with these clients.
    """

    start: Callable[..., State]
    one_round: Callable[..., State]


def run(
    reference: Reference,
    W: Array,
    rounds: Iterable[Sequence[Visit]],
    *,
    clients: int = 0,
    **settings: Any,
) -> Iterator[State]:
    """Yield the state after each round. A client without examples takes no part in a round."""
    state = reference.start(W, clients, **settings)
    for visits in rounds:
        present = [visit for visit in visits if visit.examples]
        state = reference.one_round(state, present, **settings) if present else state
        yield state


def mean(values: Sequence[Any], visits: Sequence[Visit]) -> Any:
    """Return the mean of one value for each visit, weighted by the numbers of examples."""
    total = sum(visit.examples for visit in visits)
    pairs = zip(values, visits, strict=True)
    return sum(visit.examples / total * value for value, visit in pairs)


def plain_start(W: Array, clients: int, **settings: Any) -> State:
    """Return the state of a server that keeps nothing but the model."""
    return {"params": W}
