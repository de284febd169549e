"""A small regression problem for federations on Flower, with its simulation and its rounds."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from jax import random

import fedda
from fedda import algorithms, api
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.flower import Settings, client_app
from fedda.simulate.cohort import draw_cohort
from helpers.flower_grid import LocalGrid

SIZES = (4, 7, 7, 4)

ROUNDS, COHORT, SEED = 5, 3, 3

PLAN = Plan(batch=3, amount=2, unit="steps")


def examples(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(SIZES[client], 3))
    return x, x @ rng.normal(size=(3, 2)) + 0.1 * rng.normal(size=(SIZES[client], 2))


def init(key):
    return {"kernel": random.normal(key, (3, 2)), "bias": jnp.zeros(2)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


TASK = Task(fedda.Model(init, apply), squared_error, PLAN)


def settings(algorithm="fedda-sgdm", **changes):
    base = Settings(algorithm, TASK, examples(0), ROUNDS, COHORT, seed=SEED, deadline=5.0, nodes=4)
    return base._replace(**changes)


@functools.cache
def app(client):
    """One for all tests, whose programs are compiled once; what it keeps is in its context."""
    return client_app(TASK, lambda context: examples(client))


def grid(spoil=None):
    return LocalGrid([app(client) for client in range(len(SIZES))], spoil)


@functools.cache
def simulated(name, **chosen):
    return fedda.run(
        name, TASK.model, [examples(client) for client in range(len(SIZES))], squared_error,
        rounds=ROUNDS, cohort=COHORT, batch=PLAN.batch, local_work=PLAN.amount, seed=SEED, **chosen,
    )  # fmt: skip


def assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), left, right)


@functools.cache
def reference(name, lost=frozenset(), skipped=frozenset()):
    """The rounds written out, without the replies that are `lost`: (round, phase, client)."""
    record = algorithms.get(name)
    hp = api.traced(record.Hyper(), TASK.model)
    clients = range(len(SIZES))
    shards = [from_clients([examples(client)]).shard(0) for client in clients]
    shards = [replace(shard, num_clients=len(SIZES)) for shard in shards]
    params = TASK.model.init(random.fold_in(random.key(SEED), 0))
    state, memory = record.init(hp, params), [record.memory(hp, params)] * len(SIZES)
    for number in (number for number in range(ROUNDS) if number not in skipped):
        drawn = draw_cohort(SEED, number, len(SIZES), COHORT)
        round_key = random.fold_in(random.fold_in(random.key(SEED), 1), number)
        for place, phase in enumerate(record.phases):
            message, uploads = phase.send(hp, state), []
            for client in drawn:
                key = random.fold_in(random.fold_in(round_key, place), client)
                own = (message, memory[client], shards[client], key)
                upload, kept, _ = jax.jit(phase.work, static_argnums=1)(hp, TASK, *own)
                if (number, place, client) not in lost:
                    uploads.append(upload)
                    memory[client] = kept
            state = phase.merge(hp, state, jax.tree.map(lambda *each: sum(each), *uploads))
    return state


LAST = frozenset({(4, 0, 2)})  # client 2 in the last round


def changed(reply, **records):
    content = RecordDict({name: reply.content[name] for name in reply.content})
    for name, record in records.items():
        content[name] = record
    return Message(metadata=reply.metadata, content=content)


def with_arrays(reply, change):
    arrays = {name: change(array) for name, array in reply.content["upload"].items()}
    return changed(reply, upload=ArrayRecord(arrays))
