"""The library on the problem of the test vectors: given batches and cohorts, and its state."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

import fedda
from conformance.reader import read_problem
from fedda import algorithms, api
from fedda.core.losses import cross_entropy
from fedda.core.task import Batch, Batches, Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.train import train

PROBLEM = read_problem()
CLIENTS = len(PROBLEM.clients)
ROUNDS, COHORT, SEED, FULL = 5, 3, 0, 2
PHASES = 2  # at most
MODEL = fedda.Model(
    lambda key: {"b": jnp.asarray(PROBLEM.weights[-1]), "w": jnp.asarray(PROBLEM.weights[:-1])},
    lambda params, x: x @ params["w"] + params["b"][None],
)
# Numbers of about 1 (V: up to 200) after some thousand operations, each of which errs by 1.1e-16 of
# its result; a division by eps = 0.05 makes an error at most 20 times as large.
TOLERANCE = 1e-12


def cohort(seed, number, population, size):
    """The cohort of a round, in place of the one that the library draws."""
    assert size == COHORT
    return np.array([each["client"] for each in PROBLEM.schedules["epochs"][number]], np.int32)


@cache
def given(schedule):
    """A `Task` whose clients take the batches of a schedule.

    A client knows its round by its random key, which is that of seed, round, phase and client.
    """
    visits = [
        (number, phase, each["client"], each["batches"])
        for number, visits in enumerate(PROBLEM.schedules[schedule])
        for phase in range(PHASES)
        for each in visits
    ]
    most = max(len(batches) for *_, batches in visits)
    rows = np.zeros((len(visits), most, 1, PROBLEM.batch), np.int32)
    mask, keys = np.zeros(rows.shape, bool), []
    for place, (number, phase, client, batches) in enumerate(visits):
        key = random.key(SEED)
        for part in (1, number, phase, client):  # 1 is training
            key = random.fold_in(key, part)
        keys.append(np.asarray(random.key_data(key)))
        for step, batch in enumerate(batches[:most]):
            if len(batch) <= PROBLEM.batch:  # a step with all examples is left to the library
                rows[place, step, 0, : len(batch)] = batch
                mask[place, step, 0, : len(batch)] = True
    keys, steps = np.array(keys), np.array([len(batches) for *_, batches in visits])

    class Given(Task):
        __slots__ = ()

        def batches(self, shard, key):
            if self.plan.unit == "full":
                return super().batches(shard, key)
            here = (random.key_data(key)[None] == keys).all(-1).argmax()
            chosen = (jnp.asarray(table)[here] for table in (steps, rows, mask))
            count, its_rows, its_mask = chosen

            def at(step):
                return Batch(shard, its_rows[step], its_mask[step], random.fold_in(key, step))

            return Batches(count, at)

        # Tasks are equal as tuples, but two schedules must not share a program.
        def __eq__(self, other):
            return type(self) is type(other) and tuple(self) == tuple(other)

        def __hash__(self):
            return hash((schedule, tuple(self)))

    return Given


def task(vector, model=MODEL):
    # As the schedule: the server refuses reports of more examples than planned.
    epochs = vector.schedule == "epochs"
    plan = Plan(PROBLEM.batch, 2, "epochs") if epochs else Plan(PROBLEM.batch, 3)
    return given(vector.schedule)(model, cross_entropy, plan, reduction=vector.reduction)


def full_rounds(vector):
    return FULL if vector.schedule == "full" else 0


def as_matrix(tree):
    """A tree like the parameters, as the matrix of the vectors; PyTorch's is transposed."""
    w = tree["w"] if "w" in tree else np.asarray(tree["weight"]).T
    b = tree["b"] if "b" in tree else tree["bias"]
    return np.vstack([w, np.asarray(b)[None]])


def is_model(tree):
    return isinstance(tree, dict)


def named(vector, hp, state, memory=None):
    """The server's state, and what the clients keep, by the names of the vectors."""
    found = state._asdict()
    for part in ("statistics", "point"):  # records within the state
        found |= found.pop(part)._asdict() if part in found else {}
    found = {name: value for name, value in found.items() if not isinstance(value, tuple)}
    if vector.algorithm == "scaffold":
        phase = algorithms.get("scaffold").phases[0]
        found |= {"mean_control": state.control, "control": phase.send(hp, state).control}
        if memory is not None:
            rows = [jax.tree.map(lambda leaf, i=i: leaf[i], memory) for i in range(CLIENTS)]
            found["client_controls"] = [as_matrix(row) for row in rows]
    if vector.algorithm == "climb" and memory is not None:
        found["multipliers"] = memory.multiplier
    if "x" in found:
        found["point"] = found.pop("x")
    if "unfilled" in found:
        found["ones"] = 1 - found.pop("unfilled")
    expected = vector.rounds[0].keys()
    if "rounds" not in expected or "rounds" not in found:
        found.pop("rounds", None)
    return {name: as_matrix(v) if is_model(v) else np.asarray(v) for name, v in found.items()}


def prepared(vector):
    algorithm = algorithms.get(vector.algorithm, **vector.options)
    return algorithm, api.traced(algorithm.Hyper(**vector.hyper), MODEL)


def simulated(vector, algorithm=None):
    """The state after each round of a simulation."""
    setup, hyper = api.prepare(
        vector.algorithm, MODEL, PROBLEM.clients, cross_entropy, batch=PROBLEM.batch,
        rounds=ROUNDS, cohort=COHORT, eval_every=1, stabilise=full_rounds(vector),
        **vector.options, **vector.hyper,
    )  # fmt: skip
    setup = setup._replace(task=task(vector), sample=cohort)
    if algorithm is not None:
        setup = setup._replace(algorithm=algorithm)
    hp = api.traced(hyper, MODEL)
    for evaluation in train(setup, hp, [SEED]):
        if evaluation.round > 0:
            state, memory = jax.tree.map(np.array, evaluation.run[:2])
            yield named(vector, hp, state, memory)


SHARDS = from_clients(PROBLEM.clients)
