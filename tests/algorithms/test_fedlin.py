"""FedLin against its reference in NumPy, and its fixed points and limits."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from conformance import references
from conformance.references.reference import mean
from fedda import api
from fedda.core.losses import cross_entropy
from fedda.simulate.train import train
from helpers.problems import BATCH, CLASSIFIED, W0, drawn, matrix, softmax, train_losses
from helpers.quadratics import Quadratics, five_clients

pytestmark = pytest.mark.usefixtures("x64")


SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
RATES = {"client_lr": 0.2, "server_lr": 0.7}

# Numbers of about 1 after some thousand operations that err by 1.1e-16 of their results.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def visits_of(rounds=ROUNDS, cohort=COHORT, local_work=1, local_unit="steps", **work):
    """The visits of a run on softmax regression. The local steps are in the second exchange."""
    work |= {"local_work": local_work, "local_unit": local_unit}
    return drawn(seed=SEED, rounds=rounds, cohort=cohort, phase=1, **work)


def end_of(*problem, **settings):
    """The server's state at the end of a run."""
    settings = {"batch": BATCH, "eval_every": 1000} | settings
    setup, hyper = api.prepare("fedlin", *problem, **settings)
    *_, last = train(setup, api.traced(hyper, setup.task.model), [SEED])
    return last.run.state


def regression(cohort=COHORT, rounds=ROUNDS, **settings):
    return end_of(softmax, CLASSIFIED, cross_entropy, cohort=cohort, rounds=rounds, **settings)


def apart(one, other):
    return np.abs(np.asarray(one) - np.asarray(other)).max()


def near(one, other):
    np.testing.assert_allclose(one, other, **TOLERANCE)


# ------------------------------------------------------------------------- the equations

SUMS = EPOCHS | {"reduction": "sum"}  # with short batches
LATE = STEPS | {"stabilise": 2, "reduction": "sum"}  # sums of losses, at last of all examples
CASES = {
    "epochs": ({}, EPOCHS),
    "epochs-total": ({"rate": "total"}, EPOCHS),
    "epochs-same": ({"same_batch": "yes"}, EPOCHS),
    "sums": ({}, SUMS),
    "sums-same": ({"same_batch": "yes"}, SUMS),
    "late-sums": ({}, LATE),
    "late-sums-total-same": ({"rate": "total", "same_batch": "yes"}, LATE),
}


@pytest.mark.parametrize("case", CASES)
def test_reference(case):
    """Server and clients, through visits of many, one and no examples and of unequal steps."""
    options, work = CASES[case]
    rates = RATES if work is EPOCHS else RATES | {"client_lr": 0.04}
    state = regression(**rates, **options, **work)
    *_, expected = references.run(
        references.REFERENCES["fedlin"], W0, visits_of(**work), **rates, **options
    )
    near(matrix(state.params), expected["params"])
    near(matrix(state.gradient), expected["gradient"])


def test_the_draws_hold_what_the_comparison_is_for():
    visits = list(itertools.chain(*visits_of(**EPOCHS)))
    assert {0, 1} <= {visit.examples for visit in visits}
    assert len({len(visit.batches) for visit in visits}) > 3


def test_the_training_loss_is_that_of_the_local_steps():
    """Neither pass for the full gradient is counted as training."""
    settings = RATES | EPOCHS | {"rounds": 1}
    result = fedda.run(
        "fedlin", softmax, CLASSIFIED, cross_entropy, batch=BATCH, cohort=COHORT, seed=SEED,
        eval_every=1000, **settings,
    )  # fmt: skip
    visits = visits_of(rounds=1, **EPOCHS)
    list(references.run(references.REFERENCES["fedlin"], W0, visits, **RATES))
    near(result.history[-1]["train_loss"], *train_losses(visits))


# ------------------------------------------------------------------------------ limits


def gradient_descent(rounds, rate):
    """On the loss of the pooled examples of each round's cohort."""
    W = W0
    for visits in rounds:
        present = [visit for visit in visits if visit.examples]
        W = W - rate * mean([visit.full.gradient(W) for visit in present], present)
    return W


@pytest.mark.parametrize(
    "settings",
    [
        {"stabilise": ROUNDS},  # full batches
        {"local_work": 1, "same_batch": "yes"},  # any batch: it cancels against itself
    ],
    ids=["full", "same batch"],
)
def test_one_step_is_gradient_descent_on_the_cohort(settings):
    state = regression(**RATES, **settings)
    rate = RATES["server_lr"] * RATES["client_lr"]
    near(matrix(state.params), gradient_descent(visits_of(), rate))


# ------------------------------------------------------------------------ fixed points


LR = 0.05
PAIR = Quadratics([[[1.0]], [[4.0]]], [[-1.0], [3.0]])
FIVE = Quadratics(*five_clients())
LOPSIDED = Quadratics(*five_clients(), copies=(3, 1, 2, 1, 1))
MANY = 300  # rounds: the slowest direction shrinks by about 1 - 0.05 * 5 * 0.8, so by 1e-29


@pytest.mark.parametrize("problem", [PAIR, FIVE, LOPSIDED], ids=["two", "five", "weighted"])
def test_it_finds_the_optimum_where_fedavg_does_not(problem):
    """Also that of the pooled examples, where clients have unequal numbers of them."""
    optimum = problem.optimum(problem.copies)
    assert apart(problem.train("fedlin", MANY).state.params, optimum) < 1e-12
    rest = problem.where_fedavg_rests(LR, 5)
    assert apart(problem.train("fedavg", MANY).state.params, rest) < 1e-12
    assert apart(rest, optimum) > 0.03
    if problem is PAIR:
        assert optimum == pytest.approx(2.2)
        assert rest == pytest.approx(1.99295, abs=5e-6)


@pytest.mark.parametrize("rate", ["step", "total"])
def test_unequal_numbers_of_steps_do_not_move_the_optimum(rate):
    """An epoch of LOPSIDED is three steps for one client and one for another."""
    two_epochs = {"local_unit": "epochs", "local_work": 2}
    run = LOPSIDED.train("fedlin", MANY, rate=rate, client_lr=4 * LR, **two_epochs)
    assert apart(run.state.params, LOPSIDED.optimum(LOPSIDED.copies)) < 1e-12


def test_the_total_rate_is_that_of_all_steps():
    """Where all take 5 steps, client_lr of `total` is 5 times that of `step`."""
    step, total = FIVE.train("fedlin", 8), FIVE.train("fedlin", 8, rate="total", client_lr=5 * LR)
    assert apart(step.state.params, total.state.params) < 1e-13
    assert apart(step.state.params, FIVE.optimum()) > 1e-2  # it is still on its way


def test_a_cohort_of_one_is_fedavg():
    """The cohort's gradient is then the client's own, and the correction is 0."""
    one, other = (FIVE.train(name, 6, cohort=1).state.params for name in ("fedlin", "fedavg"))
    assert apart(one, other) < 1e-14


# ------------------------------------------------------------------------ one batch, one noise


def noisy(params, x, key):
    """Softmax regression that loses half its inputs in training, as with dropout."""
    kept = random.bernoulli(key, 0.5, x.shape)
    return softmax.apply(params, jnp.where(kept, 2 * x, jnp.zeros_like(x)))


def test_the_first_correction_on_the_same_batch_is_exactly_nothing():
    """Batch and noise are those of the gradient, so each client's only step is client_lr g.

    What is left is the rounding of a weighted mean of equal numbers. A full gradient has other
    examples and another noise, and it shows.
    """
    model = fedda.Model(softmax.init, softmax.apply, noisy)
    for same_batch, work in (("yes", {"local_work": 1}), ("no", {"stabilise": 1})):
        state = end_of(
            model, CLASSIFIED, cross_entropy, cohort=COHORT, rounds=1, same_batch=same_batch,
            client_lr=0.2, **work,
        )  # fmt: skip
        step = matrix(state.params) - W0 + 0.2 * matrix(state.gradient)
        assert np.abs(step).max() < 1e-15 if same_batch == "yes" else np.abs(step).max() > 1e-3
