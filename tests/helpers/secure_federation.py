"""Clients of secure aggregation in one process, with faults.

Flower's own mod and workflow run here; what they send is serialised on its way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from jax import random

import fedda
from fedda.core.local import Weighted
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.flower import Secure, messages, secure_mods
from fedda.flower.aggregation import Exchange
from fedda.flower.secure import secure_sum

# Flower lets no process make messages that is not a server's or a client's.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

SETUP, SHARE, COLLECT, UNMASK = "setup", "share_keys", "collect_masked_vectors", "unmask"
STAGES = (SETUP, SHARE, COLLECT, UNMASK)
CONFIGS = "secaggplus_configs"
NODES = (2**63 + 5, 7, 2**62, 99, 12, 2**64 - 2, 1)  # node ids have 64 bits, none of them a sign
COUNTS = (5, 3, 4, 2, 6, 1, 4)
CLIENTS = 5
SECURE = Secure(most=4.0, most_weight=8)
PLAN = Plan(3, 2, "epochs")


class Federation:
    """Clients in this process. `lost` are those whose reply of a stage does not arrive."""

    def __init__(self, apps, lost=(), spoil=None):
        self.apps, self.lost, self.spoil = apps, set(lost), spoil
        self.clients = dict(zip(range(len(apps)), NODES, strict=False))
        self.contexts = {
            client: Context(1, node, {"partition-id": client}, RecordDict(), {})
            for client, node in self.clients.items()
        }
        self.arrived = {stage: {} for stage in STAGES}
        self.refused = {}

    def ask(self, contents):
        for client, content in contents.items():
            stage = content[CONFIGS]["stage"]
            message = Message(content, NODES[client], "train", ttl=60, group_id="0")
            message.metadata.__dict__["_message_id"] = f"{client} {stage}"
            try:
                reply = self.apps[client](over_the_wire(message), self.contexts[client])
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            if (client, stage) in self.lost:
                continue
            reply = over_the_wire(reply)
            if self.spoil is not None and reply.has_content():
                self.spoil(client, stage, reply.content)
            self.arrived[stage][client] = over_the_wire(reply)
            yield client, reply

    def refuse(self, client, reason):
        self.refused[client] = str(reason)

    def sum(self, like, secure=SECURE, plan=PLAN, message=None, **changes):
        exchange = Exchange(
            phase=None,
            plan=plan,
            params=None,
            message=messages.pack(message or {}),
            orders={client: order(client, **changes) for client in self.clients},
            like=like,
        )
        return secure_sum(exchange, self, secure)


def over_the_wire(message):
    return message_from_proto(message_to_proto(message))


def order(client, **changes):
    """The order to a client to upload."""
    return messages.Order(
        algorithm="fedda-sgdm",
        options="{}",
        seed=0,
        round=0,
        phase=0,
        full=False,
        clients=CLIENTS,
        serial=client + 1,
        resume_from=0,
        keep_from=0,
    )._replace(**changes)


def message_to(client, content=None, kind="train"):
    """A message with an order, and nothing of the protocol."""
    return Message(RecordDict({**order(client).records(), **(content or {})}), NODES[client], kind)


def sender(client, upload, loss=1.5, examples=2.0):
    """A client that uploads this whenever it is asked."""
    app = ClientApp(mods=secure_mods())

    @app.train()
    def train(message, context):
        seen = {"loss": loss, "examples": examples}
        content = {
            "fedda": messages.Order.read(message.content).reply(client),
            "upload": messages.pack(upload),
            "seen": MetricRecord(seen),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


class Upload(NamedTuple):
    """Of all kinds: entries that were multiplied by a weight, the weight, and others."""

    moved: Weighted
    control: np.ndarray


def upload(client, size=7):
    rng = np.random.default_rng(client)
    model = {"kernel": rng.uniform(-4, 4, (size, 3)), "bias": rng.uniform(-4, 4, 2)}
    weight = float(COUNTS[client])
    scaled = jax.tree.map(lambda leaf: weight * leaf, model)
    return Upload(Weighted(scaled, np.float64(weight)), rng.uniform(-4, 4, size))


def form_of(upload):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), upload)


UPLOADS = [upload(client) for client in range(len(NODES))]

LIKE = form_of(UPLOADS[0])


def federation(clients=CLIENTS, **faults):
    return Federation([sender(client, UPLOADS[client]) for client in range(clients)], **faults)


def plain_sum(clients):
    return jax.tree.map(lambda *leaves: sum(leaves), *(UPLOADS[client] for client in clients))


def assert_sum(found, clients, secure=SECURE):
    """Whatever the docstring of `Secure` promises, of the sum over just these clients."""
    assert found.counted == set(clients)
    step = len(clients) * 2 * secure.most / 2**secure.bits
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found.upload, plain_sum(clients))
    assert max(jax.tree.leaves(error.moved.sum)) < secure.most_weight * step
    assert error.moved.weight == 0
    assert error.control < step
    visited = 2 * secure.most_weight  # two epochs
    seen = (found.seen.loss, found.seen.examples)
    for one, wanted, most in zip(seen, (1.5, 2.0), (secure.most_loss, 1), strict=True):
        bound = len(clients) * 2 * most * visited / 2**secure.bits
        assert abs(one - len(clients) * wanted) < bound
    assert found.clipped == 0
    return error


def init(key):
    return {"kernel": random.normal(key, (3, 2)), "bias": jnp.zeros(2)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


TASK = Task(fedda.Model(init, apply), squared_error, PLAN)


def examples(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(COUNTS[client], 3))
    return x, x @ rng.normal(size=(3, 2)) + 0.1 * rng.normal(size=(COUNTS[client], 2))
