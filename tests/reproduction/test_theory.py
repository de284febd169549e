"""`fedda theory`: the equations against closed forms, the optimisers and the library's own runs."""

import copy
import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import fedda
from fedda.cli import main
from fedda.errors import InputError
from fedda_reproduction.theory import (
    claims,
    deviation,
    exact,
    figures,
    fits,
    flows,
    growth,
    measure,
    orders,
    page,
    problems,
    record,
)
from fedda_reproduction.theory.flows import Hyper, begin, centralised, divided

DOCS = Path(__file__).parents[2] / "reproduction" / "results" / "theory"
FAMILIES = list(problems.FAMILIES)


def one(name, clients=3, number=0):
    """The gradient of a family, and a problem of it."""
    drawn = problems.draw(name, number + 1, clients)
    return problems.FAMILIES[name].gradient, jax.tree.map(lambda leaf: leaf[number], drawn)


# ---- The problems are what they are said to be


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_have_the_lipschitz_constant_one(name):
    gradient, problem = one(name)
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
    gradient, times = problems.FAMILIES[name].gradient, jnp.linspace(0.0, time, orders.POINTS)
    got = np.asarray(orders.solutions(gradient, method, drawn, eta, times, beta))[-1, -1]
    matrices, centres = (np.asarray(each)[-1] for each in drawn.data)
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
        parts = [followed(*each, decoupled) for each in zip(matrices, offsets, strict=True)]
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
    gradient, times = problems.FAMILIES["logistic"].gradient, jnp.linspace(0.0, time, orders.POINTS)
    got = np.asarray(orders.solutions(gradient, method, drawn, eta, times, beta1))[-1, -1]
    x, p, start = (np.asarray(each)[-1] for each in drawn)
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
        own = g(y[3:])
        return [*rates(tau, *y[:2], p @ own), *-own]

    def solved(field, copies):
        """The last state, from one whose rows are zero but for the model's copies."""
        rows = np.concatenate([np.zeros((copies[0], d)), np.tile(start, (copies[1], 1))])

        def flat(tau, y):
            return np.ravel(field(tau, y.reshape(rows.shape)))

        options = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}
        return solve_ivp(flat, (0, time), rows.ravel(), **options).y[:, -1].reshape(rows.shape)

    central = solved(whole, (2, 1))[[0, 2]]
    parts = solved(local, (2 * clients, clients)).reshape(3, clients, d)
    expected = [central, central, p @ parts[[0, 2]], solved(decoupled, (2, 1 + clients))[[0, 2]]]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    models = got[1:, 1]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(models, 2)) > 1e-3


# ---- Euler's steps are the optimisers, step by step


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", flows.METHODS)
def test_centralised_steps_are_those_of_optax(method):
    gradient, problem = one("logistic")
    hyper = Hyper(exact.ALPHA * exact.ETA, exact.BETA1, exact.BETA2, exact.EPS)
    flow = centralised(method, gradient, problem, hyper)
    chosen = optax.sgd(hyper.eta) if method == "gd" else exact.optimiser(method)
    state, w = begin(flow, problem.start), problem.start
    with jax.numpy_dtype_promotion("standard"):
        of_optax = chosen.init(w)
        for t in range(10):
            updates, of_optax = chosen.update(flow.gradients(w[None])[0], of_optax, w)
            w = w + updates
            state = flows.euler(flow, t * hyper.eta, state)
            np.testing.assert_allclose(state.model, w, rtol=0, atol=1e-14)
    assert jnp.abs(w - problem.start).max() > 0.05


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("algorithm", "name"), [("fedavg", "FedAvg"), ("fedda-sgdm", "FedDA")])
def test_rounds_of_steps_are_those_of_the_library(algorithm, name):
    task = problems.classifier(3, 1)
    method, kind = orders.FEDERATED[name]
    eta, beta, local = 0.3, 0.7, 4
    flow = divided(method, kind, task.gradient, task.problem, Hyper(eta, beta))
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
        carried = task.problem.start, jnp.zeros_like(task.problem.start)
        for _ in range(rounds):
            carried = orders._round(flow, local, None, carried)
        np.testing.assert_allclose(got.params, carried[0], rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_a_precise_decomposition_is_the_whole():
    drawn = problems.draw("logistic", 3, 3)
    assert max(exact.precise("logistic", drawn, flows.METHODS, 20).values()) <= 1e-13


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


def test_an_average_over_settings_allows_for_shared_problems():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(400):
        drawn = rng.uniform(size=50)  # the same problems in both settings
        rows = [{"share": fits.share(drawn < level)} for level in (0.6, 0.8)]
        value, low, high = claims.average(rows, "share")
        assert value == pytest.approx(np.mean([drawn < 0.6, drawn < 0.8]))
        inside.append(low <= 0.7 <= high)
    assert np.mean(inside) >= 0.94


def test_crossings_and_quantiles_may_be_infinite():
    ours, theirs = np.array([[9, 0, 1, 2, 5.0], [9, 0, 1, 2, 3]]), np.full((2, 5), 4.0)
    np.testing.assert_array_equal(fits.first_crossing(ours, theirs), [4, np.inf])
    assert fits.spread([1, 2, np.inf])[1:] == [2, np.inf]
    assert fits.rounded({"a": [np.inf, np.float64(1.23456)], "b": np.int64(7)}) == {
        "a": [None, 1.235],
        "b": 7,
    }


@pytest.mark.usefixtures("x64")
def test_orders_are_those_that_theory_knows():
    gradient = problems.FAMILIES["convex quadratic"].gradient
    drawn = problems.draw("convex quadratic", 3, 3)
    times = jnp.linspace(0.0, orders.HORIZON, orders.POINTS)
    solved = orders.solutions(gradient, "sgdm", drawn, orders.ETA, times, 0.9)
    of_euler = orders.of_euler(gradient, "sgdm", drawn, solved)
    assert of_euler["order"][0] == pytest.approx(1, abs=0.01)
    assert of_euler["order at eta"][0] == pytest.approx(1, abs=0.05)
    found = {name: orders.of_federated(gradient, name, drawn) for name in orders.FEDERATED}
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
        assert found[name][key]["order"][0] == pytest.approx(order, abs=0.07), (name, key)


# ---- F1 and F2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", exact.SETTINGS)
def test_f1(method):
    found = exact.f1(method, problems.classifier(3, 0), 50)
    assert found["apart"] <= 1e-13
    assert found["moved"] > 0.1


@pytest.mark.usefixtures("x64")
def test_f2_and_that_it_would_notice(monkeypatch):
    task = problems.classifier(3, 0)
    assert exact.f2(task) <= 1e-12
    monkeypatch.setitem(exact.SETTINGS, "sgdm", {"beta1": exact.BETA1 + 1e-6})
    assert exact.f2(task) > 1e-9


# ---- F3


def leading_order(gradient, problem, beta, m, number):
    """The two deviations of the module's formulas, divided by eta, after 0..number steps."""
    hessians = jax.vmap(jax.jacobian(gradient, 1), (0, None))(problem.data, problem.start)
    g = jax.vmap(gradient, (0, None))(problem.data, problem.start)
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
@pytest.mark.parametrize("start", measure.STARTS)
def test_deviations_are_their_first_order_formulas(name, start):
    eta, beta, number = 1e-6, 0.7, 12
    gradient, problem = one(name)
    batched = jax.tree.map(lambda leaf: leaf[None], problem)
    warm = measure.STARTS[start]
    found = np.asarray(deviation.of_family(name, batched, eta, beta, warm, number)[0])[0]
    central = centralised("sgdm", gradient, problem, Hyper(eta, beta))
    first = flows.steps(central, begin(central, problem.start), warm)
    moved = problem._replace(start=first.model)
    expected = leading_order(gradient, moved, beta, first.momentum[0], number)
    assert found[:4, :2].max() < 1e-14  # after one step: all took it by the same gradients
    for index in range(2):
        np.testing.assert_allclose(found[index, 2:] / eta, expected[index][2:], rtol=1e-3)


@pytest.mark.usefixtures("x64")
def test_local_momentum_is_exact_where_clients_are_alike():
    drawn = deviation.alike(problems.draw("logistic", 4, 3))
    found = np.asarray(deviation.of_family("logistic", drawn, 0.1, 0.9, 0, 20)[0])
    assert found[:, 0].max() < 1e-14
    assert found[:, 1, 2:].min() > 1e-8


@pytest.mark.usefixtures("x64")
def test_both_momenta_keep_the_bound_that_the_paper_proves_for_one():
    drawn = problems.draw("sigmoid", 10, 3)
    found, first = map(np.asarray, deviation.of_family("sigmoid", drawn, 1.0, 0.9, 20, 60))
    bounds = problems.gradient_bounds(problems.FAMILIES["sigmoid"].slope, drawn)
    ratios = deviation.over_bound(found, first, bounds, 1.0)
    C = 2 * bounds + first  # the paper's constant, where L_g = 1
    by_hand = found[:, :2, 1:] / (C[:, None, None] * np.arange(1, 61) ** 2 / 2)
    assert list(ratios.values()) == pytest.approx(by_hand.max((0, 2)))
    assert 0 < max(ratios.values()) <= 1
    assert np.all(found[:, :2] <= C[:, None, None] * np.arange(61))  # the sharper one, in t
    tight = deviation.over_bound(found, first * 1e-6, bounds * 1e-6, 1.0)
    assert min(tight.values()) > 1  # it would notice


# ---- F4


@pytest.mark.parametrize("eta", [1e-3, 0.1, 0.5])
@pytest.mark.parametrize("beta", [0.3, 0.9])
@pytest.mark.parametrize("lipschitz", [0.2, 3.0])
def test_the_corrected_lambda_solves_the_characteristic_polynomial(eta, beta, lipschitz):
    matrix = [[-(1 - beta) / eta, (1 - beta) * lipschitz / eta], [1, 0]]
    largest = max(np.linalg.eigvals(matrix).real)
    assert growth.corrected(eta, beta, lipschitz) == pytest.approx(largest, rel=1e-10)
    assert growth.printed(eta, beta, lipschitz) != pytest.approx(largest, rel=0.2)
    step = [[beta, -(1 - beta) * lipschitz], [-eta * beta, 1 + eta * (1 - beta) * lipschitz]]
    radius = max(abs(np.linalg.eigvals(step)))
    assert growth.of_steps(eta, beta, lipschitz) == pytest.approx(math.log(radius) / eta)
    assert growth.corrected(eta, beta, lipschitz) < lipschitz


@pytest.mark.usefixtures("x64")
def test_measured_rates_are_the_corrected_lambda():
    row = growth.measure(problems.draw("indefinite quadratic", 3, 3), 0.3, 0.9)
    assert row["local, equation"][0] == pytest.approx(row["corrected"], rel=0.05)
    assert row["local, steps"][0] == pytest.approx(row["corrected, of steps"], rel=0.05)
    assert row["decoupled, equation"][0] == pytest.approx(1, rel=0.05)
    assert row["local, equation"][0] != pytest.approx(row["printed"], rel=0.2)


# ---- Verdicts, the page and the command


@pytest.fixture(scope="module")
def committed():
    return json.loads((DOCS / "theory.json").read_text())


def verdicts(found):
    return {claim.key: claim.verdict for claim in claims.claims(found)}


def test_the_page_says_what_the_record_says(committed):
    assert committed["plan"]["problems"] >= 100
    assert committed["plan"]["learn"]
    assert [claim._asdict() for claim in claims.claims(committed)] == committed["claims"]
    assert page.markdown(committed) == (DOCS / "README.md").read_text()
    assert record.text_of(committed) == (DOCS / "theory.json").read_text()
    assert all((DOCS / f"{name}.png").exists() for name in figures.FIGURES)


def test_a_mean_is_the_same_on_every_python():
    """A sum of floats is not: since 3.12 `sum` makes up for what it rounds."""
    assert claims.average([{"share": [0.1, 0.1, 0.1]}] * 10, "share") == [0.1, 0.1, 0.1]


def test_verdicts_follow_the_numbers(committed):
    changed = copy.deepcopy(committed)
    changed["exact"]["f1"]["logistic"]["adam"]["apart"] = 1e-3
    changed["exact"]["f2"]["cnn"] = 1e-9
    for row in changed["growth"]:
        row["local, equation"] = [2 * row["printed"]] * 3
    changed["deviation"]["bound"][0]["local"] = 2.0
    for row in changed["deviation"]["grid"]:
        row |= {f"local nearer, T={T}": [0.1, 0.0, 0.2] for T in deviation.ROUNDS}
    now, then = verdicts(changed), verdicts(committed)
    assert {key: (then[key], now[key]) for key in now if now[key] != then[key]} == {
        "F1": (claims.HOLDS, claims.FAILS),
        "F2": (claims.HOLDS, claims.FAILS),
        "F3 local": (claims.FAILS, claims.IN_PART),
        "F3 nearer": (claims.FAILS, claims.HOLDS),
        "F4": (claims.IN_PART, claims.FAILS),
    }


def fedda_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedda", "theory", *map(str, words)])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capfd):
    assert fedda_command(monkeypatch, "--quick", "--out", tmp_path / "new") == 0
    shown = capfd.readouterr().out
    assert claims.FAILS in shown
    found = json.loads((tmp_path / "new" / "theory.json").read_text())
    assert verdicts(found)["F1"] == verdicts(found)["F2"] == claims.HOLDS
    assert (tmp_path / "new" / "README.md").read_text() == page.markdown(found)
    for name in figures.FIGURES.keys() - {"network"}:
        assert (tmp_path / "new" / f"{name}.png").stat().st_size > 1000
    assert jnp.zeros(1).dtype == jnp.float32, "float64 must end with the command"


def test_a_missing_package_is_named(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "diffrax", None)
    assert fedda_command(monkeypatch, "--out", tmp_path / "new") == 2
    assert "pip install 'fedda[theory]'" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="diffrax"):
        flows.extra("diffrax")


def test_the_files_of_a_project_are_not_replaced(monkeypatch, tmp_path, capfd):
    def measured(*_):
        raise InputError("it would be measured")

    monkeypatch.setattr(measure, "run", measured)
    (tmp_path / "README.md").write_text("# A project")
    assert fedda_command(monkeypatch, "--out", tmp_path) == 2
    assert "is not empty. Give another --out, or that of an earlier fedda theory" in " ".join(
        capfd.readouterr().err.split()
    )
    (tmp_path / "theory.json").write_text("{}")
    assert fedda_command(monkeypatch, "--out", tmp_path) == 2
    assert "it would be measured" in capfd.readouterr().err


def test_too_few_problems_are_refused(monkeypatch, tmp_path, capfd):
    assert fedda_command(monkeypatch, "--problems", 1, "--out", tmp_path) == 2
    assert "--problems must be at least 2" in capfd.readouterr().err
