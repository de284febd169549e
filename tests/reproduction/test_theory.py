"""`fedda theory`: the equations against closed forms, the optimisers and the library's own runs."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import fedda
from fedda_reproduction.theory import (
    convergence,
    deviation,
    equations,
    fits,
    identities,
    measure,
    problems,
)
from fedda_reproduction.theory.equations import Hyper, centralised, decomposed, initial

FAMILIES = list(problems.FAMILIES)


def one(name, clients=3):
    """Return one problem of a family."""
    return jax.tree.map(lambda leaf: leaf[0], problems.draw(name, 1, clients))


# ---- The problems are what they are said to be


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_have_the_lipschitz_constant_one(name):
    problem = one(name)
    gradient = problem.gradient
    points = jnp.asarray(np.random.default_rng(0).normal(size=(20, problem.start.size)))
    hessian = jax.vmap(jax.vmap(jax.jacobian(gradient, 1), in_axes=(None, 0)), in_axes=(0, None))(
        problem.data, points
    )
    values = jnp.linalg.eigvalsh(hessian)
    largest = jnp.abs(values).max()
    if "quadratic" in name:
        assert largest == pytest.approx(1)
        edges = {"convex": (0.01, 1), "indefinite": (-1, 1)}[name.split()[0]]
        assert values.min() >= edges[0] - 1e-12
    else:
        assert largest <= 1
        far = jnp.concatenate([points, 1e3 * problem.data.mean(1)])  # all margins one sign, or none
        gradients = jax.vmap(jax.vmap(gradient, (None, 0)), (0, None))(problem.data, far)
        slope = problems.FAMILIES[name].slope
        bound = problems.gradient_bounds(slope, jax.tree.map(lambda leaf: leaf[None], problem))[0]
        assert jnp.linalg.norm(gradients, axis=-1).max() <= bound
    assert (values.min() < -1e-3) == (name in ("indefinite quadratic", "sigmoid"))
    assert problem.weights.sum() == pytest.approx(1)


# ---- Solutions against closed forms


def affine(matrix, offset, start, time):
    """The solution of x' = matrix x + offset."""
    size = len(start)
    whole = np.zeros((size + 1, size + 1))
    whole[:size, :size], whole[:size, size] = matrix, offset
    return (expm(time * whole) @ np.append(start, 1))[:size]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FAMILIES[:2])
@pytest.mark.parametrize("method", ["gd", "sgdm"])
def test_solutions_of_quadratics_are_matrix_exponentials(name, method):
    eta, beta, time = 0.2, 0.8, 1.7
    drawn = problems.draw(name, 3, 3)
    times = jnp.linspace(0.0, time, equations.POINTS)
    solved = equations.solutions(drawn, method=method, hyper=Hyper(eta, beta), times=times)
    got = np.asarray(solved)[-1, -1]
    matrices, centres = (np.asarray(leaf)[-1] for leaf in drawn.data)
    p, start = np.asarray(drawn.weights)[-1], np.asarray(drawn.start)[-1]
    offsets = np.einsum("cij,cj->ci", matrices, centres)
    d, rate = len(start), (1 - beta) / eta if method == "sgdm" else 0
    eye, zero = np.eye(d), np.zeros((d, d))

    def followed(matrix, offset, decoupled):
        """The m and W of one place whose gradient at w is matrix w - offset."""
        moves = [-matrix, zero, zero] if decoupled or method == "gd" else [zero, -eye, zero]
        model = [-matrix, zero, zero] if method == "gd" else [zero, -eye, zero]
        blocks = np.block([moves, [rate * matrix, -rate * eye, zero], model])
        none = np.zeros(d)
        plain = [offset if moves[0] is not zero else none, -rate * offset]
        plain.append(offset if model[0] is not zero else none)
        state = np.concatenate([start, none, start])
        return affine(blocks, np.concatenate(plain), state, time)[d:].reshape(2, d)

    expected = [followed(np.einsum("c,cij->ij", p, matrices), p @ offsets, False)] * 2  # precise
    for decoupled in (False, True):
        parts = [followed(*pair, decoupled) for pair in zip(matrices, offsets, strict=True)]
        expected.append(np.einsum("c,cij->ij", p, parts))
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-9)
    assert np.abs(got[0] - got[2]).max() > 1e-3
    assert (np.abs(got[2] - got[3]).max() > 1e-3) == (method == "sgdm")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", ["adam", "adagrad"])
def test_solutions_of_adaptive_methods_are_those_of_scipy(method):
    """The paper's equations in NumPy, with one global m and v where clients are decoupled."""
    eta, beta1, beta2, eps, time = 0.2, 0.8, 0.99, 0.1, 1.5
    drawn = problems.draw("logistic", 2, 3)
    times = jnp.linspace(0.0, time, equations.POINTS)
    solved = equations.solutions(drawn, method=method, hyper=Hyper(eta, beta1), times=times)
    got = np.asarray(solved)[-1, -1]
    x, p, start = (np.asarray(leaf)[-1] for leaf in (drawn.data, drawn.weights, drawn.start))
    clients, _, d = x.shape

    def g(points):
        """Each client's gradient at its own point."""
        chance = 1 / (1 + np.exp(np.einsum("cnd,cd->cn", x, points)))
        return -np.einsum("cn,cnd->cd", chance, x) / x.shape[1]

    def rates(tau, m, v, g):
        """m', v' and W' of one place that sees the gradient g."""
        if method == "adagrad":
            return [0 * m, g**2 / eta, -g / (np.sqrt(v) + eps)]
        m_hat, v_hat = (a / (1 - b ** (tau / eta + 1)) for a, b in ((m, beta1), (v, beta2)))
        of_memory = [(1 - beta1) * (g - m) / eta, (1 - beta2) * (g**2 - v) / eta]
        return [*of_memory, -m_hat / (np.sqrt(v_hat) + eps)]

    def whole(tau, y):
        return rates(tau, *y[:2], p @ g(np.tile(y[2], (clients, 1))))

    def local(tau, y):
        m, v, points = y.reshape(3, clients, d)
        return np.concatenate(rates(tau, m, v, g(points)))

    def decoupled(tau, y):
        of_clients = g(y[3:])
        return [*rates(tau, *y[:2], p @ of_clients), *-of_clients]

    def by_scipy(field, copies):
        """The last state, from one whose rows are zero but for the model's copies."""
        rows = np.concatenate([np.zeros((copies[0], d)), np.tile(start, (copies[1], 1))])

        def flat(tau, y):
            return np.ravel(field(tau, y.reshape(rows.shape)))

        options = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}
        return solve_ivp(flat, (0, time), rows.ravel(), **options).y[:, -1].reshape(rows.shape)

    central = by_scipy(whole, (2, 1))[[0, 2]]
    parts = by_scipy(local, (2 * clients, clients)).reshape(3, clients, d)
    expected = [central, central, p @ parts[[0, 2]], by_scipy(decoupled, (2, 1 + clients))[[0, 2]]]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    models = got[1:, 1]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(models, 2)) > 1e-3


# ---- Euler's steps are the optimisers, step by step


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", equations.METHODS)
def test_centralised_steps_are_those_of_optax(method):
    problem, rate = one("logistic"), identities.ALPHA * identities.ETA
    hyper = Hyper(rate, identities.BETA1, identities.BETA2, identities.EPS)
    equation = centralised(method, problem, hyper)
    chosen = optax.sgd(hyper.eta) if method == "gd" else identities.optimiser(method)
    state, w = initial(equation, problem.start), problem.start
    with jax.numpy_dtype_promotion("standard"):
        of_optax = chosen.init(w)
        for t in range(10):
            updates, of_optax = chosen.update(equation.gradients(w[None])[0], of_optax, w)
            w = w + updates
            state = equations.euler_step(equation, t * hyper.eta, state)
            np.testing.assert_allclose(state.model, w, rtol=0, atol=1e-14)
    assert jnp.abs(w - problem.start).max() > 0.05


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("algorithm", "name"), [("fedavg", "FedAvg"), ("fedda-sgdm", "FedDA")])
def test_rounds_of_steps_are_those_of_the_library(algorithm, name):
    task = problems.logistic_task(3, 1)
    method, decomposition = convergence.FEDERATED[name]
    eta, beta, local = 0.3, 0.7, 4
    equation = decomposed(method, decomposition, task.problem, Hyper(eta, beta))
    settings = {"client_lr": eta, "server_lr": 1.0}
    settings |= {"beta1": beta} if method == "sgdm" else {}
    for rounds in (1, 3):
        got = fedda.run(
            algorithm,
            task.model,
            task.clients,
            task.loss,
            rounds=rounds,
            cohort=3,
            batch=problems.EXAMPLES,
            local_work=local,
            **settings,
        )
        server = jnp.zeros_like(task.problem.start), task.problem.start
        for _ in range(rounds):
            server = convergence.federated_round(equation, local, *server)
        np.testing.assert_allclose(got.params, server[1], rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", equations.METHODS)
def test_a_precise_decomposition_is_the_whole(method):
    drawn = problems.draw("logistic", 3, 3)
    assert identities.precise(drawn, method=method, steps=20).max() <= 1e-13


# ---- Fits and intervals on known cases


def test_fits_find_known_powers_and_rates():
    x = np.array([1.0, 2.0, 5.0, 9.0])
    rows = np.stack([3 * x**2, x**0.5])
    np.testing.assert_allclose(fits.power(x, rows).slope, [2, 0.5])
    np.testing.assert_allclose(fits.exponential(x, np.exp(rows)).residual[0] > 1, True)
    np.testing.assert_allclose(fits.exponential(x, 7 * np.exp(-0.3 * x)[None]).slope, [-0.3])
    assert fits.power(x, rows).residual.max() < 1e-25


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    means = [fits.mean(rng.normal(3, 2, 50)) for _ in range(400)]
    of_few = [fits.mean(rng.normal(3, 2, 4)) for _ in range(400)]
    shares = [fits.share(rng.uniform(size=50) < 0.9) for _ in range(400)]
    for intervals, truth in ((means, 3), (of_few, 3), (shares, 0.9)):
        inside = np.mean([low <= truth <= high for _, low, high in intervals])
        assert 0.92 <= inside <= 0.98
    assert fits.share([True] * 100)[1] == pytest.approx(0.963, abs=1e-3)


def test_crossings_and_quantiles_may_be_infinite():
    ours, theirs = np.array([[9, 0, 1, 2, 5.0], [9, 0, 1, 2, 3]]), np.full((2, 5), 4.0)
    np.testing.assert_array_equal(fits.first_crossing(ours, theirs), [4, np.inf])
    assert fits.quantiles([1, 2, np.inf])[1:] == [2, np.inf]
    assert measure.rounded({"a": [np.inf, np.float64(1.23456)], "b": np.int64(7)}) == {
        "a": [None, 1.235],
        "b": 7,
    }


@pytest.mark.usefixtures("x64")
def test_orders_are_those_that_theory_knows():
    drawn = problems.draw("convex quadratic", 3, 3)
    euler = convergence.method_orders(drawn, ["sgdm"])["euler"]["sgdm"]
    assert euler["order"][0] == pytest.approx(1, abs=0.01)
    assert euler["order at eta"][0] == pytest.approx(1, abs=0.05)
    measured = {name: convergence.federated_orders(drawn, name) for name in convergence.FEDERATED}
    expected = {  # by hand, to first order in eta: T (T - 1) / 2, sums of t² / 2 and of t³ / 6
        ("FedAvg", "one round, eta"): 2,
        ("FedDA", "one round, eta"): 2,
        ("FedAvg", "one round, T <= 8"): math.log(28) / math.log(4),
        ("FedAvg", "one round, T >= 64"): 2,
        ("FedAvg", "fixed time, eta"): 1,
        ("FedAvg", "fixed time, T - 1"): 1,
        ("FedDA", "fixed time, T - 1"): 1,
    }
    for (name, key), order in expected.items():
        assert measured[name][key]["order"][0] == pytest.approx(order, abs=0.07), (name, key)


# ---- F1 and F2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", identities.SETTINGS)
def test_with_one_step_fedda_is_the_optimiser_of_optax(method):
    distances = identities.f1(method, problems.logistic_task(3, 0), 50)
    assert distances["apart"] <= 1e-13
    assert distances["moved"] > 0.1


@pytest.mark.usefixtures("x64")
def test_the_mean_momentum_is_that_of_the_mean_gradients(monkeypatch):
    task = problems.logistic_task(3, 0)
    assert identities.f2(task) <= 1e-12
    monkeypatch.setitem(identities.SETTINGS, "sgdm", {"beta1": identities.BETA1 + 1e-6})
    assert identities.f2(task) > 1e-9  # it would notice


# ---- F3


def leading_order(problem, beta, m, number):
    """Return both deviations of the module's formulas over eta, after 0..number steps."""
    hessians = jax.vmap(jax.jacobian(problem.gradient, 1), (0, None))(problem.data, problem.start)
    g = jax.vmap(problem.gradient, (0, None))(problem.data, problem.start)
    mean = problem.weights @ g
    u = jnp.einsum("c,cij,cj->i", problem.weights, hessians, g - mean[None])
    v = jnp.einsum("c,cij->ij", problem.weights, hessians) @ (mean - m)
    s = np.arange(number)
    a, b = np.zeros(number + 1), np.zeros(number + 1)
    for t in range(1, number + 1):
        decay = (1 - beta) * beta ** (t - 1 - s[:t])
        a[t] = decay @ s[:t]
        b[t] = decay @ (beta * (1 - beta ** s[:t]) / (1 - beta))
    both = jnp.asarray(a)[:, None] * u[None] + jnp.asarray(b)[:, None] * v[None]
    return jnp.asarray(a - b) * jnp.linalg.norm(u), jnp.linalg.norm(both, axis=-1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("warm", deviation.STARTS.values())
def test_deviations_are_their_first_order_formulas(name, warm):
    hyper, number = Hyper(1e-6, 0.7), 12
    problem = one(name)
    batch = jax.tree.map(lambda leaf: leaf[None], problem)
    measured = deviation.momentum_distances(batch, hyper=hyper, warm=warm, number=number)
    distances = np.asarray(measured[0])[0]
    central = centralised("sgdm", problem, hyper)
    first = equations.euler(central, initial(central, problem.start), warm)
    moved = replace(problem, start=first.model)
    expected = leading_order(moved, hyper.beta1, first.momentum[0], number)
    assert distances[:2, :2].max() < 1e-14  # after one step: all took it by the same gradients
    for index in range(2):
        np.testing.assert_allclose(distances[index, 2:] / 1e-6, expected[index][2:], rtol=1e-3)


@pytest.mark.usefixtures("x64")
def test_local_momentum_is_exact_where_clients_are_alike():
    drawn = deviation.alike(problems.draw("logistic", 4, 3))
    distances = deviation.momentum_distances(drawn, hyper=Hyper(0.1), warm=0, number=20)[0]
    assert distances[:, 0].max() < 1e-14
    assert distances[:, 1, 2:].min() > 1e-8


@pytest.mark.usefixtures("x64")
def test_both_momenta_keep_the_bound_that_the_paper_proves_for_one():
    drawn = problems.draw("sigmoid", 10, 3)
    measured = deviation.momentum_distances(drawn, hyper=Hyper(1.0), warm=20, number=60)
    distances, first = map(np.asarray, measured)
    bounds = problems.gradient_bounds(problems.FAMILIES["sigmoid"].slope, drawn)
    ratios = deviation.over_bound(distances, first, bounds, 1.0)
    C = 2 * bounds + first  # the paper's constant, where L_g = 1
    by_hand = distances[:, :2, 1:] / (C[:, None, None] * np.arange(1, 61) ** 2 / 2)
    assert list(ratios.values()) == pytest.approx(by_hand.max((0, 2)))
    assert 0 < max(ratios.values()) <= 1
    assert np.all(distances[:, :2] <= C[:, None, None] * np.arange(61))  # the sharper one, in t
    # Both begin at m(0) and average gradients of at most G: for all t, they differ by at most 2G.
    limit = 2 * bounds[:, None, None] * (1 - 0.9 ** np.arange(61)) + 1e-12
    assert np.all(distances[:, :2] <= limit)
    assert distances[:, :2].max() > 1e-3 * limit.max(), "it is not far from it"
    tight = deviation.over_bound(distances, first * 1e-6, bounds * 1e-6, 1.0)
    assert min(tight.values()) > 1  # it would notice


# ---- F4


def rate_of_steps(eta, beta, lipschitz):
    """Return the growth rate of local momentum by optimiser steps along the eigenvalue -L_g."""
    step = [[beta, -(1 - beta) * lipschitz], [-eta * beta, 1 + eta * (1 - beta) * lipschitz]]
    return math.log(max(abs(np.linalg.eigvals(step)))) / eta


@pytest.mark.parametrize("eta", [1e-3, 0.1, 0.5])
@pytest.mark.parametrize("beta", [0.3, 0.9])
@pytest.mark.parametrize("lipschitz", [0.2, 3.0])
def test_the_corrected_lambda_solves_the_characteristic_polynomial(eta, beta, lipschitz):
    matrix = [[-(1 - beta) / eta, (1 - beta) * lipschitz / eta], [1, 0]]
    largest = max(np.linalg.eigvals(matrix).real)
    assert deviation.corrected_rate(eta, beta, lipschitz) == pytest.approx(largest, rel=1e-10)
    assert deviation.printed_rate(eta, beta, lipschitz) != pytest.approx(largest, rel=0.2)
    assert deviation.corrected_rate(eta, beta, lipschitz) < lipschitz
    half = (1 + beta + (1 - beta) * eta * lipschitz) / 2  # of the polynomial of the steps
    expected = math.log(half + math.sqrt(half**2 - beta)) / eta
    assert rate_of_steps(eta, beta, lipschitz) == pytest.approx(expected)


@pytest.mark.usefixtures("x64")
def test_measured_rates_are_the_corrected_lambda():
    drawn = problems.draw("indefinite quadratic", 3, 3)
    row = deviation.growth_rates(drawn, 0.3, 0.9)
    assert row["local, equation"][0] == pytest.approx(row["corrected"], rel=0.05)
    assert row["decoupled, equation"][0] == pytest.approx(1, rel=0.05)
    assert row["local, equation"][0] != pytest.approx(row["printed"], rel=0.2)
    measured = deviation.momentum_distances(drawn, hyper=Hyper(0.3), warm=0, number=133)
    late = deviation.beyond_a_round(np.asarray(measured[0]), 0.3)
    expected = rate_of_steps(0.3, 0.9, 1.0)
    assert late["local late rate"][0] == pytest.approx(expected, rel=0.05)
    assert late["local grows"]
    assert late["decoupled grows"]
