"""What every algorithm promises for clients smaller than a mini-batch, equal to one and larger.

The algorithms are found, never listed. Everything runs in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda import algorithms, api
from fedda.algorithms import registry
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.cohort import Layout
from fedda.simulate.train import Span, begin, segment
from helpers.quadratics import Quadratics
from helpers.variants import VARIANTS, assert_near

pytestmark = pytest.mark.usefixtures("x64")


def marked(variant, reduction):
    """In the fast group: one algorithm of each module under `sum`, where steps depend on sizes."""
    slow = variant.is_slow or reduction == "mean"
    return pytest.param(variant, reduction, marks=[pytest.mark.slow] if slow else [])


EVERY = [marked(variant, reduction) for variant in VARIANTS for reduction in ("sum", "mean")]

# ------------------------------------------------------------- full-batch rounds of small clients

BATCH = 4
SMALL = (1, 3, 4, 2)  # nobody has more than a mini-batch


MODEL = fedda.Model(
    lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)},
    lambda params, x: x @ params["w"] + params["b"][None],
)


@functools.cache
def small_clients():
    rng = np.random.default_rng(0)
    return from_clients([(rng.normal(size=(n, 3)), rng.normal(size=(n, 2))) for n in SMALL])


def play(variant, task, after=None):
    """One round of all clients, the first or the one after the run `after`."""
    algorithm, shards, key = variant.algorithm, small_clients(), jax.random.key(3)
    hp = api.traced(algorithm.Hyper(), MODEL)
    if after is None:
        run, number = begin(algorithm, False, shards.num_clients)(hp, MODEL.init(key)), 0
    else:
        run, number = jax.tree.map(np.asarray, after), 1  # a copy: programs reuse their arguments
    everyone = np.arange(len(SMALL), dtype=np.int32)[None]
    span = Span(first=number, last=number + 1, cohorts=everyone, shards=shards)
    run, _ = segment(algorithm, task, Layout(), False)(hp, run, key, span)
    return run


@pytest.mark.parametrize(("variant", "reduction"), EVERY, ids=str)
def test_a_full_batch_round_of_small_clients_is_an_ordinary_round_of_one_epoch(variant, reduction):
    """With one epoch and N <= batch, the one mini-batch of a client holds all of its examples.

    The second of two rounds is compared, when momenta and what clients keep are not 0.
    """
    epoch = Task(MODEL, squared_error, Plan(BATCH, 1, "epochs"), reduction=reduction)
    first = play(variant, epoch)
    ordinary = play(variant, epoch, first)
    stabilised = play(variant, epoch._replace(plan=epoch.plan.full()), first)
    assert_near((ordinary.state, ordinary.memory), (stabilised.state, stabilised.memory))
    assert int(stabilised.skipped) == 0


def test_full_batch_rounds_do_not_depend_on_the_unit_of_local_work():
    """So the test above is for plans in steps and in epochs."""
    assert Plan(BATCH, 5, "steps").full() == Plan(BATCH, 2, "epochs").full()


def test_the_length_of_full_batch_steps_of_small_clients():
    """FedAvg, batch 20, one epoch, `sum`: N examples with gradient 1 move by client_lr times N.

    A client with more than a batch moves by client_lr times the batch: as far as by one mini-batch.
    """
    model = fedda.Model(lambda key: np.zeros(1), lambda w, x: x @ w)
    for count in (1, 3, 10, 20, 50):
        result = fedda.run(
            "fedavg", model, [(np.ones((count, 1)), np.zeros(count))], lambda outputs, y: outputs,
            rounds=1, cohort=1, batch=20, local_work=1, local_unit="epochs", reduction="sum",
            stabilise=1, client_lr=0.01,
        )  # fmt: skip
        np.testing.assert_allclose(result.params, -0.01 * min(count, 20), rtol=1e-14)


# ----------------------------------------------------- the optimum, in spite of unequal clients

# Clients of 3 and 17 copies of one example, in batches of 20. In five epochs the first takes one
# step on 15 examples, the second four on 20 and one on 5.
UNEQUAL = Quadratics(
    [[[2.0, 0.5], [0.5, 1.0]], [[0.6, -0.2], [-0.2, 1.5]]], [[1.0, -2.0], [-1.0, 2.0]], (3, 17)
)
OPTIMUM = UNEQUAL.optimum(UNEQUAL.copies)


def rests_at(name, reduction, local_work):
    """The parameters after 2,000 rounds, when the run has converged."""
    fields = algorithms.get(name).Hyper._fields
    # Under `sum` gradients are up to 20 times as large. An eps as large as the gradients makes Adam
    # and AdaGrad smooth, so that they come to rest.
    scale = 1.0 if reduction == "mean" else 20.0
    settings = {"client_lr": 0.1 / scale, "eps": scale}
    settings = {field: value for field, value in settings.items() if field in fields}
    if "eps" in settings:
        settings["client_lr"] = 0.1
    work = {"batch": 20, "local_work": local_work, "local_unit": "epochs", "reduction": reduction}
    return np.asarray(UNEQUAL.train(name, 2000, **work, **settings).state.params)


UNBIASED = [name for name, variant in registry.variants().items() if variant.unbiased]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", UNBIASED)
def test_it_rests_at_the_optimum_of_all_examples(name, reduction):
    np.testing.assert_allclose(rests_at(name, reduction, 5), OPTIMUM, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(algorithms.names()) - set(UNBIASED)))
def test_all_other_algorithms_rest_elsewhere(name):
    assert np.abs(rests_at(name, "mean", 5) - OPTIMUM).max() > 1e-3


@pytest.mark.parametrize("control", ["I", "II"])
def test_options_of_scaffold_rest_there_under_sums(control):
    work = {"batch": 20, "local_work": 5, "local_unit": "epochs", "reduction": "sum"}
    run = UNEQUAL.train("scaffold", 2000, client_lr=0.005, control=control, **work)
    np.testing.assert_allclose(run.state.params, OPTIMUM, rtol=0, atol=1e-10)


def test_where_a_correction_of_another_length_would_rest():
    """FedLin with one step a round, if it took B times the mean gradient h_i off N_i times it.

    At rest all steps together are 0: the sum over i of N_i ((N_i - B) h_i + B G) with the mean G of
    the h_i weighted by N_i. The terms with B cancel, and the sum of N_i^2 h_i is 0, as for FedAvg.
    """
    wrong = UNEQUAL.optimum(UNEQUAL.copies**2)
    assert np.abs(wrong - OPTIMUM).max() > 0.1
    np.testing.assert_allclose(rests_at("fedavg", "sum", 1), wrong, rtol=0, atol=1e-10)
    np.testing.assert_allclose(rests_at("fedlin", "sum", 1), OPTIMUM, rtol=0, atol=1e-10)
