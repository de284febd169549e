"""Results: what they show, and what they predict."""

import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pandas
import pytest

import fedda
from fedda import tasks
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.tasks import config

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 3)), RNG.integers(0, 2, n)) for n in (40, 7, 25)]
MODEL = fedda.Model(lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"])
LOSS, ACCURACY = fedda.losses.cross_entropy, fedda.losses.accuracy


@pytest.fixture(scope="module")
def result() -> fedda.Result:
    return fedda.run(
        "fedda-adam", MODEL, CLIENTS, LOSS, test=CLIENTS[0], metrics=[ACCURACY], rounds=6, cohort=2
    )


def test_a_result_shows_its_algorithm_its_rounds_and_its_first_metric(result: fedda.Result):
    assert repr(result) == f"Result(fedda-adam, 6 rounds, accuracy {_accuracy(result):.3g})"


def _accuracy(result: fedda.Result) -> float:
    x, y = CLIENTS[0]
    return float(np.mean(np.argmax(x @ np.asarray(result.params["w"]), -1) == y))


def test_without_metrics_it_shows_the_training_loss(result: fedda.Result):
    plain = dataclasses.replace(result, settings={"algorithm": "fedavg"})
    loss = result.history[-1]["train_loss"]
    assert repr(plain) == f"Result(fedavg, 6 rounds, train_loss {loss:.3g})"


def test_settings_are_plain_values_with_the_defaults(result: fedda.Result):
    expected = {"algorithm": "fedda-adam", "rounds": 6, "cohort": 2, "seed": 0, "batch": 20}
    assert expected.items() <= result.settings.items()
    assert result.settings["metrics"] == ["accuracy"]
    assert result.settings["loss"] == "cross_entropy"
    assert result.settings["client_lr"] > 0


def test_predict_applies_the_trained_model(result: fedda.Result):
    x = RNG.normal(size=(5, 3))
    np.testing.assert_allclose(result.predict(x), x @ np.asarray(result.params["w"]), rtol=1e-5)
    np.testing.assert_array_equal(result.predict(x.tolist()), result.predict(x))
    with pytest.raises(InputError, match=r"predict needs the model.*load\(path, model=model\)"):
        dataclasses.replace(result, model=None).predict(x)


def test_a_federation_brings_its_classes_and_its_preparation():
    table = pandas.DataFrame(
        {
            "hospital": ["north", "south"] * 20,
            "age": RNG.normal(50, 10, 40),
            "ward": RNG.choice(["A", "B"], 40),
            "outcome": RNG.choice(["well", "ill"], 40),
        }
    )
    hospitals = fedda.federation(table, client="hospital", label="outcome")
    found = fedda.run("fedavg", MODEL, hospitals, LOSS, metrics=[ACCURACY], rounds=2, cohort=2)
    assert found.settings["classes"] == ["ill", "well"]
    assert found.preparation is not None
    prepared = found.preparation.apply(table)
    np.testing.assert_array_equal(found.predict(table), found.predict(prepared))
    np.testing.assert_array_equal(found.predict(table), MODEL.apply(found.params, prepared))
    with pytest.raises(InputError, match=r"of shape \(2, 2\), expected .* \(examples, 3\).*rows"):
        found.predict(prepared[:2, :2])


def test_a_pickled_result_leaves_out_the_model_and_keeps_the_rest(result: fedda.Result):
    copy = pickle.loads(pickle.dumps(result))
    assert copy.model is None
    assert (copy.settings, str(copy.history)) == (result.settings, str(result.history))
    np.testing.assert_array_equal(copy.params["w"], result.params["w"])


def test_nothing_shows_the_arrays_it_holds(result: fedda.Result):
    [point, _] = fedda.run_grid(
        "fedavg", MODEL, CLIENTS, LOSS, grid={"client_lr": [0.1, 0.2]}, rounds=1, cohort=2
    )
    assert point.result.settings["client_lr"] == 0.1
    assert point.result.model is MODEL
    problem = tasks.load(config.resolve({}))
    for record in (result, point, from_clients(CLIENTS), problem, problem.shards):
        assert len(repr(record)) < 150
        assert "Array" not in repr(record)
