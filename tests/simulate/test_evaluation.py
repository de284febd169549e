"""Evaluation over all examples and for each client, against a loop over clients in NumPy."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.data import streaming
from fedda.errors import InputError
from fedda.simulate.client_metrics import ClientMetrics
from helpers import stored

RNG = np.random.default_rng(1)
SIZES = [3, 700, 1, 0, 40, 12, 9, 5, 130, 2, 6, 8]
CLIENTS = [(RNG.normal(size=(n, 4)), RNG.integers(0, 3, n)) for n in SIZES]
MODEL = fedda.Model(
    lambda key: {"w": jax.random.normal(key, (4, 3))}, lambda params, x: x @ params["w"]
)
PARAMS = MODEL.init(jax.random.key(5))
CROSS_ENTROPY, ACCURACY = fedda.losses.cross_entropy, fedda.losses.accuracy


def above_median(outputs: Any, y: Any) -> tuple[Any, Any]:
    """A ratio: how often the label is 1 where the second output is positive."""
    positive = (outputs[:, 1] > 0).astype(jnp.float32)
    return positive * (y == 1).astype(jnp.float32), positive


METRICS = [CROSS_ENTROPY, ACCURACY, above_median]


def by_hand(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """The same metrics in float64."""
    logits = x @ np.asarray(PARAMS["w"], float)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    positive = logits[:, 1] > 0
    return {
        "cross_entropy": -log_probabilities[np.arange(len(y)), y].mean(),
        "accuracy": (logits.argmax(-1) == y).mean(),
        "above_median": (y[positive] == 1).mean() if positive.any() else math.nan,
    }


def expected() -> dict[str, np.ndarray]:
    rows = [
        by_hand(x, y) if len(y) else dict.fromkeys(map(_name, METRICS), math.nan)
        for x, y in CLIENTS
    ]
    return {name: np.array([row[name] for row in rows]) for name in map(_name, METRICS)}


def _name(metric: Any) -> str:
    return str(metric.__name__)


def test_without_clients_all_examples_count_the_same():
    whole = tuple(np.concatenate(arrays) for arrays in zip(*CLIENTS, strict=True))
    found = fedda.evaluate(MODEL, PARAMS, whole, METRICS)
    assert found == pytest.approx(by_hand(*whole), rel=1e-5)
    assert fedda.evaluate(MODEL, PARAMS, CLIENTS, METRICS) == pytest.approx(found)
    assert fedda.evaluate(MODEL, PARAMS, dict(enumerate(CLIENTS)), METRICS) == found


def test_each_client_has_the_metrics_of_its_own_examples(compilations):
    new = MODEL._replace(apply=lambda params, x: x @ params["w"])
    found = fedda.evaluate(new, PARAMS, CLIENTS, METRICS, per_client=True)
    assert compilations.count("jit(_values)") == 1, "one program serves all clients"
    assert list(found.clients) == list(range(len(SIZES)))
    assert found.examples.tolist() == SIZES
    for name, values in expected().items():
        np.testing.assert_allclose(found.metrics[name], values, rtol=1e-5)


def test_the_spread_and_the_worst_tenth_ignore_clients_without_examples():
    found = fedda.evaluate(MODEL, PARAMS, CLIENTS, METRICS, per_client=True)
    assert found.higher_is_better == {
        "cross_entropy": False, "accuracy": True, "above_median": True
    }  # fmt: skip
    for name, values in expected().items():
        present = np.sort(values[~np.isnan(values)])
        tenth = math.ceil(len(present) / 10)
        worst = present[-tenth:] if name == "cross_entropy" else present[:tenth]
        assert found.mean[name] == pytest.approx(present.mean(), rel=1e-5)
        assert found.spread[name] == pytest.approx(present.std(), rel=1e-5)
        assert found.worst_decile[name] == pytest.approx(worst.mean(), rel=1e-5)


def test_clients_have_the_names_of_a_dictionary_or_a_federation():
    named = {"north": CLIENTS[0], "south": CLIENTS[1]}
    found = fedda.evaluate(MODEL, PARAMS, named, [ACCURACY], per_client=True)
    assert found.table() == [
        {"client": name, "examples": len(y), "accuracy": pytest.approx(by_hand(x, y)["accuracy"])}
        for name, (x, y) in named.items()
    ]
    made = fedda.federation(named, test=0.5)
    found = fedda.evaluate(MODEL, PARAMS, made, [ACCURACY], per_client=True)
    assert list(found.clients) == made.names
    assert found.metrics["accuracy"][1] == pytest.approx(by_hand(*made.test[1])["accuracy"])


def test_what_a_person_sees_is_a_short_table(tmp_path: Path):
    found = ClientMetrics(
        clients=["a", "<b>"],
        examples=np.array([10, 1000]),
        metrics={"accuracy": np.array([0.5, 0.75]), "loss": np.array([1.0, 3.0])},
        higher_is_better={"loss": False},
        on="test",
    )
    assert repr(found).splitlines() == [
        "2 clients, 1,010 examples to test on",
        "           mean  spread  worst tenth",
        "accuracy  0.625   0.125          0.5",
        "    loss      2       1            3",
    ]
    assert "<td>0.625</td>" in found._repr_html_()
    found.figure(tmp_path / "clients.png")
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("data", "metrics", "per_client", "message"),
    [
        (CLIENTS[0], [ACCURACY], True, "per_client needs examples of clients.* got tuple"),
        (CLIENTS[0], ACCURACY, False, "metrics must be a list of named functions"),
        ([(np.ones((2, 4)), [0])], [ACCURACY], True, "client 0 has 2 rows in x but 1 in y"),
        (3, [ACCURACY], False, r"data must be a pair \(x, y\) of arrays, got int"),
    ],
)
def test_wrong_arguments_are_named(data: Any, metrics: Any, per_client: bool, message: str):
    with pytest.raises(InputError, match=message):
        fedda.evaluate(MODEL, PARAMS, data, metrics, per_client)


# ------------------------------------------------------------------------------------- after a run

SETTINGS: dict[str, Any] = {"rounds": 4, "cohort": 3, "client_lr": 0.1, "per_client": True}


def test_a_run_evaluates_each_client_on_its_own_test_examples(tmp_path: Path):
    result = fedda.run(
        *("fedavg", MODEL, CLIENTS, CROSS_ENTROPY),
        test=CLIENTS,
        metrics=[ACCURACY],
        directory=tmp_path,
        **SETTINGS,
    )
    assert result.per_client is not None
    assert result.per_client.on == "test"
    assert result.per_client.examples.tolist() == SIZES
    found = fedda.evaluate(MODEL, result.params, CLIENTS, [ACCURACY], per_client=True)
    np.testing.assert_array_equal(result.per_client.metrics["accuracy"], found.metrics["accuracy"])
    assert result.per_client.worst_decile["loss"] > result.per_client.mean["loss"]
    summary = json.loads((tmp_path / "summary.json").read_text())["per_client"]
    assert summary["metrics"]["accuracy"] == [
        None if np.isnan(each) else each for each in found.metrics["accuracy"]
    ]
    assert ClientMetrics.from_json(summary).to_json() == summary == result.per_client.to_json()
    whole = fedda.evaluate(MODEL, result.params, CLIENTS, [ACCURACY])
    assert result.history[-1]["accuracy"] == pytest.approx(whole["accuracy"])


def test_without_test_examples_of_clients_it_takes_those_they_are_trained_with():
    named = {f"client-{number}": pair for number, pair in enumerate(CLIENTS)}
    result = fedda.run("fedavg", MODEL, named, CROSS_ENTROPY, test=CLIENTS[1], **SETTINGS)
    assert result.per_client is not None
    assert (result.per_client.on, result.per_client.clients) == ("train", list(named))
    found = fedda.evaluate(MODEL, result.params, CLIENTS, [CROSS_ENTROPY], per_client=True)
    given = result.per_client.metrics["loss"]
    np.testing.assert_allclose(given, found.metrics["cross_entropy"])


def test_a_federation_brings_its_test_examples_and_its_names():
    made = fedda.federation({f"h{number}": pair for number, pair in enumerate(CLIENTS)}, test=0.3)
    result = fedda.run("fedavg", MODEL, made, CROSS_ENTROPY, metrics=[ACCURACY], **SETTINGS)
    assert result.per_client is not None
    assert (result.per_client.on, result.per_client.clients) == ("test", made.names)
    assert result.per_client.examples.tolist() == [len(y) for _, y in made.test]
    [whole] = fedda.evaluate(MODEL, result.params, made, [ACCURACY]).values()
    assert result.history[-1]["accuracy"] == pytest.approx(whole)


def test_a_test_set_for_other_clients_is_refused():
    message = r"list of one pair for each of the 12 clients, got a list of 2"
    with pytest.raises(InputError, match=message):
        fedda.run("fedavg", MODEL, CLIENTS, CROSS_ENTROPY, test=CLIENTS[:2], **SETTINGS)


@pytest.mark.parametrize("ragged", [False, True])
def test_clients_on_disk_are_evaluated_as_those_in_memory(ragged: bool, tmp_path: Path):
    split = stored.written(tmp_path, ragged)

    def evaluated(clients: Any) -> ClientMetrics:
        def squares(outputs: Any, y: Any) -> Any:
            return (outputs - y) ** 2

        result = fedda.run("fedavg", stored.MODEL, clients, squares, **SETTINGS | {"cohort": 4})
        assert result.per_client is not None
        return result.per_client

    here, there = evaluated(streaming.resident(split)), evaluated(streaming.Feed(split))
    assert here.examples.tolist() == there.examples.tolist() == split.count.tolist()
    np.testing.assert_allclose(here.metrics["loss"], there.metrics["loss"], rtol=1e-5)
