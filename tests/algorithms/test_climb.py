"""CLIMB against its reference in NumPy, and its fixed points.

The reference keeps the table of all multipliers in one place; in the library every client keeps
its own, and the server a running mean.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from conformance import references
from fedda import algorithms, api
from fedda.algorithms import climb as module
from fedda.core.losses import cross_entropy
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import Run, train
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    SIZES,
    W0,
    drawn,
    height,
    matrix,
    softmax,
    train_losses,
)

pytestmark = pytest.mark.usefixtures("x64")


SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
# Multipliers of about 1 to 10 after some rounds, so that some weights would fall below 0.
HYPER = {"client_lr": 0.2, "server_lr": 0.7, "dual_lr": 60.0, "eps": 0.1}
# Multipliers that reach their bound of 100.
EXTREME = {"client_lr": 0.02, "server_lr": 0.1, "dual_lr": 3000.0, "eps": 0.1}

# Numbers of about 1 (and multipliers of up to 100) after some thousand operations, which err by
# 1.1e-16 each, partly at random.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def evaluations(model, clients, loss, **settings):
    """The rows, the server's states and the clients' memories, at the start and every round."""
    setup, hyper = api.prepare(
        "climb", model, clients, loss, **{"batch": BATCH, "eval_every": 1} | settings
    )
    found = train(setup, api.traced(hyper, model), [SEED])
    return [
        (each.row, *jax.tree.map(np.array, (each.run.state, each.run.memory))) for each in found
    ]


def climb(hyper, **work):
    """The states of the reference, and the mean training loss of every round."""
    weighting = {"weighting": work.pop("weighting", "examples")}
    visits = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **work)
    reference = references.REFERENCES["climb"]
    states = list(references.run(reference, W0, visits, clients=len(SIZES), **hyper, **weighting))
    return list(zip(states, train_losses(visits), strict=True))


CASES = {
    "examples, epochs": (HYPER, {"weighting": "examples"} | EPOCHS),
    "uniform, steps": (HYPER, {"weighting": "uniform", "stabilise": 2} | STEPS),
    "examples, bounded": (EXTREME, {"weighting": "examples"} | EPOCHS),
}


def found_and_expected(hyper, **work):
    found = evaluations(
        softmax, CLASSIFIED, cross_entropy, rounds=ROUNDS, cohort=COHORT, **hyper, **work
    )
    return found[1:], climb(hyper, **work)


@pytest.mark.parametrize("case", CASES)
def test_the_library_is_the_reference(case):
    hyper, work = CASES[case]
    found, expected = found_and_expected(hyper, **work)
    for (row, state, memory), (right, train_loss) in zip(found, expected, strict=True):
        np.testing.assert_allclose(matrix(state.params), right["params"], **TOLERANCE)
        np.testing.assert_allclose(memory.multiplier, right["multipliers"], **TOLERANCE)
        np.testing.assert_allclose(state.mean_multiplier, right["mean_multiplier"], **TOLERANCE)
        np.testing.assert_allclose(state.mean_loss, right["mean_loss"], **TOLERANCE)
        np.testing.assert_allclose(row["train_loss"], train_loss, **TOLERANCE)
        assert not memory.measured.any()
        # A model each way, of 8 bytes a number. Down besides: L, then l. Up: p_i, l_i, 1, then c_i.
        assert row["bytes_down"] == row["round"] * COHORT * 8 * (W0.size + 2)
        assert row["bytes_up"] == row["round"] * COHORT * 8 * (W0.size + 4)


def test_the_references_hold_what_they_are_for():
    """Multipliers that last from visit to visit, weights at 0 and above 1, the bound of 100."""
    states = [state for state, _ in climb(HYPER, **EPOCHS)]
    before = [np.zeros(len(SIZES)), *(state["multipliers"] for state in states)]
    cohorts = [draw_cohort(SEED, r, len(SIZES), COHORT).tolist() for r in range(ROUNDS)]
    weights = np.concatenate(
        [1 + lam[cohort] - lam.mean() for lam, cohort in zip(before, cohorts, strict=False)]
    )
    assert (weights < 0).any()
    assert (weights > 1).any()
    assert (before[-1] > 0).sum() >= 2
    assert {0, 1, max(SIZES)} <= {SIZES[i] for cohort in cohorts for i in cohort}
    # Someone with a multiplier comes back after rounds without it, and weighs what it kept.
    returns = [
        (i, r)
        for r in range(2, ROUNDS)
        for i in cohorts[r]
        if i not in cohorts[r - 1] and before[r][i] > 0
    ]
    assert returns
    assert max(state["multipliers"].max() for state, _ in climb(EXTREME, **EPOCHS)) == 100


def test_a_bound_of_1_is_never_reached_here():
    """The published eps: the losses differ by less, so all multipliers stay 0 and it is FedAvg."""
    *_, (_, state, memory) = evaluations(
        softmax, CLASSIFIED, cross_entropy,
        rounds=ROUNDS, cohort=COHORT, **HYPER | {"eps": 1.0, "client_lr": 0.1}, **EPOCHS,
    )  # fmt: skip
    plain = fedda.run(
        "fedavg", softmax, CLASSIFIED, cross_entropy, rounds=ROUNDS, cohort=COHORT, batch=BATCH,
        seed=SEED, client_lr=0.1, server_lr=HYPER["server_lr"], **EPOCHS,
    )  # fmt: skip
    assert not memory.multiplier.any()
    np.testing.assert_allclose(matrix(state.params), matrix(plain.params), **TOLERANCE)


# ---- quadratics: (x - b)' A (x - b) / 2, one example a client, so that a mini-batch is all


def quadratic(dimension):
    def apply(x, examples):
        A = examples[:, :-dimension].reshape(-1, dimension, dimension)
        off = x[None] - examples[:, -dimension:]
        return jnp.einsum("ni,nij,nj->n", off, A, off) / 2

    return fedda.Model(lambda key: jnp.zeros(dimension), apply)


LINE, SPACE = quadratic(1), quadratic(3)
TWO = np.array([[[1.0]], [[4.0]]]), np.array([[-1.0], [3.0]])
_rng = np.random.default_rng(4)
_roots = _rng.normal(size=(5, 3, 3))
FIVE = np.einsum("nij,nkj->nik", _roots, _roots) / 3 + 0.3 * np.eye(3), _rng.normal(size=(5, 3))


def losses_and_gradients(x, A, b):
    off = x[None] - b
    return np.einsum("ni,nij,nj->n", off, A, off) / 2, np.einsum("nij,nj->ni", A, off)


def ended(model, problem, rounds, local_work, **hyper):
    """Where a run with all clients ends, and the multipliers."""
    clients = [
        (np.concatenate([A.ravel(), b])[None], np.zeros(1)) for A, b in zip(*problem, strict=True)
    ]
    work = {"cohort": len(clients), "batch": 1, "rounds": rounds, "eval_every": rounds}
    *_, (_, state, memory) = evaluations(
        model, clients, height, local_work=local_work, **work, **hyper
    )
    return state.params, memory.multiplier


@pytest.mark.parametrize("T", [1, 4])
def test_without_slack_two_clients_end_with_equal_losses(T):
    """Where (x + 1)² = 4 (x - 3)² between -1 and 3: x + 1 = 2 (3 - x), so x = 5/3.

    Several local steps drift, but the multipliers stand still only where the losses are equal: so
    what drifts is the multipliers.
    """
    x, lam = ended(LINE, TWO, 4000, T, client_lr=0.05, dual_lr=0.1, eps=0.0)
    losses, _ = losses_and_gradients(x, *TWO)
    np.testing.assert_allclose(x, 5 / 3, rtol=0, atol=1e-13)
    np.testing.assert_allclose(losses, 32 / 9, rtol=1e-13)
    # One step: w_1 8/3 = w_2 16/3 with w_1 + w_2 = 2, so w = 4/3, 2/3: their difference is that
    # of the multipliers. Their mean is what the way here left behind.
    assert (abs(lam[0] - lam[1] - 2 / 3) < 1e-12) == (T == 1)


def test_five_clients_end_where_kuhn_and_tucker_say():
    """One local step: Σ w_i ∇f_i = 0, f_i <= mean f + eps, and equality where lambda_i > 0."""
    eps = 0.4
    x, lam = ended(SPACE, FIVE, 4000, 1, client_lr=0.1, dual_lr=0.5, eps=eps)
    losses, gradients = losses_and_gradients(x, *FIVE)
    weights, excess, active = 1 + lam - lam.mean(), losses - losses.mean() - eps, lam > 0
    assert weights.min() > 0
    np.testing.assert_allclose(weights @ gradients, 0, atol=1e-13)
    assert 0 < active.sum() < len(lam)
    np.testing.assert_allclose(excess[active], 0, atol=1e-13)
    assert excess[~active].max() < 0
    # ... which the unconstrained optimum is not: there somebody is worse off.
    A, b = FIVE
    losses, _ = losses_and_gradients(np.linalg.solve(A.sum(0), np.einsum("nij,nj->i", A, b)), *FIVE)
    assert (losses - losses.mean() - eps).max() > 0.1


# ---- a client that was lost


def test_who_was_lost_in_the_first_exchange_is_lost_in_the_second():
    """Its memory has no loss of this round: what it would say is not finite, so it is not heard."""
    hp = api.traced(algorithms.get("climb").Hyper(), softmax)
    task, shard = Task(softmax, cross_entropy, Plan(BATCH)), from_clients(CLASSIFIED).shard(0)
    for measured in (0.0, 1.0):
        memory = module.Memory(*(jnp.asarray(value) for value in (2.0, 9.0, measured)))
        change, kept, _ = module.update_multiplier(
            hp, task, jnp.asarray(3.0), memory, shard, random.key(0)
        )
        if measured:
            # (9 - 3 - 1) / 7 is added to 2; the mean over 7 clients grows by a 7th of that.
            np.testing.assert_allclose(kept.multiplier, 2 + 5 / 7, rtol=1e-15)
            np.testing.assert_allclose(change, 5 / 49, rtol=1e-15)
        else:
            assert np.isnan(change)


def test_a_lost_client_keeps_its_multiplier():
    """Also where it has one: the contract begins with zeros, which a stale loss of 0 would keep."""
    settings = {"rounds": 1, "cohort": COHORT, "batch": BATCH, "eval_every": 1, **EPOCHS}
    setup, hyper = api.prepare("climb", softmax, CLASSIFIED, cross_entropy, **settings, **HYPER)
    hp = api.traced(hyper, softmax)
    cohort = draw_cohort(SEED, 0, len(SIZES), COHORT).tolist()
    lost = max(cohort, key=lambda i: SIZES[i])
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = jnp.where(owner[:, None] == lost, jnp.nan, setup.shards.x)
    before = 1 + np.arange(7.0)
    state = setup.algorithm.init(hp, softmax.init(None))
    state = state._replace(mean_multiplier=jnp.asarray(before.mean()))
    memory = module.Memory(jnp.asarray(before), jnp.zeros(7), jnp.zeros(7))
    run = Run(state, memory, jnp.int32(0), jnp.int32(0))
    spoilt = setup._replace(shards=replace(setup.shards, x=x))
    (end,) = train(spoilt, hp, [SEED], run=run)
    after = np.asarray(end.run.memory.multiplier)
    assert end.run.nonfinite == 2  # one upload in each exchange
    heard = [i for i in cohort if i != lost and SIZES[i]]
    assert (after != before).nonzero()[0].tolist() == sorted(heard)
    np.testing.assert_allclose(end.run.state.mean_multiplier, after.mean(), rtol=1e-14)
