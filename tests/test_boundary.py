"""Mistakes that would otherwise fail deep inside, or not at all and give wrong numbers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.errors import InputError
from fedda.losses import accuracy, cross_entropy, squared_error

MODEL = fedda.Model(lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"])
X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
CLIENTS = [(X, Y)] * 3


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


def test_grid_values_must_be_lists():
    with pytest.raises(InputError, match=r"client_lr must be a list of values to try, got 0\.1"):
        fedda.run_grid("fedavg", MODEL, CLIENTS, cross_entropy, grid={"client_lr": 0.1})
