"""STEM against its reference in NumPy, and what its equations imply.

The reference takes the step of the server; the library folds it into the clients' first.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random

import fedda
from conformance import references
from conformance.problem import mean_gradient
from conformance.references.reference import mean
from fedda import algorithms, api
from fedda.algorithms.stem import Point
from fedda.core.losses import cross_entropy
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import train
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


SEED, ROUNDS, COHORT = 7, 7, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
CONSTANT = {"client_lr": 0.3, "a": 0.2}
THEORY = {"schedule": "theory", "kappa": 0.4, "w": 1.5, "sigma2": 0.7, "c": 3.0}

# Numbers of about 1 after some thousand operations, which err by 1.1e-16 each, partly at random.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def evaluations(model, clients, loss, **settings):
    """The rows and the server's states, before the first round and after each."""
    setup, hyper = api.prepare(
        "stem", model, clients, loss, **{"batch": BATCH, "eval_every": 1} | settings
    )
    found = train(setup, api.traced(hyper, model), [SEED])
    return [(each.row, jax.tree.map(np.array, each.run.state)) for each in found]


def states(*problem, **settings):
    return [state for _, state in evaluations(*problem, **settings)]


def stem(hyper, *, rounds, **work):
    """The states of the reference, and the mean loss of every round."""
    visits = drawn(seed=SEED, rounds=rounds, cohort=COHORT, **work)
    states = list(references.run(references.REFERENCES["stem"], W0, visits, **hyper))
    return list(zip(states, train_losses(visits), strict=True))


def found_and_expected(hyper, rounds=ROUNDS, **work):
    found = evaluations(
        softmax, CLASSIFIED, cross_entropy, rounds=rounds, cohort=COHORT, **hyper, **work
    )
    return found[1:], stem(hyper, rounds=rounds, **work)


CASES = {
    "constant, epochs": CONSTANT | EPOCHS,
    "constant, sums": {"client_lr": 0.05, "a": 0.2, "reduction": "sum", "stabilise": 2} | STEPS,
    "theory, epochs": THEORY | EPOCHS,
    "theory, steps": THEORY | STEPS,
}


def split(case):
    names = {*CONSTANT, *THEORY}
    return (
        {key: value for key, value in case.items() if key in names},
        {key: value for key, value in case.items() if key not in names},
    )


@pytest.mark.parametrize("case", CASES)
def test_the_library_is_the_reference(case):
    """3 of 7 clients a round, among them all sizes, one with a single example and an empty one."""
    hyper, work = split(CASES[case])
    visited = {SIZES[i] for r in range(1, ROUNDS) for i in draw_cohort(SEED, r, 7, COHORT)}
    assert {0, 1, max(SIZES)} <= visited
    found, expected = found_and_expected(hyper, **work)
    for (row, state), (right, loss) in zip(found, expected, strict=True):
        np.testing.assert_allclose(matrix(state.params), right["params"], **TOLERANCE)
        np.testing.assert_allclose(matrix(state.point.x), right["point"], **TOLERANCE)
        direction = matrix(state.point.direction)
        np.testing.assert_allclose(direction, right["direction"], **TOLERANCE)
        np.testing.assert_allclose(state.point.time, right["time"], **TOLERANCE)
        np.testing.assert_allclose(row["train_loss"], loss, **TOLERANCE)
        # Two models each way, of 8 bytes a number; t goes down, t and N_i come up.
        assert row["bytes_down"] == row["round"] * COHORT * 8 * (2 * W0.size + 1)
        assert row["bytes_up"] == row["round"] * COHORT * 8 * (2 * W0.size + 2)


def test_without_memory_and_with_one_local_step_it_is_sgd():
    """With a = 1, d = g(x), so x <- x - eta Σ p_i g_i(x; batch); the first batch is a full one."""
    hyper, work = CONSTANT | {"a": 1.0}, {"local_work": 1, "local_unit": "steps"}
    found, _ = found_and_expected(hyper, **work)
    draws, W = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **work), W0
    for r, (visits, (_, state)) in enumerate(zip(draws, found, strict=True)):
        present = [visit for visit in visits if visit.examples]
        batches = [visit.batches[0] if r else visit.whole for visit in present]
        g = mean([batch.gradient(W) for batch in batches], present)
        W = W - CONSTANT["client_lr"] * g
        np.testing.assert_allclose(matrix(state.params), W, **TOLERANCE)


@pytest.mark.parametrize("a", [1.0, 0.1, 1e-6])
def test_one_full_batch_step_of_all_clients_is_gradient_descent_whatever_a(a):
    """The error d - ∇f(x) starts at 0 and shrinks by 1 - a a step: Optax's SGD, data pooled."""
    settings = CONSTANT | {"a": a, "cohort": len(SIZES), "rounds": 20, "stabilise": 20}
    found = states(softmax, CLASSIFIED, cross_entropy, **settings)
    x, y = (jnp.asarray(np.concatenate(part)) for part in zip(*CLASSIFIED, strict=True))
    optimiser = optax.sgd(CONSTANT["client_lr"])

    @jax.jit
    def step(params, state):
        gradient = jax.grad(lambda p: cross_entropy(softmax.apply(p, x), y).mean())(params)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = softmax.init(None)
    state = optimiser.init(params)
    for each in found:
        np.testing.assert_allclose(matrix(each.params), matrix(params), **TOLERANCE)
        params, state = step(params, state)


# ---- schedules


def test_the_schedule_of_the_theory_never_forgets_more_than_all():
    """So large a c asks for a > 1 in each of these steps: the run is one with a = 1."""
    steep = THEORY | {"c": 1e6, "sigma2": 0.0, "w": 1.0, "kappa": 0.3}
    found, expected = found_and_expected(steep, **STEPS)
    plain = stem(CONSTANT | {"a": 1.0}, rounds=ROUNDS, **STEPS)
    for (_, state), (x, _), (y, _) in zip(found, expected, plain, strict=True):
        np.testing.assert_allclose(matrix(state.params), x["params"], **TOLERANCE)
        np.testing.assert_allclose(x["params"], y["params"], **TOLERANCE)


@pytest.mark.parametrize("field", ["kappa", "w", "sigma2", "c"])
def test_every_number_of_the_theory_matters(field):
    run = partial(states, softmax, CLASSIFIED, cross_entropy, rounds=3, cohort=COHORT, **STEPS)
    one, other = run(**THEORY)[-1], run(**THEORY | {field: 1.1 * THEORY[field]})[-1]
    assert np.abs(matrix(one.params) - matrix(other.params)).max() > 1e-4


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"a": 0.0}, "a number in \\(0, 1\\]"),
        ({"a": 1.01}, "a number in \\(0, 1\\]"),
        ({"schedule": "theory", "sigma2": -1.0}, "zero or a positive number"),
        ({"schedule": "theory", "client_lr": 0.1}, "client_lr"),
        ({"kappa": 0.1}, "kappa"),
    ],
)
def test_numbers_out_of_their_domain_or_of_the_other_schedule_are_refused(chosen, words):
    with pytest.raises(InputError, match=words):
        algorithms.configure("stem", chosen)


# ---- quadratics: (x - b)' A (x - b) / 2, one example a client, so that a mini-batch is all


def quadratic(dimension):
    def apply(x, examples):
        A = examples[:, :-dimension].reshape(-1, dimension, dimension)
        off = x[None] - examples[:, -dimension:]
        return jnp.einsum("ni,nij,nj->n", off, A, off) / 2

    return fedda.Model(lambda key: jnp.zeros(dimension), apply)


def quadratic_clients(A, b):
    return [(np.concatenate([H.ravel(), p])[None], np.zeros(1)) for H, p in zip(A, b, strict=True)]


LINE, SPACE = quadratic(1), quadratic(3)
TWO = np.array([[[1.0]], [[4.0]]]), np.array([[-1.0], [3.0]])
_rng = np.random.default_rng(4)
_roots = _rng.normal(size=(5, 3, 3))
FIVE = np.einsum("nij,nkj->nik", _roots, _roots) / 3 + 0.3 * np.eye(3), _rng.normal(size=(5, 3))


def optimum(A, b):
    return np.linalg.solve(A.sum(0), np.einsum("nij,nj->i", A, b))


def last_of(model, problem, rounds, local_work, **hyper):
    everyone = {"cohort": len(problem[0]), "batch": 1, "eval_every": rounds}
    work = {"rounds": rounds, "local_work": local_work, **everyone, **hyper}
    return states(model, quadratic_clients(*problem), height, **work)[-1]


@pytest.mark.parametrize(("model", "problem"), [(LINE, TWO), (SPACE, FIVE)], ids=["two", "five"])
def test_with_one_local_step_the_fixed_point_is_the_optimum(model, problem):
    """Errors shrink by 1 - eta times an eigenvalue of the mean Hessian, the least of them 0.6."""
    least = np.linalg.eigvalsh(problem[0].mean(0)).min()
    assert least > 0.6
    assert (1 - 0.2 * least) ** 400 < 1e-20
    for a in (0.1, 1.0):
        found = last_of(model, problem, 400, 1, client_lr=0.2, a=a).params
        np.testing.assert_allclose(found, optimum(*problem), rtol=0, atol=1e-13)
    assert optimum(*TWO).item() == pytest.approx(2.2)


def affine_round(x, d, *, T, eta, a):
    """A round on TWO from X = x, D = d, with d_t = ∇f_i(x_t) + (1 - a)^t (D - ∇f_i(X)).

    Without noise that is what the recursion of d gives, by induction on t.
    """
    ends = []
    for A, b in ((1.0, -1.0), (4.0, 3.0)):
        error, y, direction = d - A * (x - b), x, d
        for t in range(1, T + 1):
            y = y - eta * direction
            direction = A * (y - b) + (1 - a) ** t * error
        ends.append((y, direction))
    return np.mean(ends, 0)


def drifted(**settings):
    """The fixed point of the affine map of a round, X - eta D, by its values at three points."""
    zero = affine_round(0.0, 0.0, **settings)
    M = np.stack([affine_round(*unit, **settings) - zero for unit in np.eye(2)], 1)
    X, D = np.linalg.solve(np.eye(2) - M, zero)
    assert np.abs(np.linalg.eigvals(M)).max() < 0.99  # ... to which the rounds converge
    return X - settings["eta"] * D


@pytest.mark.parametrize("a", [0.1, 1.0])
def test_several_local_steps_drift_as_far_as_their_equations_say(a):
    T, rounds = 4, 3000  # 0.99^3000 = 8e-14
    off = []
    for eta in (0.08, 0.04, 0.02):
        found = last_of(LINE, TWO, rounds, T, client_lr=eta, a=a).params.item()
        np.testing.assert_allclose(found, drifted(T=T, eta=eta, a=a), rtol=0, atol=1e-11)
        off.append(abs(found - 2.2))
    assert off[-1] > 0.05
    # In the first order the drift is proportional to eta, as FedAvg's; with T = 1 there is none.
    assert [one / half for one, half in pairwise(off)] == pytest.approx([2, 2], rel=0.1)
    assert drifted(T=1, eta=0.08, a=a) == pytest.approx(2.2, abs=1e-12)


# ---- noise: a loss that is linear in the parameters, behind dropout

NOISY = fedda.Model(
    lambda key: jnp.zeros(3),
    lambda w, x: x @ w,
    lambda w, x, key: jnp.where(random.bernoulli(key, 0.5, x.shape), 2 * x, 0) @ w,
)
ROWS = np.random.default_rng(5).normal(1, 1, (6, 3))


class TwoNoises:
    """A task that draws dropout anew for every gradient, as code that passes no key does."""

    def __init__(self, task):
        self.task, self.calls = task, 0

    def __getattr__(self, name):
        return getattr(self.task, name)

    def gradient(self, params, batch):
        self.calls += 1
        return self.task.gradient(params, batch._replace(key=random.fold_in(batch.key, self.calls)))


class TwoBatches(TwoNoises):
    """A task that takes each gradient on other rows."""

    def gradient(self, params, batch):
        self.calls += 1
        return self.task.gradient(params, batch._replace(rows=(batch.rows + self.calls) % 6))


def direction_after(task, a, client_lr):
    """Of one client with 6 examples and 4 local steps, from D = (1, -2, 3)."""
    hp = api.traced(algorithms.get("stem").Hyper(client_lr=client_lr, a=a), NOISY)
    return np.asarray(_upload(task, hp).sum.direction) / 6


@partial(jax.jit, static_argnames="task")
def _upload(task, hp):
    (phase,) = algorithms.get("stem").phases
    start = Point(jnp.ones(3), jnp.asarray([1.0, -2.0, 3.0]), jnp.ones(()))
    shard = from_clients([(ROWS, np.zeros(6))]).shard(0)
    return phase.work(hp, task, start, (), shard, random.key(0))[0]


def test_both_gradients_of_a_step_see_the_same_rows_through_the_same_dropout():
    """The gradient does not depend on w, so g(x) - g(z) is exactly 0 and D stays, if a is 1e-300.

    (1 - a is 1 in float64; what is left are roundings of (D - g) + g.)
    """
    task = Task(NOISY, height, Plan(2, 4, "steps"))
    wrong = TwoNoises(task), TwoBatches(task)
    for client_lr in (1e-300, 0.1):  # x does not move at all, or it does
        found = direction_after(task, 1e-300, client_lr)
        np.testing.assert_allclose(found, [1, -2, 3], rtol=0, atol=1e-14)
        # The noise is there: with a = 1, D is replaced by the last gradient, behind its dropout.
        assert np.abs(direction_after(task, 1.0, client_lr) - ROWS.mean(0)).max() > 0.1
        for each in wrong:
            assert np.abs(direction_after(each, 1e-300, client_lr) - [1, -2, 3]).max() > 0.1


# ---- the first round


def test_only_the_first_round_takes_the_pass_over_all_examples():
    """Counted where a gradient is taken: 13 examples are 4 parts; then two gradients a step."""
    calls = []

    def train(params, x, key):
        jax.debug.callback(lambda: calls.append(1))
        return softmax.apply(params, x)

    counted = softmax._replace(train=train)
    counts = [0]
    for rounds in (1, 2, 3):
        calls.clear()
        states(counted, CLASSIFIED[:1], cross_entropy, rounds=rounds, cohort=1, **STEPS)
        jax.effects_barrier()
        counts.append(len(calls))
    assert np.diff(counts).tolist() == [-(-SIZES[0] // BATCH), 2 * 3, 2 * 3]


def test_a_first_round_that_is_lost_is_made_up_for():
    """Nobody has examples in the first cohort: the next round begins instead."""
    seed = next(s for s in range(99) if draw_cohort(s, 0, 7, 1) == 2 != draw_cohort(s, 1, 7, 1))
    result = fedda.run(
        "stem", softmax, CLASSIFIED, cross_entropy,
        rounds=2, cohort=1, seed=seed, batch=BATCH, **CONSTANT, **STEPS,
    )  # fmt: skip
    (second,) = draw_cohort(seed, 1, 7, 1)
    expected = mean_gradient(W0, *CLASSIFIED[second])
    np.testing.assert_allclose(matrix(result.state.point.direction), expected, **TOLERANCE)
    assert result.state.point.time == 1
    assert result.history[-1]["skipped_rounds"] == 1
