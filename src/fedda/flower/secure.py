"""Secure aggregation: the server learns the sum of the clients' uploads, and no single one.

Flower's SecAgg+ does it: its mod masks an upload at the client, and its workflow removes the masks
from the sum. Here is what stands at their two ends: what makes an upload the vector that the mod
expects, and what leads the workflow through its stages with the messages of a phase.

    setup       each client makes keys
    share       each gives the others shares of its secrets, encrypted, by way of the server
    collect     each works for the phase and uploads its vector, in whole numbers and masked
    unmask      those that are left give the shares that remove the masks from the sum

A client may be lost at every stage: one that was lost before it uploaded does not count, and its
masks are removed; one that was lost afterwards counts. If too few are left, nobody counts.

The server learns the sums over the clients that counted, of their uploads, of their weights and of
what they have seen; who they are; and how many of them had to be clipped. (How many examples a
client has it learns only from a query for them.) It learns no more if it keeps to the protocol and
fewer clients than the threshold help it. But Flower draws the masks from a Mersenne Twister that is
seeded with 32 bits: they keep uploads from being seen, and do not withstand an attack on them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    bytes_to_ndarray,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs

from fedda.cohort import batches_of
from fedda.core import Seen
from fedda.errors import InputError
from fedda.flower import wire
from fedda.flower.wire import Refused
from fedda.local import Weighted
from fedda.task import Plan
from fedda.tree import PyTree

RANGES = "secure.ranges"  # the record that tells a client how large its entries may be
MODULUS = 2**32  # the largest that Flower allows
FLAGS = 2  # entries after those of the upload: 1, and whether one was clipped
LONGEST_SHARE = 4096  # bytes that an encrypted pair of shares may have

# Sends messages to clients, by their number, and gives the replies that come, as they come.
Ask = Callable[[Mapping[int, Message]], Iterable[tuple[int, Message]]]


class Secure(NamedTuple):
    """How uploads are made into whole numbers, and how many clients may be lost.

    An entry is clipped to the range from -r to r, and rounded at random and without bias to one of
    2^bits steps. So an entry of a sum of n uploads, none of them clipped, is off by less than
    n * 2 r / 2^bits. Here r is `most` for a plain entry, and `most` times `most_weight` for one
    that was multiplied by a weight. Weights that are whole numbers are summed without error if
    `most_weight` is at most 2^(bits - 1).
    """

    most: float  # of an entry of an upload, after a weighted one was divided by its weight
    most_weight: float  # the most examples that a client has
    most_loss: float = 100.0  # of a client's mean loss, which is only shown
    bits: int = 22
    neighbours: int | None = None  # with whom a client shares secrets, itself too; None: all
    threshold: float = 2 / 3  # of these, the part that must be left at the end

    def check(self, asked: int) -> None:
        """Refuses what cannot work with so many clients."""
        for name in ("most", "most_weight", "most_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} of secure must be a positive number, got {value}.")
        if not 0.5 < self.threshold < 1:
            raise InputError(
                f"threshold of secure must be above 0.5 and below 1, got {self.threshold}. Half of "
                f"the shares of a client must not do, or both of its secrets could be asked for."
            )
        near = self.neighbours
        if near is not None and (near < 3 or near % 2 == 0):
            raise InputError(f"neighbours of secure must be an odd number from 3 on, got {near}.")
        if asked < 2:
            raise InputError("a sum over one client is its upload. Ask two or more.")
        if not 1 <= self.bits <= 30 or asked * 2**self.bits >= MODULUS:
            most = min(30, 31 - math.floor(math.log2(asked)))
            raise InputError(
                f"bits of secure must be 1 to {most}, lest a sum over {asked} clients overflow; "
                f"got {self.bits}."
            )

    def shares(self, asked: int) -> int:
        """With how many each client shares its secrets, itself included."""
        return min(self.neighbours or asked, asked)

    def needed(self, asked: int) -> int:
        """How many of these must be left at the end."""
        shares = self.shares(asked)
        return max(2, shares // 2 + 1, int(self.threshold * shares))

    def ranges(self, like: PyTree, plan: Plan) -> PyTree:
        """How large the entries of each leaf may be, of an upload and of what was seen."""
        whole = math.ceil(self.most_weight)
        visited = float(batches_of(plan, np.array(whole)).examples)
        weight = 2.0 ** math.ceil(math.log2(whole))  # so that whole numbers stay whole

        def of(part: PyTree) -> PyTree:
            if not isinstance(part, Weighted):
                return self.most
            entries = jax.tree.map(lambda _: self.most * whole, part.sum)
            return Weighted(entries, weight)  # type: ignore[arg-type]

        upload = jax.tree.map(of, like, is_leaf=lambda part: isinstance(part, Weighted))
        seen = Seen(self.most_loss * visited, visited)  # type: ignore[arg-type]
        return {"upload": upload, "seen": seen}


class Summed(NamedTuple):
    """What the server learns of a phase."""

    upload: PyTree
    seen: Seen
    counted: frozenset[int]  # the clients whose uploads are in the sum
    clipped: int  # how many of these had an entry outside of its range


class Halted(Exception):  # noqa: N818  # as one says it
    """No sum came about, and nobody counted: why, in words for the log."""


# ------------------------------------------------------------------------------- the client


def secure_mods() -> list[Mod]:
    """The mods of a client that gives uploads to sums alone, and refuses to give one in plain.

    What else changes an upload, such as noise, comes after them in the list of mods.
    """
    return [_only_masked, secaggplus_mod, _as_vector]


def _only_masked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuses what the mod would do for any server: to upload in plain, or with too few others."""
    kind = message.metadata.message_type
    if kind.split(".")[0] == MessageType.TRAIN:  # the mod lets train.default through as it is
        if kind != MessageType.TRAIN or RECORD_KEY_CONFIGS not in message.content.config_records:
            raise Refused(
                "an upload in plain was asked for, and this client gives only masked ones"
            )
        asked = _said(message.content)
        if asked.get(Key.STAGE) == Stage.SETUP:
            shares, needed = (asked.get(name) for name in (Key.SHARE_NUMBER, Key.THRESHOLD))
            if type(shares) is not int or type(needed) is not int:
                raise Refused("the setup does not say how secrets are shared")
            if needed < 2 or 2 * needed <= shares:
                raise Refused(f"{needed} of {shares} shares would reveal a secret: too few")
    return call_next(message, context)


def _as_vector(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Makes a reply what the mod expects: one vector, and 1 for the number of its examples."""
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    ranges = message.content.config_records.get(RANGES, ConfigRecord())
    reply = call_next(message, context)
    content = _fitres([_vector(reply.content, ranges)])
    content["fedda"] = reply.content["fedda"]
    return Message(content, reply_to=message)


def _vector(content: RecordDict, ranges: Mapping[str, Any]) -> np.ndarray:
    """All entries as parts of their ranges in the order of their names, and the flags."""
    upload, seen = content.array_records["upload"], content.metric_records["seen"]
    entries = {_under("upload", name): _floats(sent.numpy()) for name, sent in upload.items()}
    entries |= {_under("seen", name): np.asarray(value, float) for name, value in seen.items()}
    if set(ranges) != set(entries):
        odd = sorted(set(ranges) ^ set(entries))
        raise Refused(f"the ranges are not those of this upload; the first of them is {odd[0]}")
    vector = np.concatenate([entries[name].ravel() / ranges[name] for name in sorted(ranges)])
    if not np.isfinite(vector).all():
        raise Refused("a number of the upload is not finite")  # as no sum could do without it
    clipped = bool((np.abs(vector) > 1).any())
    return np.append(vector, [1.0, clipped])


def _floats(array: np.ndarray) -> np.ndarray:
    """In the precision in which the mod quantises best; bfloat16 travels as its bits."""
    return np.asarray(array.view(jnp.bfloat16) if array.dtype == np.uint16 else array, np.float64)


def _under(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def _fitres(arrays: list[np.ndarray]) -> RecordDict:
    """Flower's older form of a reply, in which its mod and its workflow speak."""
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 1, {})
    return fitres_to_recorddict(result, keep_input=True)


# ------------------------------------------------------------------------------- the server


def secure_sum(
    secure: Secure,
    orders: Mapping[int, Message],
    like: PyTree,
    plan: Plan,
    ask: Ask,
    refuse: Callable[[int, Refused], None],
) -> Summed:
    """The sum of the uploads that the clients are ordered, by their number, to make in a phase.

    `like` has the shapes and types of an upload, and `plan` says how much the clients work. Each
    stage is one call of `ask`. Who sends a reply that is not sound is lost, and `refuse` is told.
    """
    secure.check(len(orders))
    number = jax.ShapeDtypeStruct((), np.float64)
    form = {"upload": like, "seen": Seen(number, number)}  # type: ignore[arg-type]
    ranges = secure.ranges(like, plan)
    named = {name: float(one.numpy()) for name, one in wire.pack(ranges).items()}
    entries = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(form))
    line = _Line(orders, ConfigRecord({**named}), entries + FLAGS, ask, refuse)
    counted, mean = _workflow(secure, line)
    steps = 2 ** (secure.bits - 1)
    vector = np.rint(mean * len(counted) * steps) / steps  # takes back what the mean was rounded
    ones, clipped = vector[-FLAGS:]
    if ones != len(counted):
        raise Halted("the masks could not be removed, as a client gave a wrong share")
    total = _tree(vector[:-FLAGS], form, list(named), jax.tree.leaves(ranges))
    return Summed(total["upload"], total["seen"], counted, int(clipped))


def _tree(vector: np.ndarray, form: PyTree, names: list[str], ranges: list[float]) -> PyTree:
    """Puts entries, which are parts of their ranges, back into the leaves they came from."""
    leaves, structure = jax.tree.flatten(form)
    order = sorted(range(len(names)), key=names.__getitem__)
    ends = np.cumsum([math.prod(leaves[place].shape) for place in order])
    for place, part in zip(order, np.split(vector, ends[:-1]), strict=True):
        leaf = leaves[place]
        leaves[place] = (part * ranges[place]).reshape(leaf.shape).astype(leaf.dtype)
    return jax.tree.unflatten(structure, leaves)


def _workflow(secure: Secure, line: "_Line") -> tuple[frozenset[int], np.ndarray]:
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
    context: Any = LegacyContext(Context(0, 0, {}, records, {}), strategy=strategy)  # type: ignore[arg-type]
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
        if not done:
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
        asked = {self.client[one.metadata.dst_node_id]: _said(one.content) for one in messages}
        sound = []
        for client, reply in self.ask({key: self.outgoing(key, asked[key]) for key in asked}):
            try:
                if reply.has_error():
                    raise Refused(f"an error: {reply.error.reason}")
                reply.content = self.checked(client, asked[client], reply.content)
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
        said = _said(content)
        check(client, asked, said)
        if asked[Key.STAGE] != Stage.COLLECT_MASKED_VECTORS:
            return RecordDict({RECORD_KEY_CONFIGS: said})
        about = wire.read(content, "fedda", algorithm=str, serial=int, partition=int)
        if about != dict(wire.Order.read(self.orders[client].content).reply(client)):
            raise Refused(f"it belongs to another order: {about}")
        return RecordDict({**_fitres([]), RECORD_KEY_CONFIGS: said})

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
            except (
                Exception
            ) as error:  # NumPy raises many kinds, and all mean that it is unreadable
                raise Refused(f"its masked vector cannot be read: {error}") from error
            if (array.dtype, array.shape) != (np.dtype(np.int64), (size,)):
                raise Refused(f"its masked vector is {array.dtype}{array.shape}")

    def check_shares(self, client: int, asked: ConfigRecord, said: ConfigRecord) -> None:
        lists: Any = (asked[Key.ACTIVE_NODE_ID_LIST], asked[Key.DEAD_NODE_ID_LIST])
        of, _ = _lists(said, Key.NODE_ID_LIST, Key.SHARE_LIST)
        if of != [*lists[0], *lists[1]]:
            raise Refused("its shares are not of those that were named")


def _said(content: RecordDict) -> ConfigRecord:
    return content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())


def _both(said: ConfigRecord, *names: str) -> list[bytes]:
    found = [said.get(name) for name in names]
    if not all(type(one) is bytes for one in found):
        raise Refused(f"it does not give {' and '.join(names)}")
    return found  # type: ignore[return-value]


def _lists(said: ConfigRecord, numbers: str, texts: str) -> tuple[list[int], list[bytes]]:
    """A list of numbers and, for each of them, bytes."""
    first: Any = said.get(numbers)
    second: Any = said.get(texts)
    if type(first) is not list or type(second) is not list or len(first) != len(second):
        raise Refused(f"it does not give {numbers} and {texts}")
    if not all(type(one) is int for one in first) or not all(type(one) is bytes for one in second):
        raise Refused(f"its {numbers} or {texts} are of a wrong type")
    return first, second
