"""FedOpt against a reference in NumPy, Optax and what follows from its equations (B.6).

In the references W, m, v, D are matrices, eta is the client's and alpha the server's rate.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedda
from fedda.core.losses import cross_entropy
from helpers.problems import BATCH, CLASSIFIED, SIZES, W0, drawn, matrix, mean_gradient, softmax
from helpers.quadratics import Quadratics, six_clients, two_kinds_of_clients

pytestmark = pytest.mark.usefixtures("x64")
PROVES = ("fedopt-sgdm", "fedopt-adam", "fedopt-adagrad", "fedopt-yogi")


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


# ---- the NumPy references: one server step each, (W, m, v, D, r) -> (W, m, v)


def sgdm(W, m, v, D, r, form, alpha, beta1):
    if form == "keras":
        m = beta1 * m + alpha * D
        return W + m, m, v
    m = beta1 * m + (1 - beta1) * D
    return W + alpha * m, m, v


def nesterov(W, m, v, D, r, form, alpha, beta1):
    """Sutskever's form of Nesterov's momentum: the step looks ahead by one more beta1 m."""
    if form == "keras":
        m = beta1 * m + alpha * D
        return W + beta1 * m + alpha * D, m, v
    m = beta1 * m + (1 - beta1) * D
    return W + alpha * (beta1 * m + (1 - beta1) * D), m, v


def quasi_hyperbolic(W, m, v, D, r, form, alpha, beta1, nu):
    """Ma and Yarats (2019), equation 4. Undamped, alpha stands for (1 - beta1) times their rate."""
    rate = alpha / (1 - beta1) if form == "keras" else alpha
    m = beta1 * m + (1 - beta1) * D
    return W + rate * (nu * m + (1 - nu) * D), m, v


def adagrad(W, m, v, D, r, form, alpha, tau):
    v = v + D**2
    return W + alpha * D / (np.sqrt(v) + tau), m, v


def adagrad_along_momentum(W, m, v, D, r, form, alpha, beta1, tau):
    m = beta1 * m + (1 - beta1) * D
    v = v + D**2
    return W + alpha * m / (np.sqrt(v) + tau), m, v


def adagrad_of_momentum(W, m, v, D, r, form, alpha, beta1, tau):
    m = beta1 * m + (1 - beta1) * D
    v = v + m**2
    return W + alpha * m / (np.sqrt(v) + tau), m, v


def corrected_rate(form, r, alpha, beta1, beta2):
    """Keras also counts the update with a zero that creates its state: round 0 is its second."""
    if form == "paper":
        return alpha
    t = r + 2
    return alpha * np.sqrt(1 - beta2**t) / (1 - beta1**t)


def adam(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    m = beta1 * m + (1 - beta1) * D
    v = beta2 * v + (1 - beta2) * D**2
    return W + corrected_rate(form, r, alpha, beta1, beta2) * m / (np.sqrt(v) + tau), m, v


def yogi(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    m = beta1 * m + (1 - beta1) * D
    v = v - (1 - beta2) * D**2 * np.sign(v - D**2)
    return W + corrected_rate(form, r, alpha, beta1, beta2) * m / (np.sqrt(v) + tau), m, v


def mean_change(visits, W, eta, weight=lambda N: N):
    """D: FedAvg's clients, averaged by their numbers of examples."""
    total, D = sum(weight(N) for N, _ in visits), 0 * W
    for N, batches in visits:
        y = W
        for x, labels, _ in batches:
            y = y - eta * mean_gradient(y, x, labels)
        D = D + weight(N) / total * (y - W)
    return D


def reference(step, draws, form, client_lr, server_lr, start=0.0, weight=lambda N: N, **numbers):
    """`start` is that of v in Keras' form."""
    if form == "paper":
        start = numbers.get("tau", 0.0) ** 2  # SGDM has neither
    W, m, v = W0, 0 * W0, np.full_like(W0, start)
    for r, visits in enumerate(draws):
        D = mean_change(visits, W, client_lr, weight)
        W, m, v = step(W, m, v, D, r, form, server_lr, **numbers)
    return {"params": W, "momentum": m, "second": v}


STEPS = {"fedopt-sgdm": sgdm, "fedopt-adam": adam, "fedopt-adagrad": adagrad, "fedopt-yogi": yogi}
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
    assert {0, 1, max(SIZES)} <= {N for visits in draws for N, _ in visits}
    last = {len(batches[-1][0]) for visits in draws for _, batches in visits if batches}
    assert {len(visits) for visits in draws} == {3}
    assert min(last) < max(last) == BATCH


@every_server
def test_the_numpy_reference(name, form):
    state = run(name, form).state
    expected = reference(STEPS[name], drawn(**RUN, **WORK[form]), form, **HYPER[name])
    for field, value in expected.items():
        got = getattr(state, field)
        if got != ():  # SGDM has no v, AdaGrad no m
            np.testing.assert_allclose(matrix(got), value, err_msg=field, **TOLERANCE)
    has = {"sgdm": {"momentum"}, "adagrad": {"second"}}
    kept = has.get(name.removeprefix("fedopt-"), {"momentum", "second"})
    assert {field for field in ("momentum", "second") if getattr(state, field) != ()} == kept


OPTIONS = {
    "nesterov": ("fedopt-sgdm", {"direction": "nesterov"}, nesterov, {}),
    "quasi-hyperbolic": (
        "fedopt-sgdm", {"direction": "quasi-hyperbolic"}, quasi_hyperbolic, {"nu": 0.6}),
    "ahead of nu 1": (
        "fedopt-sgdm", {"direction": "quasi-hyperbolic"}, quasi_hyperbolic, {"nu": 1.3}),
    "step along momentum": (
        "fedopt-adagrad", {"server_momentum": "step"}, adagrad_along_momentum, {"beta1": BETA1}),
    "squares of momentum": (
        "fedopt-adagrad", {"server_momentum": "gradient"}, adagrad_of_momentum, {"beta1": BETA1}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", OPTIONS)
def test_the_numpy_reference_of_an_option(case, form):
    name, options, step, more = OPTIONS[case]
    state = run(name, form, **options, **more).state
    expected = reference(step, drawn(**RUN, **WORK[form]), form, **HYPER[name] | more)
    if form == "keras" and "nu" in more:  # its m has the scale of the step
        expected["momentum"] = expected["momentum"] * ALPHA / (1 - BETA1)
    for field in {"params", "momentum", "second"} - ({"second"} if "sgdm" in name else set()):
        got = matrix(getattr(state, field))
        np.testing.assert_allclose(got, expected[field], err_msg=field, **TOLERANCE)
    plain = reference(STEPS[name], drawn(**RUN, **WORK[form]), form, **HYPER[name])["params"]
    assert np.abs(matrix(state.params) - plain).max() > 1e-3  # ... and the option matters


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


# ---- what it would not be


def adam_with_bias_correction(exponent):
    """Adam's correction where the form has none, or another exponent than the form's."""

    def step(W, m, v, D, r, form, alpha, beta1, beta2, tau):
        t = exponent(r)
        rate = alpha * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        return adam(W, m, v, D, r, "paper", rate, beta1, beta2, tau)

    return step


def adam_with_tau_beside_the_corrected_root(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    """Kingma and Ba's epsilon, where Keras has their epsilon hat."""
    m, v = beta1 * m + (1 - beta1) * D, beta2 * v + (1 - beta2) * D**2
    m_hat, v_hat = m / (1 - beta1 ** (r + 2)), v / (1 - beta2 ** (r + 2))
    return W + alpha * m_hat / (np.sqrt(v_hat) + tau), m, v


def adam_with_tau_in_the_root(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    m, v = beta1 * m + (1 - beta1) * D, beta2 * v + (1 - beta2) * D**2
    return W + alpha * m / np.sqrt(v + tau**2), m, v


def adam_undamped(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    m, v = beta1 * m + D, beta2 * v + (1 - beta2) * D**2
    return W + alpha * m / (np.sqrt(v) + tau), m, v


def adagrad_with_momentum(W, m, v, D, r, form, alpha, tau):
    m, v = BETA1 * m + (1 - BETA1) * D, v + D**2
    return W + alpha * m / (np.sqrt(v) + tau), m, v


def yogi_with_the_other_sign(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    m, v = beta1 * m + (1 - beta1) * D, v + (1 - beta2) * D**2 * np.sign(v - D**2)
    return W + alpha * m / (np.sqrt(np.maximum(v, 0)) + tau), m, v


def yogi_whose_sign_looks_at_the_change(W, m, v, D, r, form, alpha, beta1, beta2, tau):
    """sign(g - v), as a comment in the authors' code has it."""
    m, v = beta1 * m + (1 - beta1) * D, v + (1 - beta2) * D**2 * np.sign(D - v)
    return W + alpha * m / (np.sqrt(np.maximum(v, 0)) + tau), m, v


def damped_where_it_is_not(W, m, v, D, r, form, alpha, beta1):
    return sgdm(W, m, v, D, r, "paper" if form == "keras" else "keras", alpha, beta1)


MISREADINGS = {
    "Flower: exponent round + 1, from 1": (
        "fedopt-adam", "paper", adam_with_bias_correction(lambda r: r + 2), {}),
    "bias correction": ("fedopt-adam", "paper", adam_with_bias_correction(lambda r: r + 1), {}),
    "textbook exponent": ("fedopt-adam", "keras", adam_with_bias_correction(lambda r: r + 1), {}),
    "epsilon, no hat": ("fedopt-adam", "keras", adam_with_tau_beside_the_corrected_root, {}),
    "tau in the root": ("fedopt-adam", "paper", adam_with_tau_in_the_root, {}),
    "undamped Adam": ("fedopt-adam", "paper", adam_undamped, {}),
    "v from TensorFlow's 0.1": ("fedopt-adagrad", "keras", adagrad, {"start": 0.1}),
    "momentum in AdaGrad": ("fedopt-adagrad", "paper", adagrad_with_momentum, {}),
    "Yogi's sign": ("fedopt-yogi", "paper", yogi_with_the_other_sign, {}),
    "Yogi's sign of D": ("fedopt-yogi", "paper", yogi_whose_sign_looks_at_the_change, {}),
    "v from 1": ("fedopt-yogi", "keras", yogi, {"start": 1.0}),
    "damped FedAvgM": ("fedopt-sgdm", "keras", damped_where_it_is_not, {}),
    "undamped paper form": ("fedopt-sgdm", "paper", damped_where_it_is_not, {}),
    "uniform weights": ("fedopt-sgdm", "keras", sgdm, {"weight": lambda N: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", MISREADINGS)
def test_a_misreading_would_be_noticed(case):
    name, form, step, other = MISREADINGS[case]
    wrong = reference(step, drawn(**RUN, **WORK[form]), form, **HYPER[name], **other)["params"]
    assert np.abs(matrix(run(name, form).params) - wrong).max() > 1e-3


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
