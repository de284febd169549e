"""F13 in `fedda theory`: FedDA+Adam's m-hat and v-hat against NumPy and Optax, and the verdict."""

import copy
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedda.models import Model
from fedda_reproduction.theory import adam_ratios, page, problems, verdicts
from fedda_reproduction.theory.adam_ratios import BETA1, BETA2, Round

RESULTS = Path(__file__).parents[2] / "reproduction" / "results" / "theory"
CHOSEN = [
    {"client_lr": 0.3, "server_lr": 0.4, "eps": 0.05},
    {"client_lr": 0.1, "server_lr": 0.2, "eps": 0.001},
]
CLIENTS, ROUNDS = 3, 8


def followed(model, clients, loss, rates, T):
    """Return the rounds of the library with full batches and all clients."""
    examples = len(clients[0][0])
    settings = {"cohort": len(clients), "batch": examples, "rounds": ROUNDS, "local_work": T}
    return list(adam_ratios.rounds_of(model, clients, loss, rates, **settings))


def sigmoid_gradient(x, w):
    """Of the mean of log(1 + exp(-x w))."""
    return -(1 / (1 + np.exp(x @ w))) @ x / len(x)


def by_hand(clients, w, T, rates, gradient=sigmoid_gradient):
    """m-hat, sqrt(v-hat), P and G of every round, from the equations; clients weigh the same."""
    M, V = np.zeros_like(w), np.zeros_like(w)
    for number in range(1, ROUNDS + 1):
        sums, ends = [], []
        for x in clients:
            local, m, P = w.copy(), M.copy(), np.zeros_like(w)
            for _ in range(T):
                g = gradient(x, local)
                local -= rates["client_lr"] * g
                m = BETA1 * m + (1 - BETA1) * g
                P += m
            sums.append(P)
            ends.append(m)
        P = np.mean(sums, 0)
        G = (P - BETA1 * M) / (1 - BETA1)
        V = BETA2 * V + (1 - BETA2) * G**2
        m_hat, root = P / (1 - BETA1**number), np.sqrt(V / (1 - BETA2**number))
        w = w - rates["server_lr"] * rates["client_lr"] * m_hat / (root + rates["eps"])
        M = np.mean(ends, 0)
        yield m_hat, root, P, G


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("rates", CHOSEN)
def test_rounds_are_those_of_the_equations(rates, T):
    task = problems.logistic_task(CLIENTS, 1)
    measured = followed(task.model, task.clients, task.loss, rates, T)
    inputs, start = np.asarray(task.problem.data), np.asarray(task.problem.start)
    expected = list(by_hand(inputs, start, T, rates))
    assert len(measured) == len(expected) == ROUNDS
    for ours, theirs in zip(measured, expected, strict=True):
        for got, value in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, value, rtol=0, atol=1e-12)
    # It would notice: the largest of what is compared, and how far another T is.
    assert np.abs(expected[-1][0]).max() > 1e-2
    other = list(by_hand(inputs, start, T + 1, rates))
    assert np.abs(other[-1][0] / other[-1][1] - expected[-1][0] / expected[-1][1]).max() > 1e-2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rates", CHOSEN)
def test_with_one_step_the_entries_are_those_of_optax(rates):
    """Without an eps, the update of Optax's Adam is m-hat / sqrt(v-hat) itself."""
    task = problems.logistic_task(CLIENTS, 2)
    x = jnp.asarray(np.concatenate([x for x, _ in task.clients]))
    gradient = jax.jit(jax.grad(lambda w: task.loss(x @ w, None).mean()))
    chosen = optax.scale_by_adam(BETA1, BETA2, eps=0.0)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        w = task.problem.start
        state = chosen.init(w)
        for ours in followed(task.model, task.clients, task.loss, rates, 1):
            entries, state = chosen.update(gradient(w), state)
            np.testing.assert_allclose(ours.m_hat / ours.root, entries, rtol=0, atol=1e-9)
            step = ours.m_hat / (ours.root + rates["eps"])
            w = w - rates["server_lr"] * rates["client_lr"] * step


# ---- The predictions


def sequence(gradients, T):
    """Return P and G of every round of one client that sees these gradients, whatever it does."""
    M, rounds = 0.0, []
    for of_round in gradients.reshape(-1, T):
        m, P = M, 0.0
        for g in of_round:
            m = BETA1 * m + (1 - BETA1) * g
            P += m
        rounds.append((P, (P - BETA1 * M) / (1 - BETA1)))
        M = m
    return np.array(rounds).T


@pytest.mark.parametrize("T", [1, 2, 5, 20])
def test_predicted_scales_are_those_of_such_gradients(T):
    P, G = sequence(np.full(300 * T, -0.7), T)
    assert P[-1] / G[-1] == pytest.approx(adam_ratios.constant_scale(T), rel=1e-9)
    noise = np.random.default_rng(0).normal(size=20_000 * T)
    P, G = sequence(noise, T)
    scale = np.sqrt(np.square(P).mean() / np.square(G).mean())
    assert scale == pytest.approx(adam_ratios.noise_scale(T), rel=0.03)


def test_predictions_are_those_of_the_specification():
    assert [round(adam_ratios.constant_scale(T), 3) for T in (1, 5, 10, 20)] == [
        1,
        0.122,
        0.110,
        0.105,
    ]
    assert adam_ratios.noise_scale(1) == pytest.approx(np.sqrt(0.1 / 1.9))  # Adam's on noise
    for predicted in (adam_ratios.constant_scale, adam_ratios.noise_scale):
        assert predicted(10_000) == pytest.approx(1 - BETA1, rel=1e-3)


# ---- What is made of the rounds


def test_entries_without_any_gradient_are_left_out_and_counted():
    root = np.array([[2.0, 0.0, 4.0, 1.0], [2.0, 0.0, 4.0, 1.0]])
    m_hat = root * np.array([[0.5, 0, -1.0, 3.0], [-2.0, 0, 0.1, 0.0]])
    P = np.array([[3.0, 0, 1.0, 0.0], [4.0, 0, 1.0, 0.0]])
    late = Round(m_hat=m_hat, root=root, P=P, G=10 * P)
    np.testing.assert_allclose(adam_ratios.ratios(m_hat, root), [0.5, 1, 3, 2, 0.1, 0])
    summary = adam_ratios.summary(late)
    assert summary["V = 0"] == 0.25
    assert summary["near"] == pytest.approx(3 / 6)  # 0.5, 1 and 2
    assert summary["mean"] == pytest.approx(6.6 / 6)
    assert summary["quantiles"][2] == pytest.approx(0.75)
    assert summary["scale"] == pytest.approx(0.1)


@pytest.mark.usefixtures("x64")
def test_a_blank_input_has_no_entry():
    """A feature that is always 0 gives its weight no gradient, hence V = 0 and no step."""
    x = np.random.default_rng(0).normal(size=(CLIENTS, 5, 4))
    x[..., 2] = 0
    clients = [(inputs, np.zeros(5)) for inputs in x]
    model = Model(lambda key: jnp.ones(4), lambda w, x: x @ w)
    measured = followed(model, clients, problems.logistic_task(2, 0).loss, CHOSEN[0], 3)
    assert all(number.root[2] == 0 and number.m_hat[2] == 0 for number in measured)
    assert adam_ratios.ratios(measured[-1].m_hat, measured[-1].root).shape == (3,)


@pytest.mark.usefixtures("x64")
def test_the_measurement_on_digits_at_its_first_rounds():
    """In the first round M is 0, so that m-hat is G and every entry 1 or -1, whatever T is."""
    measured = adam_ratios.measure((2,), 2, 0)
    assert measured["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    for row, curve in zip(measured["grid"], measured["curves"]["rows"], strict=True):
        assert (row["clients"], row["rates"]) == (curve["clients"], curve["rates"])
        assert curve["medians"][0] == pytest.approx(1, abs=1e-9)
        assert curve["medians"][1] == pytest.approx(row["quantiles"][2])  # the late one is the last
        # A pixel of all 64 units, at least.
        assert 64 / measured["parameters"] <= row["V = 0"] < 0.3


# ---- The verdict


@pytest.fixture(scope="module")
def committed():
    return json.loads((RESULTS / "theory.json").read_text())


def test_the_published_scales_are_those_of_constant_gradients(committed):
    assert verdicts.verdicts(committed)["F13"] == verdicts.NOT
    for row in verdicts.numbers(committed)["everybody"][1:]:
        assert row["T"] > 1
        assert row["scale"] == pytest.approx(row["constant"], rel=0.05)


def test_the_verdict_follows_the_numbers(committed):
    changed = copy.deepcopy(committed)
    grid = changed["ratios"]["grid"]

    def judged():
        return [verdicts.verdicts(changed)[key] for key in ("F13", "Adam")]

    for row in grid:
        row["near"] = 0.9
    assert judged() == [verdicts.CONFIRMED, verdicts.CONFIRMED]
    for row in verdicts.select(grid, T=5):
        row["near"] = 0.4
    assert judged() == [verdicts.PARTLY, verdicts.CONFIRMED]
    for row in grid:
        row["near"] = 0.1 if row["T"] == 1 else 0.9
    assert judged() == [verdicts.CONFIRMED, verdicts.NOT]
    (claim,) = verdicts.select(page.claims(changed), key="F13")
    assert "at most 90 % of entries have sizes within [0.5, 2]" in claim["measured"]
    assert "|" not in claim["measured"], "it is a cell of tables"
