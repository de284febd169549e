"""Mime and MimeLite against references in NumPy, and what follows from their equations.

Everything is in float64. The notation is that of `fedda/algorithms/mime.py`.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedda
from conformance import references
from conformance.problem import mean_gradient
from conformance.references import mime as reference
from conformance.references.reference import mean
from fedda import algorithms
from fedda.core.losses import cross_entropy, squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    FITTED,
    SIZES,
    W0,
    centralised,
    drawn,
    matrix,
    network,
    optax_adagrad,
    softmax,
    train_losses,
)

pytestmark = pytest.mark.usefixtures("x64")

SEED, ROUNDS, COHORT = 7, 8, 3
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
HYPER = {
    "sgdm": {"client_lr": 0.3, "server_lr": 0.7, "beta": 0.8},
    "adam": {"client_lr": 0.05, "server_lr": 0.7, "beta1": 0.8, "beta2": 0.9, "eps": 0.05},
    "adagrad": {"client_lr": 0.05, "server_lr": 0.7, "eps": 0.05},
}
# Numbers of about 1 after some thousand operations, each of which errs by 1.1e-16 of its result;
# a division by eps = 0.05 makes an error at most 20 times as large.
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)


def distance(one, other):
    """The largest difference of two arrays."""
    return np.abs(np.asarray(one) - other).max()


def draws_of(name, work):
    """The local steps of Mime are in the second exchange of a round, with keys of their own."""
    phase = 1 if name.startswith("mime-") else 0
    return drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, phase=phase, **work)


def run(name, hp, **settings):
    return fedda.run(
        name, softmax, CLASSIFIED, cross_entropy, seed=SEED,
        **{"batch": BATCH, "cohort": COHORT, "rounds": ROUNDS, "eval_every": ROUNDS} | settings,
        **hp,
    )  # fmt: skip


ALL = [
    (f"{method}-{base}", denominator)
    for method, base in itertools.product(("mimelite", "mime"), HYPER)
    for denominator in (("fresh",) if base == "sgdm" else ("fresh", "frozen"))
]


def settings_of(name, denominator):
    base = name.split("-")[1]
    return HYPER[base] | ({} if base == "sgdm" else {"denominator": denominator})


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples, larger than a batch or not, and short batches."""
    for name in ("mime-", "mimelite-"):
        visits = list(itertools.chain(*draws_of(name, EPOCHS)))
        assert {0, 1, max(SIZES)} <= {visit.examples for visit in visits}
        assert len({len(visit.batches[-1].x) for visit in visits if visit.batches}) > 1
        for visit in visits:
            assert sum(len(batch.x) for batch in visit.batches) == 2 * visit.examples


def check(name, denominator, work):
    settings = settings_of(name, denominator)
    result, visits = run(name, settings, **work), draws_of(name, work)
    *_, expected = references.run(references.REFERENCES[name], W0, visits, **settings)
    W = expected["params"]
    close(matrix(result.params), W)
    found = result.state.statistics
    for field in ("momentum", "second"):
        tree = getattr(found, field)
        assert (tree != ()) == (field in expected)
        if tree != ():
            close(matrix(tree), expected[field])
    # The training loss is that of the local steps alone, in two exchanges as in one.
    close(result.history[-1]["train_loss"], np.mean(train_losses(visits)))
    assert distance(W, W0) > 0.1


@pytest.mark.parametrize(("name", "denominator"), ALL)
def test_epochs(name, denominator):
    check(name, denominator, EPOCHS)


@pytest.mark.parametrize("name", ["mime-sgdm", "mime-adam", "mimelite-sgdm"])
def test_sums_with_short_batches(name, monkeypatch):
    base = name.split("-")[1]
    monkeypatch.setitem(HYPER, base, HYPER[base] | {"client_lr": 0.05})
    check(name, "fresh", EPOCHS | {"reduction": "sum"})


@pytest.mark.parametrize(("name", "denominator"), ALL[::4])  # MimeLite and Mime, all three bases
def test_steps(name, denominator):
    check(name, denominator, STEPS)


# ---- the denominator


def test_the_frozen_denominator_does_not_explode_in_the_first_round():
    """With v = 0, d / eps would be 1000 times too long; the first round is FedAvg's instead."""
    work = {**EPOCHS, "rounds": 1, "eval_every": 1}
    expected = matrix(run("fedavg", {"client_lr": 0.05}, **work).params)
    frozen = run("mimelite-adam", {"client_lr": 0.05, "denominator": "frozen"}, **work)
    close(matrix(frozen.params), expected)
    start, hp = {"second": 0 * W0, "rounds": 1}, {"eps": 1e-3}
    gradient = mean_gradient(W0, *CLASSIFIED[0])
    exploded = reference.direction("adagrad", hp, gradient, start, "frozen")
    assert distance(exploded, 0) > 100


def test_a_fresh_denominator_bounds_the_steps_of_the_first_round():
    """Without statistics, |d| / (|d| + eps) < 1 for AdaGrad and for bias-corrected Adam."""
    work = {**STEPS, "rounds": 1, "eval_every": 1}
    for name in ("mimelite-adam", "mimelite-adagrad"):
        fresh = run(name, {"client_lr": 0.05, "eps": 1e-3}, **work)
        moved = distance(matrix(fresh.params), W0)
        assert 0.05 < moved < 3 * 0.05


# ---- one local step of all clients: the centralised optimiser on the pooled data


LONG = 30
CENTRALISED = {
    # Optax does not damp: its trace is m / (1 - beta), which the rate makes up for.
    "mime-sgdm": ({"client_lr": 0.3, "beta": 0.9}, optax.sgd(0.3 * (1 - 0.9), 0.9)),
    "mime-adam": ({"client_lr": 0.1, "eps": 0.05}, optax.adam(0.1, 0.9, 0.99, 0.05)),
    "mime-adagrad": ({"client_lr": 0.1, "eps": 0.05}, optax_adagrad(0.1, 0.05)),
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", CENTRALISED)
def test_one_step_of_all_clients_is_the_centralised_optimiser(name):
    """At W the correction makes the gradient of any mini-batch c, the one of all the data.

    So not even full batches are needed. For SGDM and the fresh denominator the direction uses the
    statistics that c itself moves, as Optax does.
    """
    hp, optimiser = CENTRALISED[name]
    result = fedda.run(
        name, network, FITTED, squared_error, batch=BATCH, local_work=1, cohort=len(SIZES),
        rounds=LONG, eval_every=LONG, **hp,
    )  # fmt: skip
    expected = flat(centralised(optimiser, LONG)[-1])
    np.testing.assert_allclose(flat(result.params), expected, rtol=0, atol=1e-12)
    assert distance(expected, flat(network.init(None))) > 0.3


@pytest.mark.parametrize(("method", "base"), [("mime", "adam"), ("mimelite", "adagrad")])
def test_one_full_batch_step_is_the_centralised_step_with_lagged_statistics(method, base):
    """The frozen denominator is that of the round before.

    As U is then linear in d, the mean of MimeLite's directions U(c_i; s) is U(c; s), too.
    """
    hp = HYPER[base] | {"server_lr": 1.0}
    x, y = (np.concatenate(part) for part in zip(*CLASSIFIED, strict=True))
    W, state = W0, {"momentum": 0 * W0, "second": 0 * W0, "rounds": 0}
    for r in range(ROUNDS):
        g = mean_gradient(W, x, y)
        W = W - hp["client_lr"] * reference.direction(base, hp, g, state, "frozen")
        state |= {**reference.statistics(base, hp, g, state), "rounds": r + 1}
    work = {"cohort": len(SIZES), "local_work": 1, "denominator": "frozen", "stabilise": ROUNDS}
    close(matrix(run(f"{method}-{base}", hp, **work).params), W)


# ---- where they end: quadratics f_i = (x - b_i)' H_i (x - b_i) / 2, one kind of example a client


def quadratics(H, b, sizes):
    """Clients, as many copies of their example as `sizes` says, and the model whose loss is f_i."""
    model = fedda.Model(
        lambda key: jnp.zeros(b.shape[1]),
        lambda w, x: jnp.einsum(
            "ni,nij,nj->n", w[None] - x[:, -1], x[:, :-1] / 2, w[None] - x[:, -1]
        ),
    )
    examples = np.concatenate([H, b[:, None]], 1)
    pairs = zip(examples, sizes, strict=True)
    return model, [(np.tile(each, (size, 1, 1)), np.zeros(size)) for each, size in pairs]


def value(outputs, y):
    return outputs


A, B = np.array([1.0, 4.0]), np.array([-1.0, 3.0])
TWO = quadratics(A[:, None, None], B[:, None], (1, 1))


def end(name, problem, rounds=400, **hp):
    model, clients = problem
    result = fedda.run(
        name, model, clients, value, batch=1, local_work=5, cohort=len(clients),
        rounds=rounds, eval_every=rounds, **hp,
    )  # fmt: skip
    return np.asarray(result.params)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_mime_ends_at_the_optimum(beta):
    """2.2 = (1 (-1) + 4 (3)) / (1 + 4): there c = 0, so m = 0 and no client moves."""
    found = end("mime-sgdm", TWO, client_lr=0.1, beta=beta)
    np.testing.assert_allclose(found, [2.2], atol=1e-12)


@pytest.mark.parametrize("denominator", ["fresh", "frozen"])
@pytest.mark.parametrize("base", ["adam", "adagrad"])
def test_adaptive_mime_ends_at_the_optimum(base, denominator):
    """A large eps, as Adam with steps of one length only comes near."""
    hp = {"client_lr": 0.1, "eps": 1.0, "denominator": denominator}
    found = end(f"mime-{base}", TWO, rounds=2000, **hp)
    np.testing.assert_allclose(found, [2.2], atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_mimelite_ends_where_its_drift_balances(beta):
    """A client's y moves to where (1 - beta) a (y - b) + beta m = 0, by a share 1 - k^5.

    k = 1 - client_lr (1 - beta) a, and m = the mean of a (x - b) as x rests. That the mean of
    what they move is zero is linear in x. Without momentum it is the fixed point of FedAvg.
    """
    rate, T = 0.1, 5
    share = 1 - (1 - rate * (1 - beta) * A) ** T

    def mean_move(x):
        m = np.mean(A * (x - B))
        return np.mean(-share * ((x - B) + beta * m / ((1 - beta) * A)))

    expected = mean_move(0) / (mean_move(0) - mean_move(1))
    found = end("mimelite-sgdm", TWO, client_lr=rate, beta=beta, rounds=1000)
    np.testing.assert_allclose(found, [expected], atol=1e-12)
    assert abs(expected - 2.2) > 1e-3
    if beta == 0:
        assert expected == pytest.approx(share @ B / share.sum(), rel=1e-14)


def test_mime_weights_clients_by_their_examples():
    """In three dimensions, with five clients of one to three examples."""
    rng = np.random.default_rng(5)
    factors = rng.normal(size=(5, 3, 3))
    H = np.einsum("nij,nkj->nik", factors, factors) / 3 + 0.5 * np.eye(3)
    b, sizes = rng.normal(size=(5, 3)), np.array([1, 3, 2, 1, 2])
    optimum, uniform = (
        np.linalg.solve(np.einsum("n,nij->ij", n, H), np.einsum("n,nij,nj->i", n, H, b))
        for n in (sizes, np.ones(5))
    )
    problem = quadratics(H, b, sizes)
    for beta in (0.0, 0.9):
        found = end("mime-sgdm", problem, client_lr=0.05, beta=beta)
        np.testing.assert_allclose(found, optimum, atol=1e-12)
    assert distance(optimum, uniform) > 0.01
    lite = end("mimelite-sgdm", problem, client_lr=0.05, beta=0.0)
    assert distance(lite, optimum) > 1e-3


# ---- noise, and clients larger than a batch


def test_both_gradients_of_a_batch_share_their_noise():
    """With dropout, too, the correction is exactly zero at the first step: every client moves by c.

    What the server keeps as c is that of the last round, so W moved by -client_lr c.
    """

    def train(params, x, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return softmax.apply(params, jnp.where(kept, 2 * x, 0))

    noisy = softmax._replace(train=train)
    result = fedda.run(
        "mime-sgdm", noisy, CLASSIFIED, cross_entropy, batch=BATCH, local_work=1, cohort=COHORT,
        seed=SEED, rounds=1, eval_every=1, client_lr=0.3, beta=0.0,
    )  # fmt: skip
    c = matrix(result.state.gradient)
    np.testing.assert_allclose(matrix(result.params), W0 - 0.3 * c, rtol=0, atol=1e-15)
    # The noise is there: c is not that of the model without it.
    visits = [visit for visit in draws_of("mime-", EPOCHS)[0] if visit.examples]
    plain = mean([visit.full.gradient(W0) for visit in visits], visits)
    assert distance(c, plain) > 0.01


@pytest.mark.parametrize("batch", [1, 4, 5, 13, 50])
def test_the_full_gradient_is_the_mean_over_examples_whatever_the_batch(batch):
    """13 examples in batches of 4 or 5 end in a short one, which counts by its size."""
    x, y = CLASSIFIED[0]
    algorithm = algorithms.get("mime-sgdm")
    measure = algorithm.phases[0].work
    shards = from_clients(CLASSIFIED)
    task = Task(softmax, cross_entropy, Plan(batch))

    @jax.jit
    def uploaded():
        hp = algorithm.Hyper()
        return measure(hp, task, softmax.init(None), (), shards.shard(0), jax.random.key(0))[0]

    upload = uploaded()
    assert upload.weight == 13
    close(matrix(upload.sum) / 13, mean_gradient(W0, x, y))
    if batch in (4, 5):
        parts = [slice(k, k + batch) for k in range(0, 13, batch)]
        unweighted = np.mean([mean_gradient(W0, x[k], y[k]) for k in parts], 0)
        assert distance(unweighted, mean_gradient(W0, x, y)) > 0.01
