"""Messages that are lost, late or repeated, and nodes that come, go or are refused."""

import time

import numpy as np
import pytest

from fedda import algorithms
from fedda.errors import InputError
from helpers.flower_grid import LocalGrid

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from fedda.flower import client_app, messages, serve, transport
from fedda.flower.client import introduce
from fedda.simulate.cohort import draw_cohort
from helpers.flower_problem import (
    COHORT,
    ROUNDS,
    SEED,
    TASK,
    app,
    assert_same,
    examples,
    grid,
    reference,
    settings,
    simulated,
)

pytestmark = pytest.mark.usefixtures("x64")

LOST = frozenset({(1, 0, 0), (1, 0, 2), (3, 0, 1), (3, 1, 2)})


def vanish(partition, message, reply):
    order = messages.Order.read(message.content)
    return [] if (order.round, order.phase, partition) in LOST else [reply]


@pytest.mark.parametrize("name", ["fedda-sgdm", "scaffold", "mime-sgdm", "stem"])
def test_lost_replies_leave_no_trace_with_server_or_client(name):
    """A client whose reply was lost goes on from what it kept when it last counted."""
    served = serve(grid(vanish), settings(name, deadline=0.3))
    assert_same(served.state, reference(name, LOST))
    assert served.events["missing_replies"] >= 1


def test_the_reference_is_the_simulator_where_nothing_is_lost():
    assert_same(reference("scaffold"), simulated("scaffold").state)


def test_an_error_in_a_client_is_a_reply_too():
    def broken(context):
        raise RuntimeError("no disk")

    nodes = [app(0), app(1), client_app(TASK, broken), app(3)]
    served = serve(LocalGrid(nodes), settings(nodes=3))
    assert served.events["refused_nodes"] == 1
    assert served.history[-1]["round"] == ROUNDS


def test_a_client_without_examples_is_refused():
    empty = client_app(TASK, lambda context: (np.zeros((0, 3)), np.zeros((0, 2))))
    served = serve(LocalGrid([app(0), app(1), empty, app(3)]), settings(nodes=3))
    assert served.events == {"refused_nodes": 1}
    with pytest.raises(InputError, match="at least one example, got 0"):
        introduce(Context(1, 1, {"partition-id": 0}, RecordDict(), {}), examples=0, supported=[])


def test_a_reply_that_comes_twice_counts_once():
    served = serve(grid(lambda partition, message, reply: [reply, reply]), settings())
    assert served.events["repeated_replies"] == ROUNDS * COHORT
    assert_same(served.state, simulated("fedda-sgdm").state)


def test_a_late_reply_is_dropped():
    held = []

    def spoil(partition, message, reply):
        number = messages.Order.read(message.content).round
        if (number, partition) == (1, 0):
            held.append(reply)
            return []
        return [reply, *(held.pop() for _ in range(len(held)) if number > 1)]

    served = serve(grid(spoil), settings(deadline=0.3))
    assert served.events == {"missing_replies": 1, "late_replies": 1}
    assert_same(served.state, reference("fedda-sgdm", frozenset({(1, 0, 0)})))


def test_a_stranger_cannot_write_what_it_likes_into_the_log(caplog):
    def broken(context):
        raise RuntimeError("no disk\nround 5: all is well\n" * 10**5)

    nodes = [app(0), app(1), client_app(TASK, broken), app(3)]
    serve(LocalGrid(nodes), settings(nodes=3))
    (line,) = [one.getMessage() for one in caplog.records if "no disk" in one.getMessage()]
    assert len(line) < 1000
    assert "\n" not in line


def test_two_nodes_with_one_partition_are_one_client():
    network = LocalGrid([app(client) for client in range(4)])
    network.apps[200] = app(0)
    network.contexts[200] = network.contexts[100]
    served = serve(network, settings())
    assert served.events == {"refused_nodes": 1}
    assert_same(served.state, simulated("fedda-sgdm").state)


def test_a_silent_node_is_waited_for_but_once():
    class Quiet(LocalGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            return [reply for reply in replies if reply.metadata.src_node_id != 200]

    network = Quiet([app(client) for client in range(4)])
    network.apps[200], network.contexts[200] = app(0), network.contexts[100]
    served = serve(network, settings(deadline=0.5))
    assert served.events == {"missing_replies": 1}
    assert len([m for m in network.sent if m.metadata.dst_node_id == 200]) == 1
    assert_same(served.state, simulated("fedda-sgdm").state)


def test_a_refused_node_that_leaves_and_comes_back_is_asked_again():
    """Its data were repaired, and its SuperNode was started again: Flower knows it as the same."""
    network = grid()
    network.apps[102] = ClientApp()  # it knows nothing of queries

    def spoil(partition, message, reply):
        number = messages.Order.read(message.content).round
        if number == 1:
            network.apps.pop(102, None)
        if number == 2:
            network.apps[102] = app(2)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings(nodes=3))
    assert served.events == {"refused_nodes": 1}
    drawn = {number + 1 for number in range(ROUNDS) if 2 in draw_cohort(SEED, number, 4, COHORT)}
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert {int(m.group_id) for m in asked if m.dst_node_id == 102} == drawn & {4, 5} != set()


def test_a_node_that_came_before_the_one_it_replaces_had_gone_is_asked_again():
    network = grid()
    network.apps[200] = app(3)
    network.contexts[200] = network.contexts[103]

    def spoil(partition, message, reply):
        if messages.Order.read(message.content).round == 2:
            network.apps.pop(103, None)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings())
    assert served.events == {"refused_nodes": 1}
    assert_same(served.state, simulated("fedda-sgdm").state)
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert {int(m.group_id) for m in asked if m.dst_node_id == 200} <= {4, 5}
    assert not [m for m in asked if m.dst_node_id == 103 and int(m.group_id) > 3]


def test_a_federation_that_nobody_joins_is_a_message():
    message = r"4 clients are needed, but 2 joined within 0\.2 s, and 0 nodes were refused"
    with pytest.raises(InputError, match=message):
        serve(LocalGrid([app(0), app(1)]), settings(deadline=0.2))


def refusing(reason):
    def broken(context):
        raise RuntimeError(reason)

    return client_app(TASK, broken)


def never_waits(monkeypatch):
    """Waiting fails the test at once: the deadlines of these tests would take minutes."""
    monkeypatch.setattr(transport.time, "sleep", lambda _: pytest.fail("the server waits"))


def test_a_federation_whose_nodes_all_refuse_ends_without_waiting(monkeypatch):
    never_waits(monkeypatch)
    network = LocalGrid([refusing(f"no disk {node}") for node in range(7)])
    with pytest.raises(InputError, match="all 7 nodes were refused") as error:
        serve(network, settings(deadline=600.0))
    lines = str(error.value).splitlines()
    assert lines[1:6] == [f"  node 10{node}: an error: no disk {node}" for node in range(5)]
    assert lines[6] == "  and 2 more"
    assert "start the run again" in lines[7]
    assert {message.metadata.message_type for message in network.sent} == {"query"}


def test_too_few_nodes_that_all_refuse_are_waited_for_a_little(monkeypatch):
    """Others may come; but not for the whole deadline."""
    monkeypatch.setattr(transport, "GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(InputError, match="all 2 nodes were refused"):
        serve(LocalGrid([refusing("no disk")] * 2), settings(deadline=600.0))
    assert 0.5 < time.monotonic() - start < 60


def test_one_good_client_among_nodes_that_refuse_is_waited_for():
    """The others may be repaired and started again, until the deadline."""
    nodes = [app(0), *[refusing("no disk")] * 4]
    with pytest.raises(InputError, match=r"1 joined within 0\.3 s, and 4 nodes were"):
        serve(LocalGrid(nodes), settings(deadline=0.3))


def test_nodes_that_all_refuse_after_a_round_has_counted_are_waited_for():
    """Their SuperNodes were started again with another app, say: that may be corrected."""
    network = grid()

    def spoil(partition, message, reply):
        if messages.Order.read(message.content).round == 1:
            network.contexts = {node + 100: network.contexts[node] for node in network.apps}
            network.apps = {node + 100: refusing("no disk") for node in network.apps}
            return []
        return [reply]

    network.spoil = spoil
    with pytest.raises(InputError, match=r"1 clients are needed, but 0 joined within 0\.5 s"):
        serve(network, settings(deadline=0.5))


@pytest.mark.parametrize(("own", "at_server"), [(None, "scaffold"), ("fedavg", "fedavg")])
def test_a_client_that_does_not_support_the_algorithm_is_refused_at_once(
    own, at_server, monkeypatch
):
    """A server with an algorithm of the user, and clients without it; and the other way round."""
    never_waits(monkeypatch)
    network = grid()
    if own:
        nodes = [client_app(TASK, lambda _: examples(0), algorithms.get(own))] * 4
        network = LocalGrid(nodes)
    algorithm = at_server if own else algorithms.get(at_server)
    name = at_server if own else "custom"
    with pytest.raises(InputError, match=f"the server trains {name}, which this client does not"):
        serve(network, settings(algorithm, deadline=600.0))
    assert {message.metadata.message_type for message in network.sent} == {"query"}


def test_a_federation_that_only_strangers_join_is_another():
    nodes = [app(0), app(1), ClientApp(), ClientApp()]
    with pytest.raises(InputError, match="2 nodes were refused"):
        serve(LocalGrid(nodes), settings(deadline=0.2))


@pytest.mark.parametrize(("name", "told"), [("fedda-sgdm", 0), ("scaffold", 1)])
def test_a_node_that_leaves_is_not_asked_again(name, told):
    """And where clients remember something, that the population changed is an event."""
    network = grid()

    def spoil(partition, message, reply):
        if messages.Order.read(message.content).round == 2:
            network.apps.pop(103, None)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings(name))
    assert served.history[-1]["round"] == ROUNDS
    assert served.events["changed_populations"] == told
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert not [m for m in asked if m.dst_node_id == 103 and int(m.group_id) > 3]
