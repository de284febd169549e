"""Rounds of a Flower server: the numbers of a simulation, failed rounds, and restarts.

Server, clients and messages are the real ones; only the network is missing.
"""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda import algorithms
from fedda.core.losses import squared_error
from fedda.errors import InputError
from helpers.flower_grid import LocalGrid
from helpers.variants import FAST

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord

from fedda.flower import Secure, client_app, messages, secure_mods, serve
from fedda.simulate.cohort import draw_cohort
from helpers.flower_problem import (
    COHORT,
    LAST,
    ROUNDS,
    SEED,
    SIZES,
    TASK,
    apply,
    assert_same,
    changed,
    examples,
    grid,
    init,
    reference,
    settings,
    simulated,
    with_arrays,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in algorithms.names()
    ],
)
def test_every_algorithm_comes_to_the_state_of_the_simulator(name):
    # Without limits: of four clients with 4 or 7 examples, an honest one may add more than three
    # times the median to a sum. Its weight would be lowered, and a simulation lowers none.
    free = {"most_norm_ratio": None, "most_sum_ratio": None, "most_weight_ratio": None}
    there, here = simulated(name), serve(grid(), settings(name, **free))
    assert not here.events
    assert_same(here.state, there.state)
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


def test_a_round_with_too_few_replies_is_repeated_and_at_last_skipped():
    """What clients kept for a round that failed is forgotten, and so the next try is the same."""
    tries = []

    def spoil(partition, message, reply):
        order = messages.Order.read(message.content)
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
        if is_liar(partition, messages.Order.read(message.content).round):
            arrays["change/sum/moved/bias"] = Array(np.full(2, 1e6) * SIZES[partition])
        return [changed(reply, upload=ArrayRecord(arrays))]

    nodes = [client_app(TASK, lambda _, k=k: examples(k), FRAGILE) for k in range(len(SIZES))]
    free = settings(FRAGILE, most_norm_ratio=None, most_sum_ratio=None)
    return serve(LocalGrid(nodes, spoil), free)


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


def test_metrics_are_json_also_where_an_evaluation_is_not_finite(tmp_path):
    """JSON knows no Infinity and no NaN, though Python would write them."""
    own = {"evaluate": lambda params: {"a": np.inf, "b": float("nan")}, "directory": tmp_path}
    serve(grid(), settings("fedavg", rounds=1, **own))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert (row["a"], row["b"]) == (None, None)


def test_a_federation_that_never_trained_is_an_error_and_its_files_stay(tmp_path):
    def spoil(partition, message, reply):  # two clients diverge, and the others are silent
        spoilt = with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * np.nan)))
        return [spoilt] if partition < 2 else []

    wrong = settings("fedavg", rounds=2, cohort=4, directory=tmp_path, attempts=1, deadline=0.3)
    for _ in range(2):  # also if it is started again after its end
        with pytest.raises(InputError, match="all of the 2 rounds were skipped"):
            serve(grid(spoil), wrong)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["train_loss"], row["skipped_rounds"]) for row in rows] == [(None, 1), (None, 2)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    refused = sum(one["refused_replies"] for one in summary["events_by_client"].values())
    assert refused == summary["events"]["refused_replies"] == 2 * 2


def failing(bad, reason="no memory"):
    """Replace the replies of some clients by errors: `bad(partition, round)`."""

    def spoil(partition, message, reply):
        if bad(partition, messages.Order.read(message.content).round):
            return [Message(Error(2, f"{reason} {partition}"), reply_to=message)]
        return [reply]

    return spoil


def trained(network):
    return [m.metadata for m in network.sent if m.metadata.message_type == "train"]


@pytest.mark.parametrize("name", ["fedavg", "mime-sgdm"])
def test_a_federation_in_which_all_clients_fail_ends_after_its_first_round(name, tmp_path):
    """In mime's case in the second phase only, which is no progress either."""

    def spoil(partition, message, reply):
        bad = name == "fedavg" or messages.Order.read(message.content).phase == 1
        error = Message(Error(2, f"no memory {partition}"), reply_to=message)
        return [error if bad else reply]

    network = grid(spoil)
    start = time.monotonic()
    with pytest.raises(InputError, match="no client can train: all 4 clients") as error:
        serve(network, settings(name, cohort=4, deadline=600.0, directory=tmp_path))
    assert time.monotonic() - start < 60
    assert {m.group_id for m in trained(network)} == {"1"}
    assert len(trained(network)) == 4 * 3 * len(algorithms.get(name).phases)
    for client in range(4):
        assert f"\n  client {client}: an error: no memory {client}" in str(error.value)
    # Nothing was trained, so another algorithm may use the folder.
    served = serve(grid(), settings("fedprox", directory=tmp_path))
    assert_same(served.state, simulated("fedprox").state)


def test_uploads_that_are_all_refused_end_it_too():
    def spoil(partition, message, reply):
        return [with_arrays(reply, lambda a: Array(np.asarray(a.numpy() * np.nan)))]

    with pytest.raises(InputError, match=r"client 0: a number in its upload .* not finite"):
        serve(grid(spoil), settings("fedavg", cohort=4, deadline=600.0))


def test_clients_that_fail_in_one_cohort_are_no_reason_to_end_it():
    """A cohort of one: the client of the first round always fails, the other three do not."""
    (first,) = draw_cohort(SEED, 0, len(SIZES), 1)
    served = serve(grid(failing(lambda client, _: client == first)), settings("fedavg", cohort=1))
    assert served.history[0]["skipped_rounds"] == 1
    assert served.history[-1]["skipped_rounds"] < ROUNDS


def test_ten_clients_that_fail_are_enough():
    """Of 30 clients, 7 a round: the second round may end it at the earliest."""
    nodes = [client_app(TASK, lambda _, k=k: examples(k % len(SIZES))) for k in range(30)]
    network = LocalGrid(nodes, failing(lambda client, _: True))
    with pytest.raises(InputError, match="no client can train") as error:
        serve(network, settings("fedavg", cohort=7, nodes=30, rounds=50, attempts=1))
    last = max(int(m.group_id) for m in trained(network))
    seen = [set(draw_cohort(SEED, number, 30, 7).tolist()) for number in range(last)]
    assert len(set.union(*seen)) >= 10 > len(set.union(*seen[:-1]))
    assert f"all {len(set.union(*seen))} clients that were asked" in str(error.value)


def test_a_federation_that_has_made_progress_goes_on_after_a_round_in_which_all_fail():
    network = grid(failing(lambda _, number: number == 2))
    served = serve(network, settings("fedavg", cohort=4))
    assert [row["skipped_rounds"] for row in served.history] == [0, 0, 1, 1, 1]
    assert served.events == {"refused_replies": 3 * 4, "repeated_rounds": 3}


def test_the_log_has_a_block_at_the_start_and_a_line_for_each_round(caplog, tmp_path):
    spoil = failing(lambda client, number: number == 1 or (client, number) == (2, 2))
    own = {"test": examples(1), "eval_every": 2, "attempts": 1, "directory": tmp_path}
    with caplog.at_level("INFO", "flwr.fedda"):
        served = serve(grid(spoil), settings("mime-sgdm", cohort=4, rounds=4, **own))
    lines = [one.getMessage() for one in caplog.records if one.levelname == "INFO"]
    assert lines[0].startswith("Training with mime-sgdm: client_lr 0.1, ")
    assert lines[1:3] == [
        "\t├── Rounds: 4, of 4 clients each",
        f"\t├── Directory: {tmp_path}",
    ]
    first = TASK.model.init(random.fold_in(random.key(SEED), 0))
    error = np.mean(squared_error(apply(first, examples(1)[0]), jnp.asarray(examples(1)[1])))
    parameters = 3 * 2 + 2
    assert lines[3] == f"\t└── Model: {parameters} parameters, loss {error:.4g}"
    rows = served.history
    loss = [f"train_loss {row['train_loss']:.4g}" for row in rows]
    tested = [f", loss {row['loss']:.4g}" if "loss" in row else "" for row in rows]
    outcomes = ["replies 4/4, 4/4", "skipped: no reply was valid"]
    outcomes += ["replies 3/4, 3/4", "replies 4/4, 4/4"]
    for k, line in enumerate(lines[4:8]):
        assert re.fullmatch(
            re.escape(f"[ROUND {k + 1}/4] {loss[k]}{tested[k]}, {outcomes[k]}, ") + r"\d+\.\d s",
            line,
        )
    assert [bool(text) for text in tested] == [False, True, False, True]
    counts = (
        "{'refused_replies': 6, 'repeated_rounds': 1}"  # 4 in round 2, and twice one in round 3
    )
    assert lines[8:] == [f"Finished 4 rounds. Events: {counts}"]


def test_the_training_loss_is_that_of_the_last_round_that_counted():
    def spoil(partition, message, reply):
        even = messages.Order.read(message.content).round % 2 == 0
        return [] if even else [reply]

    served = serve(grid(spoil), settings("fedavg", rounds=3, deadline=0.2, attempts=1))
    first, second, third = (row["train_loss"] for row in served.history)
    assert first is None
    assert second == third > 0


def test_there_is_no_training_loss_if_no_client_tells_its_loss(caplog):
    nothing = MetricRecord({"loss": 0.0, "examples": 0.0})  # as under differential privacy
    network = grid(lambda partition, message, reply: [changed(reply, seen=nothing)])
    with caplog.at_level("INFO", "flwr.fedda"):
        (row,) = serve(network, settings("fedavg", rounds=1)).history
    assert row["train_loss"] is None
    assert "[ROUND 1/1] replies 3/3, " in caplog.text


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
            order[partition] = messages.Order.read(message.content).round
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


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["fedda-adam", "scaffold"])
@pytest.mark.parametrize("when", [0, 3])
def test_a_server_that_was_killed_goes_on(tmp_path, name, when):
    def spoil(partition, message, reply):
        if messages.Order.read(message.content).round == when:
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


def test_a_server_that_was_killed_compares_replies_with_those_before(tmp_path):
    """The limits are multiples of a median that includes earlier replies."""

    def spoil(partition, message, reply):
        if messages.Order.read(message.content).round == 3:
            raise Killed
        return [reply]

    expected = serve(grid(), settings(most_sum_ratio=1.2))
    network = grid(spoil)
    with pytest.raises(Killed):
        serve(network, settings(most_sum_ratio=1.2, directory=tmp_path))
    network.spoil = None
    network.arrived.clear()
    served = serve(network, settings(most_sum_ratio=1.2, directory=tmp_path))
    assert served.events["lowered_weights"] == expected.events["lowered_weights"] > 0
    assert_same(served.state, expected.state)


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
            {"task": TASK._replace(model=fedda.Model(lambda key: init(key) | {"c": 0.0}, apply))},
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


def test_a_client_keeps_its_programs_on_disk(tmp_path, monkeypatch):
    """Flower starts a process for every message: the next one compiles nothing."""
    monkeypatch.setenv("FEDDA_COMPILE_CACHE", str(tmp_path))
    jax.clear_caches()
    serve(grid(), settings(rounds=1))
    assert [path.name for path in tmp_path.glob("*/jit__lambda*-cache")]
