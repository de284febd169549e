"""The client of a federation: it works for a phase, and remembers what the algorithm asks it to.

What a client keeps between rounds is in `context.state`. A reply may be lost, or come too late, or
be part of a round that failed: the server says with every message which of the client's uploads was
the last to count, and the client goes on from what it kept then.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from jax import random

from fedda import algorithms, api
from fedda.core.algorithm import Algorithm, Phase
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, from_clients
from fedda.errors import InputError
from fedda.flower import messages

log = logging.getLogger("fedda.flower")
KEPT = "fedda.kept."  # and the serial number of the message after which it was kept


def client_app(
    task: Task,
    data: Callable[[Context], tuple[Any, Any]],
    algorithm: Algorithm | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """A client for whatever algorithm the server names, or for one of your own.

    `data(context)` gives the client's examples `(x, y)`, and is asked once in a process. The
    client's number is `partition-id` in the configuration of its node.
    """
    app = ClientApp(mods=mods)
    loaded: dict[int, Shards] = {}

    def shards(context: Context) -> Shards:
        number = partition(context)
        if number not in loaded:
            loaded[number] = from_clients([data(context)])
        return loaded[number]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        examples = int(shards(context).count[0])
        return Message(introduce(context, examples), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        order = messages.Order.read(message.content)
        record = algorithm or _named(order.algorithm, order.options)
        content = work(record, task, shards(context), order, message.content, context)
        return Message(content, reply_to=message)

    return app


def partition(context: Context) -> int:
    """The client's number in the federation."""
    try:
        number = int(context.node_config["partition-id"])
    except (KeyError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < 2**32:  # as many as a random key can be folded with
        raise InputError(
            "a client's number, from 0 to 2^32 - 1, is partition-id in the configuration of its "
            f"node, got {dict(context.node_config)}. Start the node with --node-config "
            "'partition-id=0'."
        )
    return number


def introduce(context: Context, examples: int) -> RecordDict:
    """The reply to the server's query who a client is, and whether it has examples to learn from.

    How many they are stays with the client, for under secure aggregation nobody is to know.
    """
    about = ConfigRecord({"partition": partition(context), "has_examples": bool(examples > 0)})
    return RecordDict({"fedda": about})


def work(
    algorithm: Algorithm,
    task: Task,
    shards: Shards,
    order: messages.Order,
    content: RecordDict,
    context: Context,
) -> RecordDict:
    """One phase of one round: what the client uploads, with what it has seen."""
    hp = api.traced(algorithms.hyper(order.algorithm, algorithm, order.hyper), task.model)
    phase = algorithm.phases[order.phase]
    state = jax.eval_shape(algorithm.init, hp, task.model.shapes())
    message = messages.unpack(
        content.array_records["message"], jax.eval_shape(phase.send, hp, state)
    )
    if order.full:
        task = task._replace(plan=task.plan.full())
    memory = recall(algorithm, hp, task, order, context)
    number = partition(context)
    key = _own_key() if phase.secret else random.fold_in(order.key(), number)
    shard = replace(shards.shard(0), num_clients=order.clients)
    upload, kept, seen = _work(phase, task, hp, message, memory, shard, key)
    remember(kept, order, context)
    return RecordDict(
        {
            "fedda": order.reply(number),
            "upload": messages.pack(upload),
            "seen": MetricRecord({"loss": float(seen.loss), "examples": float(seen.examples)}),
        }
    )


def recall(
    algorithm: Algorithm, hp: Any, task: Task, order: messages.Order, context: Context
) -> PyTree:
    """What the client kept when an upload of it last counted."""

    def at_first() -> PyTree:
        params = task.model.init(random.fold_in(random.key(order.seed), 0))
        return algorithm.memory(hp, params)

    like = jax.eval_shape(at_first)
    if not jax.tree.leaves(like):
        return like
    name = f"{KEPT}{order.counted}"
    if order.counted:
        if name in context.state:
            kept = messages.unpack(context.state.array_records[name], like)
            return jax.tree.map(jnp.asarray, kept)
        log.warning("round %d: what this client kept is lost, it begins anew", order.round)
    return jax.jit(at_first)()


def remember(kept: PyTree, order: messages.Order, context: Context) -> None:
    """Keeps what the next message may ask for, and forgets what none can."""
    for name in [name for name in context.state if name.startswith(KEPT)]:
        if not order.settled <= int(name.removeprefix(KEPT)) <= order.counted:
            del context.state[name]
    if jax.tree.leaves(kept):
        context.state[f"{KEPT}{order.serial}"] = messages.pack(kept)


def _own_key() -> jax.Array:
    """A key that only this client knows: whoever knew it could take its noise away again."""
    words = jnp.asarray(np.frombuffer(os.urandom(8), np.uint32))
    return random.wrap_key_data(words, impl="threefry2x32")


@partial(jax.jit, static_argnames=("phase", "task"))
def _work(
    phase: Phase, task: Task, hp: Any, message: PyTree, memory: PyTree, shard: Shards, key: Any
) -> Any:
    return phase.work(hp, task, message, memory, shard, key)


@lru_cache
def _named(name: str, options: str) -> Algorithm:
    """The same record whenever it is asked for, so that its work is compiled once."""
    return algorithms.get(name, **json.loads(options))
