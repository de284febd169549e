"""The Flower client: it does the work of a phase and saves the client's memory.

The memory is in `context.state`. A reply may be lost, arrive too late, or belong to a round that
failed. So every order names the client's last upload that the server used, and the client resumes
from the memory that it saved with this upload.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from jax import random

from fedda import algorithms, api
from fedda.core.algorithm import Algorithm
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, from_clients
from fedda.errors import InputError
from fedda.flower.messages import CUSTOM, Order, pack, unpack
from fedda.flower.state import log
from fedda.simulate.devices import compile_cache

Data = TypeVar("Data")
MEMORY = "fedda.memory."  # followed by the serial number of the order with which it was saved


def client_app(
    task: Task,
    data: Callable[[Context], Any],
    algorithm: Algorithm | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """Return a Flower client. The server chooses the algorithm.

    The client's number is `partition-id` in the configuration of its node.

    Args:
        task: The model, the loss and the local work, such as from `fedda.flower.task`. They must be
            the same on the server.
        data: `(context) -> (x, y)`, returns the client's examples for the Flower context of a node:
            a pair of arrays or tensors, or a `Dataset` or `DataLoader` of PyTorch. It is called
            once for each client of a process.
        algorithm: A custom algorithm, the same as on the server. None uses the named algorithm
            that the server chooses.
        mods: Flower mods, such as `secure_mods()`.

    Returns:
        The client app, for Flower's `flower-supernode` or its simulation.

    Example:
        >>> import numpy as np
        >>> from fedda import models
        >>> from fedda.flower import client_app, task
        >>> def data(context):
        ...     rng = np.random.default_rng(context.node_config["partition-id"])
        ...     return rng.normal(size=(100, 8)), rng.integers(0, 3, 100)
        >>> app = client_app(task(models.linear(8, 3), "cross_entropy", batch=20), data)
    """
    train = partial(work, task, algorithm)
    supported = [CUSTOM] if algorithm else algorithms.names()
    return build_app(lambda context: from_clients([data(context)]), train, supported, mods)


def build_app(
    load: Callable[[Context], Data],
    train: Callable[[Data, RecordDict, Context], RecordDict],
    supported: Sequence[str],
    mods: list[Mod] | None,
) -> ClientApp:
    """Return a Flower client from functions that load the data and train.

    Args:
        load: `(context) -> data`, called once for each client of a process. It raises an error if
            the client has no examples.
        train: `(data, content, context) -> reply`, does the work of an order.
        supported: The names of the algorithms that the client can run.
        mods: Flower mods.
    """
    app = ClientApp(mods=mods)
    loaded: dict[int, Data] = {}

    def data(context: Context) -> Data:
        number = partition(context)
        if number not in loaded:
            loaded[number] = load(context)
        return loaded[number]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        data(context)
        return Message(introduce(context, 1, supported), reply_to=message)

    @app.train()
    @compile_cache()  # Flower starts a process for every message
    def answer(message: Message, context: Context) -> Message:
        return Message(train(data(context), message.content, context), reply_to=message)

    return app


def partition(context: Context) -> int:
    """Return the number of the client in the federation."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < 2**32:  # the range of jax.random.fold_in
        raise InputError(
            "the configuration of a node must have a partition-id from 0 to 2^32 - 1, got "
            f"{dict(context.node_config)}. Start the node with --node-config 'partition-id=0'."
        )
    return number


def introduce(context: Context, examples: int, supported: Sequence[str]) -> RecordDict:
    """Return the reply to the server's query: the client's number, and what it supports.

    The number of examples is only checked, not sent: secure aggregation keeps it secret.

    Args:
        context: The Flower context of the node.
        examples: The number of the client's examples.
        supported: The names of the algorithms that the client can run.

    Raises:
        InputError: The client has no examples, so it cannot take part.
    """
    if examples < 1:
        raise InputError(f"a client must have at least one example, got {examples}.")
    known = ConfigRecord({"partition": partition(context), "algorithms": [*supported]})
    return RecordDict({"fedda": known})


def build_reply(
    order: Order, context: Context, upload: PyTree, loss: float, examples: float
) -> RecordDict:
    """Return the reply to an order.

    Args:
        order: The order.
        context: The Flower context of the node.
        upload: The upload of the phase.
        loss: The sum of the training losses over all processed examples.
        examples: The number of processed examples.
    """
    answered = order.reply(partition(context))
    seen = MetricRecord({"loss": float(loss), "examples": float(examples)})
    return RecordDict({"fedda": answered, "upload": pack(upload), "seen": seen})


def work(
    task: Task,
    algorithm: Algorithm | None,
    shards: Shards,
    content: RecordDict,
    context: Context,
) -> RecordDict:
    """Do the work of one phase, and return the reply with the client's upload."""
    order = Order.read(content)
    algorithm = algorithm or algorithms.get(order.algorithm, **json.loads(order.options))
    hp = api.traced(algorithms.hyper(order.algorithm, algorithm, order.hyper), task.model)
    phase = algorithm.phases[order.phase]
    state = jax.eval_shape(algorithm.init, hp, task.model.shapes())
    like = jax.eval_shape(phase.send, hp, state)
    if order.full:
        task = task._replace(plan=task.plan.full())
    inputs = (
        unpack(content.array_records["message"], like),
        _load_memory(algorithm, hp, task, order, context),
        replace(shards.shard(0), num_clients=order.clients),
        _secret_key() if phase.secret else random.fold_in(order.key(), partition(context)),
    )
    upload, memory, seen = _work(phase, task, hp, inputs)
    _save_memory(memory, order, context)
    return build_reply(order, context, upload, seen.loss, seen.examples)


def _load_memory(
    algorithm: Algorithm, hp: Any, task: Task, order: Order, context: Context
) -> PyTree:
    """Return the memory that the client saved with its last upload that the server used."""

    def first() -> PyTree:
        params = task.model.init(random.fold_in(random.key(order.seed), 0))
        return algorithm.memory(hp, params)

    like = jax.eval_shape(first)
    name = f"{MEMORY}{order.resume_from}"
    if not jax.tree.leaves(like):
        return like
    if name in context.state:
        return unpack(context.state.array_records[name], like)
    if order.resume_from:
        log.warning("round %d: the client's memory is lost and was reset", order.round + 1)
    return jax.jit(first)()


def _save_memory(memory: PyTree, order: Order, context: Context) -> None:
    """Save the new memory, and delete memories that no later order can refer to."""
    for name in [name for name in context.state if name.startswith(MEMORY)]:
        if not order.keep_from <= int(name.removeprefix(MEMORY)) <= order.resume_from:
            del context.state[name]
    if jax.tree.leaves(memory):
        context.state[f"{MEMORY}{order.serial}"] = pack(memory)


def _secret_key() -> jax.Array:
    """Return a random key that only this client knows. With the key, its noise could be removed."""
    numbers = jnp.asarray(np.frombuffer(os.urandom(8), np.uint32))
    return random.wrap_key_data(numbers, impl="threefry2x32")


_work = jax.jit(
    lambda phase, task, hp, inputs: phase.work(hp, task, *inputs), static_argnums=(0, 1)
)
