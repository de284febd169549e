"""FedDA as a Flower strategy: against its equations in NumPy, and with replies that are wrong."""

import logging
import math
import re

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra fedda[flower] is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedda.errors import InputError
from fedda.flower import FedDA
from helpers.flower_grid import LocalGrid

ROUNDS, STEPS, EXAMPLES = 4, (3, 1, 2), (5, 2, 8)  # of each of the three clients
SHAPES = {"w": (3, 2), "b": (2,)}
LR, SERVER_LR, BETA1, BETA2, EPS = 0.3, 0.2, 0.8, 0.95, 0.05
_rng = np.random.default_rng(5)
START = {name: _rng.normal(size=shape) for name, shape in SHAPES.items()}
GRADIENTS = [  # of a round, a client and a step
    [
        [{name: _rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(steps)]
        for steps in STEPS
    ]
    for _ in range(ROUNDS)
]


def reference(optimizer, units="grad", clients=(0, 1, 2), rounds=range(ROUNDS)):
    """The equations of the paper for one array after another: clients start at the momentum M."""
    weights = np.array([EXAMPLES[client] for client in clients]) / sum(
        EXAMPLES[client] for client in clients
    )
    rate, eps = (SERVER_LR * LR, EPS) if units == "grad" else (SERVER_LR, EPS / LR)
    after = {}
    for name in SHAPES:
        W, M, V = START[name], np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for r, number in enumerate(rounds):
            Ps, ms = [], []
            for client in clients:
                m, P = M, 0
                for gradient in GRADIENTS[number][client]:
                    m = BETA1 * m + (1 - BETA1) * gradient[name]
                    P = P + m
                Ps.append(P)
                ms.append(m)
            P, m = (np.tensordot(weights, each, 1) for each in (Ps, ms))
            G = (P - BETA1 * M) / (1 - BETA1)
            if optimizer == "sgdm":
                W = W - SERVER_LR * LR * P
            elif optimizer == "adagrad":
                V = V + G**2
                W = W - rate * G / (np.sqrt(V) + eps)
            else:
                V = BETA2 * V + (1 - BETA2) * G**2
                first, second = P / (1 - BETA1 ** (r + 1)), V / (1 - BETA2 ** (r + 1))
                W = W - rate * first / (np.sqrt(second) + eps)
            M = m
        after[name] = W
    return after


def reply(client, config, dtype):
    """What a client sends: its momentum starts at 0."""
    arrays = {}
    gradients = GRADIENTS[config["server-round"] - 1][client]
    for name, shape in SHAPES.items():
        m = np.zeros(shape)
        for gradient in gradients:
            m = config["beta1"] * m + (1 - config["beta1"]) * gradient[name]
        arrays[f"fedda/gradients/{name}"] = sum(gradient[name] for gradient in gradients)
        arrays[f"fedda/momentum/{name}"] = m
    arrays = {key: value.astype(dtype) for key, value in arrays.items()}
    for key, number in {"steps": len(gradients), **config}.items():
        if key in ("steps", "lr", "beta1", "mu"):
            arrays[f"fedda/{key}"] = np.array(float(number))
    metrics = {"train_loss": float(client), "num-examples": EXAMPLES[client]}
    return RecordDict({"arrays": record(arrays), "metrics": MetricRecord(metrics)})


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def app(client, dtype=float):
    made = ClientApp()

    @made.train()
    def train(message, context):
        return Message(reply(client, message.content["config"], dtype), reply_to=message)

    return made


def strategy(optimizer="adam", **settings):
    rest = {"sgdm": {}, "adagrad": {"eps": EPS}, "adam": {"eps": EPS, "beta2": BETA2}}[optimizer]
    defaults = {"client_lr": LR, "server_lr": SERVER_LR, "beta1": BETA1, "fraction_evaluate": 0.0}
    return FedDA(optimizer, **defaults | rest | settings)


def trained(made, spoil=None, rounds=ROUNDS, dtype=float, start=START, **settings):
    """Run a strategy with the three clients; return the arrays at its end."""
    grid = LocalGrid([app(client, dtype) for client in range(3)], spoil)
    initial = record({name: value.astype(dtype) for name, value in start.items()})
    result = made.start(grid, initial, rounds, **settings)
    return {name: array.numpy() for name, array in result.arrays.items()}


def assert_close(found, expected, tolerance=1e-13):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("sgdm", {}), ("adam", {}), ("adagrad", {}), ("adam", {"units": "delta"})],
    ids=str,
)
def test_the_equations_with_unequal_clients(optimizer, options):
    """Clients differ in their examples and in their number of steps."""
    expected = reference(optimizer, **options)
    assert_close(trained(strategy(optimizer, **options)), expected)
    assert max(np.abs(expected[name] - START[name]).max() for name in SHAPES) > 0.05
    # float32 arrays: gradients and weights are rounded, the server's sums are not. The weights are
    # rounded once in a round, and the steps depend smoothly on rounded numbers of size 1.
    found = trained(strategy(optimizer, **options), dtype=np.float32)
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    assert_close(found, expected, 20 * ROUNDS * np.finfo(np.float32).eps)


def test_a_step_starts_at_the_arrays_that_the_clients_received():
    """Something else, such as a wrapper of the strategy, may change them between two rounds."""
    made, arrays, shift = strategy(), record(START), 0.5
    grid = LocalGrid([app(client) for client in range(3)])
    for number in range(1, ROUNDS + 1):
        messages = made.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = made.aggregate_train(number, grid.send_and_receive(messages))
        arrays = record({name: array.numpy() + shift for name, array in arrays.items()})
    found = {name: array.numpy() - ROUNDS * shift for name, array in arrays.items()}
    assert_close(found, reference("adam"))


def test_every_start_begins_with_momentum_0():
    made = strategy()
    assert_close(trained(made), trained(made), 0)


def test_it_is_flowers_fedavg_in_everything_else():
    """Sampling, configuration, evaluation and metrics are those of `FedAvg`."""
    seen = []

    def client(number):
        made = app(number)

        @made.evaluate()
        def evaluate(message, context):
            seen.append(("evaluate", dict(message.content["config"])))
            metrics = MetricRecord({"accuracy": 0.25 * number, "num-examples": 1 + number})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return made

    def evaluate_fn(number, arrays):
        return MetricRecord({"norm": float(np.abs(arrays["w"].numpy()).sum())})

    grid = LocalGrid([client(number) for number in range(3)])
    made = strategy(fraction_evaluate=1.0, fraction_train=0.7, min_train_nodes=1)
    assert isinstance(made, FedAvg)
    result = made.start(
        grid=grid,
        initial_arrays=record(START),
        num_rounds=2,
        train_config=ConfigRecord({"epochs": 3, "lr": LR}),
        evaluate_config=ConfigRecord({"batches": 2}),
        evaluate_fn=evaluate_fn,
    )
    train = [one for one in grid.sent if one.metadata.message_type == "train"]
    assert len(train) == 2 * int(0.7 * 3)
    assert dict(train[-1].content["config"]) == {
        "epochs": 3, "lr": LR, "beta1": BETA1, "mu": 0.0, "server-round": 2
    }  # fmt: skip
    assert seen == 3 * [("evaluate", {"batches": 2, "server-round": 1})] + 3 * [
        ("evaluate", {"batches": 2, "server-round": 2})
    ]
    # 0, 1/4 and 2/4, with the weights 1, 2 and 3
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(2 / 6)
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    norm = np.abs(result.arrays["w"].numpy()).sum()
    assert result.evaluate_metrics_serverapp[2]["norm"] == pytest.approx(norm)
    assert set(result.train_metrics_clientapp[1]) == {"train_loss"}


def test_arrays_that_are_not_trained_are_averaged():
    mask = np.array([0.0, -np.inf])
    start = START | {"mean": np.zeros(2), "count": np.array(7), "mask": mask}

    def add(client, message, answer):
        extra = {"mean": np.array([1.0, client]), "count": np.array(3 * client), "mask": mask}
        arrays = {**answer.content["arrays"], **record(extra)}
        answer.content["arrays"] = ArrayRecord(arrays)
        return [answer]

    grid = LocalGrid([app(client) for client in range(3)], add)
    result = strategy().start(grid, record(start), ROUNDS)
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert list(found) == list(start), "in the order of the model"
    weighted = (2 * 1 + 8 * 2) / 15
    np.testing.assert_allclose(found.pop("mean"), [1, weighted], rtol=1e-15)
    count = found.pop("count")
    assert (count, count.dtype) == (round(3 * weighted), np.dtype(int)), "3.6 is rounded"
    np.testing.assert_array_equal(found.pop("mask"), mask)
    assert_close(found, reference("adam"))


# ------------------------------------------------------------------------------ wrong replies


def set_array(name, value):
    def change(content):
        content["arrays"][name] = Array(np.asarray(value))

    return change


def set_metric(value):
    def change(content):
        content["metrics"]["num-examples"] = value

    return change


def without_helper(content):
    content["arrays"] = record(START)


def of_another_model(content):
    arrays = {key.replace("/w", "/v"): array for key, array in content["arrays"].items()}
    content["arrays"] = ArrayRecord(arrays)


def with_an_extra_layer(content):
    for part in ("gradients", "momentum"):
        content["arrays"][f"fedda/{part}/extra"] = Array(np.zeros(2))


def numbers_only(content):
    arrays = {key: array for key, array in content["arrays"].items() if key.count("/") == 1}
    content["arrays"] = ArrayRecord({**record(START), **arrays})


def head_only(content):
    arrays = {key: array for key, array in content["arrays"].items() if not key.endswith("/w")}
    content["arrays"] = ArrayRecord(arrays | {"w": Array(START["w"])})


def second_record(content):
    content["more"] = record(START)


BAD = [
    (without_helper, r"no momentum.*replace ArrayRecord.* by fedda.torch.reply_arrays"),
    (of_another_model, "fedda/gradients/w is missing. The server and all clients need"),
    (with_an_extra_layer, "fedda/gradients/extra is not expected"),
    (numbers_only, "fedda/gradients/b is missing"),
    (head_only, "fedda/gradients/w is missing.*optimizers of the same parameters"),
    (second_record, "one ArrayRecord and one MetricRecord"),
    (set_array("fedda/momentum/w", np.zeros((2, 3))), r"momentum/w must be float64\(3, 2\), got"),
    (set_array("fedda/momentum/w", np.zeros((3, 2), "f4")), "got float32"),
    (set_array("fedda/momentum/b", [math.nan, 0]), "momentum/b is not finite.*lower client_lr"),
    (set_array("fedda/gradients/b", [0, math.inf]), "gradients/b is not finite"),
    (set_array("fedda/lr", 0.1), r"has lr=0.1, but the strategy has 0.3. Create DecoupledSGD with"),
    (set_array("fedda/beta1", 0.9), "has beta1=0.9, but the strategy has 0.8"),
    (set_array("fedda/mu", 0.1), "has mu=0.1, but the strategy has 0"),
    (set_array("fedda/steps", -1.0), "local steps must not be negative, got -1"),
    (set_array("fedda/steps", math.nan), "local steps must not be negative, got nan"),
    (set_metric(0), "num-examples in its MetricRecord must be a positive number.*got 0"),
    (set_metric(-2.5), "got -2.5"),
    (set_metric(math.inf), "got inf"),
    (set_metric([1, 2]), r"got \[1, 2\]"),
]


def spoiling(clients, change):
    def spoil(client, message, answer):
        if client in clients:
            change(answer.content)
        return [answer]

    return spoil


@pytest.mark.parametrize(("change", "expected"), BAD, ids=[text for _, text in BAD])
def test_a_wrong_reply_is_left_out_and_logged(change, expected, caplog):
    caplog.set_level(logging.WARNING, "flwr")
    found = trained(strategy(), spoiling([0], change))
    assert_close(found, reference("adam", clients=(1, 2)))
    logged = [line.getMessage() for line in caplog.records if "Left out" in line.getMessage()]
    assert len(logged) == ROUNDS
    for line in logged:
        assert line.startswith("\t> Left out node 100: ")
        assert re.search(expected, line), line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_helper, "it has no momentum"),
        (numbers_only, "it has no momentum"),
        (of_another_model, "w is missing"),
        (with_an_extra_layer, "fedda/gradients/extra is not expected"),
        (set_array("fedda/lr", 0.1), "its optimizer has lr=0.1"),
    ],
)
def test_clients_that_are_all_wrong_end_the_run(change, expected):
    with pytest.raises(InputError, match=f"^no reply of round 1 can be used: {expected}"):
        trained(strategy(), spoiling([0, 1, 2], change))


def test_a_majority_with_another_model_does_not_stop_the_others():
    found = trained(strategy(), spoiling([0, 1], with_an_extra_layer))
    assert_close(found, reference("adam", clients=(2,)))


def test_metrics_that_differ_end_the_run_as_with_fedavg():
    def change(content):
        content["metrics"]["more"] = 1.0

    with pytest.raises(Exception, match="same keys for aggregation"):
        trained(strategy(), spoiling([0], change))


def spoiling_round(number, clients, change):
    def spoil(client, message, answer):
        if message.content["config"]["server-round"] == number and client in clients:
            change(answer.content)
        return [answer]

    return spoil


@pytest.mark.parametrize(
    ("clients", "value"),
    [([0, 1, 2], math.nan), ([0], 1e200)],
    ids=["no reply is finite", "the square of the gradient overflows"],
)
def test_a_round_without_a_finite_step_leaves_the_model_as_it_is(clients, value, caplog):
    """The next rounds continue as if it had not been: with the momentum and count before it."""
    large = set_array("fedda/gradients/b", [value, value])
    found = trained(strategy(), spoiling_round(2, clients, large))
    assert "Round 2 leaves the model as it is" in caplog.text
    assert_close(found, reference("adam", rounds=(0, 2, 3)))


def test_clients_that_fail_are_left_out():
    failing = ClientApp()

    @failing.train()
    def train(message, context):
        raise RuntimeError("no data")

    grid = LocalGrid([app(0), app(1), failing])
    result = strategy().start(grid, record(START), ROUNDS)
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert_close(found, reference("adam", clients=(0, 1)))
    result = strategy().start(LocalGrid([failing, failing]), record(START), 1)
    assert not result.arrays, "as with FedAvg"


# ------------------------------------------------------------------------------ wrong settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "adamw"}, "unknown optimizer of FedDA 'adamw'. Did you mean adam"),
        ({"client_lr": 0}, "client_lr of fedda-adam must be a positive number, got 0"),
        ({"server_lr": -1.0}, "server_lr of fedda-adam must be a positive number, got -1.0"),
        ({"client_lr": "0.1"}, "client_lr of fedda-adam must be a positive number, got '0.1'"),
        ({"beta1": 1.0}, r"beta1 of fedda-adam must be a number in \[0, 1\), got 1.0"),
        ({"optimizer": "sgdm", "beta2": 0.9}, "unknown setting of fedda-sgdm 'beta2'"),
        ({"momentum": 0.9}, "momentum"),
        ({"fraction_fit": 0.5}, "unknown setting of fedda-adam 'fraction_fit'. Did you mean frac"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_a_message(settings, expected):
    with pytest.raises(InputError, match=expected):
        FedDA(**settings)


def test_clients_must_start_at_momentum_0():
    with pytest.raises(TypeError, match="sends"):
        FedDA(sends="both")


@pytest.mark.parametrize("rounds", [0, -1, 1.5])
def test_the_number_of_rounds(rounds):
    with pytest.raises(InputError, match="num_rounds must be a whole number of at least 1, got"):
        trained(strategy(), rounds=rounds)


def test_another_rate_in_the_clients_configuration():
    message = "lr of train_config must be 0.3, as in the strategy, got 0.1. Leave it out"
    with pytest.raises(InputError, match=message):
        trained(strategy(), train_config=ConfigRecord({"lr": 0.1}))


def test_jax_outside_stays_in_single_precision():
    trained(strategy())
    assert jax.numpy.ones(()).dtype == np.float32
