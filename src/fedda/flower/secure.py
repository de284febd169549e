"""Secure aggregation: the server learns the sum of the uploads, but no single upload.

It uses Flower's SecAgg+ protocol. Flower's mod masks an upload on the client, and Flower's workflow
removes the masks from the sum. `secure_mods` turns an upload into the vector that the mod expects,
and `secure_sum` runs the workflow with the messages of a phase:

    setup       every client makes keys
    share       every client sends encrypted shares of its secrets to the others, via the server
    collect     every client does the work of the phase, and uploads its quantised, masked vector
    unmask      the remaining clients send the shares that remove the masks from the sum

A client may be lost at every stage. If it is lost before it has shared its secrets, the protocol
starts again without it. If it is lost before it uploads, the sum does not include it, and its masks
are removed. If it is lost later, the sum includes it. If too few clients remain, the phase fails.

The server learns the sums of uploads, weights and losses, which clients the sums include, and how
many of them had to be clipped. It learns nothing else if it follows the protocol and fewer clients
than the threshold collude with it. But Flower draws the masks from a Mersenne Twister with a 32-bit
seed: they hide an upload, but they do not withstand an attack. Also, the server can subtract two
sums. If the same model is sent twice, as when the second phase of a round fails and the round is
repeated, the difference is the upload of a client that is in only one of the sums. Only noise
protects against that.

Flower documents the mod, the workflow and its context. This module also uses three internals of
Flower, which may change with its versions:

- `flwr.common.secure_aggregation.secaggplus_constants`: the names in the protocol's records, to
  check a reply before the workflow or another client reads it;
- `flwr.compat.common.recorddict_compat.fitres_to_recorddict`: the form of a reply that the mod
  and the workflow read;
- `flwr.server.workflow.constant`: the names of two records in the workflow's context.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr import common as flower
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow import constant as workflow_names

from fedda.core.algorithm import Seen
from fedda.core.local import is_counter, is_weighted
from fedda.core.tree import PyTree
from fedda.flower import messages
from fedda.flower.aggregation import Aggregate, AggregationError, Exchange, wide
from fedda.flower.messages import MessageError, read_config
from fedda.flower.settings import MODULUS, Secure
from fedda.flower.transport import Transport
from fedda.simulate.cohort import work_of

RANGES = "secure.ranges"  # the record with the largest entries that a client may upload
MAX_SHARE = 4096  # the most bytes of an encrypted pair of shares
REPLIES: dict[str, dict[str, type]] = {  # the entries of a client's reply at each stage
    Stage.SETUP: {Key.PUBLIC_KEY_1: bytes, Key.PUBLIC_KEY_2: bytes},
    Stage.SHARE_KEYS: {Key.DESTINATION_LIST: list, Key.CIPHERTEXT_LIST: list},
    Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: list},
    Stage.UNMASK: {Key.NODE_ID_LIST: list, Key.SHARE_LIST: list},
}
EXTRA = 4  # further entries of a vector: loss, examples, 1, and whether an entry was clipped


# --------------------------------------------------------------------------------- the client


def secure_mods() -> list[Mod]:
    """Return the Flower mods of a client that uploads only masked vectors.

    In a list of mods, put other mods that change an upload, such as noise, after these.

    Example:
        >>> from fedda.flower import secure_mods
        >>> len(secure_mods())
        3
    """
    return [_refuse_unmasked, secaggplus_mod, _reply_with_vector]


def _refuse_unmasked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse requests that Flower's mod accepts: an unmasked upload, or too few shares."""
    kind, content = message.metadata.message_type, message.content
    if kind.split(".")[0] == MessageType.TRAIN:  # the mod ignores kinds such as train.default
        if kind != MessageType.TRAIN or RECORD_KEY_CONFIGS not in content.config_records:
            raise MessageError("the server asked for an unmasked upload; this client masks it")
        if content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE) == Stage.SETUP:
            types = {Key.SHARE_NUMBER: int, Key.THRESHOLD: int}
            shares, needed = read_config(content, RECORD_KEY_CONFIGS, **types).values()
            if needed < 2 or 2 * needed <= shares:
                raise MessageError(f"{needed} of {shares} shares would reveal a secret: too few")
    return call_next(message, context)


def _reply_with_vector(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Convert a reply to the form that Flower's mod expects: one vector with weight 1."""
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    ranges: Any = message.content.config_records.get(RANGES, ConfigRecord())
    reply = call_next(message, context)
    content = _fit_result([_vector(reply.content, ranges)])
    content["fedda"] = reply.content["fedda"]
    return Message(content, reply_to=message)


def _vector(content: RecordDict, ranges: Mapping[str, Any]) -> np.ndarray:
    """Return all numbers of a reply divided by their ranges, then 1, and whether one exceeds 1."""
    upload, seen = content.array_records["upload"], content.metric_records["seen"]
    if odd := sorted(set(upload) ^ set(ranges["names"])):
        raise MessageError(f"the server's ranges are not those of this upload: see {odd[0]}")
    arrays = [upload[name].numpy() for name in ranges["names"]]
    arrays = [array.view(jnp.bfloat16) if array.dtype == np.uint16 else array for array in arrays]
    arrays += [np.array(seen["loss"]), np.array(seen["examples"])]
    parts = zip(arrays, ranges["ranges"], strict=True)
    vector = np.concatenate([array.astype(np.float64).ravel() / most for array, most in parts])
    if not np.isfinite(vector).all():  # such a number would make the sum useless
        raise MessageError(f"a number in the upload is not finite. {messages.NOT_FINITE}")
    return np.append(vector, [1.0, (np.abs(vector) > 1).any()])


def _fit_result(arrays: list[np.ndarray]) -> RecordDict:
    """Return a reply in the older message format that Flower's mod and workflow read."""
    status, parameters = flower.Status(flower.Code.OK, ""), flower.ndarrays_to_parameters(arrays)
    return fitres_to_recorddict(flower.FitRes(status, parameters, 1, {}), keep_input=True)


# --------------------------------------------------------------------------------- the server


def secure_sum(
    exchange: Exchange, transport: Transport, secure: Secure, least: int = 1
) -> Aggregate:
    """Return the sum of the clients' uploads without seeing a single upload.

    A sum over fewer than `least` clients stays masked. A repeated round asks for the same uploads,
    and the difference of two sums would be the upload of a client that is in only one of them.

    Args:
        exchange: The messages of the phase.
        transport: Sends the messages, and logs refused replies.
        secure: The settings of secure aggregation.
        least: The smallest number of clients in the sum.

    Raises:
        AggregationError: Too few clients remained, or a client sent a wrong share.
    """
    secure.check(len(exchange.orders))
    needed = secure.needed(len(exchange.orders))
    leaves, structure = jax.tree.flatten(exchange.like)
    ranges = _ranges(secure, exchange)
    nodes: dict[int, int] | None = {transport.clients[key]: key for key in exchange.orders}
    while nodes is not None:
        grid = _ProtocolGrid(exchange, transport, ranges, nodes, least=max(least, needed))
        mean = _run_workflow(secure, grid, needed)
        nodes = grid.restart_with
    if mean is None:
        raise AggregationError(f"too few clients are left at the stage {grid.stage}")
    steps = 2 ** (secure.bits - 1)
    total = np.rint(mean * len(grid.counted) * steps) / steps  # removes rounding errors of the mean
    *parts, extra = np.split(total, np.cumsum([math.prod(leaf.shape) for leaf in leaves]))
    loss, examples, ones, clipped = extra * [*ranges[-2:], 1.0, 1.0]
    if ones != len(grid.counted):
        raise AggregationError("the masks could not be removed: a client sent a wrong share")
    arrays = [
        (part * most).reshape(leaf.shape).astype(wide(leaf.dtype))
        for part, most, leaf in zip(parts, ranges[:-2], leaves, strict=True)
    ]
    upload, seen = jax.tree.unflatten(structure, arrays), Seen(loss, examples)
    return Aggregate(upload, seen, counted=grid.counted, clipped=int(clipped))


def _ranges(secure: Secure, exchange: Exchange) -> list[float]:
    """Return the largest entry of each leaf of an upload, and of a client's loss and examples."""
    most_examples = math.ceil(secure.most_weight)
    work = work_of(exchange.plan, np.array(most_examples))
    visited = float(work.examples)
    most_counter = max(secure.most, float(work.computed))  # a counter is at most the local steps
    most_weight = 2.0 ** math.ceil(math.log2(most_examples))  # so that integers stay exact

    def of(parts: PyTree, weight: float = 1.0) -> list[float]:
        ranges: list[float] = []
        for part in jax.tree.leaves(parts, is_leaf=lambda one: is_weighted(one) or is_counter(one)):
            if is_weighted(part):
                ranges += [*of(part.sum, most_examples), most_weight]
            else:
                most = most_counter if is_counter(part) else secure.most
                ranges += [most * weight] * len(jax.tree.leaves(part))
        return ranges

    return [*of(exchange.like), secure.most_loss * visited, visited]


def _run_workflow(secure: Secure, grid: "_ProtocolGrid", needed: int) -> np.ndarray | None:
    """Run Flower's workflow. Return the mean of the clients' vectors, or None if it stopped."""
    nodes = [SimpleNamespace(node_id=node) for node in grid.clients]
    chosen = [(node, flower.FitIns(flower.Parameters([], ""), {})) for node in nodes]
    # Flower expects a strategy, but its workflow calls only these two methods.
    strategy: Any = SimpleNamespace(
        configure_fit=lambda *_: chosen,
        aggregate_fit=lambda _, results, failures: (results[0][1].parameters, {}),  # all are equal
    )
    shares = secure.shares(len(nodes))
    workflow: Any = SecAggPlusWorkflow(
        num_shares=1.0 if shares == len(nodes) else shares,
        reconstruction_threshold=needed,
        max_weight=1.0,  # every vector has weight 1, so Flower's weights have no effect
        clipping_range=1.0,
        quantization_range=2**secure.bits,
        modulus_range=MODULUS,
    )
    config = ConfigRecord({workflow_names.Key.CURRENT_ROUND: 0})
    result = workflow_names.MAIN_PARAMS_RECORD
    records = RecordDict({workflow_names.MAIN_CONFIGS_RECORD: config, result: ArrayRecord()})
    try:
        workflow(grid, LegacyContext(Context(0, 0, {}, records, {}), strategy=strategy))
    except (AssertionError, TypeError, ValueError) as error:
        if grid.stage != Stage.UNMASK:
            raise
        raise AggregationError(f"the shares of a secret do not fit together: {error}") from error
    means = records.array_records[result].to_numpy_ndarrays()
    return means[0] if means else None


@dataclass
class _ProtocolGrid:
    """A grid for Flower's workflow that adds the orders to messages and checks the replies."""

    exchange: Exchange
    transport: Transport
    ranges: list[float]
    clients: dict[int, int]  # the clients by their Flower node
    least: int  # the smallest number of clients in the sum
    stage: str = ""
    counted: frozenset[int] = frozenset()  # the clients in the sum
    # The remaining nodes, if others were lost before they shared their secrets. Without a restart,
    # the workflow would ask for shares of these secrets at the end, and fail.
    restart_with: dict[int, int] | None = None
    public_keys: set[bytes] = field(default_factory=set)

    def send_and_receive(
        self, requests: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send the messages of a stage, and return the valid replies."""
        configs: dict[int, Any] = {
            self.clients[request.metadata.dst_node_id]: request.content[RECORD_KEY_CONFIGS]
            for request in requests
        }
        self.stage = next(iter(configs.values()))[Key.STAGE]
        replies: dict[int, Message] = {}
        contents = {client: self._content(client, config) for client, config in configs.items()}
        for client, reply in self.transport.ask(contents):
            try:
                config = self._check(client, configs[client], messages.read_content(reply))
            except MessageError as reason:
                self.transport.refuse(client, reason)
            else:
                reply.content = RecordDict({**_fit_result([]), RECORD_KEY_CONFIGS: config})
                replies[client] = reply
        if self.stage == Stage.UNMASK:
            return [*replies.values()]
        if len(replies) < self.least:
            raise AggregationError(f"too few clients are left at the stage {self.stage}")
        self.counted = frozenset(replies)
        if self.stage != Stage.COLLECT_MASKED_VECTORS and len(replies) < len(configs):
            self.restart_with = {self.transport.clients[client]: client for client in replies}
            return []  # stops the workflow
        return [*replies.values()]

    def _content(self, client: int, config: ConfigRecord) -> RecordDict:
        """Return the content of a message, with the order at the stage in which clients work."""
        # A copy, because Flower's mod removes the stage from the record.
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(config))})
        if self.stage != Stage.COLLECT_MASKED_VECTORS:
            return content
        leaves = jax.tree_util.tree_leaves_with_path(self.exchange.like)
        names = [messages.leaf_name(path) for path, _ in leaves]
        content[RANGES] = ConfigRecord({"names": names, "ranges": self.ranges})
        return RecordDict({**self.exchange.content(client), **content})

    def _check(self, client: int, request: Mapping[str, Any], content: RecordDict) -> ConfigRecord:
        """Return the protocol's record of a reply. Raise a `MessageError` if it is not valid."""
        values = [*read_config(content, RECORD_KEY_CONFIGS, **REPLIES[self.stage]).values()]
        if self.stage == Stage.SETUP:
            for key in values:
                self._check_key(key)
        elif self.stage == Stage.COLLECT_MASKED_VECTORS:
            self.exchange.orders[client].check_reply(client, content)
            leaves = jax.tree.leaves(self.exchange.like)
            entries = sum(math.prod(leaf.shape) for leaf in leaves) + EXTRA
            if [type(part) for part in values[0]] != [bytes, bytes]:
                raise MessageError("it has no masked vector")
            for part, size in zip(values[0], (1, entries), strict=True):  # Flower's weight first
                array = Array("int64", (size,), "numpy.ndarray", part)
                messages.read_array(array, "masked vector", np.dtype(np.int64), (size,))
        else:
            nodes, shares = values
            if self.stage == Stage.SHARE_KEYS:
                named = {int(node) for node in request if node != Key.STAGE}
                named.discard(self.transport.clients[client])
                correct = len(nodes) == len(named) and set(nodes) == named
            else:
                correct = nodes == request[Key.ACTIVE_NODE_ID_LIST] + request[Key.DEAD_NODE_ID_LIST]
            if not correct or len(shares) != len(nodes):
                raise MessageError("its shares are not those of the clients that were named")
            if not all(type(share) is bytes and len(share) <= MAX_SHARE for share in shares):
                raise MessageError(f"a share must be at most {MAX_SHARE} bytes")
        return content.config_records[RECORD_KEY_CONFIGS]

    def _check_key(self, key: bytes) -> None:
        try:
            public: Any = load_pem_public_key(key)
            # The other clients will do the same, with keys on this curve.
            ec.generate_private_key(ec.SECP384R1()).exchange(ec.ECDH(), public)
        except Exception as error:  # an invalid key may raise errors of many types
            raise MessageError(f"a public key cannot be used: {error}") from error
        if key in self.public_keys:
            raise MessageError("another client has the same public key")
        self.public_keys.add(key)
