"""Replies that are spoilt or out of proportion, in federations in one process."""

import io
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedda.simulate.cohort import draw_cohort

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedda.flower import aggregation, messages, serve
from fedda.flower.outliers import measure
from helpers.flower_problem import (
    LAST,
    ROUNDS,
    SEED,
    SIZES,
    assert_same,
    changed,
    grid,
    reference,
    settings,
    with_arrays,
)

pytestmark = pytest.mark.usefixtures("x64")


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
        last = messages.Order.read(message.content).round == 4
        return [SPOILT[kind](reply) if partition == 2 and last else reply]

    served = serve(grid(spoil), settings())
    assert served.events == {"refused_replies": 1}
    assert served.events_by_client == {"client 2 (node 102)": {"refused_replies": 1}}
    assert_same(served.state, reference("fedda-sgdm", LAST))
    assert served.history[-1]["nonfinite_clients"] == (kind == "nan")


@pytest.mark.parametrize("cohort", [2, 3])
def test_entries_whose_squares_overflow_are_refused_also_where_few_reply(cohort):
    """The largest float64 is 1.8e308, so the square of 1e200 overflows."""

    def spoil(partition, message, reply):
        if partition != 2:
            return [reply]
        return [with_arrays(reply, lambda a: Array(np.full(a.shape, 1e200)))]

    served = serve(
        grid(spoil),
        settings(cohort=cohort, most_weight=1e300, most_norm_ratio=None, most_sum_ratio=None),
    )
    assert set(served.events_by_client) == {"client 2 (node 102)"}
    assert served.events.keys() == {"refused_replies"}
    assert served.history[-1]["skipped_rounds"] == 0


@pytest.mark.parametrize("bound", [{"most_norm": 50.0}, {"most_weight": 10.0}])
def test_uploads_out_of_bounds_are_refused(bound):
    """Client 2 multiplies its upload, or says that it has a hundred times its examples."""

    def spoil(partition, message, reply):
        if partition != 2 or messages.Order.read(message.content).round != 4:
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
        order = messages.Order.read(message.content)
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

    bounds = {"most_norm": 50.0, "most_weight_ratio": None, "most_sum_ratio": None}
    assert not serve(grid(spoil), settings("scaffold", **bounds)).events


def test_a_weight_out_of_proportion_is_lowered_and_its_mean_stays():
    """Client 2 has 1e6 times its examples: it counts as 30 times the median, and is named.

    There is no limit on what it adds to the sum, which would lower its weight further.

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

    everyone = settings("fedavg", cohort=4, most_sum_ratio=None)
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
        if messages.Order.read(message.content).round != number:
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


def test_the_norms_of_a_round_are_logged(caplog):
    """From them one chooses most_norm."""
    with caplog.at_level("DEBUG", "flwr.fedda"):
        serve(grid(), settings("fedavg", cohort=4, rounds=1))
    norms = []
    for reply in replies_of(clients=range(4)):
        arrays = {name: a.numpy() for name, a in reply.content["upload"].items()}
        weight = arrays.pop("weight")
        flat = np.concatenate([(array / weight).ravel() for array in arrays.values()])
        norms.append(np.linalg.norm(flat))
    expected = f"the median {np.median(norms):g}; the largest is {max(norms):g}"
    assert expected in caplog.text


def test_sums_over_clients_are_in_float32_at_least():
    """In bfloat16 the sum of a thousand ones is 256: adding 1 to it changes nothing."""
    ones = {"a": jnp.ones(2, jnp.bfloat16), "b": np.ones((), np.float16)}
    reply = aggregation.Reply(ones, aggregation.NO_REPORT, measure(ones, ones))
    total = aggregation.Aggregate.of(dict.fromkeys(range(1000), reply)).upload
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 1000.0), total)
