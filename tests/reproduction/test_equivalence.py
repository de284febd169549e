"""FedDA's momentum is FedAvgM's with a lag: the identity, the order, the prediction, its end."""

import numpy as np
import pytest

import fedda
from fedda_reproduction.theory import equivalence
from fedda_reproduction.theory.equivalence import case, distance, lag, largest_step, runs
from helpers.quadratics import Quadratics

STEPS = (2, 5, 10)


@pytest.mark.parametrize("T", [1, *STEPS])
def test_the_lag_is_that_of_the_recursion(T):
    """P = T m' - L (m' - M) for gradients that are equal in a round, whatever M was."""
    b, M, g = 0.9, 0.7, -1.3
    beta, m, P = b ** (1 / T), M, 0.0
    for _ in range(T):
        m = beta * m + (1 - beta) * g
        P += m
    assert pytest.approx(T * m - lag(b, T) * (m - M), rel=1e-12) == P
    G = (P - beta * M) / (1 - beta)
    scale = (T - beta) / (1 - beta)  # G, if M and all gradients are 1
    assert G / scale == pytest.approx(m - equivalence.adagrad_lag(b, T) * (m - M), rel=1e-12)


def test_the_lag_approaches_half_the_other_steps():
    """For b near 1; with smaller b it is shorter."""
    for T in (1, *STEPS, 50):
        assert lag(1 - 1e-4, T) == pytest.approx((T - 1) / 2, rel=1e-3, abs=1e-6)
        assert lag(0.5, T) <= (T - 1) / 2


@pytest.mark.parametrize("T", STEPS)
def test_without_drift_fedda_is_fedavgm_at_a_point_behind(T):
    """W = Z + step L M, where Z is FedAvgM whose gradients are those at W. Exact, not a limit."""
    problem, b, step = case(), 0.8, 0.05
    clients = len(problem.matrices)
    found = runs(
        problem.gradients, problem.start, b=b, T=T, eta=0, step=step, rounds=30, clients=clients
    )
    Z, m = problem.start, 0 * problem.start
    for W in found.fedda:
        np.testing.assert_allclose(W, Z + step * lag(b, T) * m, rtol=1e-12, atol=1e-13)
        g = problem.gradients(np.tile(W, (clients, 1))).mean(0)
        m = b * m + (1 - b) * g
        Z = Z - step * T * m
    assert np.abs(found.fedda - found.fedavgm).max() > 0.01


@pytest.mark.parametrize("b", [0.5, 0.9])
@pytest.mark.parametrize("T", STEPS)
def test_the_distance_shrinks_as_derived(T, b):
    """With the step h it is O(h), as predicted; what the prediction leaves is O(h²).

    Each order is that of halving h once more, where the next order is at most a fifth of it.
    """
    coarse, fine = (distance(case(), b=b, T=T, eta=h / T) for h in (0.005, 0.0025))
    assert np.log2(coarse.measured / fine.measured) == pytest.approx(1, abs=0.1)
    assert np.log2(coarse.unexplained / fine.unexplained) == pytest.approx(2, abs=0.2)
    assert fine.unexplained < 0.05 * fine.predicted


def test_one_local_step_is_fedavgm_itself():
    assert lag(0.9, 1) == pytest.approx(0, abs=1e-12)
    assert distance(case(), b=0.9, T=1, eta=0.05).measured < 1e-12


@pytest.mark.parametrize("fedda", [True, False])
@pytest.mark.parametrize("T", [1, *STEPS])
def test_the_largest_stable_step(T, fedda):
    """Three percent below it a quadratic shrinks, and three percent above it grows."""
    limit, ends = largest_step(0.9, T, fedda), []
    for share in (0.97, 1.03):
        found = runs(
            lambda w: w,
            np.ones(1),
            b=0.9,
            T=T,
            eta=0,
            step=share * limit / T,
            rounds=600,
            clients=1,
        )
        ends.append(abs(found.fedda if fedda else found.fedavgm)[-40:].max())
    assert ends[0] < 1 < ends[1]


@pytest.mark.usefixtures("x64")
def test_the_runs_are_those_of_the_library():
    problem, T, b, eta, alpha = case(clients=3), 4, 0.8, 0.1, 0.7
    quadratics = Quadratics(problem.matrices, problem.centres, start=problem.start)
    expected = runs(
        problem.gradients, problem.start, b=b, T=T, eta=eta, step=alpha * eta, rounds=6, clients=3
    )
    rates = {"client_lr": eta, "server_lr": alpha, "beta1": b, "local_work": T, "eval_every": 1}
    for name, options, models in (
        ("fedda-sgdm", {"beta1_per": "round"}, expected.fedda),
        ("fedopt-sgdm", {"form": "paper"}, expected.fedavgm),
    ):
        found = [
            np.array(each.run.state.params)
            for each in quadratics.evaluations(name, 6, **rates, **options)
        ]
        np.testing.assert_allclose(found, models, rtol=1e-12, atol=1e-13)


def test_beta_per_round_is_the_conversion_of_beta_per_step():
    """So a user of FedDA can set its beta from FedAvgM's."""
    clients = [(np.ones((4, 2)), np.full((4, 1), 3.0)), (-np.ones((4, 2)), np.ones((4, 1)))]
    ends = [
        fedda.run(
            "fedda-sgdm", fedda.models.linear(2, 1), clients, fedda.losses.squared_error,
            cohort=2, batch=2, local_work=5, rounds=10, client_lr=0.01, **chosen,
        ).params
        for chosen in ({"beta1_per": "round", "beta1": 0.9}, {"beta1": 0.9**0.2})
    ]  # fmt: skip
    np.testing.assert_allclose(
        ends[0]["out"]["kernel"], ends[1]["out"]["kernel"], rtol=1e-4, atol=1e-5
    )
