"""FedLocal against a reference in NumPy, and what follows from its equations.

Everything is in float64. The notation is that of `fedda/algorithms/fedlocal.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedda
from conformance import references
from conformance.problem import mean_gradient
from fedda.algorithms import fedlocal
from fedda.core.losses import cross_entropy
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    SIZES,
    SLOPE,
    W0,
    drawn,
    height,
    matrix,
    optax_adagrad,
    slope,
    softmax,
    train_losses,
)

pytestmark = pytest.mark.usefixtures("x64")


SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
HYPER = {
    "fedlocal-sgdm": {"client_lr": 0.1, "server_lr": 0.7, "beta": 0.8},
    "fedlocal-adam": {
        "client_lr": 0.05, "server_lr": 0.7, "beta1": 0.8, "beta2": 0.9, "eps": 0.05,
    },
    "fedlocal-adagrad": {"client_lr": 0.05, "server_lr": 0.7, "eps": 0.05},
}  # fmt: skip
CORRECTIONS = ("joint", "local", "none")

# Numbers of about 1 after some thousand operations, each of which errs by 1.1e-16 of its result;
# a division by eps = 0.05 makes an error at most 20 times as large.
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)


def distance(one, other):
    """The largest difference of two arrays."""
    return np.abs(np.asarray(one) - other).max()


def draws_of(work):
    return drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **work)


def run(name, hp, clients=CLASSIFIED, **settings):
    return fedda.run(
        name, softmax, clients, cross_entropy, seed=SEED,
        **{"batch": BATCH, "cohort": COHORT, "rounds": ROUNDS, "eval_every": ROUNDS} | settings,
        **hp,
    )  # fmt: skip


def check(name, correction, work):
    result = run(name, HYPER[name], correction=correction, **work)
    visits = draws_of(work)
    settings = HYPER[name] | {"correction": correction}
    *_, expected = references.run(references.REFERENCES[name], W0, visits, **settings)
    W = expected["params"]
    close(matrix(result.params), W)
    close(result.history[-1]["train_loss"], np.mean(train_losses(visits)))
    assert distance(W, W0) > 0.05


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples, so that A_i is of one to seven steps."""
    visits = [visit for round_visits in draws_of(EPOCHS) for visit in round_visits]
    assert {0, 1, max(SIZES)} <= {visit.examples for visit in visits}
    assert {0, 1, 7} <= {len(visit.batches) for visit in visits}
    assert len({len(visit.batches[-1].x) for visit in visits if visit.batches}) > 1


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", HYPER)
def test_epochs(name, correction):
    check(name, correction, EPOCHS)


@pytest.mark.parametrize(("name", "correction"), list(zip(HYPER, CORRECTIONS, strict=True)))
def test_steps(name, correction):
    check(name, correction, STEPS)


# ---- the client's optimiser, against Optax


OPTAX = {
    "fedlocal-sgdm": optax.sgd(0.1, 0.8),
    "fedlocal-adam": optax.adam(0.05, 0.8, 0.9, 0.05),
    "fedlocal-adagrad": optax_adagrad(0.05, 0.05),
}


@pytest.mark.parametrize("name", HYPER)
def test_a_client_alone_runs_the_optimiser_of_optax_and_needs_no_correction(name):
    """One client with one batch of data: six epochs are six full-batch steps.

    There are two rounds; Optax is restarted between them. With one client, D / (1 / A) is y - W.
    """
    x, y = CLASSIFIED[5]
    assert len(x) == BATCH
    work = {"cohort": 1, "local_work": 6, "local_unit": "epochs", "rounds": 2, "eval_every": 2}
    found = run(name, HYPER[name] | {"server_lr": 1.0}, [(x, y)], **work)
    optimiser, W = OPTAX[name], jnp.asarray(W0)
    update = jax.jit(optimiser.update)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        for _ in range(2):
            state = optimiser.init(W)
            for _ in range(6):
                step, state = update(jnp.asarray(mean_gradient(np.asarray(W), x, y)), state)
                W = W + step
    close(matrix(found.params), W)


# ---- the restart


@pytest.mark.parametrize("name", HYPER)
def test_no_round_remembers_another(name):
    """Where the gradient is g everywhere, every round moves by the same: the state is gone.

    What it moves by is derived here for T = 3 steps of all clients alike, where the correction
    changes nothing: SGDM by g (1 + (1 + b) + (1 + b + b²)); Adam, whose corrected moments of a
    constant are exact, by 3 g / (|g| + eps); AdaGrad by the sum of g / (sqrt(k) |g| + eps).
    """
    g, hp = SLOPE, HYPER[name]
    eps = hp.get("eps", 0.0)
    moves = {
        "fedlocal-sgdm": g * (1 + (1 + 0.8) + (1 + 0.8 + 0.8**2)),
        "fedlocal-adam": 3 * g / (np.abs(g) + eps),
        "fedlocal-adagrad": sum(g / (np.sqrt(k) * np.abs(g) + eps) for k in (1, 2, 3)),
    }
    clients = [(np.tile(SLOPE, (size, 1)), np.zeros(size)) for size in (1, 3, 2)]
    result = fedda.run(
        name, slope, clients, height, batch=1, cohort=2, rounds=4, eval_every=4, **STEPS, **hp
    )
    close(result.params, -4 * hp["server_lr"] * hp["client_lr"] * moves[name])


# ---- limits


def test_without_momentum_the_joint_correction_is_fedavg_for_equal_numbers_of_steps():
    hp = {"client_lr": 0.3, "server_lr": 0.7}
    for work, equal in ((STEPS, True), (EPOCHS, False)):
        found = matrix(run("fedlocal-sgdm", hp | {"beta": 0.0}, **work).params)
        expected = matrix(run("fedavg", hp, **work).params)
        if equal:
            close(found, expected)
        else:  # ... so it is FedNova
            assert distance(found, expected) > 1e-3


def test_equal_progress_needs_no_correction_and_undamped_momentum_cancels():
    """SGDM has A_i = sum_k (1 - beta^k): with equally many steps it is the same for all.

    The `local` correction is shorter by exactly that, which knows nothing of the factor
    1 / (1 - beta) in undamped momentum; the joint one is not.
    """
    name, hp = "fedlocal-sgdm", HYPER["fedlocal-sgdm"]
    work = STEPS | {"rounds": 1, "eval_every": 1}
    joint, local, none = (
        matrix(run(name, hp, correction=correction, **work).params) - W0
        for correction in CORRECTIONS
    )
    close(joint, none)
    close(local * sum(1 - hp["beta"] ** k for k in (1, 2, 3)), none)


def test_nothing_over_nothing_is_nothing():
    """Where nobody could move, A = 0 and so is what was moved."""
    quotient = fedlocal.divide(jnp.array([0.0, 3.0, 0.0]), jnp.array([0.0, 2.0, 4.0]))
    assert quotient.tolist() == [0, 1.5, 0]


def test_a_gradient_whose_square_overflows_does_no_harm():
    """It gives v = inf and p = 0 in every step whose compiler does not take sqrt(g²) for |g|."""
    steep = np.array([1e160, 1.0, 1.0])
    clients = [(np.tile(steep, (size, 1)), np.zeros(size)) for size in (1, 2)]
    for correction in ("joint", "local"):
        result = fedda.run(
            "fedlocal-adagrad", slope, clients, height, batch=1, cohort=2, rounds=1, eval_every=1,
            correction=correction, **STEPS,
        )  # fmt: skip
        assert result.history[-1]["nonfinite_clients"] == 0
        assert np.isfinite(result.params).all()
        assert (result.params[1:] < 0).all()


# ---- where it ends: two quadratics f_i = a_i (x - b_i)² / 2


A, B = np.array([1.0, 4.0]), np.array([-1.0, 3.0])
COPIES = np.array([3, 1])  # examples, all alike: with batches of one, three epochs are T_i steps
T = 3 * COPIES
parabola = fedda.Model(
    lambda key: jnp.zeros(1), lambda w, x: x[:, 0] * (w - x[:, 1]) ** 2 / 2
)  # x = (a, b)


def end(rounds=300, **hp):
    clients = [(np.tile([a, b], (n, 1)), np.zeros(n)) for a, b, n in zip(A, B, COPIES, strict=True)]
    result = fedda.run(
        "fedlocal-sgdm", parabola, clients, height, batch=1, local_work=3, local_unit="epochs",
        cohort=2, rounds=rounds, eval_every=rounds, **hp,
    )  # fmt: skip
    return result.params[0]


def shares(rate, beta):
    """How far each client goes to its own optimum: undamped momentum on a line is linear."""
    found = []
    for a, steps in zip(A, T, strict=True):
        # (error, u) -> (error - rate u', u') with u' = beta u + a error
        step = np.array([[1 - rate * a, -rate * beta], [a, beta]])
        found.append(1 - np.linalg.matrix_power(step, steps)[0, 0])
    return np.array(found)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_where_it_ends(beta):
    """A client moves by s_i (b_i - x), so that x rests at the mean of the b_i weighted by ...

    ... N_i s_i without correction, as for FedAvg if beta = 0, and N_i s_i / A_i with one. For
    beta = 0, s_i = 1 - (1 - rate a_i)^T_i and A_i = T_i, the normalisation of FedNova.
    """
    rate = 0.02
    s = shares(rate, beta)
    A_i = np.array([sum(1 - beta**k for k in range(1, steps + 1)) for steps in T])
    if beta == 0:
        close(s, 1 - (1 - rate * A) ** T)
        close(A_i, T)
    for correction, weights in (
        ("none", COPIES * s),
        ("joint", COPIES * s / A_i),
        ("local", COPIES * s / A_i),
    ):
        # Divided by A_i, the steps of `local` are shorter, and the server's rate makes up for it.
        found = end(client_lr=rate, beta=beta, correction=correction, rounds=1000,
                    server_lr=3.0 if correction == "local" else 1.0)  # fmt: skip
        np.testing.assert_allclose(found, weights @ B / weights.sum(), atol=1e-12)


def test_the_joint_correction_is_consistent_and_no_correction_is_not():
    """For short steps s_i = rate a_i T_i: the joint weights are N_i a_i, those of the optimum.

    Without correction they are N_i a_i T_i, so that the client with more steps pulls. What is left
    of the drift is at most of the order of rate a_i T_i, here 0.01.
    """
    optimum, pulled = ((w @ B) / w.sum() for w in (COPIES * A, COPIES * A * T))
    joint, none = (
        end(client_lr=1e-3, beta=0.0, correction=c, rounds=4000) for c in ("joint", "none")
    )
    assert abs(joint - optimum) < 0.02 < 0.5 < abs(none - optimum)
    assert abs(none - pulled) < 0.02


def test_where_it_ends_in_three_dimensions():
    """Five clients of one to three examples with random Hessians, of one epoch of SGD.

    The share s_i is a matrix, 1 - (1 - rate H_i)^T_i, and x rests where the sum of
    N_i / A_i s_i (b_i - x) is 0, with A_i = T_i = N_i.
    """
    rng = np.random.default_rng(5)
    factors = rng.normal(size=(5, 3, 3))
    H = np.einsum("nij,nkj->nik", factors, factors) / 3 + 0.5 * np.eye(3)
    b, N, rate = rng.normal(size=(5, 3)), np.array([1, 3, 2, 1, 2]), 0.1
    share = [
        np.eye(3) - np.linalg.matrix_power(np.eye(3) - rate * h, n)
        for h, n in zip(H, N, strict=True)
    ]
    bowl = fedda.Model(
        lambda key: jnp.zeros(3),
        lambda w, x: jnp.einsum(
            "ni,nij,nj->n", w[None] - x[:, -1], x[:, :-1] / 2, w[None] - x[:, -1]
        ),
    )
    clients = [
        (np.tile(each, (n, 1, 1)), np.zeros(n))
        for each, n in zip(np.concatenate([H, b[:, None]], 1), N, strict=True)
    ]
    for correction, weight in (("joint", N / N), ("none", N)):
        result = fedda.run(
            "fedlocal-sgdm", bowl, clients, height, batch=1, local_work=1, local_unit="epochs",
            cohort=5, rounds=400, eval_every=400, client_lr=rate, beta=0.0, correction=correction,
        )  # fmt: skip
        pull = np.einsum("n,nij->nij", weight, share)
        expected = np.linalg.solve(pull.sum(0), np.einsum("nij,nj->i", pull, b))
        np.testing.assert_allclose(result.params, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["fedlocal-adam", "fedlocal-adagrad"])
@pytest.mark.parametrize("correction", ["joint", "local"])
def test_a_gradient_that_is_not_finite_is_not_taken_for_none(name, correction):
    """Its A is 0, as that of a coordinate that no step has moved; the client is left out."""
    model = fedda.Model(lambda key: jnp.zeros(1), lambda w, x: x @ w)
    bad, good, none = (  # the sum of two rows of the first is too large for a number
        (np.full((rows, 1), value), np.zeros(rows))
        for rows, value in ((2, 1.7e308), (2, 1.0), (0, 1.0))
    )
    runs = [
        fedda.run(
            name, model, clients, height, rounds=1, cohort=2, batch=2, local_work=1,
            correction=correction,
        )
        for clients in ([good, bad], [good, none])
    ]  # fmt: skip
    assert [run.history[-1]["nonfinite_clients"] for run in runs] == [1, 0]
    np.testing.assert_array_equal(*(run.params for run in runs))
