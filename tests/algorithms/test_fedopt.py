"""FedOpt against a reference in NumPy, Optax and what follows from its equations (B.6).

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
from helpers.problems import BATCH, CLASSIFIED, SIZES, W0, drawn, matrix, softmax
from helpers.quadratics import Quadratics, six_clients, two_kinds_of_clients

pytestmark = pytest.mark.usefixtures("x64")


NAMES = ("fedopt-sgdm", "fedopt-adam", "fedopt-adagrad", "fedopt-yogi")
FORMS = ("paper", "keras")
ETA, ALPHA, BETA1, BETA2, TAU = 0.3, 0.2, 0.8, 0.95, 0.05
HYPER = {
    "fedopt-sgdm": {"client_lr": ETA, "server_lr": ALPHA, "beta1": BETA1},
    "fedopt-adagrad": {"client_lr": ETA, "server_lr": ALPHA, "tau": TAU},
    "fedopt-adam": {
        "client_lr": ETA, "server_lr": ALPHA, "beta1": BETA1, "beta2": BETA2, "tau": TAU,
    },
}  # fmt: skip
HYPER["fedopt-yogi"] = HYPER["fedopt-adam"]
every_server = pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in NAMES for form in FORMS]
)


RUN = {"seed": 7, "rounds": 8, "cohort": 3}
# Clients are FedAvg's whatever the server, so each form meets one of the two ways to count work.
WORK = {
    "paper": {"local_work": 2, "local_unit": "epochs"},
    "keras": {"local_work": 3, "local_unit": "steps"},
}

# Numbers of about 1 after some thousand operations, each of which errs by 1.1e-16 of its result;
# 1 / tau = 20 and a server's 8 steps may magnify that.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def run(name, form, work=None, **hyper):
    return fedda.run(
        name, softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100, form=form,
        **RUN, **(work or WORK[form]), **HYPER[name] | hyper,
    )  # fmt: skip


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples; last batches that are full and that are short."""
    draws = drawn(**RUN, **WORK["paper"])
    found = [visit for visits in draws for visit in visits]
    assert {0, 1, max(SIZES)} <= {visit.examples for visit in found}
    last = {len(visit.batches[-1].x) for visit in found if visit.batches}
    assert {len(visits) for visits in draws} == {3}
    assert min(last) < max(last) == BATCH


@every_server
def test_the_numpy_reference(name, form):
    state = run(name, form).state
    visits = drawn(**RUN, **WORK[form])
    *_, expected = references.run(references.REFERENCES[name], W0, visits, form=form, **HYPER[name])
    for field in ("params", "momentum", "second"):
        got = getattr(state, field)
        assert (got != ()) == (field in expected)  # SGDM has no v, AdaGrad no m
        if got != ():
            np.testing.assert_allclose(matrix(got), expected[field], err_msg=field, **TOLERANCE)


@pytest.mark.parametrize(("direction", "nesterov"), [("momentum", False), ("nesterov", True)])
def test_fedavgm_is_the_momentum_of_optax(direction, nesterov):
    """One full-batch step of all clients, on eta times the gradient."""
    hessians, centres = six_clients()
    hyper = HYPER["fedopt-sgdm"] | {"local_work": 1, "eval_every": 1, "direction": direction}
    found = on_quadratics("fedopt-sgdm", (hessians, centres), 30, **hyper)
    optimiser = optax.sgd(ALPHA, BETA1, nesterov=nesterov)
    x, state, expected = X0, optimiser.init(jnp.asarray(X0)), [X0]
    for _ in range(30):
        gradient = np.mean([H @ (x - b) for H, b in zip(hessians, centres, strict=True)], 0)
        change, state = optimiser.update(jnp.asarray(ETA * gradient), state)
        x = x + np.asarray(change)
        expected.append(x)
    np.testing.assert_allclose([s.params for s in found], expected, **TOLERANCE)


# ---- reductions


@pytest.mark.parametrize("form", FORMS)
def test_without_momentum_fedavgm_is_fedavg(form):
    """With any server rate; 1 makes it McMahan's."""
    for server_lr in (1.0, 0.6):
        rates = {"client_lr": 0.17, "server_lr": server_lr}
        got = run("fedopt-sgdm", form, work=WORK[form], beta1=0.0, **rates)
        plain = fedda.run(
            "fedavg", softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100,
            **RUN, **WORK[form], **rates,
        )  # fmt: skip
        np.testing.assert_allclose(matrix(got.params), matrix(plain.params), **TOLERANCE)


def test_damping_is_a_factor_of_the_rate():
    """So published rates, all for the undamped form, are 1 / (1 - beta1) = 5 times too small."""
    assert fedda.algorithms.options("fedopt-sgdm")["form"][0] == "keras"
    work = WORK["paper"]
    undamped = run("fedopt-sgdm", "keras", work)
    damped = run("fedopt-sgdm", "paper", work, server_lr=ALPHA / (1 - BETA1))
    np.testing.assert_allclose(matrix(undamped.params), matrix(damped.params), **TOLERANCE)
    defaults = [fedda.algorithms.get("fedopt-sgdm", form=form).Hyper() for form in FORMS]
    assert defaults[0].server_lr * (1 - defaults[0].beta1) == pytest.approx(defaults[1].server_lr)


def fedda_delta(name, **hyper):
    return fedda.run(
        name, softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100, units="delta",
        client_lr=ETA, server_lr=ALPHA, beta1=0.0, eps=TAU, **RUN, **WORK["keras"], **hyper,
    )  # fmt: skip


def test_without_momentum_fedda_with_adagrad_is_fedadagrad():
    """A.7-5 for AdaGrad: in units of changes, on v from 0."""
    got, expected = fedda_delta("fedda-adagrad"), run("fedopt-adagrad", "keras")
    np.testing.assert_allclose(matrix(got.params), matrix(expected.params), **TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_without_momentum_fedda_with_adam_is_fedadam_where_no_bias_is_left(form):
    """A.7-5. FedDA's exponent is r + 1, Keras' r + 2, the paper's form has none: beta2 = 0."""
    got = fedda_delta("fedda-adam", beta2=0.0)
    expected = run("fedopt-adam", form, WORK["keras"], beta1=0.0, beta2=0.0)
    np.testing.assert_allclose(matrix(got.params), matrix(expected.params), **TOLERANCE)


# ---- quadratics


X0 = np.array([1.5, -2.0, 0.5])


def on_quadratics(name, problem, rounds, **settings):
    """The server's state at every evaluation."""
    trained = Quadratics(*problem, start=X0).evaluations(name, rounds, **settings)
    return [jax.tree.map(np.array, each.run.state) for each in trained]


def from_moments(scale_by, form, alpha, b1, b2, tau):
    """A server by Optax, whose Adam and Yogi give (m / (1 - b1^t)) / sqrt(v / (1 - b2^t)) at eps 0.

    Keras:  rate m / (sqrt(v) + tau) with rate = alpha sqrt(1 - b2^t) / (1 - b1^t) is alpha times
            that, divided by 1 + tau / sqrt(v); and its t is ahead by one update with a zero.
    Paper:  the same without the rate's factor, which is divided out; and v starts at tau².
    """
    optimiser = scale_by(b1, b2, eps=0.0)
    zeros = jnp.zeros(3)
    state = optimiser.init(zeros)
    state = state._replace(mu=zeros, nu=zeros if form == "keras" else zeros + tau**2)
    if form == "keras":
        _, state = optimiser.update(zeros, state)

    def step(gradient):
        nonlocal state
        direction, state = optimiser.update(gradient, state)
        t = state.count.astype(float)
        if form == "paper":
            direction = direction * (1 - b1**t) / jnp.sqrt(1 - b2**t)
        return -alpha * direction / (1 + tau / jnp.sqrt(state.nu))

    return step


def from_squares(form, alpha, tau):
    """AdaGrad by Optax, whose eps is inside the root: without it, D / sqrt(v), then as above."""
    start = 0.0 if form == "keras" else tau**2
    optimiser = optax.scale_by_rss(initial_accumulator_value=start, eps=0.0)
    state = optimiser.init(jnp.zeros(3))

    def step(gradient):
        nonlocal state
        direction, state = optimiser.update(gradient, state)
        return -alpha * direction / (1 + tau / jnp.sqrt(state.sum_of_squares))

    return step


def from_trace(form, alpha, beta1):
    if form == "keras":
        optimiser = optax.sgd(alpha, beta1)
    else:
        optimiser = optax.chain(optax.ema(beta1, debias=False), optax.scale(-alpha))
    state = optimiser.init(jnp.zeros(3))

    def step(gradient):
        nonlocal state
        change, state = optimiser.update(gradient, state)
        return change

    return step


OPTAX = {
    "fedopt-sgdm": lambda form: from_trace(form, ALPHA, BETA1),
    "fedopt-adagrad": lambda form: from_squares(form, ALPHA, TAU),
    "fedopt-adam": lambda form: from_moments(optax.scale_by_adam, form, ALPHA, BETA1, BETA2, TAU),
    "fedopt-yogi": lambda form: from_moments(optax.scale_by_yogi, form, ALPHA, BETA1, BETA2, TAU),
}


@every_server
def test_one_full_batch_step_of_all_clients_is_the_centralised_optimiser(name, form):
    """On eta times the gradient, for that is what the clients' changes are."""
    hessians, centres = six_clients()
    found = on_quadratics(
        name, (hessians, centres), 30, local_work=1, eval_every=1, form=form, **HYPER[name]
    )
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        step, x, expected = OPTAX[name](form), X0, [X0]
        for _ in range(30):
            gradient = np.mean([H @ (x - b) for H, b in zip(hessians, centres, strict=True)], 0)
            x = x + np.asarray(step(jnp.asarray(ETA * gradient)))
            expected.append(x)
    np.testing.assert_allclose([s.params for s in found], expected, **TOLERANCE)
    assert np.abs(expected[-1] - X0).max() > 0.3  # ... and it does train


def test_the_first_step_tells_the_exponent():
    """With tau lost in rounding, |m| / sqrt(v) of one D is (1 - b1) / sqrt(1 - b2).

    At (0.9, 0.99) that is 1: the paper's first step is server_lr in every coordinate. Keras'
    correction at its second count makes it sqrt(1 + b2) / (1 + b1) = 0.74, where at its first it
    would be 1. Flower has this 0.74 under the name of the paper's method.
    """
    numbers = HYPER["fedopt-adam"] | {"beta1": 0.9, "beta2": 0.99, "tau": 1e-60}
    share = {}
    for form in FORMS:
        before, after = on_quadratics(
            "fedopt-adam", six_clients(), 30, local_work=1, eval_every=1, form=form, **numbers
        )[:2]
        share[form] = np.abs(after.params - before.params) / ALPHA
    np.testing.assert_allclose(share["paper"], 1.0, rtol=1e-12)
    np.testing.assert_allclose(share["keras"], np.sqrt(1.99) / 1.9, rtol=1e-12)
    assert np.sqrt(1.99) / 1.9 == pytest.approx(0.74, abs=0.005)


def fixed_point(hessians, centres, T):
    """Where FedAvg's change is 0: sum_i (I - (I - eta H_i)^T) (x - b_i) = 0."""
    eye = np.eye(3)
    pulls = [eye - np.linalg.matrix_power(eye - ETA * H, T) for H in hessians]
    return np.linalg.solve(sum(pulls), sum(c @ b for c, b in zip(pulls, centres, strict=True)))


def end_of(name, problem, local_work):
    settings = {"local_work": local_work, "eval_every": 4000} | HYPER[name]
    return on_quadratics(name, problem, 4000, **settings)[-1].params


@pytest.mark.parametrize("name", NAMES)
def test_the_server_changes_the_way_and_not_the_fixed_point(name):
    """Three local steps end where FedAvg's do, which is not the optimum."""
    for problem in (two_kinds_of_clients(), six_clients()):
        end = fixed_point(*problem, T=3)
        assert np.abs(end - fixed_point(*problem, T=1)).max() > 0.1
        np.testing.assert_allclose(end_of(name, problem, 3), end, atol=1e-8)


def test_one_local_step_ends_at_the_optimum():
    pair = two_kinds_of_clients()
    np.testing.assert_allclose(fixed_point(*pair, T=1), 2.2)  # (1 * -1 + 4 * 3) / (1 + 4)
    np.testing.assert_allclose(end_of("fedopt-adam", pair, 1), 2.2, atol=1e-8)
