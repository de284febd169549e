"""MFL against a reference in NumPy, Optax and what follows from its equations (B.9).

The references in NumPy are in `conformance/references`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedda
from conformance import references
from fedda.core.losses import cross_entropy
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    W0,
    drawn,
    matrix,
    optax_adagrad,
    softmax,
)
from helpers.quadratics import Quadratics, six_clients, two_kinds_of_clients

pytestmark = pytest.mark.usefixtures("x64")


ETA, GAMMA, BETA1, BETA2, EPS = 0.1, 0.8, 0.8, 0.95, 0.05
SGDM = {"client_lr": ETA, "gamma": GAMMA}
ADAM = {"client_lr": ETA, "beta1": BETA1, "beta2": BETA2, "eps": EPS}
ADAGRAD = {"client_lr": ETA, "eps": EPS}


CASES = {
    "sgdm": ("mfl-sgdm", SGDM),
    "sgdm, damped": ("mfl-sgdm", SGDM | {"damping": "on"}),
    "adam": ("mfl-adam", ADAM),
    "adagrad": ("mfl-adagrad", ADAGRAD),
}
RUN = {"seed": 7, "rounds": 8, "cohort": 3}
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}

# Numbers of about 1 after some thousand operations, each of which errs by 1.1e-16 of its result;
# 1 / eps = 20 may magnify that.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def run(name, work, **settings):
    return fedda.run(
        name, softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100, **RUN, **work,
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("work", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize("case", CASES)
def test_the_numpy_reference(case, work):
    """Under epochs the clients' numbers of steps differ, and so do the counts that are averaged."""
    name, settings = CASES[case]
    state = run(name, work, **settings).state
    visits = drawn(**RUN, **work)
    *_, expected = references.run(references.REFERENCES[name], W0, visits, **settings)
    kept = {"mfl-sgdm": {"momentum"}, "mfl-adagrad": {"second"}}
    kept = {"params"} | kept.get(name, {"momentum", "second", "steps"})
    assert {field for field, got in state._asdict().items() if not isinstance(got, tuple)} == kept
    for field in kept - {"steps"}:
        got = matrix(getattr(state, field))
        np.testing.assert_allclose(got, expected[field], err_msg=field, **TOLERANCE)
    if "steps" in kept:
        assert state.steps == expected["steps"] > RUN["rounds"]


# ---- reductions


def test_without_momentum_it_is_fedavg():
    for client_lr in (0.1, 0.37):
        plain = run("fedavg", EPOCHS, client_lr=client_lr, server_lr=1.0)
        for damping in ("off", "on"):
            got = run("mfl-sgdm", EPOCHS, client_lr=client_lr, gamma=0.0, damping=damping)
            np.testing.assert_allclose(matrix(got.params), matrix(plain.params), **TOLERANCE)


def test_damping_is_a_factor_of_the_rate():
    undamped = run("mfl-sgdm", EPOCHS, client_lr=ETA, gamma=GAMMA)
    damped = run("mfl-sgdm", EPOCHS, client_lr=ETA / (1 - GAMMA), gamma=GAMMA, damping="on")
    np.testing.assert_allclose(matrix(undamped.params), matrix(damped.params), **TOLERANCE)
    off, on = (fedda.algorithms.get("mfl-sgdm", damping=each).Hyper() for each in ("off", "on"))
    assert on.client_lr * (1 - on.gamma) == pytest.approx(off.client_lr)


# ---- quadratics


X0 = np.array([1.5, -2.0, 0.5])


def equal_clients():
    hessians, centres = six_clients()
    return np.array([hessians[0]] * 6), np.array([centres[0]] * 6)


ROUNDS = 30


def on_quadratics(name, problem, local_work, rounds=ROUNDS, **settings):
    """The state before the first round and after each."""
    settings |= {"local_work": local_work, "eval_every": 1}
    trained = Quadratics(*problem, start=X0).evaluations(name, rounds, **settings)
    return [jax.tree.map(np.array, each.run.state) for each in trained]


OPTAX = {
    "sgdm": optax.sgd(ETA, GAMMA),
    "sgdm, damped": optax.chain(optax.ema(GAMMA, debias=False), optax.scale(-ETA)),
    "adam": optax.adam(ETA, BETA1, BETA2, EPS),
    "adagrad": optax_adagrad(ETA, EPS),
}


def centralised(case, problem, steps):
    """Optax on the mean of the clients' functions."""
    found = [X0]
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        state = OPTAX[case].init(jnp.zeros(3))
        for _ in range(steps):
            gradient = np.mean([H @ (found[-1] - b) for H, b in zip(*problem, strict=True)], 0)
            change, state = OPTAX[case].update(jnp.asarray(gradient), state)
            found.append(found[-1] + np.asarray(change))
    return np.array(found)


@pytest.mark.parametrize("case", CASES)
def test_equal_clients_are_the_centralised_optimiser_whatever_the_rounds(case):
    """Nothing is lost between rounds: three steps a round, and the state goes on as if alone."""
    name, settings = CASES[case]
    found = on_quadratics(name, equal_clients(), 3, **settings)
    expected = centralised(case, equal_clients(), 3 * ROUNDS)
    np.testing.assert_allclose([s.params for s in found], expected[::3], **TOLERANCE)
    assert np.abs(expected[-1] - X0).max() > 0.3  # ... and it does train
    if name == "mfl-adam":
        assert [s.steps for s in found] == [3 * r for r in range(ROUNDS + 1)]


def test_one_full_batch_step_of_all_clients_is_centralised_sgdm():
    """For all that is linear in the gradient, the clients may differ."""
    found = on_quadratics("mfl-sgdm", six_clients(), 1, **SGDM)
    expected = centralised("sgdm", six_clients(), ROUNDS)
    np.testing.assert_allclose([s.params for s in found], expected, **TOLERANCE)


@pytest.mark.parametrize("case", ["adam", "adagrad"])
def test_the_mean_of_the_second_moments_is_not_that_of_the_mean_gradient(case):
    """MFL is not the centralised optimiser here, and is not meant to be: FedDA's argument.

    The mean of the squares exceeds the square of the mean by the gradients' variance, and the mean
    of the clients' steps, all of about client_lr at first, is not the step of the mean gradient.
    """
    name, settings = CASES[case]
    hessians, centres = six_clients()
    found = on_quadratics(name, (hessians, centres), 1, **settings)
    gradients = np.array([H @ (X0 - b) for H, b in zip(hessians, centres, strict=True)])
    share = 1 - BETA2 if case == "adam" else 1.0
    mean_of_squares, square_of_mean = (gradients**2).mean(0), gradients.mean(0) ** 2
    np.testing.assert_allclose(found[1].second, share * mean_of_squares, **TOLERANCE)
    assert (mean_of_squares > 1.05 * square_of_mean).all()
    # In the first step, bias-corrected Adam and AdaGrad both move by client_lr g / (|g| + eps).
    steps = -ETA * gradients / (np.abs(gradients) + EPS)
    np.testing.assert_allclose(found[1].params - X0, steps.mean(0), **TOLERANCE)
    pooled = centralised(case, (hessians, centres), 1)[1]
    assert np.abs(found[1].params - pooled).max() > 0.01


def fixed_point(hessians, centres, T, gamma, share):
    """Of the mean of the clients' T affine steps in (x - b_i, m), with m <- gamma m + share g."""
    eye, kept, given = np.eye(3), 0, 0
    for H, b in zip(hessians, centres, strict=True):
        one = np.block([[eye - ETA * share * H, -ETA * gamma * eye], [share * H, gamma * eye]])
        all_steps = np.linalg.matrix_power(one, T)
        kept = kept + all_steps / len(centres)
        given = given + (np.eye(6) - all_steps) @ np.concatenate([b, 0 * b]) / len(centres)
    return np.split(np.linalg.solve(np.eye(6) - kept, given), 2)


@pytest.mark.parametrize("damping", ["off", "on"])
def test_the_fixed_point_on_quadratics(damping):
    """One local step ends at the optimum, with momentum 0; three with neither."""
    share = {"off": 1.0, "on": 1 - GAMMA}[damping]
    for problem in (two_kinds_of_clients(), six_clients()):
        optimum, still = fixed_point(*problem, 1, GAMMA, share)
        hessians, centres = problem
        pulls = sum(H @ b for H, b in zip(hessians, centres, strict=True))
        np.testing.assert_allclose(optimum, np.linalg.solve(hessians.sum(0), pulls))
        np.testing.assert_allclose(still, 0, atol=1e-14)
        x, m = fixed_point(*problem, 3, GAMMA, share)
        assert np.abs(x - optimum).max() > 0.01
        assert np.abs(m).max() > 0.001
        end = on_quadratics("mfl-sgdm", problem, 3, rounds=600, damping=damping, **SGDM)[-1]
        np.testing.assert_allclose(end.params, x, atol=1e-10)
        np.testing.assert_allclose(end.momentum, m, atol=1e-10)


def test_one_local_step_ends_at_the_optimum():
    end = on_quadratics("mfl-sgdm", two_kinds_of_clients(), 1, rounds=300, **SGDM)[-1]
    np.testing.assert_allclose(end.params, 2.2, atol=1e-10)  # (1 * -1 + 4 * 3) / (1 + 4)
