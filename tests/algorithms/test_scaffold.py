"""SCAFFOLD against its reference in NumPy, and its fixed points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from conformance import references
from conformance.problem import mean_gradient
from fedda import algorithms, api
from fedda.core.losses import cross_entropy
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import train
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    SIZES,
    W0,
    drawn,
    matrix,
    softmax,
    train_losses,
)
from helpers.quadratics import Quadratics, five_clients

pytestmark = pytest.mark.usefixtures("x64")


SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
RATES = {"client_lr": 0.2, "server_lr": 0.7}
# Numbers of about 1 after some thousand operations that err by 1.1e-16 of their results; the
# printed form of option II divides such errors by K_i client_lr, of 0.08 at the least.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def reference(visits, **settings):
    """The state after the last round."""
    scaffold = references.REFERENCES["scaffold"]
    *_, state = references.run(scaffold, W0, visits, clients=len(SIZES), **settings)
    return state


def end_of(name, *problem, seed=SEED, **settings):
    """The whole of a run at its end: the server's state and what the clients keep."""
    setup, hyper = api.prepare(name, *problem, **{"batch": BATCH, "eval_every": 1000} | settings)
    *_, last = train(setup, api.traced(hyper, setup.task.model), [seed])
    return last.run


def regression(name="scaffold", cohort=COHORT, rounds=ROUNDS, **settings):
    settings |= {"cohort": cohort, "rounds": rounds}
    return end_of(name, softmax, CLASSIFIED, cross_entropy, **settings)


def apart(one, other):
    return np.abs(np.asarray(one) - np.asarray(other)).max()


# ------------------------------------------------------------------------- the equations


SUMS = EPOCHS | {"reduction": "sum"}  # with short batches
LATE = STEPS | {"stabilise": 2, "reduction": "sum"}  # sums of losses, at last of all examples


@pytest.mark.parametrize(
    ("control", "weighting", "work"),
    [
        ("II", "examples", EPOCHS),
        ("I", "uniform", EPOCHS),
        ("II", "uniform", LATE),
        ("I", "examples", LATE),
        ("II", "examples", SUMS),
        ("I", "examples", SUMS),
    ],
    ids=[
        "II-examples-epochs",
        "I-uniform-epochs",
        "II-uniform-late-sums",
        "I-examples-late-sums",
        "II-examples-sums",
        "I-examples-sums",
    ],
)
def test_reference(control, weighting, work):
    """Server and clients, through visits of many, one and no examples and of unequal steps."""
    settings = RATES | {"control": control, "weighting": weighting}
    if "reduction" in work:
        settings["client_lr"] = 0.04
    run = regression(**settings, **work)
    visits = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **work)
    expected = reference(visits, **settings)
    np.testing.assert_allclose(matrix(run.state.params), expected["params"], **TOLERANCE)
    np.testing.assert_allclose(matrix(run.state.control), expected["mean_control"], **TOLERANCE)
    np.testing.assert_allclose(matrix(sent(run).control), expected["control"], **TOLERANCE)
    for i, own in enumerate(expected["client_controls"]):
        np.testing.assert_allclose(of_client(run.memory, i), own, **TOLERANCE)
    assert np.abs(expected["control"]).max() > 0.1  # there was something to correct
    # C is the mean of w_i c_i over all clients, also those never visited: an invariant.
    weights = SIZES if weighting == "examples" else [1] * len(SIZES)
    mean = sum(w * of_client(run.memory, i) for i, w in enumerate(weights)) / len(SIZES)
    np.testing.assert_allclose(matrix(run.state.control), mean, **TOLERANCE)


def sent(run):
    """What the server would send next."""
    algorithm = algorithms.get("scaffold")
    return algorithm.phases[0].send(algorithm.Hyper(), run.state)


def test_the_draws_hold_what_the_comparison_is_for():
    cohorts = [draw_cohort(SEED, r, len(SIZES), COHORT).tolist() for r in range(ROUNDS)]
    empty = SIZES.index(0)
    assert any(empty in cohort for cohort in cohorts)
    assert any(SIZES.index(1) in cohort for cohort in cohorts)
    assert any(set(visits_of(i, cohorts)) >= {0, 3} for i in range(len(SIZES)))  # and not 1, 2
    assert any(0 < len(visits_of(i, cohorts)) < ROUNDS for i in range(len(SIZES)))
    steps = {
        len(visit.batches)
        for visits in drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **EPOCHS)
        for visit in visits
    }
    assert len(steps) > 3


def visits_of(client, cohorts):
    return [r for r, cohort in enumerate(cohorts) if client in cohort]


def test_the_training_loss_is_that_of_the_local_steps():
    """Option I's extra pass over the data is not counted as training."""
    result = fedda.run(
        "scaffold", softmax, CLASSIFIED, cross_entropy, batch=BATCH, cohort=COHORT, rounds=1,
        seed=SEED, control="I", **EPOCHS, **RATES,
    )  # fmt: skip
    visits = drawn(seed=SEED, rounds=1, cohort=COHORT, **EPOCHS)
    reference(visits, **RATES, control="I")
    expected = train_losses(visits)
    np.testing.assert_allclose([result.history[-1]["train_loss"]], expected, **TOLERANCE)


def test_option_ii_keeps_the_mean_of_the_gradients_of_the_steps():
    """After a round from c = 0, and after one from c and c_i that are not 0."""
    everyone = {"cohort": len(SIZES), **EPOCHS}
    x, c, own = W0, 0 * W0, [0 * W0] * len(SIZES)
    for rounds in (1, 2):
        run = regression(rounds=rounds, **RATES, **everyone)
        for visit in drawn(seed=SEED, rounds=rounds, **everyone)[-1]:
            i, y, seen = visit.client, x, []
            for batch in visit.batches:
                seen.append(batch.gradient(y))
                y = y - RATES["client_lr"] * (seen[-1] - own[i] + c)
            expected = np.mean(seen, axis=0) if visit.examples else 0 * W0
            np.testing.assert_allclose(of_client(run.memory, i), expected, **TOLERANCE)
        x, c = map(matrix, sent(run))
        own = [of_client(run.memory, i) for i in range(len(SIZES))]


def of_client(memory, i):
    return matrix(jax.tree.map(lambda leaf: leaf[i], memory))


# ------------------------------------------------------------------------ fixed points


PAIR = Quadratics([[[1.0]], [[4.0]]], [[-1.0], [3.0]])
FIVE = Quadratics(*five_clients())
LOPSIDED = Quadratics([[[1.0]], [[4.0]]], [[-1.0], [3.0]], copies=(4, 1))
MANY = 300  # rounds: the slowest direction shrinks by 1 - 0.05 * 5 * 0.9, so by 1e-33


def test_the_optimum_of_the_two_clients():
    assert PAIR.optimum() == pytest.approx(2.2)
    assert PAIR.where_fedavg_rests(0.05, 5) == pytest.approx(1.99295, abs=5e-6)


@pytest.mark.parametrize(
    ("problem", "control"),
    [(PAIR, "II"), (PAIR, "I"), (FIVE, "II")],
    ids=["two-II", "two-I", "five-II"],
)
def test_it_finds_the_optimum_where_fedavg_does_not(problem, control):
    run = problem.train("scaffold", MANY, control=control)
    assert apart(run.state.params, problem.optimum()) < 1e-12
    assert apart(run.state.control, 0) < 1e-12
    gradients = [problem.gradient(i, problem.optimum()) for i in range(len(problem.b))]
    assert apart(run.memory, gradients) < 1e-12  # each c_i is what the others must cancel
    rest = problem.where_fedavg_rests(0.05, 5)
    assert apart(problem.train("fedavg", MANY).state.params, rest) < 1e-12
    assert apart(rest, problem.optimum()) > 0.05


@pytest.mark.parametrize("control", ["II", "I"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_it_rests_at_the_optimum_of_the_objective_that_its_weights_define(weighting, control):
    """At rest y = W for all clients, so c_i = g_i(W) and c = 0: the weighted mean of the g_i is 0.

    For N = (4, 1) the optimum of all examples is (4 * 1 * -1 + 1 * 4 * 3) / (4 * 1 + 1 * 4) = 1,
    and that of the plain mean of the clients (1 * -1 + 4 * 3) / (1 + 4) = 2.2.
    """
    weights = LOPSIDED.copies if weighting == "examples" else (1, 1)
    assert LOPSIDED.optimum(weights) == pytest.approx(1.0 if weighting == "examples" else 2.2)
    run = LOPSIDED.train("scaffold", MANY, weighting=weighting, control=control)
    assert apart(run.state.params, LOPSIDED.optimum(weights)) < 1e-12
    assert apart(sent(run).control, 0) < 1e-12


def test_it_reaches_the_optimum_when_only_some_clients_take_part():
    """The divisor of c is then an estimate, which changes how it gets there and not where."""
    problem = Quadratics(*five_clients(), copies=(4, 1, 2, 7, 1))
    run = problem.train("scaffold", 3000, cohort=2)
    assert apart(run.state.params, problem.optimum(problem.copies)) < 1e-10


# ------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("control", ["II", "I"])
def test_one_full_batch_step_of_all_is_gradient_descent(control):
    """With uniform weights the c_i cancel against c, whatever they are."""
    present = [pair for pair in CLASSIFIED if len(pair[0])]  # c counts empty clients, W cannot
    run = end_of(
        "scaffold", softmax, present, cross_entropy, cohort=len(present), rounds=20, stabilise=20,
        control=control, weighting="uniform", **RATES,
    )  # fmt: skip
    W = W0
    for _ in range(20):
        gradient = np.mean([mean_gradient(W, x, y) for x, y in present], axis=0)
        W = W - RATES["server_lr"] * RATES["client_lr"] * gradient
    np.testing.assert_allclose(matrix(run.state.params), W, **TOLERANCE)


def test_the_first_round_is_fedavgs_and_no_other():
    """All c are 0 in it; later the two part, so this is no reduction."""
    for rounds in (1, 2):
        one, other = (
            matrix(regression(name, rounds=rounds, **RATES, **EPOCHS).state.params)
            for name in ("scaffold", "fedavg")
        )
        assert apart(one, other) < 1e-14 if rounds == 1 else apart(one, other) > 1e-3


def test_a_client_uses_what_it_kept_at_its_last_visit():
    """Client `i` is away for rounds; spoilt in the meantime, its c_i spoils the next visit."""
    cohorts = [draw_cohort(SEED, r, len(SIZES), COHORT).tolist() for r in range(ROUNDS)]
    i = next(
        i for i in range(len(SIZES)) if SIZES[i] > 1 and visits_of(i, cohorts)[:2] == [0, 3]
    )  # rounds 1 and 4, counted from one
    setup, hyper = api.prepare(
        "scaffold", softmax, CLASSIFIED, cross_entropy, batch=BATCH, cohort=COHORT, rounds=4,
        eval_every=3, **RATES, **EPOCHS,
    )  # fmt: skip
    hp = api.traced(hyper, softmax)

    def after_four(change):
        """What a run is after four rounds if the table is changed after three."""
        evaluations = train(setup, hp, [SEED])
        next(evaluations)
        run = next(evaluations).run
        kept = of_client(run.memory, i)
        run = run._replace(memory=jax.tree.map(lambda leaf: leaf.at[i].set(change(leaf[i])),
                                               run.memory))  # fmt: skip
        (last,) = train(setup, hp, [SEED], first=3, run=run)
        return kept, matrix(last.run.state.params)

    kept, params = after_four(lambda own: own)
    first = drawn(seed=SEED, rounds=1, cohort=COHORT, **EPOCHS)
    controls = reference(first, **RATES)["client_controls"]
    np.testing.assert_allclose(kept, controls[i], **TOLERANCE)
    assert apart(params, after_four(jnp.zeros_like)[1]) > 1e-3
