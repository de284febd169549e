"""One liar among ten clients on digits: what the default limits of a Flower server stop.

The liar is client 3. Without limits the same lies cost at least 20 points of accuracy.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedda import algorithms
from fedda.algorithms import scaffold
from fedda.core import losses
from fedda.core.local import Counter, Weighted
from fedda.core.task import Plan, Task
from fedda.data import digits, partition
from fedda.models import linear
from fedda.tasks import config

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedda.flower import Settings, aggregation, client_app, messages, serve
from fedda.flower.outliers import measure
from helpers.flower_grid import LocalGrid

ROUNDS, CLIENTS, LIAR = 10, 10, 3
NAME = "client 3 (node 103)"
TASK = Task(linear(64, 10), losses.cross_entropy, Plan(16, 5), (losses.accuracy,))
RATES = {
    "fedavg": {"client_lr": 0.5},
    "fedda-adam": {"client_lr": 0.3, "server_lr": 0.5},
}


@functools.cache
def data() -> tuple[Any, ...]:
    found = digits.load()
    train, test = (
        (x.reshape(len(x), -1) / 16).astype(np.float32) for x in (found.train_x, found.test_x)
    )
    return train, found.train_y, test, found.test_y


@functools.cache
def app(client: int, clients: int = CLIENTS):
    """The app of a client that has every tenth example, or as many as its number says."""
    x, y, *_ = data()
    own = slice(client, None, CLIENTS)
    if clients != CLIENTS:  # of unequal size: 2, 4, 8, ... examples
        own = slice(2 ** (client + 1), 2 ** (client + 2))
    return client_app(TASK, lambda context: (x[own], y[own]))


def settings(algorithm: str, **changes: Any) -> Settings:
    x, y, *test = data()
    chosen = {"chosen": RATES[algorithm], "test": tuple(test), "eval_every": ROUNDS}
    base = Settings(algorithm, TASK, (x[:1], y[:1]), ROUNDS, CLIENTS, deadline=30.0, **chosen)
    return base._replace(**changes)


def lies(change, when=range(ROUNDS), liars=(LIAR,)):
    """A network in which client 3 changes each array of its upload in these rounds."""

    def spoil(partition, message, reply):
        if partition not in liars or messages.Order.read(message.content).round not in when:
            return [reply]
        content = RecordDict({name: reply.content[name] for name in reply.content})
        content["upload"] = ArrayRecord(
            {
                name: Array(np.asarray(change(name == "weight", array.numpy()), np.float32))
                for name, array in reply.content["upload"].items()
            }
        )
        return [Message(metadata=reply.metadata, content=content)]

    return LocalGrid([app(client) for client in range(CLIENTS)], spoil)


def times(factor):
    return lambda is_weight, array: array if is_weight else factor * array


def entries_of(value):
    return lambda is_weight, array: array if is_weight else np.full_like(array, value)


def heavy(is_weight, array):
    return np.float32(1e6) if is_weight else array


@functools.cache
def honest(algorithm: str):
    served = serve(lies(times(1)), settings(algorithm))
    assert not served.events
    return served


def accuracy_of(served):
    return served.history[-1]["accuracy"]


NO_LIMITS = {"most_norm_ratio": None, "most_sum_ratio": None, "most_weight_ratio": None}
LIES = {  # the change, in which rounds, and what the server counts
    "weight": (heavy, range(ROUNDS), {"lowered_weights": ROUNDS}),
    "one reply of 1e30": (entries_of(1e30), [4], {"refused_replies": 1}),
    "one reply of 1e15": (entries_of(1e15), [ROUNDS - 1], {"refused_replies": 1}),
    "x2000": (times(2000.0), range(ROUNDS), {"refused_replies": ROUNDS}),
    "x100": (times(100.0), range(ROUNDS), {"refused_replies": ROUNDS}),
    "x100 later": (times(100.0), range(5, ROUNDS), {"refused_replies": 5}),
    "x-10": (times(-10.0), range(ROUNDS), {"lowered_weights": ROUNDS}),
}
LOSS = {"weight": 0.15, "x-10": 0.1}  # of accuracy; 0.02 for all others


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize(
    "algorithm", ["fedavg", pytest.param("fedda-adam", marks=pytest.mark.slow)]
)
def test_a_liar_is_named_and_the_others_learn(algorithm, name):
    """With the default settings."""
    change, when, events = LIES[name]
    served = serve(lies(change, when), settings(algorithm))
    assert served.events_by_client == {NAME: events}
    assert served.history[-1]["skipped_rounds"] == 0
    # A refused client is one tenth of the examples. One that counts three times against the others
    # makes them slower, but they do learn.
    assert accuracy_of(served) > accuracy_of(honest(algorithm)) - LOSS.get(name, 0.02)


# Entries of 1e30 are refused by an absolute limit, whatever the settings.
@pytest.mark.parametrize("name", [name for name in LIES if name != "one reply of 1e30"])
def test_without_limits_the_same_lies_spoil_the_model(name):
    """They cost more than the limits let any of them cost, and ten times the usual 0.02."""
    change, when, _ = LIES[name]
    served = serve(lies(change, when), settings("fedavg", **NO_LIMITS))
    assert accuracy_of(served) < accuracy_of(honest("fedavg")) - 0.2


@pytest.mark.parametrize("algorithm", RATES)
def test_limits_do_not_touch_clients_of_equal_size(algorithm):
    """Bit by bit."""
    free = serve(lies(times(1)), settings(algorithm, **NO_LIMITS))
    jax.tree.map(np.testing.assert_array_equal, honest(algorithm).state, free.state)


@pytest.mark.parametrize("algorithm", RATES)
def test_large_honest_clients_count_for_less(algorithm):
    """Client 8 has 2^4 times the examples of the median: 512. Clients 7 and 8 are lowered."""
    common = settings(algorithm, nodes=9, cohort=9)
    limited, free = (
        serve(LocalGrid([app(client, 9) for client in range(9)]), common._replace(**changes))
        for changes in ({}, NO_LIMITS)
    )
    assert not free.events
    assert limited.events.keys() == {"lowered_weights"}
    assert {"client 7 (node 107)", "client 8 (node 108)"} <= limited.events_by_client.keys()
    assert accuracy_of(limited) > accuracy_of(free) - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_what_the_limits_cost_clients_with_few_classes_each(algorithm):
    """No algorithm loses a reply, and none more than three points of accuracy.

    In Dirichlet's partition the largest client has five times the examples of the smallest.
    """
    x, y, *_ = data()
    rows = partition.split("dirichlet:0.3", y, CLIENTS, seed=0)
    apps = [client_app(TASK, lambda _, own=own: (x[own], y[own])) for own in rows]
    chosen = config.preset("digits", "mlp").get(algorithm, {})
    common = settings("fedavg", chosen=chosen, rounds=20, eval_every=20)
    common = common._replace(algorithm=algorithm)
    limited = serve(LocalGrid(apps), common)
    free = serve(LocalGrid(apps), common._replace(**NO_LIMITS))
    print(algorithm, accuracy_of(free), accuracy_of(limited), dict(limited.events))
    assert limited.events.keys() <= {"lowered_weights"}
    assert accuracy_of(limited) > accuracy_of(free) - 0.03


def test_a_round_that_raises_the_loss_goes_on_without_the_suspect():
    when = [ROUNDS - 1]
    common = settings("fedavg", **NO_LIMITS)
    assert accuracy_of(serve(lies(times(-100.0), when), common)) < 0.5
    served = serve(lies(times(-100.0), when), common._replace(most_loss_ratio=1.5))
    assert served.events_by_client == {NAME: {"refused_replies": 1}}
    assert accuracy_of(served) > accuracy_of(honest("fedavg")) - 0.02


def test_a_round_that_raises_the_loss_is_rolled_back_if_no_single_client_is_to_blame():
    when, liars = [ROUNDS - 1], (LIAR, 4)
    common = settings("fedavg", **NO_LIMITS, most_loss_ratio=1.5)
    served = serve(lies(times(-100.0), when, liars), common)
    assert (served.events, served.events_by_client) == ({"rolled_back_rounds": 1}, {})
    assert served.history[-1]["skipped_rounds"] == 1
    shorter = serve(lies(times(1)), common._replace(rounds=ROUNDS - 1))
    jax.tree.map(np.testing.assert_array_equal, served.state, shorter.state)


@pytest.mark.parametrize("factor", [1e6, -1.0])
def test_a_false_count_of_steps_is_refused(factor):
    """FedDA+Adam with bias=steps divides by the mean number of steps, which no norm covers."""

    def spoil(partition, message, reply):
        if partition != LIAR:
            return [reply]
        content = RecordDict({name: reply.content[name] for name in reply.content})
        upload = ArrayRecord(dict(reply.content["upload"]))
        steps = upload["sum/steps/value"].numpy()
        upload["sum/steps/value"] = Array(np.asarray(factor * steps, steps.dtype))
        content["upload"] = upload
        return [Message(metadata=reply.metadata, content=content)]

    chosen = RATES["fedda-adam"] | {"bias": "steps"}
    grid = LocalGrid([app(client) for client in range(CLIENTS)], spoil)
    served = serve(grid, settings("fedda-adam", chosen=chosen, rounds=2))
    assert served.events_by_client == {NAME: {"refused_replies": 2}}
    assert served.history[-1]["skipped_rounds"] == 0


def test_a_lowered_weight_lowers_all_that_it_weighs():
    """SCAFFOLD's moves and control variates must have the same weights."""
    change = scaffold.Change(np.full(2, 100.0), np.full(2, 300.0))  # 100 times 1 and 3
    upload = scaffold.Upload(Weighted(change, np.float32(100)), Counter(np.float32(1)))
    reply = aggregation.Reply(upload, aggregation.NO_REPORT, measure(upload, np.zeros(2)))
    lowered = aggregation._with_weights(reply, [30.0, 0.0]).upload
    assert lowered.change.weight == pytest.approx(30)
    np.testing.assert_allclose(lowered.change.sum.moved, 30.0)
    np.testing.assert_allclose(lowered.change.sum.control, 90.0)
    assert lowered.clients.value == 1
