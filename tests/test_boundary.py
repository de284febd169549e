"""Mistakes that would otherwise fail deep inside, or not at all and give wrong numbers."""

import functools
from collections import namedtuple
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.core import Positive
from fedda.errors import InputError
from fedda.losses import accuracy, cross_entropy, squared_error

MODEL = fedda.Model(lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"])
X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
CLIENTS = [(X, Y)] * 3


def named(name):
    def metric(outputs, y):
        return accuracy(outputs, y)

    metric.__name__ = name
    return metric


def run(algorithm="fedavg", clients=CLIENTS, loss=cross_entropy, **settings):
    return fedda.run(algorithm, MODEL, clients, loss, **({"cohort": 1, "rounds": 1} | settings))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"loss": squared_error}, r"squared_error needs .* one shape, got \(2,\) and \(\)"),
        ({"loss": lambda outputs, y: outputs.mean()}, "must give one number an example"),
        ({"test": (X, Y[:2])}, "the test set has 4 rows in x but 2 in y"),
        ({"test": (X[:0], Y[:0])}, "the test set must hold at least one example"),
        ({"test": X}, r"the test set must be a pair \(x, y\) of arrays, got ndarray"),
        ({"test": (X[:, :2], Y)}, r"x of the test set has examples of shape \(2,\)"),
        ({"test": (X * np.nan, Y)}, "x of the test set has a non-finite value in row 0"),
        ({"test": (X, Y + 2)}, "y of the test set has label 2 in row 0"),
        ({"algorithm": None}, "unknown algorithm None"),
        ({"algorithm": "fedda-adam", "units": 3}, "unknown value of units of fedda-adam 3"),
        ({"reduction": 3}, "unknown value of reduction 3"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 1.5}, r"seed must be a whole number of at least 0, got 1\.5"),
        ({"seed": 2**33}, r"seed must be below 2\*\*31"),
        ({"stabilise": "a"}, "stabilise must be a share"),
        ({"stabilise": True}, "stabilise must be a share"),
        ({"round": 3}, "unknown setting of fedavg 'round'. Did you mean rounds"),
        ({"eval_evry": 3}, "Did you mean eval_every"),
        ({"loss": "cross_entropy"}, "loss must be a function .* got 'cross_entropy'"),
        ({"metrics": [accuracy]}, "metrics are of the test set: give test"),
        ({"metrics": [accuracy, accuracy], "test": (X, Y)}, "the metric name 'accuracy' is taken"),
        ({"metrics": [named("loss")], "test": (X, Y)}, "the metric name 'loss' is taken"),
        ({"test": (X, Y.astype(float))}, "y of the test set must hold one whole number"),
        ({"memory_gb": -1}, "memory_gb must be a positive number, got -1"),
        ({"metrics": accuracy}, "metrics must be a list of named functions"),
        ({"metrics": [functools.partial(accuracy)]}, "metrics must be a list of named functions"),
        ({"clients": None}, "clients must be a list of pairs .* got NoneType"),
        ({"clients": {"a": (X, Y)}}, "clients must be a list of pairs .* got dict"),
        ({"clients": [(X * np.inf, Y)]}, "x of client 0 has a non-finite value in row 0"),
        ({"clients": [(X.astype(np.float64) * 1e300, Y)]}, "x of client 0 has a non-finite value"),
        ({"clients": [(np.array([["a"]]), Y[:1])]}, "x of client 0 is ragged or not numeric"),
        ({"clients": [(X, Y.astype(float))]}, "y of the clients must hold one whole number"),
        ({"clients": [(X[:, :2], Y)]}, "the model cannot be applied to .* shape"),
    ],
)
def test_refused(mistake, message):
    with pytest.raises(InputError, match=message):
        run(**mistake)


@pytest.mark.parametrize(
    "unusual",
    [
        {"client_lr": np.float32(0.1), "cohort": np.int64(2)},
        {"clients": (pair for pair in CLIENTS)},
        {"clients": [*CLIENTS, ([], [])]},
        {"clients": [*CLIENTS, (X[:0], np.zeros(0))]},
    ],
    ids=["numpy scalars", "a generator", "an empty list", "an empty client of another dtype"],
)
def test_accepted(unusual):
    assert run(**unusual).history[-1]["round"] == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ((MODEL.init, MODEL.apply), r"model must be a fedda\.Model\(init, apply\), got tuple"),
        (fedda.Model(lambda key: {}, MODEL.apply), "the parameters must be arrays .* got none"),
        (
            fedda.Model(lambda key: {"w": jnp.zeros((3, 2), "float16")}, MODEL.apply),
            "float16 overflows in sums over clients",
        ),
        (
            fedda.Model(MODEL.init, lambda params, x: params["v"]),
            "the model cannot be applied to a batch of examples of shape",
        ),
    ],
    ids=["a tuple", "no parameters", "float16", "a KeyError"],
)
def test_models_refused(model, message):
    with pytest.raises(InputError, match=message):
        fedda.run("fedavg", model, CLIENTS, cross_entropy, cohort=1, rounds=1)


def test_a_record_of_ones_own_is_run_like_a_named_one():
    record = fedda.algorithms.get("fedprox")
    ours = run(record, mu=0.5, rounds=3)
    np.testing.assert_array_equal(ours.params["w"], run("fedprox", mu=0.5, rounds=3).params["w"])
    with pytest.raises(InputError, match="unknown setting of this algorithm 'nu'"):
        run(record, nu=0.5)


AVERAGE = fedda.algorithms.get("fedavg")
PHASE = AVERAGE.phases[0]


class Unbounded(NamedTuple):
    client_lr: float = 0.1


class NoDefault(NamedTuple):
    client_lr: Positive


def two_values(hp, task, message, memory, shard, key):
    return PHASE.work(hp, task, message, memory, shard, key)[:2]


def no_seen(hp, task, message, memory, shard, key):
    upload, memory, seen = PHASE.work(hp, task, message, memory, shard, key)
    return upload, memory, seen.loss


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"phases": PHASE.work}, r"phases .* must be a tuple of fedda\.Phase.* got <function"),
        ({"phases": PHASE}, r"as in \(fedda\.Phase\(send, work, merge\),\), got Phase\("),
        ({"phases": [PHASE]}, r"must be a tuple of fedda\.Phase.* got \[Phase\("),
        ({"phases": ()}, r"must be a tuple of fedda\.Phase.* got \(\)"),
        ({"init": None}, "init of an Algorithm must be a function, got None"),
        ({"phases": (PHASE._replace(merge=3),)}, "merge of phase 0 .* must be a function, got 3"),
        ({"Hyper": {"client_lr": 0.1}}, r"Hyper .* NamedTuple class, got \{'client_lr': 0\.1\}"),
        ({"Hyper": AVERAGE.Hyper()}, r"Hyper .* must be a NamedTuple class, got Hyper\("),
        ({"Hyper": Unbounded}, "client_lr of Hyper must have a default .* got <class 'float'>"),
        ({"Hyper": NoDefault}, "client_lr of Hyper must have a default"),
        ({"Hyper": namedtuple("Bare", "mu", defaults=[0])}, "mu of Hyper must .* got None"),
        ({"init": lambda hp, params: params}, "must give a state with a field params, got dict"),
        ({"phases": (PHASE._replace(work=two_values),)}, "work of phase 0 gave 2 values"),
        ({"phases": (PHASE, PHASE._replace(work=no_seen))}, "work of phase 1 gave 3 values"),
    ],
)
def test_records_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        run(AVERAGE._replace(**wrong))


def test_a_loss_that_is_not_finite_is_counted():
    """Labels outside the outputs, hidden from the check: the gradient of such a loss may be 0."""
    result = run(clients=[(X, Y + 5)] * 3, loss=lambda outputs, y: cross_entropy(outputs, y))
    assert result.history[-1]["nonfinite_clients"] == 1
    assert result.history[-1]["skipped_rounds"] == 1


def test_grid_values_must_be_lists():
    with pytest.raises(InputError, match=r"client_lr must be a list of values to try, got 0\.1"):
        fedda.run_grid("fedavg", MODEL, CLIENTS, cross_entropy, grid={"client_lr": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 3}, r"run_grid has no seed\. Give it a list of them, as in seeds=\[0, 1\]"),
        ({"grid": {"seed": [0, 1]}}, r"run_grid has no seed\."),
        ({"on_evaluation": print}, r"run_grid has no on_evaluation: .* in its result\.history"),
    ],
)
def test_settings_of_run_that_run_grid_lacks(settings, message):
    values = {"grid": {"client_lr": [0.1, 0.2]}, "cohort": 1} | settings
    with pytest.raises(InputError, match=message):
        fedda.run_grid("fedavg", MODEL, CLIENTS, cross_entropy, **values)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedopt-adam", {"form": "keras"}), ("fedda-adam", {"beta2": 0.999}),
     ("fedda-sgdm", {"beta1": 0.999})],
)  # fmt: skip
def test_a_number_that_the_parameters_cannot_hold_is_refused(name, settings):
    """0.999 is 1 in bfloat16, and a moment that never changes would leave the model where it is."""
    model = fedda.Model(
        lambda key: jnp.zeros((3, 2), jnp.bfloat16), lambda w, x: x @ w.astype(jnp.float32)
    )
    with pytest.raises(InputError, match=r"got 0\.999.*, which is 1 in bfloat16, .* in float32"):
        fedda.run(name, model, CLIENTS, cross_entropy, cohort=1, rounds=1, **settings)
    fedda.run("fedda-sgdm", model, CLIENTS, cross_entropy, cohort=1, rounds=1, beta1=0.99)
