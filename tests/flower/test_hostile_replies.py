"""One liar among ten clients on digits: what the default limits of a Flower server stop.

The liar is client 3. Without limits the same lies ruin the model.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedda.algorithms import scaffold
from fedda.core import losses
from fedda.core.local import Counter, Weighted
from fedda.core.task import Plan, Task
from fedda.data import digits
from fedda.models import linear

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedda.flower import Settings, aggregation, client_app, messages, serve
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


def lies(change, when=range(ROUNDS)):
    """A network in which client 3 changes each array of its upload in these rounds."""

    def spoil(partition, message, reply):
        if partition != LIAR or messages.Order.read(message.content).round not in when:
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


NO_LIMITS = {"most_norm_ratio": None, "most_weight_ratio": None}
LIES = {  # the change, in which rounds, what the server counts, settings
    "weight": (heavy, range(ROUNDS), {"lowered_weights": ROUNDS}, {}),
    "one reply of 1e30": (entries_of(1e30), [4], {"refused_replies": 1}, {}),
    "one reply of 1e15": (entries_of(1e15), [ROUNDS - 1], {"refused_replies": 1}, {}),
    "x2000": (times(2000.0), range(ROUNDS), {"refused_replies": ROUNDS}, {}),
    "x100": (times(100.0), range(ROUNDS), {"refused_replies": ROUNDS}, {"most_norm_ratio": 10.0}),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize(
    "algorithm", ["fedavg", pytest.param("fedda-adam", marks=pytest.mark.slow)]
)
def test_a_liar_is_named_and_the_others_learn(algorithm, name):
    change, when, events, changes = LIES[name]
    served = serve(lies(change, when), settings(algorithm, **changes))
    assert served.events_by_client == {NAME: events}
    assert served.history[-1]["skipped_rounds"] == 0
    # A refused client is one tenth of the examples. One that says it has 30 times the median, and
    # hardly moves, leaves 9 / 39 of each step to the others: they are slower, but do learn.
    loss = 0.15 if "lowered_weights" in events else 0.02
    assert accuracy_of(served) > accuracy_of(honest(algorithm)) - loss


# Entries of 1e30 are refused by an absolute limit, whatever the settings.
@pytest.mark.parametrize("name", [name for name in LIES if name != "one reply of 1e30"])
def test_without_limits_the_same_lies_stop_the_learning(name):
    change, when, _, _ = LIES[name]
    served = serve(lies(change, when), settings("fedavg", **NO_LIMITS))
    assert accuracy_of(served) < accuracy_of(honest("fedavg")) - 0.3


@pytest.mark.parametrize("algorithm", RATES)
def test_limits_do_not_touch_honest_clients(algorithm):
    """Bit by bit, also where the largest client has 2^4 times the examples of the median one."""
    for nodes in ([app(client) for client in range(CLIENTS)], [app(k, 9) for k in range(9)]):
        common = settings(algorithm, nodes=len(nodes), cohort=9, rounds=3)
        limited = serve(LocalGrid(nodes), common)
        free = serve(LocalGrid(nodes), common._replace(**NO_LIMITS))
        assert not limited.events
        jax.tree.map(np.testing.assert_array_equal, limited.state, free.state)


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
    reply = aggregation.Reply(upload, aggregation.NO_REPORT, aggregation.measure(upload))
    lowered = aggregation._with_weights(reply, [30.0, 0.0]).upload
    assert lowered.change.weight == pytest.approx(30)
    np.testing.assert_allclose(lowered.change.sum.moved, 30.0)
    np.testing.assert_allclose(lowered.change.sum.control, 90.0)
    assert lowered.clients.value == 1
