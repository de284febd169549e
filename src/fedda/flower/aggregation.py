"""The sum of what clients upload in a phase: a reply is checked as if it came from a stranger.

Each reply is checked by itself, and then against the median of the replies of this round and of the
rounds before, so that one client can neither make a sum overflow nor outweigh the others by far.
`docs/flower.md` says what these checks do not stop.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message, RecordDict

from fedda.core.algorithm import Phase, Seen
from fedda.core.local import Weighted, is_counter, is_weighted, without_counters
from fedda.core.task import Plan
from fedda.core.tree import PyTree
from fedda.flower import messages
from fedda.flower.messages import Refused
from fedda.flower.settings import Settings
from fedda.simulate.cohort import work_of

log = logging.getLogger("fedda.flower")
SEEN = ("loss", "examples")  # what a reply tells of local work
FEWEST = 3  # replies of which one liar cannot choose the median
RECENT = 20  # replies of earlier rounds that are remembered
LARGEST_LOSS = float(np.finfo(np.float32).max)  # of an example: no sum of such losses overflows

# Called with the name of an event, the client that is responsible for it, and the reason.
Note = Callable[[str, int, object], None]


class Halted(Exception):  # noqa: N818  # as one says it
    """No sum came about, and nobody counted: why, in words for the log."""


class NotFinite(Refused):
    """A reply in which a number is not finite."""


class Reply(NamedTuple):
    """A reply that passed the checks."""

    upload: PyTree
    seen: Weighted  # the sum of the losses of the visited examples, and their number


class Size(NamedTuple):
    """How large a reply is."""

    norm: float
    weights: list[float]
    counts: list[float]


NOTHING = Weighted(np.float64(0), np.float64(0))


class Summed(NamedTuple):
    """What the server learns of a phase."""

    upload: PyTree
    seen: Seen
    counted: frozenset[int]  # the clients whose uploads are in the sum
    clipped: int = 0  # how many of these had an entry outside of its range
    replies: Mapping[int, Reply] = {}  # by client; of a secure sum nobody knows them


def plain_sum(
    settings: Settings,
    plan: Plan,
    phase: Phase,
    orders: Mapping[int, messages.Order],
    like: PyTree,
    model_norm: float,
    recent: deque[Size],
    replies: Iterable[tuple[int, Message]],
    refuse: Callable[[int, Refused], None],
    note: Note,
) -> Summed:
    """Add up the replies, by the number of their client, that pass all checks.

    Args:
        settings: The bounds of `most_norm` and so on.
        plan: How much the clients were asked to work.
        phase: The phase to which the replies belong.
        orders: What each client was asked to do.
        like: The shapes and types of an upload.
        model_norm: Uploads of at most this norm are never refused for being larger than others.
        recent: The sizes of replies to this phase in earlier rounds; those of this round are added.
        replies: What arrived.
        refuse: Called with each client whose reply is left out, and why.
        note: Called for each reply of which a part is left out or lowered.
    """
    sound: dict[int, Reply] = {}
    for partition, reply in replies:
        try:
            belongs, content = orders[partition].reply(partition), messages.content(reply)
            sound[partition] = _checked(settings, len(orders), phase, belongs, like, content)
        except Refused as reason:
            refuse(partition, reason)
    norms = {partition: _norm(reply.upload) for partition, reply in sound.items()}
    if norms:
        words = "round %d: the norms of %d uploads have the median %g; the largest is %g"
        number, values = next(iter(orders.values())).round, [*norms.values()]
        log.info(words, number, len(values), np.median(values), max(values))
    too_large = _too_large(norms, recent, settings, model_norm)
    for partition, fault in (_false_counts(sound, recent, settings) | too_large).items():
        refuse(partition, fault)
        del sound[partition]
    for partition, own in sound.items():
        if lie := _false_report(settings, plan, own):
            note("refused_reports", partition, lie)
            sound[partition] = own._replace(seen=NOTHING)
    for partition, weights in _too_heavy(sound, recent, settings).items():
        words = f"its weights {_weights(sound[partition])} were lowered to {weights}"
        note("lowered_weights", partition, f"{words}, by most_weight_ratio")
        sound[partition] = _with_weights(sound[partition], weights)
    for key in sorted(sound):
        recent.append(Size(norms[key], _weights(sound[key]), _counts(sound[key].upload)))
    return add_up(sound)


def add_up(replies: Mapping[int, Reply]) -> Summed:
    """Return the sum of the replies, in the order of the clients' numbers."""
    if not replies:
        raise Halted("no reply was sound")
    ordered = [replies[partition] for partition in sorted(replies)]
    upload = _sum([reply.upload for reply in ordered])
    seen = _sum([reply.seen for reply in ordered])
    return Summed(upload, Seen(*seen), frozenset(replies), replies=replies)


# ------------------------------------------------------------------------- a reply by itself


def _checked(
    settings: Settings,
    asked: int,
    phase: Phase,
    belongs: Mapping[str, Any],
    like: PyTree,
    content: RecordDict,
) -> Reply:
    """A reply that is what was asked for, from whom it was asked, and sound; or a refusal."""
    about = messages.read(content, "fedda", algorithm=str, serial=int, partition=int)
    if about != dict(belongs):
        raise Refused(f"it belongs to another order: {about}")
    if "upload" not in content.array_records or "seen" not in content.metric_records:
        raise Refused("it has no upload, or does not say what was seen")
    upload = _opened(phase, messages.unpack(content.array_records["upload"], like))
    said = content.metric_records["seen"]
    numbers = [said.get(name, np.nan) for name in SEEN]
    seen: list[Any] = [np.float64(one) for one in numbers if not isinstance(one, list)]
    if len(seen) < len(numbers):
        raise Refused("what was seen is not in numbers")
    if not _all_finite((upload, seen)):
        raise NotFinite(f"a number of its upload or of its loss is not finite. {messages.REMEDY}")
    reply = Reply(upload, Weighted(*seen))
    _check_size(reply, settings, asked)
    return reply


def _check_size(reply: Reply, settings: Settings, asked: int) -> None:
    most_weight = settings.most_weight or np.inf
    for weight in _weights(reply.upload):
        if not 0 < weight <= most_weight:
            raise Refused(f"its weight is {weight:g}, not above 0 and at most {most_weight:g}")
    for leaf in filter(_is_inexact, jax.tree.leaves(reply.upload)):
        largest = float(np.max(np.abs(np.asarray(leaf, np.float64)), initial=0.0))
        # The square of a sum of so many such entries is finite, and so is what merges compute.
        most = float(np.sqrt(np.finfo(wide(leaf.dtype)).max)) / asked
        if largest > most:
            raise Refused(f"an entry of its upload is {largest:g}, more than {most:g}")
    if settings.most_norm is not None and (norm := _norm(reply.upload)) > settings.most_norm:
        raise Refused(f"its norm is {norm:g}, more than most_norm, which is {settings.most_norm:g}")


def _norm(upload: PyTree) -> float:
    """The norm of all parts but counters together, each weighted one divided by its weight."""
    total = 0.0
    for part in jax.tree.leaves(without_counters(upload), is_leaf=is_weighted):
        weight, values = (float(part.weight), part.sum) if is_weighted(part) else (1.0, part)
        for leaf in jax.tree.leaves(values):
            with np.errstate(over="ignore"):  # an infinite norm is out of bounds too
                total += float(np.square(np.asarray(leaf, np.float64) / weight).sum())
    return float(np.sqrt(total))


def _false_report(settings: Settings, plan: Plan, reply: Reply) -> str:
    """What is wrong with the loss and the examples that a client says it has seen; "" if nothing.

    They are only shown, so an upload counts without them.
    """
    loss, examples = map(float, reply.seen)
    most = np.inf
    if plan.unit == "steps":  # and STEM's first step takes all examples
        most = float(work_of(plan, np.ones(())).examples) + max([0.0, *_weights(reply.upload)])
    elif settings.most_weight is not None:
        most = float(work_of(plan, np.ceil(settings.most_weight)).examples)
    if not 0 <= examples <= most:
        return f"it says that it visited {examples:g} examples, not 0 to {most:g}"
    if not abs(loss) <= LARGEST_LOSS * examples:
        return f"it says that the losses of {examples:g} examples sum up to {loss:g}"
    return ""


# ------------------------------------------------------------------- a reply beside the others


def _too_large(
    norms: Mapping[int, float], recent: Iterable[Size], settings: Settings, model_norm: float
) -> dict[int, Refused]:
    """Refusals of the replies whose norm is out of proportion.

    A norm up to that of the model does no harm, and late in training the median may be tiny.
    """
    usual = [size.norm for size in recent] + [*norms.values()]
    if len(usual) < FEWEST or settings.most_norm_ratio is None:
        return {}
    median = float(np.median(usual))
    most = max(settings.most_norm_ratio * median, model_norm)
    words = "its norm is {:g}, more than {:g}; the median of the replies is {:g}"
    return {
        partition: Refused(words.format(norm, most, median))
        for partition, norm in norms.items()
        if norm > most
    }


def _false_counts(
    replies: Mapping[int, Reply], recent: Iterable[Size], settings: Settings
) -> dict[int, Refused]:
    """Refusals of the replies with a counter below 0, or out of proportion and above 1.

    Counters are numbers of local steps, or at most 1. Norms leave them out: they are judged here.
    """
    counts = {partition: _counts(reply.upload) for partition, reply in replies.items()}
    usual = [size.counts for size in recent] + [*counts.values()]
    limits = np.full(len(usual[0]) if usual else 0, np.inf)
    if len(usual) >= FEWEST and settings.most_weight_ratio is not None:
        limits = np.maximum(1.0, settings.most_weight_ratio * np.median(usual, axis=0))
    found = {}
    for partition, own in counts.items():
        for count, most in zip(own, limits, strict=True):
            if not 0 <= count <= most:
                found[partition] = Refused(
                    f"a counter of its upload is {count:g}, not 0 to {most:g}"
                )
    return found


def _too_heavy(
    replies: Mapping[int, Reply], recent: Iterable[Size], settings: Settings
) -> dict[int, list[float]]:
    """The lower weights of the replies of which one is out of proportion.

    The number of visited examples is one of them: it is the weight of the client's mean loss.
    """
    ratio = settings.most_weight_ratio
    weights = np.array([_weights(reply) for reply in replies.values()])
    usual = [size.weights for size in recent] + weights.tolist()
    if len(usual) < FEWEST or ratio is None or settings.most_weight is not None or not replies:
        return {}
    medians = np.median(usual, axis=0)
    lowered = np.minimum(weights, np.where(medians > 0, ratio * medians, np.inf))
    heavy = (lowered < weights).any(axis=1)
    return {key: lowered[row].tolist() for row, key in enumerate(replies) if heavy[row]}


def _weights(parts: PyTree) -> list[float]:
    found = jax.tree.leaves(parts, is_leaf=is_weighted)
    return [float(part.weight) for part in found if is_weighted(part)]


def _counts(upload: PyTree) -> list[float]:
    """The counters of an upload, those of weighted parts divided by the weight."""
    found = []
    for part in jax.tree.leaves(upload, is_leaf=lambda one: is_weighted(one) or is_counter(one)):
        weight, values = (float(part.weight), part.sum) if is_weighted(part) else (1.0, part)
        for counter in filter(is_counter, jax.tree.leaves(values, is_leaf=is_counter)):
            found += [float(leaf) / weight for leaf in jax.tree.leaves(counter)]
    return found


def _with_weights(reply: Reply, weights: list[float]) -> Reply:
    """The reply with other weights of its weighted parts, whose means stay the same."""
    left = iter(weights)

    def weigh(part: PyTree) -> PyTree:
        if not is_weighted(part):
            return part
        new, old = next(left), float(part.weight)
        if new == old:
            return part
        return jax.tree.map(lambda leaf: np.asarray(leaf * (new / old), leaf.dtype), part)

    return jax.tree.map(weigh, reply, is_leaf=is_weighted)


# --------------------------------------------------------------------------------- arithmetic


def wide(dtype: Any) -> Any:
    """The type in which numbers of this type are added up: float32 at least, float64 under x64."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return np.promote_types(dtype, jnp.result_type(float))


def _is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _all_finite(values: PyTree) -> bool:
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(values))


def _sum(uploads: list[PyTree]) -> PyTree:
    def add(*leaves: Any) -> Any:
        return reduce(np.add, (np.asarray(leaf, wide(leaf.dtype)) for leaf in leaves))

    return jax.tree.map(add, *uploads)


@partial(jax.jit, static_argnames="phase")
def _opened(phase: Phase, sent: PyTree) -> PyTree:
    return phase.opened(sent)
