"""Secure aggregation at the server: Flower's workflow is led to the sum of masked uploads."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, bytes_to_ndarray, parameters_to_ndarrays
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs

from fedda.core.algorithm import Seen
from fedda.core.task import Plan
from fedda.core.tree import PyTree
from fedda.flower import messages as wire
from fedda.flower.aggregation import Halted, Summed, wide
from fedda.flower.messages import Refused
from fedda.flower.secure import FLAGS, MODULUS, RANGES, Secure, fitres, protocol_part

LONGEST_SHARE = 4096  # bytes that an encrypted pair of shares may have

# Sends messages to clients, by their number, and gives the replies that come, as they come.
Ask = Callable[[Mapping[int, Message]], Iterable[tuple[int, Message]]]


def secure_sum(
    secure: Secure,
    orders: Mapping[int, Message],
    like: PyTree,
    plan: Plan,
    ask: Ask,
    refuse: Callable[[int, Refused], None],
    least: int = 1,
) -> Summed:
    """The sum of the uploads that the clients are ordered, by their number, to make in a phase.

    `like` has the shapes and types of an upload, and `plan` says how much the clients work. Each
    stage is one call of `ask`. Who sends a reply that is not sound is lost, and `refuse` is told. A
    sum over fewer than `least` stays masked: when its round is repeated the same uploads are asked
    for, and the difference of two such sums would be the upload of whoever is in one of them.
    """
    secure.check(len(orders))
    number = jax.ShapeDtypeStruct((), np.float64)
    form = {"upload": like, "seen": {"loss": number, "examples": number}}
    ranges = secure.ranges(like, plan)
    named = {name: float(one.numpy()) for name, one in wire.pack(ranges).items()}
    entries = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(form))
    line = _Line(orders, ConfigRecord({**named}), entries + FLAGS, ask, refuse)
    counted, mean = _workflow(secure, line, least)
    steps = 2 ** (secure.bits - 1)
    vector = np.rint(mean * len(counted) * steps) / steps  # takes back what the mean was rounded
    ones, clipped = vector[-FLAGS:]
    if ones != len(counted):
        raise Halted("the masks could not be removed, as a client gave a wrong share")
    total = _tree(vector[:-FLAGS], form, list(named), jax.tree.leaves(ranges))
    return Summed(total["upload"], Seen(**total["seen"]), counted, int(clipped))


def _tree(vector: np.ndarray, form: PyTree, names: list[str], ranges: list[float]) -> PyTree:
    """Puts entries, which are parts of their ranges, back into the leaves they came from."""
    leaves, structure = jax.tree.flatten(form)
    order = sorted(range(len(names)), key=names.__getitem__)
    ends = np.cumsum([math.prod(leaves[place].shape) for place in order])
    for place, part in zip(order, np.split(vector, ends[:-1]), strict=True):
        leaf = leaves[place]
        leaves[place] = (part * ranges[place]).reshape(leaf.shape).astype(wide(leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def _workflow(secure: Secure, line: "_Line", least: int) -> tuple[frozenset[int], np.ndarray]:
    """Who counted, and the mean of their vectors, by Flower's workflow."""
    asked = len(line.nodes)
    shares = secure.shares(asked)
    workflow = SecAggPlusWorkflow(
        1.0 if shares == asked else shares,
        secure.needed(asked),
        max_weight=1.0,  # and one example each: the workflow's weights do nothing
        clipping_range=1.0,
        quantization_range=2**secure.bits,
        modulus_range=MODULUS,
    )
    strategy, state = _Strategy(line.nodes), WorkflowState()
    records = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 0}),
            MAIN_PARAMS_RECORD: ArrayRecord(),
        }
    )
    # Flower's classes are to be inherited from whole; what it calls of them is there.
    context = LegacyContext(Context(0, 0, {}, records, {}), strategy=strategy)  # type: ignore[arg-type]
    stages = {
        Stage.SETUP: workflow.setup_stage,
        Stage.SHARE_KEYS: workflow.share_keys_stage,
        Stage.COLLECT_MASKED_VECTORS: workflow.collect_masked_vectors_stage,
        Stage.UNMASK: workflow.unmask_stage,
    }
    for name, stage in stages.items():
        try:
            done = stage(line, context, state)  # type: ignore[arg-type]
        except (AssertionError, TypeError, ValueError) as error:
            if name != Stage.UNMASK:
                raise
            raise Halted(f"the shares of a secret do not fit together: {error}") from error
        if not done or (name != Stage.UNMASK and len(state.active_node_ids) < least):
            raise Halted(f"too few clients are left at the stage {name}")
        if name in (Stage.SETUP, Stage.SHARE_KEYS):
            _forget_lost(state)
    return frozenset(line.client[node] for node in strategy.counted), strategy.mean


def _forget_lost(state: WorkflowState) -> None:
    """Who was lost before it shared its secrets has put no masks on anybody.

    The workflow would ask for shares of those secrets at the end, and fail.
    """
    left = state.active_node_ids
    state.sampled_node_ids = set(left)
    state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & left for node in left}


class _Strategy:
    """The parts of Flower's strategy that its workflow calls."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes = nodes
        self.counted: list[int] = []
        self.mean = np.zeros(0)

    def configure_fit(self, *_: object) -> list[tuple[SimpleNamespace, FitIns]]:
        return [
            (SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes
        ]

    def aggregate_fit(
        self, _: int, results: list[tuple[Any, FitRes]], failures: object
    ) -> tuple[None, dict[str, Any]]:
        self.counted = [proxy.node_id for proxy, _ in results]
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)  # the same in all
        return None, {}


class _Line:
    """What the workflow takes for a grid: it adds the orders, and keeps replies that are sound."""

    def __init__(
        self,
        orders: Mapping[int, Message],
        ranges: ConfigRecord,
        entries: int,
        ask: Ask,
        refuse: Callable[[int, Refused], None],
    ) -> None:
        self.orders, self.ranges, self.entries = orders, ranges, entries
        self.ask, self.refuse = ask, refuse
        self.client = {order.metadata.dst_node_id: key for key, order in orders.items()}
        self.nodes = list(self.client)
        self.trial_key, _ = generate_key_pairs()
        self.public_keys: set[bytes] = set()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        asked = {
            self.client[one.metadata.dst_node_id]: protocol_part(one.content) for one in messages
        }
        sound = []
        for client, reply in self.ask({key: self.outgoing(key, asked[key]) for key in asked}):
            try:
                reply.content = self.checked(client, asked[client], wire.content(reply))
            except Refused as reason:
                self.refuse(client, reason)
                continue
            sound.append(reply)
        return sound

    def outgoing(self, client: int, asked: ConfigRecord) -> Message:
        """A message of the workflow, with the order if that is to be done now."""
        order = self.orders[client]
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(asked))})
        if asked[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
            content = RecordDict({**order.content, **content, RANGES: self.ranges})
        about = order.metadata
        return Message(
            content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id
        )

    def checked(self, client: int, asked: ConfigRecord, content: RecordDict) -> RecordDict:
        """What the workflow needs of a reply, and nothing that it or other clients stumble over."""
        check = {
            Stage.SETUP: self.check_keys,
            Stage.SHARE_KEYS: self.check_ciphertexts,
            Stage.COLLECT_MASKED_VECTORS: self.check_masked,
            Stage.UNMASK: self.check_shares,
        }[str(asked[Key.STAGE])]
        said = protocol_part(content)
        check(client, asked, said)
        if asked[Key.STAGE] != Stage.COLLECT_MASKED_VECTORS:
            return RecordDict({RECORD_KEY_CONFIGS: said})
        about = wire.read(content, "fedda", algorithm=str, serial=int, partition=int)
        if about != dict(wire.Order.read(self.orders[client].content).reply(client)):
            raise Refused(f"it belongs to another order: {about}")
        return RecordDict({**fitres([]), RECORD_KEY_CONFIGS: said})

    def check_keys(self, client: int, asked: ConfigRecord, said: ConfigRecord) -> None:
        for key in _both(said, Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
            try:
                generate_shared_key(self.trial_key, bytes_to_public_key(key))  # as the others will
            except Exception as error:  # there are many kinds, and all mean that it is no such key
                raise Refused(f"a public key cannot be used: {error}") from error
            if key in self.public_keys:
                raise Refused("a public key is not its own")
            self.public_keys.add(key)

    def check_ciphertexts(self, client: int, asked: ConfigRecord, said: ConfigRecord) -> None:
        own = self.orders[client].metadata.dst_node_id
        others = {int(node) for node in asked if node != Key.STAGE} - {own}
        to, texts = _lists(said, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST)
        if sorted(to) != sorted(others):
            raise Refused("its shares are not for those that were named")
        if any(len(text) > LONGEST_SHARE for text in texts):
            raise Refused("a share is too long")

    def check_masked(self, client: int, asked: ConfigRecord, said: ConfigRecord) -> None:
        parts: Any = said.get(Key.MASKED_PARAMETERS)
        sizes = (1, self.entries)  # the workflow's weight, and the vector
        if type(parts) is not list or len(parts) != len(sizes):
            raise Refused("it has no masked vector")
        for part, size in zip(parts, sizes, strict=True):
            if type(part) is not bytes or len(part) > 8 * size + wire.HEADER:
                raise Refused("its masked vector has too many bytes")
            try:
                array = bytes_to_ndarray(part)
            except Exception as error:  # NumPy raises many kinds, and all mean the same
                raise Refused(f"its masked vector cannot be read: {error}") from error
            wire.check_array(array, np.dtype(np.int64), (size,), "its masked vector")

    def check_shares(self, client: int, asked: ConfigRecord, said: ConfigRecord) -> None:
        lists: Any = (asked[Key.ACTIVE_NODE_ID_LIST], asked[Key.DEAD_NODE_ID_LIST])
        of, _ = _lists(said, Key.NODE_ID_LIST, Key.SHARE_LIST)
        if of != [*lists[0], *lists[1]]:
            raise Refused("its shares are not of those that were named")


def _both(said: ConfigRecord, *names: str) -> list[bytes]:
    found = [one for one in map(said.get, names) if type(one) is bytes]
    if len(found) < len(names):
        raise Refused(f"it does not give {' and '.join(names)}")
    return found


def _lists(said: ConfigRecord, numbers: str, texts: str) -> tuple[list[int], list[bytes]]:
    """A list of numbers and, for each of them, bytes."""
    first: Any = said.get(numbers)
    second: Any = said.get(texts)
    if type(first) is not list or type(second) is not list or len(first) != len(second):
        raise Refused(f"it does not give {numbers} and {texts}")
    if not all(type(one) is int for one in first) or not all(type(one) is bytes for one in second):
        raise Refused(f"its {numbers} or {texts} are of a wrong type")
    return first, second
