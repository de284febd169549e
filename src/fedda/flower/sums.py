"""The sum of what clients upload in a phase: a reply is checked as if it came from a stranger."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message, RecordDict

from fedda.core import Phase, Seen
from fedda.flower import wire
from fedda.flower.settings import Settings
from fedda.flower.wire import Refused
from fedda.local import is_weighted, without_counters
from fedda.tree import PyTree

SEEN = ("loss", "examples")  # what a reply tells of local work


class Summed(NamedTuple):
    """What the server learns of a phase."""

    upload: PyTree
    seen: Seen
    counted: frozenset[int]  # the clients whose uploads are in the sum
    clipped: int = 0  # how many of these had an entry outside of its range


class Halted(Exception):  # noqa: N818  # as one says it
    """No sum came about, and nobody counted: why, in words for the log."""


class NotFinite(Refused):
    """A reply in which a number is not finite."""


class Reply(NamedTuple):
    """A sound one."""

    upload: PyTree
    seen: list[np.float64]  # in the order of `SEEN`


def plain_sum(
    settings: Settings,
    phase: Phase,
    orders: Mapping[int, wire.Order],
    like: PyTree,
    replies: Iterable[tuple[int, Message]],
    refuse: Callable[[int, Refused], None],
) -> Summed:
    """The sum of the replies, by the number of their client, that are sound each by itself.

    `like` has the shapes and types of an upload. What is not sound is left out, and `refuse` told.
    """
    sound: dict[int, Reply] = {}
    for partition, reply in replies:
        try:
            belongs = orders[partition].reply(partition)
            sound[partition] = _checked(settings, phase, belongs, like, wire.content(reply))
        except Refused as reason:
            refuse(partition, reason)
    if not sound:
        raise Halted("no reply was sound")
    upload = _sum([sound[key].upload for key in sorted(sound)])
    seen = _sum([one.seen for one in sound.values()])
    return Summed(upload, Seen(*seen), frozenset(sound))


def _checked(
    settings: Settings, phase: Phase, belongs: Mapping[str, Any], like: PyTree, content: RecordDict
) -> Reply:
    """A reply that is what was asked for, from whom it was asked, and sound; or a refusal."""
    about = wire.read(content, "fedda", algorithm=str, serial=int, partition=int)
    if about != dict(belongs):
        raise Refused(f"it belongs to another order: {about}")
    if "upload" not in content.array_records or "seen" not in content.metric_records:
        raise Refused("it has no upload, or does not say what was seen")
    upload = _opened(phase, wire.unpack(content.array_records["upload"], like))
    said = content.metric_records["seen"]
    numbers = [said.get(name, np.nan) for name in SEEN]
    seen = [np.float64(one) for one in numbers if not isinstance(one, list)]
    if len(seen) < len(numbers):
        raise Refused("what was seen is not in numbers")
    if not _all_finite((upload, seen)):
        raise NotFinite(f"a number of its upload or of its loss is not finite. {wire.REMEDY}")
    _check_size(upload, settings)
    return Reply(upload, seen)


def _check_size(upload: PyTree, settings: Settings) -> None:
    most_weight = settings.most_weight or np.inf
    squares = []
    for part in jax.tree.leaves(without_counters(upload), is_leaf=is_weighted):
        weight, values = 1.0, part
        if is_weighted(part):
            weight, values = float(part.weight), part.sum
            if not 0 < weight <= most_weight:
                raise Refused(f"its weight is {weight:g}, not above 0 and at most {most_weight:g}")
        if settings.most_norm is not None:
            squares += [_square_sum(leaf, weight) for leaf in jax.tree.leaves(values)]
    norm = float(np.sqrt(np.sum(squares)))
    if settings.most_norm is not None and norm > settings.most_norm:
        raise Refused(f"its norm is {norm:g}, more than {settings.most_norm:g}")


def _square_sum(leaf: Any, divisor: float) -> float:
    with np.errstate(over="ignore"):  # an infinite norm is out of bounds too
        return float(np.square(np.asarray(leaf, np.float64) / divisor).sum())


def _all_finite(values: PyTree) -> bool:
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(values))


def _sum(uploads: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: reduce(jnp.add, leaves), *uploads)


@partial(jax.jit, static_argnames="phase")
def _opened(phase: Phase, sent: PyTree) -> PyTree:
    return phase.opened(sent)
