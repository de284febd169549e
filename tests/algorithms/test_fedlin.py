"""FedLin (B.3) against a reference in NumPy, and its fixed points and limits.

The reference is a loop over lists in the notation of the paper: x is the server's point, g the
cohort's gradient. It knows a client only by its gradients, so it serves softmax regression, with
batches as they were drawn, as well as quadratics.
"""

import itertools
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda import api
from fedda.core.losses import cross_entropy
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import train
from helpers.problems import BATCH, CLASSIFIED, SIZES, W0, losses_of, matrix, mean_gradient, softmax
from helpers.quadratics import Quadratics, five_clients

pytestmark = pytest.mark.usefixtures("x64")
PROVES = ("fedlin",)


SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
RATES = {"client_lr": 0.2, "server_lr": 0.7}

# Numbers of about 1 after some thousand operations that err by 1.1e-16 of their results.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def fedlin(
    rounds, x, *, client_lr, server_lr=1.0, rate="step", same_batch="no",
    share=lambda gradient: 1.0,
    # What follows is right as it stands; other values are mistakes.
    sign=1, stale=False,
):  # fmt: skip
    """B.3, line by line; a visit is (client, N_i, its mini-batches' gradients, the full one).

    `share` is the part of a mini-batch that a gradient is of, under the reduction `sum`.
    """
    old = {}
    for visits in rounds:
        total = sum(N for _, N, _, _ in visits)
        g = sum((N / total * full(x) for _, N, _, full in visits if N > 0), 0 * x)  # phase A
        move = 0 * x
        for i, N, gradients, full in visits:  # phase B
            y, tau = x, len(gradients)
            own = full(x) if N else None
            if stale:
                own, old[i] = old.get(i, own), own
            for gradient in gradients:
                eta = client_lr if rate == "step" else client_lr / tau
                at_x = share(gradient) * own if same_batch == "no" else gradient(x)
                y = y - eta * (gradient(y) - sign * (at_x - share(gradient) * g))
            move = move + N / total * (y - x)
        x = x + server_lr * move
    return x, g


def batch_gradient(x, labels, factor, W):
    return factor * mean_gradient(W, x, labels)


def part_of_a_batch(gradient):
    """Under the reduction `sum`: b / B."""
    _, _, factor = gradient.args
    return factor / BATCH


@lru_cache
def batch_rows(plan, r, i):
    """The rows of each batch of a client: as `problems.drawn`, but for the second phase."""
    steps, rows, mask = jax.device_get(_batches(plan, from_clients(CLASSIFIED), r, i))
    return [rows[t, 0][mask[t, 0]] for t in range(steps)]


@partial(jax.jit, static_argnames="plan")
def _batches(plan, shards, r, i):
    key = random.key(SEED)
    for number in (1, r, 1, i):  # training, round, the second phase, client
        key = random.fold_in(key, number)
    batches = Task(softmax, cross_entropy, plan).batches(shards.shard(i), key)
    return batches.steps, batches.rows, batches.mask


def regression_rounds(
    rounds=ROUNDS, cohort=COHORT, local_work=1, local_unit="steps", stabilise=0, reduction="mean"
):
    """The visits of a run on softmax regression."""
    plan, found = Plan(BATCH, local_work, local_unit), []
    for r in range(rounds):
        visits = []
        for i in draw_cohort(SEED, r, len(SIZES), cohort).tolist():
            x, y = CLASSIFIED[i]
            full = partial(batch_gradient, x, y, BATCH if reduction == "sum" else 1)
            step = partial(batch_gradient, x, y, min(BATCH, len(x)) if reduction == "sum" else 1)
            if len(x) == 0:
                gradients = []
            elif r >= rounds - stabilise:
                gradients = [step]
            else:
                gradients = [
                    partial(batch_gradient, x[k], y[k], len(k) if reduction == "sum" else 1)
                    for k in batch_rows(plan, r, i)
                ]
            visits.append((i, len(x), gradients, full))
        found.append(visits)
    return found


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
    share = {"share": part_of_a_batch} if "reduction" in work else {}
    x, g = fedlin(regression_rounds(**work), W0, **rates, **options, **share)
    near(matrix(state.params), x)
    near(matrix(state.gradient), g)


def test_the_draws_hold_what_the_comparison_is_for():
    rounds = regression_rounds(**EPOCHS)
    visited = [[i for i, *_ in visits] for visits in rounds]
    assert {0, 1} <= {SIZES[i] for i in itertools.chain(*visited)}
    assert len({len(gradients) for visits in rounds for _, _, gradients, _ in visits}) > 3


def test_the_training_loss_is_that_of_the_local_steps():
    """Neither pass for the full gradient is counted as training."""
    settings = RATES | EPOCHS | {"rounds": 1}
    result = fedda.run(
        "fedlin", softmax, CLASSIFIED, cross_entropy, batch=BATCH, cohort=COHORT, seed=SEED,
        eval_every=1000, **settings,
    )  # fmt: skip
    (visits,) = regression_rounds(rounds=1, **EPOCHS)
    total = sum(N for _, N, _, _ in visits)
    g = sum(N / total * full(W0) for _, N, _, full in visits if N)
    losses = []
    for _, _, gradients, full in visits:
        y = W0
        for gradient in gradients:
            losses.extend(losses_of(y, *gradient.args[:2]))
            y = y - RATES["client_lr"] * (gradient(y) - full(W0) + g)
    near(result.history[-1]["train_loss"], np.mean(losses))


# ------------------------------------------------------------------------------ limits


def gradient_descent(rounds, rate):
    """On the loss of the pooled examples of each round's cohort."""
    W = W0
    for visits in rounds:
        total = sum(N for _, N, _, _ in visits)
        W = W - rate * sum(N / total * full(W) for _, N, _, full in visits if N)
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
    near(matrix(state.params), gradient_descent(regression_rounds(), rate))


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


# --------------------------------------------------------------- mistakes would be noticed


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param({"sign": -1}, id="flipped sign"),
        pytest.param({"stale": True}, id="own gradient of the last visit"),
        pytest.param({"rate": "total"}, id="rate"),
        pytest.param({"same_batch": "yes"}, id="batch"),
    ],
)
def test_a_mistake_would_be_noticed(mistake):
    right = matrix(regression(**RATES, **EPOCHS).params)
    wrong, _ = fedlin(regression_rounds(**EPOCHS), W0, **RATES, **mistake)
    assert apart(wrong, right) > 1e-3  # the tolerance is nine orders below


def test_a_flipped_sign_is_seen_at_the_fixed_point():
    right, _ = fedlin(PAIR.rounds(MANY), np.zeros(1), client_lr=LR)
    wrong, _ = fedlin(PAIR.rounds(MANY), np.zeros(1), client_lr=LR, sign=-1)
    assert apart(right, 2.2) < 1e-12
    assert not apart(wrong, 2.2) < 0.1
