"""Mistakes that would otherwise fail deep inside, or not at all and give wrong numbers."""

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedda
from fedda.core.algorithm import Positive
from fedda.core.losses import accuracy, cross_entropy, squared_error
from fedda.errors import InputError
from fedda.simulate import check_problem

MODEL = fedda.Model(lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"])
X, Y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
CLIENTS = [(X, Y)] * 3


def named(name):
    def metric(outputs, y):
        return accuracy(outputs, y)

    metric.__name__ = name
    return metric


def wrong_class(outputs, y):
    return (jnp.argmax(outputs, -1) != y).astype("int32")


def run(algorithm="fedavg", clients=CLIENTS, loss=cross_entropy, **settings):
    return fedda.run(algorithm, MODEL, clients, loss, **({"cohort": 1, "rounds": 1} | settings))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"loss": squared_error}, r"squared_error needs .* same shape, got \(2,\) and \(\)"),
        ({"loss": lambda outputs, y: outputs.mean()}, "must return one number for each example"),
        ({"loss": lambda outputs, y: outputs.mean(0)}, r"one number .* got shape \(2,\)"),
        ({"loss": lambda outputs, y: None}, "return one number for each .* got NoneType"),
        ({"loss": lambda outputs, y: (outputs[:, 0], y)}, "one number for each .* got tuple"),
        ({"loss": wrong_class}, "wrong_class must return floating-point numbers, got int32"),
        ({"loss": lambda outputs, y: outputs[:, 0] > 0}, "floating-point numbers, got bool"),
        ({"test": (X, Y[:2])}, "the test set has 4 rows in x but 2 in y"),
        ({"test": (X[:0], Y[:0])}, "the test set must have at least one example"),
        ({"test": X}, r"the test set must be a pair \(x, y\) of arrays, got ndarray"),
        ({"test": (X[:, :2], Y)}, r"x of the test set has examples of shape \(2,\)"),
        ({"test": (X * np.nan, Y)}, "x of the test set has a non-finite value in row 0"),
        ({"test": (X, Y + 2)}, "y of the test set has label 2 in row 0"),
        ({"algorithm": None}, "unknown algorithm None"),
        ({"algorithm": "FedDA"}, "mean fedda-adagrad or fedda-adam or fedda-sgdm"),
        ({"algorithm": "fedda-adam", "units": 3}, "unknown value of units of fedda-adam 3"),
        ({"reduction": 3}, "unknown value of reduction 3"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 1.5}, r"seed must be a whole number of at least 0, got 1\.5"),
        ({"seed": 2**33}, r"seed must be below 2\*\*31"),
        ({"stabilise": "a"}, "stabilise must be a share"),
        ({"stabilise": True}, "stabilise must be a share"),
        ({"round": 3}, "unknown setting of fedavg 'round'. Did you mean rounds"),
        ({"eval_evry": 3}, "Did you mean eval_every"),
        ({"directry": "runs"}, "Did you mean directory"),
        ({"client_rl": 1}, "unknown setting of fedavg 'client_rl'. Did you mean client_lr"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1, got 0"),
        ({"loss": 7}, "loss must be a function .* got 7"),
        ({"loss": "crossentropy"}, "unknown loss or metric .* Did you mean cross_entropy"),
        ({"metrics": [accuracy]}, "metrics need a test set: give test"),
        ({"metrics": [accuracy, accuracy], "test": (X, Y)}, "name .accuracy. is already used"),
        ({"metrics": [named("loss")], "test": (X, Y)}, "the metric name 'loss' is already used"),
        ({"test": (X, Y.astype(float))}, "y of the test set must hold the class of each example"),
        ({"memory_gb": -1}, "memory_gb must be a positive finite number, got -1"),
        ({"memory_gb": np.inf}, "memory_gb must be a positive finite number, got inf"),
        ({"memory_gb": 10**400}, "memory_gb must be a positive finite number, got 1000"),
        ({"batch": 2**64}, r"batch must be below 2\*\*31, got 18446744073709551616"),
        ({"batch": 2**29, "local_work": 4}, "would process 2,147,483,648 .* Lower local_wo"),
        ({"local_work": 2**30, "local_unit": "epochs"}, r"would process 4,294,967,296 examples"),
        ({"rounds": 10**5000}, r"rounds must be below 2\*\*31, got int that is too long"),
        ({"stabilise": 10**400}, "stabilise must be a share"),
        ({"client_lr": 10**400}, "client_lr of fedavg must be a positive number, got 1000"),
        ({"metrics": accuracy}, "metrics must be a list of named functions"),
        ({"metrics": [functools.partial(accuracy)]}, "metrics must be a list of named functions"),
        ({"clients": None}, "clients must be a list of pairs .* got NoneType"),
        ({"clients": 7}, "clients must be a list of pairs .* got int"),
        ({"clients": pd.DataFrame({"x": [1]})}, "got DataFrame. fedda.federation makes clients"),
        ({"clients": [(X * np.inf, Y)]}, "x of client 0 has a non-finite value in row 0"),
        ({"clients": [(X.astype(np.float64) * 1e300, Y)]}, "x of client 0 has a non-finite value"),
        ({"clients": [(np.array([["a"]]), Y[:1])]}, "x of client 0 is text; expected numbers"),
        ({"clients": [(X, ["a", "b", "a", "b"])]}, r"y of client 0 is text.* np\.searchsorted\("),
        ({"clients": [(X, np.array(list("abab"), object))]}, "y of client 0 is text"),
        (
            {"clients": [(X, Y.astype(float))]},
            "y of the clients must hold the class of each example",
        ),
        ({"clients": [(X[:, :2], Y)]}, r"applied to examples of shape \(2,\): .*Give examples of"),
    ],
)
def test_refused(mistake, message):
    with pytest.raises(InputError, match=message) as refused:
        run(**mistake)
    assert str(check_problem.TRIED) not in str(refused.value), "of the user's arrays, and no others"


@pytest.mark.parametrize(
    "unusual",
    [
        {"client_lr": np.float32(0.1), "cohort": np.int64(2)},
        {"client_lr": jnp.float32(0.1), "server_lr": np.array(1.0)},
        {"metrics": [wrong_class], "test": (X, Y)},
        {"clients": (pair for pair in CLIENTS)},
        {"clients": [*CLIENTS, ([], [])], "cohort": 2},
        {"clients": [*CLIENTS, (X[:0], np.zeros(0))], "cohort": 2},
    ],
    ids=[
        "numpy scalars",
        "arrays of one number",
        "a whole number as a metric",
        "a generator",
        "an empty list",
        "an empty client of another dtype",
    ],
)
def test_accepted(unusual):
    assert run(**unusual).history[-1]["round"] == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            (MODEL.init, MODEL.apply),
            r"model must be a fedda\.Model\(init, apply\), or a module .*, got tuple",
        ),
        (fedda.Model(lambda key: {}, MODEL.apply), "the parameters must be arrays .* got none"),
        (
            fedda.Model(lambda key: {"w": jnp.zeros((3, 2), "int32")}, MODEL.apply),
            "must be arrays of float32, float64, float16 or bfloat16, got int32",
        ),
        (
            fedda.Model(MODEL.init, lambda params, x: params["v"]),
            r"the model cannot be applied to examples of shape \(3,\): 'v'. Give examples",
        ),
    ],
    ids=["a tuple", "no parameters", "integers", "a KeyError"],
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


class Visited(NamedTuple):
    params: Any
    visits: Any


class NoDefault(NamedTuple):
    client_lr: Positive


def two_values(hp, task, message, memory, shard, key):
    return PHASE.work(hp, task, message, memory, shard, key)[:2]


def keeps_a_sum(hp, task, message, memory, shard, key):
    upload, memory, seen = PHASE.work(hp, task, message, memory, shard, key)
    return upload, {"w": memory["w"].sum()}, seen


def keeps_a_half(hp, task, message, memory, shard, key):
    upload, memory, seen = PHASE.work(hp, task, message, memory, shard, key)
    return upload, memory + 0.5, seen


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
        ({"init": lambda hp, params: params}, "must return a state with a field params, got dict"),
        ({"phases": (PHASE._replace(work=two_values),)}, "work of phase 0 returned 2 values"),
        ({"phases": (PHASE, PHASE._replace(work=no_seen))}, "work of phase 1 returned 3 values"),
        (
            {"memory": lambda hp, params: params, "phases": (PHASE._replace(work=keeps_a_sum),)},
            r"work of phase 0 must return a memory .*\['w'\] was float32\[3, 2\], now .*\[\]",
        ),
        (
            {"memory": lambda hp, params: 0, "phases": (PHASE._replace(work=keeps_a_half),)},
            r"work of phase 0 must return a memory .* memory was int32\[\], now it is float32\[\]",
        ),
        (
            {"phases": (PHASE._replace(merge=lambda hp, state, total: total),)},
            r"the last merge must return a state .* state\.params\['w'\] .* it is absent",
        ),
        (
            {"init": lambda hp, params: [*AVERAGE.init(hp, params)]},
            "init of an Algorithm must return a state with a field params, got list",
        ),
    ],
)
def test_records_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        run(AVERAGE._replace(**wrong))


def test_a_memory_may_begin_as_a_number():
    def counts(hp, task, message, memory, shard, key):
        upload, _, seen = PHASE.work(hp, task, message, memory, shard, key)
        return upload._replace(sum=(upload.sum, shard.count * memory)), memory + 1, seen

    def merge(hp, state, total):
        model, visits = total.sum
        return Visited(PHASE.merge(hp, state, total._replace(sum=model)).params, visits)

    record = AVERAGE._replace(
        init=lambda hp, params: Visited(params, 0),
        memory=lambda hp, params: 0,
        phases=(PHASE._replace(work=counts, merge=merge),),
    )
    assert run(record, cohort=3, rounds=5).state.visits == 3 * len(X) * 4  # before the fifth


def test_a_run_whose_cohorts_had_no_examples_is_refused():
    with pytest.raises(InputError, match=r"all 2 rounds .* no client .* had examples\. Raise coho"):
        run(clients=[(X[:0], Y[:0])] * 9 + CLIENTS[:1], rounds=2)


def test_a_loss_that_is_not_finite_is_counted():
    """Labels outside the outputs, hidden from the check: the gradient of such a loss may be 0."""
    message = r"nothing was trained: all 1 rounds were skipped.* not finite \(1 in all\)"
    with pytest.raises(InputError, match=message):
        run(clients=[(X, Y + 5)] * 3, loss=lambda outputs, y: cross_entropy(outputs, y))


def grid(values, **settings):
    return fedda.run_grid(
        "fedavg", MODEL, CLIENTS, cross_entropy, grid=values, cohort=1, rounds=1, **settings
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"client_lr": 0.1}, r"client_lr must be a list of values to try, got 0\.1"),
        ({"client_lr": [], "server_lr": [1, 2]}, r"client_lr must be a list .* got \[\]"),
        ([("client_lr", [0.1, 1])], r"grid must be a dictionary, as in .*, got \[\("),
    ],
)
def test_what_is_no_grid(values, message):
    with pytest.raises(InputError, match=message):
        grid(values)
    with pytest.raises(InputError, match=r"seeds must be a list of values to try, got range"):
        grid({"client_lr": [0.1, 1]}, seeds=range(0))


def test_a_grid_may_be_of_arrays_and_its_points_are_of_numbers():
    found = grid({"client_lr": jnp.array([0.5, 1])}, seeds=np.arange(2))
    assert [(point.hyper, point.seed) for point in found] == [
        ({"client_lr": lr}, seed) for lr in (0.5, 1.0) for seed in (0, 1)
    ]
    assert {type(value) for point in found for value in (*point.hyper.values(), point.seed)} == {
        float,
        int,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 3}, r"unknown setting of fedavg 'seed'\. Did you mean seeds"),
        ({"grid": {"seed": [0, 1]}}, "unknown hyper-parameter of fedavg 'seed'"),
        ({"on_evaluation": print}, "unknown setting of fedavg 'on_evaluation'"),
        ({"directory": "runs"}, "unknown setting of fedavg 'directory'"),
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
