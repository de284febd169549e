"""Sum the uploads of a phase, and check every reply as if its sender were malicious.

A reply is first checked alone, and then compared with the others (see `outliers`). So a single
client can neither make the sum overflow nor outweigh the others. `docs/flower.md` describes attacks
that these checks do not stop.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, RecordDict

from fedda.core.algorithm import Phase, Seen
from fedda.core.local import Weighted, is_weighted
from fedda.core.task import Plan
from fedda.core.tree import PyTree
from fedda.flower import messages
from fedda.flower.messages import NOT_FINITE, MessageError, NotFiniteError, Order
from fedda.flower.outliers import Comparison, Size, measure, norm_of
from fedda.flower.settings import Settings
from fedda.flower.state import log
from fedda.flower.transport import Transport
from fedda.simulate.cohort import work_of
from fedda.transforms.compression import on_weighted

LARGEST_LOSS = float(np.finfo(np.float32).max)  # of one example; sums of such losses are finite
NO_REPORT = Weighted(np.float64(0), np.float64(0))


class AggregationError(Exception):
    """The uploads of a phase could not be summed. None of them is used."""


class Exchange(NamedTuple):
    """The messages of one phase to the clients, and the form of their uploads."""

    phase: Phase
    plan: Plan  # the local work of a client
    params: PyTree  # the parameters of the server's model
    message: ArrayRecord  # the message of the phase, the same for all clients
    orders: Mapping[int, Order]  # the order to each client
    like: PyTree  # the shapes and types of an upload

    def content(self, client: int) -> RecordDict:
        """Return the content of the message to a client."""
        return RecordDict({**self.orders[client].records(), "message": self.message})


class Reply(NamedTuple):
    """A reply that passed the checks."""

    upload: PyTree
    seen: Weighted  # the sum of the losses of the processed examples, and their number
    size: Size


class Aggregate(NamedTuple):
    """The sum of the uploads of a phase."""

    upload: PyTree
    seen: Seen
    counted: frozenset[int]  # the clients in the sum
    clipped: int = 0  # the number of these clients with an entry outside of its range
    replies: Mapping[int, Reply] = {}  # by client; empty after secure aggregation

    @classmethod
    def of(cls, replies: Mapping[int, Reply]) -> "Aggregate":
        """Return the sum of the replies, added in the order of the clients' numbers."""
        if not replies:
            raise AggregationError("no reply was valid")

        def add(*leaves: Any) -> Any:
            return reduce(np.add, (np.asarray(leaf, wide(leaf.dtype)) for leaf in leaves))

        parts = [(replies[client].upload, replies[client].seen) for client in sorted(replies)]
        upload, seen = jax.tree.map(add, *parts)
        return cls(upload, Seen(*seen), counted=frozenset(replies), replies=replies)


class PlainAggregator:
    """Sums uploads that the server can read. There is one aggregator for each phase of a round."""

    def __init__(self, transport: Transport, settings: Settings) -> None:
        self.transport, self.settings = transport, settings
        self.comparison = Comparison(settings)

    def sum(self, exchange: Exchange) -> Aggregate:
        """Send the messages of a phase, and return the sum of the replies that pass all checks.

        Raises:
            AggregationError: No reply passed the checks.
        """
        replies: dict[int, Reply] = {}
        contents = {client: exchange.content(client) for client in exchange.orders}
        for client, message in self.transport.ask(contents):
            try:
                reply = self._read(exchange, client, messages.read_content(message))
            except MessageError as reason:
                self.transport.refuse(client, reason)
                continue
            if fault := self._false_report(exchange.plan, reply):
                self.transport.note("refused_reports", client, fault)
                reply = reply._replace(seen=NO_REPORT)
            replies[client] = reply
        if replies:
            norms = [reply.size.norm for reply in replies.values()]
            text = "the norms of %d uploads have the median %g; the largest is %g"
            log.debug(text, len(norms), np.median(norms), max(norms))  # to choose most_norm
            self._compare(replies, exchange.params)
        return Aggregate.of(replies)

    def _read(self, exchange: Exchange, client: int, content: RecordDict) -> Reply:
        """Return a reply after the checks that need no other replies.

        Raises:
            MessageError: The reply belongs to another order, or exceeds an absolute limit.
        """
        exchange.orders[client].check_reply(client, content)
        if "upload" not in content.array_records or "seen" not in content.metric_records:
            raise MessageError("it has no upload, or no report of the loss")
        metrics: Mapping[str, Any] = content.metric_records["seen"]
        report = [metrics.get(name) for name in ("loss", "examples")]
        if not all(isinstance(value, (int, float)) for value in report):
            raise MessageError(f"its report must be two numbers, loss and examples, got {report}")
        sent = messages.unpack(content.array_records["upload"], exchange.like)
        upload = _opened(exchange.phase, sent)
        arrays = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(upload)]
        if not all(np.isfinite(array).all() for array in (*arrays, np.array(report))):
            raise NotFiniteError(f"a number in its upload or loss is not finite. {NOT_FINITE}")
        # The square of a sum of such entries over all clients is finite. Merges need this.
        limit = float(np.sqrt(np.finfo(jnp.result_type(float)).max)) / len(exchange.orders)
        largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)
        if largest > limit:
            raise MessageError(f"an entry of its upload is {largest:g}, more than {limit:g}")
        limit = self.settings.most_weight or np.inf
        for weight in _weights(upload):
            if not 0 < weight <= limit:
                raise MessageError(f"its weight is {weight:g}, not above 0 and at most {limit:g}")
        size, limit = measure(upload, exchange.params), self.settings.most_norm or np.inf
        if size.norm > limit:
            raise MessageError(f"its norm is {size.norm:g}, more than most_norm, {limit:g}")
        return Reply(upload=upload, seen=Weighted(*map(np.float64, report)), size=size)

    def _false_report(self, plan: Plan, reply: Reply) -> str:
        """Return the reason why a client's report of its loss is impossible, or "".

        The report is only logged, so the upload is used without it.
        """
        loss, examples = map(float, reply.seen)
        limit = np.inf
        if plan.unit == "steps":  # plus all examples, for the first step of STEM
            limit = float(work_of(plan, np.ones(())).examples) + max([0.0, *reply.size.weights])
        elif self.settings.most_weight is not None:
            limit = float(work_of(plan, np.ceil(self.settings.most_weight)).examples)
        if 0 <= examples <= limit and abs(loss) <= LARGEST_LOSS * examples:
            return ""
        return (
            f"it reports the loss {loss:g} over {examples:g} examples, at most {limit:g} expected"
        )

    def _compare(self, replies: dict[int, Reply], params: PyTree) -> None:
        """Refuse replies that are out of proportion, and lower the weights of others."""

        def sizes() -> dict[int, Size]:
            return {
                key: reply.size._replace(weights=_weights(reply)) for key, reply in replies.items()
            }

        for client, fault in self.comparison.faults(sizes(), norm_of(params)).items():
            self.transport.refuse(client, MessageError(fault))
            del replies[client]
        for client, lowered in self.comparison.lowered(sizes()).items():
            reply, weights = replies[client], _weights(replies[client])
            if lowered != weights:
                fault = f"its weights {weights} were lowered to {lowered}"
                self.transport.note("lowered_weights", client, fault)
                reply = _with_weights(reply, lowered)
                replies[client] = reply._replace(size=measure(reply.upload, params))
        self.comparison.accepted += sizes().values()


def _weights(parts: PyTree) -> list[float]:
    leaves = jax.tree.leaves(parts, is_leaf=is_weighted)
    return [float(part.weight) for part in leaves if is_weighted(part)]


def _with_weights(reply: Reply, weights: Iterable[float]) -> Reply:
    """Return the reply with new weights of its weighted parts. Their means do not change."""
    remaining = iter(weights)

    def change(part: Weighted) -> Weighted:
        new, old = float(next(remaining)), float(part.weight)
        if new == old:
            return part
        return jax.tree.map(lambda leaf: np.asarray(leaf * (new / old), leaf.dtype), part)

    return on_weighted(change, reply)


def wide(dtype: Any) -> Any:
    """Return the type for sums of numbers: at least float32, or float64 if JAX has enabled it."""
    floating = jnp.issubdtype(dtype, jnp.inexact)
    return np.promote_types(dtype, jnp.result_type(float)) if floating else dtype


_opened = jax.jit(lambda phase, sent: phase.decoded(sent), static_argnums=0)
