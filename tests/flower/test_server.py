"""Federations on Flower's messages, in one process: the numbers of a simulation, and every fault.

The server and the clients are the real ones, and so are the messages; only the network is missing.
"""

import functools
import io
import json
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda import algorithms, api
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.simulate.cohort import draw_cohort
from helpers.flower_grid import LocalGrid

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedda.flower import (
    Secure,
    Settings,
    client_app,
    secure_mods,
    serve,
    unmasking,
)
from fedda.flower import (
    aggregation as sums,
)
from fedda.flower import (
    messages as wire,
)
from fedda.flower.client import partition

pytestmark = pytest.mark.usefixtures("x64")

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


# --------------------------------------------------------------------- the numbers of a simulation


FIRST = [next(iter(module.variants)) for module in algorithms.modules()]  # others of it are slow


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow])
        for name in algorithms.names()
    ],
)
def test_every_algorithm_comes_to_the_state_of_the_simulator(name):
    there, here = simulated(name), serve(grid(), settings(name))
    assert_same(here.state, there.state)
    assert not here.events
    assert here.history[-1]["train_loss"] > 0


@pytest.mark.parametrize(("name", "last"), [("fedda-adam", 0.4), ("mime-sgdm", 2)])
def test_the_last_rounds_may_take_all_examples(name, last):
    """Their share or their number, as in a simulation: 0.4 of five rounds are two."""
    there = simulated(name, stabilise=2)
    assert_same(serve(grid(), settings(name, stabilise=last)).state, there.state)


def test_options_and_hyper_parameters_reach_the_clients():
    chosen = {"units": "delta", "bias": "steps", "client_lr": 0.03, "beta1": 0.5}
    there = simulated("fedda-adam", **chosen)
    assert_same(serve(grid(), settings("fedda-adam", chosen=chosen)).state, there.state)


def test_an_algorithm_of_ones_own():
    own = algorithms.get("scaffold")
    nodes = [client_app(TASK, lambda _, k=k: examples(k), own) for k in range(len(SIZES))]
    assert_same(serve(LocalGrid(nodes), settings(own)).state, simulated("scaffold").state)


def test_the_test_set_is_evaluated_and_bytes_are_those_of_the_arrays():
    network = grid()
    own = {"evaluate": lambda params: {"bias": float(params["bias"][0])}}
    served = serve(network, settings(test=examples(1), eval_every=2, **own))
    assert [row["round"] for row in served.history if "loss" in row] == [2, 4, 5]
    assert served.history[-1]["bias"] == served.state.params["bias"][0]
    outputs = apply(served.state.params, examples(1)[0])
    expected = np.mean(squared_error(outputs, jnp.asarray(examples(1)[1])))
    assert served.history[-1]["loss"] == pytest.approx(float(expected), abs=1e-12)
    sent = [m.content for m in network.sent if m.metadata.message_type == "train"]
    arrays = [a for one in sent for record in one.array_records.values() for a in record.values()]
    assert served.history[-1]["bytes_down"] == sum(len(array.data) for array in arrays)


# ------------------------------------------------------------------------- what may go wrong


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
            for client in clients if phase.everyone else drawn:
                key = random.fold_in(random.fold_in(round_key, place), client)
                own = (message, memory[client], shards[client], key)
                upload, kept, _ = jax.jit(phase.work, static_argnums=1)(hp, TASK, *own)
                if (number, place, client) not in lost:
                    uploads.append(upload)
                    memory[client] = kept
            state = phase.merge(hp, state, jax.tree.map(lambda *each: sum(each), *uploads))
    return state


LOST = frozenset({(1, 0, 0), (1, 0, 2), (3, 0, 1), (3, 1, 2)})
LAST = frozenset({(4, 0, 2)})  # client 2 in the last round


def vanish(partition, message, reply):
    order = wire.Order.read(message.content)
    return [] if (order.round, order.phase, partition) in LOST else [reply]


@pytest.mark.parametrize("name", ["fedda-sgdm", "scaffold", "mime-sgdm", "stem"])
def test_lost_replies_leave_no_trace_with_server_or_client(name):
    """A client whose reply was lost goes on from what it kept when it last counted."""
    served = serve(grid(vanish), settings(name, deadline=0.3))
    assert_same(served.state, reference(name, LOST))
    assert served.events["missing_replies"] >= 1


def test_the_reference_is_the_simulator_where_nothing_is_lost():
    assert_same(reference("scaffold"), simulated("scaffold").state)


def changed(reply, **records):
    content = RecordDict({name: reply.content[name] for name in reply.content})
    for name, record in records.items():
        content[name] = record
    return Message(metadata=reply.metadata, content=content)


def with_arrays(reply, change):
    arrays = {name: change(array) for name, array in reply.content["upload"].items()}
    return changed(reply, upload=ArrayRecord(arrays))


def altered(reply, **entries):
    record = type(reply.content["fedda"])(dict(reply.content["fedda"]) | entries)
    return changed(reply, fedda=record)


def pickled(array):
    return Array(array.dtype, tuple(array.shape), array.stype, pickle.dumps(array.numpy()))


def lying(array):
    """It says that it has the agreed shape, and holds another."""
    other = Array(np.zeros(5))
    return Array(array.dtype, tuple(array.shape), array.stype, other.data)


def zipped(array):
    """NumPy reads this too, but not as an array."""
    file = io.BytesIO()
    np.savez(file, array.numpy())
    return Array(array.dtype, tuple(array.shape), array.stype, file.getvalue())


SPOILT = {
    "nan": lambda reply: with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * np.nan))),
    "shape": lambda reply: with_arrays(reply, lambda a: Array(np.zeros((9, *a.shape)))),
    "type": lambda reply: with_arrays(reply, lambda a: Array(a.numpy().astype("float16"))),
    "lie": lambda reply: with_arrays(reply, lying),
    "size": lambda reply: with_arrays(
        reply, lambda a: Array(a.dtype, tuple(a.shape), a.stype, a.data + bytes(10**6))
    ),
    "pickle": lambda reply: with_arrays(reply, pickled),
    "zip": lambda reply: with_arrays(reply, zipped),
    "seen": lambda reply: changed(reply, seen=MetricRecord({"loss": [1.0, 2.0], "examples": 1.0})),
    "names": lambda reply: changed(reply, upload=ArrayRecord({"x": Array(np.zeros(2))})),
    "nothing": lambda reply: Message(metadata=reply.metadata, content=RecordDict()),
    "algorithm": lambda reply: altered(reply, algorithm="fedavg"),
    "serial": lambda reply: altered(reply, serial=1),
    "partition": lambda reply: altered(reply, partition=0),
    "kind": lambda reply: altered(reply, serial="1"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_reply_is_refused_and_the_round_goes_on_without_it(kind):
    def spoil(partition, message, reply):
        last = wire.Order.read(message.content).round == 4
        return [SPOILT[kind](reply) if partition == 2 and last else reply]

    served = serve(grid(spoil), settings())
    assert served.events == {"refused_replies": 1}
    assert served.events_by_client == {"client 2 (node 102)": {"refused_replies": 1}}
    assert_same(served.state, reference("fedda-sgdm", LAST))
    assert served.history[-1]["nonfinite_clients"] == (kind == "nan")


def test_an_error_in_a_client_is_a_reply_too():
    def broken(context):
        raise RuntimeError("no disk")

    nodes = [app(0), app(1), client_app(TASK, broken), app(3)]
    served = serve(LocalGrid(nodes), settings(nodes=3))
    assert served.events["refused_nodes"] == 1
    assert served.history[-1]["round"] == ROUNDS


def test_a_reply_that_comes_twice_counts_once():
    served = serve(grid(lambda partition, message, reply: [reply, reply]), settings())
    assert served.events["repeated_replies"] == ROUNDS * COHORT
    assert_same(served.state, simulated("fedda-sgdm").state)


def test_a_late_reply_is_dropped():
    held = []

    def spoil(partition, message, reply):
        number = wire.Order.read(message.content).round
        if (number, partition) == (1, 0):
            held.append(reply)
            return []
        return [reply, *(held.pop() for _ in range(len(held)) if number > 1)]

    served = serve(grid(spoil), settings(deadline=0.3))
    assert served.events == {"missing_replies": 1, "late_replies": 1}
    assert_same(served.state, reference("fedda-sgdm", frozenset({(1, 0, 0)})))


def test_a_round_with_too_few_replies_is_repeated_and_at_last_skipped():
    """What clients kept for a round that failed is forgotten, and so the next try is the same."""
    tries = []

    def spoil(partition, message, reply):
        order = wire.Order.read(message.content)
        if order.round == 1:
            tries.append(order.serial)
            return [] if len(tries) <= COHORT else [reply]
        return [] if order.round == 3 else [reply]

    served = serve(grid(spoil), settings("scaffold", least=2, deadline=0.2, attempts=2))
    assert served.events["repeated_rounds"] == 1 + 2
    assert served.history[-1]["skipped_rounds"] == 1
    assert_same(served.state, reference("scaffold", skipped=frozenset({3})))


SCAFFOLD = algorithms.get("scaffold")
(TRAINING,) = SCAFFOLD.phases


def merge_up_to_100(hp, state, total):
    """SCAFFOLD's merge, which cannot bear it if the mean of the bias is above 100."""
    spoilt = total.change.sum.moved["bias"][0] > 100 * total.change.weight
    after = TRAINING.merge(hp, state, total)
    return jax.tree.map(lambda leaf: jnp.where(spoilt, jnp.nan, leaf), after)


FRAGILE = SCAFFOLD._replace(phases=(TRAINING._replace(merge=merge_up_to_100),))


def serve_fragile(is_liar):
    """A federation with the fragile merge; a liar says that the bias moved by 1e6."""

    def spoil(partition, message, reply):
        arrays = dict(reply.content["upload"])
        if is_liar(partition, wire.Order.read(message.content).round):
            arrays["change/sum/moved/bias"] = Array(np.full(2, 1e6) * SIZES[partition])
        return [changed(reply, upload=ArrayRecord(arrays))]

    nodes = [client_app(TASK, lambda _, k=k: examples(k), FRAGILE) for k in range(len(SIZES))]
    return serve(LocalGrid(nodes, spoil), settings(FRAGILE, most_norm_ratio=None))


def test_an_unusable_sum_never_happened():
    """Every upload would spoil the state: that is no client's fault, and the round is skipped."""
    served = serve_fragile(lambda partition, number: number == 2)
    assert served.events == {"unusable_sums": 1}
    assert served.history[-1]["skipped_rounds"] == 1
    assert_same(served.state, reference("scaffold", skipped=frozenset({2})))


def test_a_reply_that_spoils_the_state_is_refused_and_the_others_count():
    served = serve_fragile(lambda partition, number: (partition, number) == (2, 4))
    assert served.events == {"refused_replies": 1}
    assert served.events_by_client == {"client 2 (node 102)": {"refused_replies": 1}}
    assert_same(served.state, reference("scaffold", LAST))


@pytest.mark.parametrize("cohort", [2, 3])
def test_entries_whose_squares_overflow_are_refused_also_where_few_reply(cohort):
    """The largest float64 is 1.8e308, so the square of 1e200 overflows."""

    def spoil(partition, message, reply):
        if partition != 2:
            return [reply]
        return [with_arrays(reply, lambda a: Array(np.full(a.shape, 1e200)))]

    served = serve(grid(spoil), settings(cohort=cohort, most_weight=1e300, most_norm_ratio=None))
    assert set(served.events_by_client) == {"client 2 (node 102)"}
    assert served.events.keys() == {"refused_replies"}
    assert served.history[-1]["skipped_rounds"] == 0


@pytest.mark.parametrize("bound", [{"most_norm": 50.0}, {"most_weight": 10.0}])
def test_uploads_out_of_bounds_are_refused(bound):
    """Client 2 multiplies its upload, or says that it has a hundred times its examples."""

    def spoil(partition, message, reply):
        if partition != 2 or wire.Order.read(message.content).round != 4:
            return [reply]
        arrays = dict(reply.content["upload"])
        for name in arrays:
            if (name == "weight") == ("most_weight" in bound):
                arrays[name] = Array(np.asarray(arrays[name].numpy() * 100))
        return [changed(reply, upload=ArrayRecord(arrays))]

    served = serve(grid(spoil), settings(**bound))
    assert served.events == {"refused_replies": 1}
    assert_same(served.state, reference("fedda-sgdm", LAST))
    assert not serve(grid(), settings(**bound)).events, "nobody else is refused"


@pytest.mark.parametrize(
    ("name", "part"), [("fedda-sgdm", ""), ("scaffold", "moved/"), ("climb", "loss/")]
)
@pytest.mark.parametrize(
    ("weight", "bound"), [(-5.0, {}), (0.0, {}), (100.0, {"most_weight": 10.0})]
)
def test_a_weight_out_of_bounds_is_refused_wherever_it_is(name, part, weight, bound):
    def spoil(partition, message, reply):
        order = wire.Order.read(message.content)
        if (partition, order.round, order.phase) != (2, 4, 0):
            return [reply]
        arrays = dict(reply.content["upload"]) | {f"{part}weight": Array(np.asarray(weight))}
        return [changed(reply, upload=ArrayRecord(arrays))]

    served = serve(grid(spoil), settings(name, **bound))
    assert served.events["refused_replies"] >= 1
    assert_same(served.state, reference(name, frozenset({(4, 0, 2), (4, 1, 2)})))


def test_the_norm_of_a_part_is_taken_after_it_was_divided_by_its_weight():
    """Client 2 has 1e6 times its examples and moved as ever: as a mean it is no larger."""

    def spoil(partition, message, reply):
        if partition != 2:
            return [reply]
        arrays = dict(reply.content["upload"])
        for name in (name for name in arrays if name.startswith("moved/")):
            arrays[name] = Array(np.asarray(arrays[name].numpy() * 1e6))
        return [changed(reply, upload=ArrayRecord(arrays))]

    bounds = {"most_norm": 50.0, "most_weight_ratio": None}
    assert not serve(grid(spoil), settings("scaffold", **bounds)).events


def test_a_weight_out_of_proportion_is_lowered_and_its_mean_stays():
    """Client 2 has 1e6 times its examples: it counts as 30 times the median, and is named.

    The median of the weights of clients 0 to 3 is 5.5, so that client 2 weighs 165 instead of 7.
    """

    def spoil(partition, message, reply):
        if partition == 2:
            reply = with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * 1e6)))
        return [reply]

    def honest(partition, message, reply):
        if partition == 2:
            reply = with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * (165 / 7))))
        return [reply]

    everyone = settings("fedavg", cohort=4)
    served = serve(grid(spoil), everyone)
    assert served.events_by_client == {"client 2 (node 102)": {"lowered_weights": ROUNDS}}
    assert_same(served.state, serve(grid(honest), everyone).state)
    assert not serve(grid(spoil), everyone._replace(most_weight_ratio=None)).events


@pytest.mark.parametrize("event", ["refused_replies", "lowered_weights"])
def test_a_client_that_is_alone_in_its_round_is_compared_with_those_before(event):
    """In the last round it multiplies its upload by a million, or its weight with it."""
    number, cohort = ROUNDS - 1, 1
    (liar,) = draw_cohort(SEED, number, len(SIZES), cohort)

    def spoil(partition, message, reply):
        if wire.Order.read(message.content).round != number:
            return [reply]
        arrays = dict(reply.content["upload"])
        for name in arrays:
            if name != "weight" or event == "lowered_weights":
                arrays[name] = Array(np.asarray(arrays[name].numpy() * 1e6))
        return [changed(reply, upload=ArrayRecord(arrays))]

    served = serve(grid(spoil), settings("fedavg", cohort=cohort, attempts=1))
    assert served.events_by_client == {f"client {liar} (node {100 + liar})": {event: 1}}


@pytest.mark.parametrize(
    ("seen", "event"),
    [
        ({"loss": np.inf, "examples": 6.0}, "refused_replies"),
        ({"loss": 6.0, "examples": np.nan}, "refused_replies"),
        ({"loss": 1e308, "examples": 6.0}, "refused_reports"),
        ({"loss": 6.0, "examples": 0.0}, "refused_reports"),
        ({"loss": 6.0, "examples": -6.0}, "refused_reports"),
        ({"loss": 6.0, "examples": 14.0}, "refused_reports"),  # 2 steps of 3, and its 7 examples
    ],
)
def test_a_false_report_is_not_shown(tmp_path, seen, event):
    """Clients 1 and 2 give it; two losses of 1e308 would add up to infinity."""

    def spoil(partition, message, reply):
        return [changed(reply, seen=MetricRecord(seen)) if partition in (1, 2) else reply]

    served = serve(grid(spoil), settings("fedavg", cohort=4, rounds=1, directory=tmp_path))
    assert served.events == {event: 2}
    alone = [one.content["seen"] for one in replies_of(clients=(0, 3))]
    expected = sum(one["loss"] for one in alone) / sum(one["examples"] for one in alone)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["train_loss"] == pytest.approx(expected, rel=1e-12)
    if event == "refused_reports":
        assert_same(served.state, serve(grid(), settings("fedavg", cohort=4, rounds=1)).state)


def replies_of(clients):
    """What these clients reply in the first round of FedAvg."""
    found = {}

    def spoil(partition, message, reply):
        found[partition] = reply
        return [reply]

    serve(grid(spoil), settings("fedavg", cohort=4, rounds=1))
    return [found[client] for client in clients]


def test_metrics_are_json_also_where_an_evaluation_is_not_finite(tmp_path):
    """JSON knows no Infinity and no NaN, though Python would write them."""
    own = {"evaluate": lambda params: {"a": np.inf, "b": float("nan")}, "directory": tmp_path}
    serve(grid(), settings("fedavg", rounds=1, **own))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert (row["a"], row["b"]) == (None, None)


def test_the_norms_of_a_round_are_logged(caplog):
    """From them one chooses most_norm."""
    with caplog.at_level("INFO", "fedda.flower"):
        serve(grid(), settings("fedavg", cohort=4, rounds=1))
    norms = []
    for reply in replies_of(clients=range(4)):
        arrays = {name: a.numpy() for name, a in reply.content["upload"].items()}
        weight = arrays.pop("weight")
        flat = np.concatenate([(array / weight).ravel() for array in arrays.values()])
        norms.append(np.linalg.norm(flat))
    expected = f"the median {np.median(norms):g}; the largest is {max(norms):g}"
    assert expected in caplog.text


def test_a_federation_that_never_trained_is_an_error_and_its_files_stay(tmp_path):
    def spoil(partition, message, reply):
        return [with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * np.nan)))]

    wrong = settings("fedavg", rounds=2, directory=tmp_path, attempts=1)
    for _ in range(2):  # also if it is started again after its end
        with pytest.raises(InputError, match="all of the 2 rounds were skipped"):
            serve(grid(spoil), wrong)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["train_loss"], row["skipped_rounds"]) for row in rows] == [(None, 1), (None, 2)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    refused = sum(one["refused_replies"] for one in summary["events_by_client"].values())
    assert refused == summary["events"]["refused_replies"] == 2 * COHORT


def test_the_training_loss_is_that_of_the_last_round_that_counted():
    def spoil(partition, message, reply):
        even = wire.Order.read(message.content).round % 2 == 0
        return [] if even else [reply]

    served = serve(grid(spoil), settings("fedavg", rounds=3, deadline=0.2, attempts=1))
    first, second, third = (row["train_loss"] for row in served.history)
    assert first is None
    assert second == third > 0


def test_there_is_no_training_loss_if_no_client_tells_its_loss():
    nothing = MetricRecord({"loss": 0.0, "examples": 0.0})  # as under differential privacy
    network = grid(lambda partition, message, reply: [changed(reply, seen=nothing)])
    (row,) = serve(network, settings("fedavg", rounds=1)).history
    assert row["train_loss"] is None


def test_sums_over_clients_are_in_float32_at_least():
    """In bfloat16 the sum of a thousand ones is 256: adding 1 to it changes nothing."""
    ones = [{"a": jnp.ones(2, jnp.bfloat16), "b": np.ones((), np.float16)}] * 1000
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 1000.0), sums._sum(ones))
    like = jax.ShapeDtypeStruct((1,), jnp.bfloat16)
    assert unmasking._tree(np.array([0.5]), {"a": like}, ["a"], [2002.0])["a"] == 1001.0


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"cohort": 2.5}, "cohort must be a whole number of at least 1, got 2.5"),
        ({"least": 4}, "least must be at most cohort, which is 3, got 4"),
        ({"nodes": -1}, "nodes must be a whole number of at least 0, got -1"),
        ({"stabilise": -3}, "stabilise must be a share of the rounds below 1 or .*, got -3"),
        ({"stabilise": 50}, f"a whole number of rounds up to {ROUNDS}, got 50"),
        ({"deadline": 0.0}, "deadline must be a positive number of seconds, got 0.0"),
        ({"most_norm": 0.0}, "most_norm must be a positive number, or None for no limit, got 0.0"),
        ({"most_weight": np.nan}, "most_weight must be a positive number"),
        ({"most_norm_ratio": 0.5}, "most_norm_ratio must be a number of at least 1, or None"),
        ({"most_weight_ratio": 0}, "most_weight_ratio must be a number of at least 1, or None"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"algorithm": "fedada"}, "unknown algorithm 'fedada'"),
    ],
)
def test_wrong_settings_are_a_message(changes, message):
    with pytest.raises(InputError, match=message):
        serve(grid(), settings(**changes))


@pytest.mark.parametrize(
    "config",
    [
        {"partition": 3},
        {"partition-id": "a"},
        {"partition-id": -1},
        {"partition-id": 2**32},
        {"partition-id": float("inf")},
    ],
)
def test_a_node_without_a_number_says_so(config):
    context = Context(1, 1, config, RecordDict(), {})
    with pytest.raises(InputError, match="partition-id in the configuration of its node, got"):
        partition(context)


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
        number = wire.Order.read(message.content).round
        if number == 1:
            network.apps.pop(102, None)
        if number == 2:
            network.apps[102] = app(2)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings(nodes=3, cohort=4))
    assert served.events == {"refused_nodes": 1}
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert {int(m.group_id) for m in asked if m.dst_node_id == 102} == {3, 4}


def test_a_node_that_came_before_the_one_it_replaces_had_gone_is_asked_again():
    network = grid()
    network.apps[200] = app(3)
    network.contexts[200] = network.contexts[103]

    def spoil(partition, message, reply):
        if wire.Order.read(message.content).round == 2:
            network.apps.pop(103, None)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings())
    assert served.events == {"refused_nodes": 1}
    assert_same(served.state, simulated("fedda-sgdm").state)
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert {int(m.group_id) for m in asked if m.dst_node_id == 200} <= {3, 4}
    assert not [m for m in asked if m.dst_node_id == 103 and int(m.group_id) > 2]


def test_a_federation_that_nobody_joins_is_a_message():
    with pytest.raises(
        InputError, match=r"4 clients are needed, and 2 have come in 0\.2 s\. Start"
    ):
        serve(LocalGrid([app(0), app(1)]), settings(deadline=0.2))


def test_a_federation_that_only_strangers_join_is_another():
    nodes = [app(0), app(1), ClientApp(), ClientApp()]
    with pytest.raises(InputError, match="Nodes that are no clients, the log says why: 2"):
        serve(LocalGrid(nodes), settings(deadline=0.2))


@pytest.mark.parametrize(("name", "told"), [("fedda-sgdm", 0), ("scaffold", 1)])
def test_a_node_that_leaves_is_not_asked_again(name, told):
    """And where clients remember something, that the population changed is an event."""
    network = grid()

    def spoil(partition, message, reply):
        if wire.Order.read(message.content).round == 2:
            network.apps.pop(103, None)
        return [reply]

    network.spoil = spoil
    served = serve(network, settings(name))
    assert served.history[-1]["round"] == ROUNDS
    assert served.events["changed_populations"] == told
    asked = [m.metadata for m in network.sent if m.metadata.message_type == "train"]
    assert not [m for m in asked if m.dst_node_id == 103 and int(m.group_id) > 2]


# ------------------------------------------------------------------------- secure aggregation


@pytest.mark.parametrize("lost", [None, 2])
def test_a_secure_federation_comes_to_the_same_model_but_for_rounding(lost):
    """Entries are below 20 and weights below 8: 160 / 2^21 a step for each of three clients.

    A round moves the model by 0.1 times P, so an error of the sum over 15 examples or more by less
    than 0.1 * 3 * 160 / 2^21 / 15 = 2e-6, times 1 + beta1 / (1 - beta1) = 10. That is 1e-4 in five
    rounds, and 1e-3 leaves room for what a round makes of the errors before it.
    """
    order = {}

    def spoil(partition, message, reply):
        if "fedda" in message.content:
            order[partition] = wire.Order.read(message.content).round
        gone = order.get(partition) == 4 and partition == lost
        return [] if gone else [reply]

    nodes = [
        client_app(TASK, lambda _, k=k: examples(k), mods=secure_mods()) for k in range(len(SIZES))
    ]
    secure = Secure(most=20.0, most_weight=8, threshold=0.6)
    served = serve(LocalGrid(nodes, spoil), settings(secure=secure, deadline=1.0))
    assert "clipped_uploads" not in served.events
    assert bool(served.events["missing_replies"]) == (lost is not None)
    expected = reference("fedda-sgdm", LAST if lost else frozenset()).params
    far = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), served.state.params, expected)
    assert 0 < max(jax.tree.leaves(far)) < 1e-3


def test_a_sum_over_too_few_is_never_unmasked():
    """A repeated round asks for the same uploads: two sums would show what one of them lacks."""
    given = []

    def spoil(partition, message, reply):
        given.extend(reply.content["secaggplus_configs"])
        lost = given[-1] == "masked_params" and given.count("masked_params") == COHORT
        return [] if lost else [reply]

    nodes = [client_app(TASK, lambda _, k=k: examples(k), mods=secure_mods()) for k in range(3)]
    secure = Secure(most=20.0, most_weight=8)
    served = serve(
        LocalGrid(nodes, spoil),
        settings(secure=secure, deadline=1.0, nodes=3, least=3, rounds=1),
    )
    assert served.events["repeated_rounds"] == 1
    assert given.count("masked_params") == 2 * COHORT
    assert given.count("shares") == COHORT, "of the second time alone"


def test_secure_aggregation_and_bounds_on_single_uploads_exclude_each_other():
    with pytest.raises(InputError, match="does not see"):
        serve(grid(), settings(secure=Secure(1.0, 1.0), most_norm=1.0))


# ------------------------------------------------------------------------- to be continued


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["fedda-adam", "scaffold"])
@pytest.mark.parametrize("when", [0, 3])
def test_a_server_that_was_killed_goes_on(tmp_path, name, when):
    def spoil(partition, message, reply):
        if wire.Order.read(message.content).round == when:
            raise Killed
        return [reply]

    network = grid(spoil)
    with pytest.raises(Killed):
        serve(network, settings(name, directory=tmp_path))
    network.spoil = None
    network.arrived.clear()
    served = serve(network, settings(name, directory=tmp_path))
    assert_same(served.state, simulated(name).state)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines == served.history
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds"] == ROUNDS
    assert summary["events"] == ({"restarts": 1} if when else {})


def test_a_finished_federation_is_not_trained_again(tmp_path):
    first = serve(grid(), settings(directory=tmp_path))
    network = grid()
    again = serve(network, settings(directory=tmp_path))
    assert_same(first.state, again.state)
    assert not [m for m in network.sent if m.metadata.message_type == "train"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "fedprox"}, "is a run with algorithm = 'fedavg', got 'fedprox'"),
        ({"chosen": {"client_lr": 0.5}}, r"client_lr = '0\.1', got '0\.5'"),
        ({"seed": 9}, f"seed = '{SEED}', got '9'"),
        (
            {"task": TASK._replace(model=fedda.Model(lambda _: jnp.zeros((6, 2)), apply))},
            "parameter",
        ),
    ],
)
def test_a_folder_with_another_federation_is_left_as_it_is(tmp_path, changes, words):
    serve(grid(), settings("fedavg", rounds=1, directory=tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=words):
        serve(grid(), settings(**({"algorithm": "fedavg"} | changes), directory=tmp_path))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    longer = serve(grid(), settings("fedavg", directory=tmp_path))
    assert_same(longer.state, simulated("fedavg").state)


@pytest.mark.parametrize("name", ["checkpoints/round-1", "metrics.jsonl", "config.toml"])
def test_a_damaged_folder_is_refused_and_left_as_it_is(tmp_path, name):
    serve(grid(), settings("fedavg", rounds=1, directory=tmp_path))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(b"0", b"1", 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"{tmp_path / name} (is|was changed or) damaged"):
        serve(grid(), settings("fedavg", directory=tmp_path))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_two_servers_do_not_share_a_folder(tmp_path):
    def spoil(partition, message, reply):
        with pytest.raises(InputError, match="is in use by process"):
            serve(grid(), settings(directory=tmp_path))
        return [reply]

    assert_same(
        serve(grid(spoil), settings(directory=tmp_path)).state, simulated("fedda-sgdm").state
    )


def test_a_default_that_is_said_is_no_other_federation(tmp_path):
    serve(grid(), settings("fedda-adam", rounds=1, directory=tmp_path))
    said = settings("fedda-adam", chosen={"units": "grad"}, directory=tmp_path)
    assert_same(serve(grid(), said).state, simulated("fedda-adam").state)


def test_settings_that_came_to_no_round_may_be_set_right(tmp_path):
    with pytest.raises(InputError, match="clients are needed"):
        serve(LocalGrid([]), settings("fedavg", deadline=0.2, directory=tmp_path))
    served = serve(grid(), settings("fedprox", directory=tmp_path))
    assert_same(served.state, simulated("fedprox").state)


# ------------------------------------------------------------------------- arrays and orders


def test_bfloat16_travels_bit_by_bit():
    values = {"a": jnp.asarray([1.5, -0.1, 3e38], jnp.bfloat16), "b": {"c": jnp.arange(3)}}
    record = wire.pack(values)
    assert sorted(record) == ["a", "b/c"]
    back = wire.unpack(record, jax.eval_shape(lambda: values))
    assert back["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["a"].view(np.uint16), np.asarray(values["a"]).view("uint16"))
    np.testing.assert_array_equal(back["b"]["c"], [0, 1, 2])


def test_an_order_is_what_was_sent():
    order = wire.Order("fedavg", "{}", 1, 2, 0, False, 4, 7, 6, 5, {"client_lr": 0.1})
    assert wire.Order.read(RecordDict(order.records())) == order
    with pytest.raises(wire.Refused, match=r"fedda\.algorithm must be str, got None\. Server and"):
        wire.Order.read(RecordDict())


def test_a_client_with_another_model_says_so(caplog):
    """It is refused in each round, and the others go on."""
    other = TASK._replace(model=TASK.model._replace(init=lambda key: init(key) | {"bias": 0.0}))
    nodes = [app(0), app(1), client_app(other, lambda _: examples(2)), app(3)]
    served = serve(LocalGrid(nodes), settings(cohort=4))
    assert served.events == {"refused_replies": ROUNDS}
    assert r"params/bias must be float64(), got float64(2,). Server and clients need" in caplog.text


def test_a_client_of_another_version_says_so(caplog):
    """The server has a hyper-parameter of which this client has not heard."""
    older = algorithms.get("fedda-sgdm")._replace(Hyper=algorithms.get("fedavg").Hyper)
    nodes = [app(0), app(1), client_app(TASK, lambda _: examples(2), older), app(3)]
    served = serve(LocalGrid(nodes), settings(cohort=4))
    assert served.events == {"refused_replies": ROUNDS}
    assert "unknown hyper-parameter of fedda-sgdm" in caplog.text
