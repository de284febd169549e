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
from fedda_reproduction.theory import claims, page, problems, ratios
from fedda_reproduction.theory.ratios import BETA1, BETA2, Rates, Round

RESULTS = Path(__file__).parents[2] / "reproduction" / "results" / "theory"
CHOSEN = [Rates(0.3, 0.4, 0.05), Rates(0.1, 0.2, 0.001)]
CLIENTS, ROUNDS = 3, 8


def followed(model, clients, loss, T, rounds=ROUNDS, seed=0):
    examples = len(clients[0][0])
    how = {"cohort": len(clients), "batch": examples, "rounds": rounds, "local_work": T}
    return list(ratios.rounds_of(model, clients, loss, CHOSEN, seed, **how))


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
                local -= rates.client_lr * g
                m = BETA1 * m + (1 - BETA1) * g
                P += m
            sums.append(P)
            ends.append(m)
        P = np.mean(sums, 0)
        G = (P - BETA1 * M) / (1 - BETA1)
        V = BETA2 * V + (1 - BETA2) * G**2
        m_hat, root = P / (1 - BETA1**number), np.sqrt(V / (1 - BETA2**number))
        w = w - rates.server_lr * rates.client_lr * m_hat / (root + rates.eps)
        M = np.mean(ends, 0)
        yield m_hat, root, P, G


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("T", [1, 4])
def test_rounds_are_those_of_the_equations(T):
    task = problems.classifier(CLIENTS, 1)
    found = followed(task.model, task.clients, task.loss, T)
    inputs, start = np.asarray(task.problem.data), np.asarray(task.problem.start)
    for index, rates in enumerate(CHOSEN):
        expected = list(by_hand(inputs, start, T, rates))
        assert len(found) == len(expected) == ROUNDS
        for ours, theirs in zip(found, expected, strict=True):
            for name, value in zip(Round._fields, theirs, strict=False):
                np.testing.assert_allclose(getattr(ours, name)[index], value, rtol=0, atol=1e-12)
    # It would notice: the largest of what is compared, and how far another T is.
    assert np.abs(expected[-1][0]).max() > 1e-2
    other = list(by_hand(inputs, start, T + 1, rates))
    assert np.abs(other[-1][0] / other[-1][1] - expected[-1][0] / expected[-1][1]).max() > 1e-2


@pytest.mark.usefixtures("x64")
def test_with_one_step_the_entries_are_those_of_optax():
    """Without an eps, the update of Optax's Adam is m-hat / sqrt(v-hat) itself."""
    task = problems.classifier(CLIENTS, 2)
    found = followed(task.model, task.clients, task.loss, 1)
    x = jnp.asarray(np.concatenate([x for x, _ in task.clients]))
    gradient = jax.jit(jax.grad(lambda w: task.loss(x @ w, None).mean()))
    chosen = optax.scale_by_adam(BETA1, BETA2, eps=0.0)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        for index, rates in enumerate(CHOSEN):
            w = task.problem.start
            state = chosen.init(w)
            for ours in found:
                entries, state = chosen.update(gradient(w), state)
                got = ours.m_hat[index] / ours.root[index]
                np.testing.assert_allclose(got, entries, rtol=0, atol=1e-9)
                step = ours.m_hat[index] / (ours.root[index] + rates.eps)
                w = w - rates.server_lr * rates.client_lr * step


# ---- The predictions


def sequence(gradients, T):
    """P and G of every round of one client that sees these gradients, whatever it does."""
    M, found = 0.0, []
    for own in gradients.reshape(-1, T):
        m, P = M, 0.0
        for g in own:
            m = BETA1 * m + (1 - BETA1) * g
            P += m
        found.append((P, (P - BETA1 * M) / (1 - BETA1)))
        M = m
    return np.array(found).T


@pytest.mark.parametrize("T", [1, 2, 5, 20])
def test_predicted_scales_are_those_of_such_gradients(T):
    P, G = sequence(np.full(300 * T, -0.7), T)
    assert P[-1] / G[-1] == pytest.approx(ratios.of_constant(T), rel=1e-9)
    noise = np.random.default_rng(0).normal(size=20_000 * T)
    P, G = sequence(noise, T)
    found = np.sqrt(np.square(P).mean() / np.square(G).mean())
    assert found == pytest.approx(ratios.of_noise(T), rel=0.03)


def test_predictions_are_those_of_the_specification():
    assert [round(ratios.of_constant(T), 3) for T in (1, 5, 10, 20)] == [1, 0.122, 0.110, 0.105]
    assert ratios.of_noise(1) == pytest.approx(np.sqrt(0.1 / 1.9))  # Adam's on noise
    for predicted in (ratios.of_constant, ratios.of_noise):
        assert predicted(10_000) == pytest.approx(1 - BETA1, rel=1e-3)


# ---- What is made of the rounds


def test_entries_without_any_gradient_are_left_out_and_counted():
    root = np.array([[2.0, 0.0, 4.0, 1.0], [2.0, 0.0, 4.0, 1.0]])
    m_hat = root * np.array([[0.5, 0, -1.0, 3.0], [-2.0, 0, 0.1, 0.0]])
    P = np.array([[3.0, 0, 1.0, 0.0], [4.0, 0, 1.0, 0.0]])
    late = Round(m_hat, root, P, 10 * P, np.array([0.2, 0.4]))
    np.testing.assert_allclose(ratios.ratios(m_hat, root), [0.5, 1, 3, 2, 0.1, 0])
    found = ratios.summary(late)
    assert found["V = 0"] == 0.25
    assert found["near"] == pytest.approx(3 / 6)  # 0.5, 1 and 2
    assert found["mean"] == pytest.approx(6.6 / 6)
    assert found["quantiles"][2] == pytest.approx(0.75)
    assert found["scale"] == pytest.approx(0.1)
    assert found["train loss"] == pytest.approx(0.3)


@pytest.mark.usefixtures("x64")
def test_a_blank_input_has_no_entry():
    """A feature that is always 0 gives its weight no gradient, hence V = 0 and no step."""
    x = np.random.default_rng(0).normal(size=(CLIENTS, 5, 4))
    x[..., 2] = 0
    clients = [(each, np.zeros(5)) for each in x]
    model = Model(lambda key: jnp.ones(4), lambda w, x: x @ w)
    found = followed(model, clients, problems.classifier(2, 0).loss, 3)
    assert all((each.root[:, 2] == 0).all() and (each.m_hat[:, 2] == 0).all() for each in found)
    last = found[-1]
    assert ratios.ratios(last.m_hat, last.root).shape == (len(CHOSEN) * 3,)


@pytest.mark.usefixtures("x64")
def test_the_measurement_on_digits_at_its_first_rounds():
    """In the first round M is 0, so that m-hat is G and every entry 1 or -1, whatever T is."""
    found = ratios.measure((ratios.EVERYBODY,), (2,), 2, 0)
    assert found["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
    for row, curve in zip(found["grid"], found["curves"]["rows"], strict=True):
        assert row["rates"] == curve["rates"]
        assert curve["medians"][0] == pytest.approx(1, abs=1e-9)
        assert curve["medians"][1] == pytest.approx(row["quantiles"][2])  # the late one is the last
        assert 64 / found["parameters"] <= row["V = 0"] < 0.3  # a pixel of all 64 units, at least


# ---- The verdict


@pytest.fixture(scope="module")
def committed():
    return json.loads((RESULTS / "theory.json").read_text())


def verdict(found, key):
    (claim,) = [claim for claim in claims.claims(found) if claim.key == key]
    return claim


def test_the_verdict_on_what_was_measured(committed):
    claim = verdict(committed, "F13")
    assert claim.verdict == claims.FAILS
    longer = [row for row in committed["ratios"]["grid"] if row["T"] > 1]
    assert max(row["near"] for row in longer) < 0.01
    predicted = {row["T"]: row for row in committed["ratios"]["predicted"]}
    for row in claims.select(longer, clients=ratios.EVERYBODY, rates=ratios.PAPER):
        assert row["scale"] == pytest.approx(predicted[row["T"]]["constant"], rel=0.05)


def test_the_verdict_follows_the_numbers(committed):
    changed = copy.deepcopy(committed)
    for row in changed["ratios"]["grid"]:
        row["near"] = 0.9
    assert verdict(changed, "F13").verdict == claims.HOLDS
    assert verdict(changed, "Adam").verdict == claims.HOLDS
    for row in changed["ratios"]["grid"]:
        if row["T"] == 5:
            row["near"] = 0.4
    assert verdict(changed, "F13").verdict == claims.IN_PART
    assert verdict(changed, "Adam").verdict == claims.HOLDS
    for row in changed["ratios"]["grid"]:
        row["near"] = 0.1 if row["T"] == 1 else 0.9
    assert verdict(changed, "F13").verdict == claims.HOLDS
    assert verdict(changed, "Adam").verdict == claims.FAILS
    told = verdict(changed, "F13").measured
    assert "at most 90 % of entries have sizes within [0.5, 2]" in told
    assert "|" not in told, "it is a cell of tables"


def test_the_page_has_the_table(committed):
    text = page.markdown(committed)
    for row in committed["ratios"]["grid"]:
        assert f"| {row['clients']} | {row['rates']} | {row['T']} | " in text
