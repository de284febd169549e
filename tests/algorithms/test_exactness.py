"""What FedDA is claimed to be, and what follows from its equations.

The marks are those of the specification. All in float64, on the library's own runs or on the work
of one of its clients.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedda import algorithms, api
from fedda.algorithms.fedda import State, moved
from fedda.core.losses import cross_entropy, squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.train import Run, train
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    FITTED,
    SIZES,
    SLOPE,
    W0,
    centralised,
    drawn,
    height,
    matrix,
    network,
    optax_adagrad,
    slope,
    softmax,
)

pytestmark = pytest.mark.usefixtures("x64")

ETA, ALPHA, BETA1, BETA2, EPS = 0.3, 0.4, 0.9, 0.99, 0.05
SGDM = {"client_lr": ETA, "server_lr": ALPHA, "beta1": BETA1}
ADAGRAD = SGDM | {"eps": EPS}
ADAM = ADAGRAD | {"beta2": BETA2}
WORK = {"cohort": 3, "local_work": 3, "local_unit": "steps", "rounds": 6}
SEED = 7


def prepared(name, *problem, **settings):
    defaults = {option: values[0] for option, values in algorithms.options(name).items()}
    setup, hyper = api.prepare(
        name, *problem, **{"batch": BATCH, "eval_every": 1} | defaults | settings
    )
    return setup, api.traced(hyper, setup.task.model)


def states(name, *problem, **settings):
    """The server's state before the first round and after each."""
    setup, hp = prepared(name, *problem, **settings)
    return [jax.tree.map(np.array, each.run.state) for each in train(setup, hp, [SEED])]


def regression_states(name, **settings):
    return states(name, softmax, CLASSIFIED, cross_entropy, **WORK | settings)


def apart(one, other):
    """The largest difference of two trees of numbers."""
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), one, other)
    return np.max(jax.tree.leaves(differences))  # nan if one is


def close(one, other):
    """For numbers below about 10 after some hundred operations, which err by 1.1e-16 of that."""
    assert apart(one, other) <= 1e-13


# ---- F1 and A.7-1: T = 1, full batches, all clients: the centralised optimiser on the pooled data


DELTA = {"units": "delta", "gradient": "sum"}  # where T = 1, `sum` and `steps` change nothing
TINY = 1e-200  # an eps that is lost in rounding
CENTRALISED = {
    # Optax does not damp: its trace is m / (1 - beta1), which the rate makes up for.
    "sgdm": ("fedda-sgdm", SGDM, optax.sgd(ALPHA * ETA * (1 - BETA1), BETA1)),
    "adam": ("fedda-adam", ADAM, optax.adam(ALPHA * ETA, BETA1, BETA2, EPS)),
    "adam, delta units": (
        "fedda-adam",
        ADAM | DELTA | {"bias": "steps", "server_lr": 0.05},
        optax.adam(0.05, BETA1, BETA2, EPS / ETA),
    ),
    "adagrad": ("fedda-adagrad", ADAGRAD, optax_adagrad(ALPHA * ETA, EPS)),
    "adagrad, delta units": ("fedda-adagrad", ADAGRAD | DELTA, optax_adagrad(ALPHA, EPS / ETA)),
    "adagrad, no eps": (
        "fedda-adagrad",
        ADAGRAD | {"eps": TINY},
        optax.adagrad(ALPHA * ETA, initial_accumulator_value=0.0, eps=0.0),
    ),
}


@pytest.mark.parametrize("case", CENTRALISED)
def test_one_full_batch_step_of_all_clients_is_the_centralised_optimiser(case):
    name, settings, optimiser = CENTRALISED[case]
    everyone = {"cohort": len(SIZES), "rounds": 50, "stabilise": 50}
    got = [s.params for s in states(name, network, FITTED, squared_error, **everyone, **settings)]
    expected = centralised(optimiser, 50)
    assert len(got) == len(expected) == 51
    close(got, expected)
    assert apart(got[0], got[-1]) > 0.3  # ... and it does train


# ---- F2: the mean of the clients' momenta is the momentum of their mean gradients


def test_the_mean_of_the_momenta_is_the_momentum_of_the_mean_gradients():
    found = regression_states("fedda-sgdm", **SGDM)
    m = 0 * W0
    draws = drawn(seed=SEED, **WORK)
    for before, after, visits in zip(found[:-1], found[1:], draws, strict=True):
        points = [matrix(before.params) for _ in visits]
        total = sum(visit.examples for visit in visits)
        for t in range(WORK["local_work"]):
            mean = 0 * W0
            for i, visit in enumerate(visits):
                if visit.examples > 0:
                    g = visit.batches[t].gradient(points[i])
                    points[i] = points[i] - ETA * g
                    mean = mean + visit.examples / total * g
            m = BETA1 * m + (1 - BETA1) * mean
        close(matrix(after.momentum), m)
    assert np.abs(m).max() > 0.1


# ---- A.7-2 and A.7-3, on one client's work


@partial(jax.jit, static_argnames=("work", "task"))
def upload_of(work, task, hp, message, shards, client):
    """What a client uploads, without its weight."""
    key = jax.random.fold_in(jax.random.key(SEED), client)
    upload, _, _ = work(hp, task, message, (), shards.shard(client), key)
    return jax.tree.map(lambda leaf: leaf / upload.weight, upload.sum)


EPOCHS = 2


class Client:
    """One client with the network, the server's W and a momentum m that is not 0."""

    def __init__(self, number):
        self.T = -(-EPOCHS * SIZES[number] // BATCH)
        self.task = Task(network, squared_error, Plan(BATCH, EPOCHS, "epochs"))
        self.shards, self.number = from_clients(FITTED), number
        self.W = network.init(jax.random.key(0))
        rng = np.random.default_rng(number)
        self.m = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), self.W)

    def upload(self, name, hyper, m=None):
        algorithm = algorithms.get(name)
        hp = api.traced(algorithm.Hyper(**hyper), network)
        state = algorithm.init(hp, self.W)
        if "momentum" in state._fields:
            state = state._replace(momentum=self.m if m is None else m)
        (phase,) = algorithm.phases
        message = phase.send(hp, state)
        return upload_of(phase.work, self.task, hp, message, self.shards, self.number)


each_client = pytest.mark.parametrize("number", [i for i, size in enumerate(SIZES) if size > 0])


@each_client
def test_a_client_uploads_the_sum_of_its_gradients_and_its_momentum(number):
    client = Client(number)
    fedda = client.upload("fedda-sgdm", SGDM)
    delta = client.upload("fedavg", {"client_lr": ETA})
    close(fedda.gradients, jax.tree.map(lambda d: -d / ETA, delta))


@each_client
def test_a_start_from_zero_momentum_tells_the_same(number):
    client = Client(number)
    nothing = jax.tree.map(jnp.zeros_like, client.m)
    fedda = client.upload("fedda-sgdm", SGDM)
    zero = client.upload("fedda-sgdm", SGDM, m=nothing)
    decay = BETA1**client.T
    share = BETA1 * (1 - decay) / (1 - BETA1)
    close(fedda.momentum, jax.tree.map(lambda m, m_r: m + decay * m_r, zero.momentum, client.m))
    P, P0 = (
        moved(BETA1, State(client.W, start), upload)
        for start, upload in ((client.m, fedda), (nothing, zero))
    )
    close(P, jax.tree.map(lambda P, m_r: P + share * m_r, P0, client.m))


# ---- A.7-4


def test_fedda_with_sgdm_is_fedavg_at_an_extrapolated_point():
    found = regression_states("fedda-sgdm", **SGDM)
    setup, hp = prepared(
        "fedavg", softmax, CLASSIFIED, cross_entropy, client_lr=ETA, server_lr=1.0, **WORK
    )
    W = [matrix(state.params) for state in found]
    extrapolation = ALPHA * ETA * BETA1 / (1 - BETA1)
    Z = [w - extrapolation * matrix(s.momentum) for w, s in zip(W, found, strict=True)]
    deltas = []
    for r, state in enumerate(found[:-1]):  # round r of FedAvg, from FedDA's W_r
        start = setup.algorithm.init(hp, jax.tree.map(jnp.asarray, state.params))
        run = Run(start, (), jnp.int32(0), jnp.int32(0))
        (after,) = train(setup._replace(rounds=r + 1), hp, [SEED], first=r, run=run)
        deltas.append(matrix(after.run.state.params) - W[r])
        close(Z[r + 1], Z[r] + ALPHA * deltas[r])
    close(Z[-1] - Z[0], ALPHA * sum(deltas))
    assert np.abs(Z[-1] - W[-1]).max() > 0.1


# ---- A.7-5


@pytest.mark.parametrize(("other", "pull"), [("fedavg", {}), ("fedprox", {"mu": 0.7})])
def test_without_momentum_fedda_with_sgdm_is_local_sgd(other, pull):
    settings = SGDM | {"beta1": 0.0, "server_lr": 1.0} | pull
    found = regression_states("fedda-sgdm", **settings)
    expected = regression_states(other, client_lr=ETA, **pull)
    close([state.params for state in found], [state.params for state in expected])


def fedadam(units, draws, W):
    """FedAdam without first moment, with bias correction, on Σg or on the change of the model."""
    V, found = 0 * W, [W]
    for r, visits in enumerate(draws):
        total, pseudo = sum(visit.examples for visit in visits), 0 * W
        for visit in visits:
            w, S = W, 0 * W
            for batch in visit.batches:
                g = batch.gradient(w)
                w, S = w - ETA * g, S + g
            pseudo = pseudo + visit.examples / total * (S if units == "grad" else W - w)
        V = BETA2 * V + (1 - BETA2) * pseudo**2
        rate = ALPHA * ETA if units == "grad" else ALPHA
        W = W - rate * pseudo / (np.sqrt(V / (1 - BETA2 ** (r + 1))) + EPS)
        found.append(W)
    return found


@pytest.mark.parametrize("units", ["grad", "delta"])
def test_without_momentum_fedda_with_adam_is_fedadam(units):
    found = regression_states("fedda-adam", **ADAM | {"beta1": 0.0}, units=units)
    close([matrix(state.params) for state in found], fedadam(units, drawn(seed=SEED, **WORK), W0))


def test_the_units_differ_by_the_rate_and_eps():
    """D(α, ε) = L(α/η, ε/η)."""
    delta = regression_states("fedda-adam", **ADAM, units="delta")
    scaled = ADAM | {"server_lr": ALPHA / ETA, "eps": EPS / ETA}
    close(delta, regression_states("fedda-adam", **scaled, units="grad"))
    assert apart(delta, regression_states("fedda-adam", **ADAM, units="grad")) > 0.1


# ---- A.7-6


def test_fedprox_with_mu_zero_is_fedavg():
    base, prox = (
        regression_states(name, client_lr=ETA, **mu)
        for name, mu in (("fedavg", {}), ("fedprox", {"mu": 0.0}))
    )
    close(base, prox)


MAY_PULL = {
    "fedprox": {"client_lr": ETA},
    "fedda-sgdm": SGDM,
    "fedda-adam": ADAM,
    "fedda-adagrad": ADAGRAD,
}


@pytest.mark.parametrize("name", MAY_PULL)
def test_mu_is_irrelevant_to_the_first_step_and_to_no_other(name):
    """At the first step the proximal term is mu times an exact zero: not one bit may differ."""
    clients = [Client(number) for number in (0, 1, 3, 6)]
    assert [client.T for client in clients] == [7, 1, 3, 1]
    for client in clients:
        pulled, free = (client.upload(name, MAY_PULL[name] | {"mu": mu}) for mu in (0.7, 0.0))
        if client.T == 1:
            assert apart(pulled, free) == 0
        else:
            assert apart(pulled, free) > 0.01


# ---- A.5, A.7-7 and A.8-14: a gradient that never changes


LENGTHS = (1, 5, 10, 20)  # numbers of steps T, from as many examples in batches of one
ONE_EPOCH, FULL = Plan(1, 1, "epochs"), Plan(1, unit="full")
LONG = 400  # rounds: 0.9^400 = 5e-19, so what decays like beta1 is gone

# Factors of g that come of sums of at most 20 terms, products and a root: 1e-13 is 1000 roundings.
ratio = partial(np.testing.assert_allclose, rtol=1e-13)


@partial(jax.jit, static_argnames=("algorithm", "plan"))
def rounds_on_a_slope(algorithm, plan, hp, state, client):
    """The states after each of LONG rounds with one client.

    W is put back to 0 before each round, as the gradient does not depend on it; so the W of a state
    is the step of its round, without cancellation.
    """
    (phase,) = algorithm.phases
    shards = from_clients([(np.tile(SLOPE, (T, 1)), np.zeros(T)) for T in LENGTHS])

    def one(state, r):
        state = state._replace(params=jnp.zeros(3))
        message, key = phase.send(hp, state), jax.random.fold_in(jax.random.key(0), r)
        task, shard = Task(slope, height, plan), shards.shard(client)
        upload, _, _ = phase.work(hp, task, message, (), shard, key)
        state = phase.merge(hp, state, upload)
        return state, state

    return jax.lax.scan(one, state, jnp.arange(LONG))[1]


class OnASlope:
    """An algorithm with a client that takes T steps a round, and all that the server remembers."""

    def __init__(self, T, name, hyper, **options):
        self.client = LENGTHS.index(T)
        self.algorithm = algorithms.get(name, **options)
        self.hp = api.traced(self.algorithm.Hyper(**hyper), slope)
        self.state = self.algorithm.init(self.hp, jnp.zeros(3))

    def train(self, plan=ONE_EPOCH, times=1):
        """The states after each of `times` LONG further rounds."""
        parts = []
        for _ in range(times):
            more = rounds_on_a_slope(self.algorithm, plan, self.hp, self.state, self.client)
            self.state = jax.tree.map(lambda leaf: leaf[-1], more)
            parts.append(more)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def corrected(states, hyper):
    """m̂ and V̂ of every round, out of V and of the step -αη m̂ / (sqrt(V̂) + ε)."""
    r = np.arange(len(states.params))[:, None]
    V_hat = states.second / (1 - hyper["beta2"] ** (r + 1))
    m_hat = -states.params / (hyper["server_lr"] * hyper["client_lr"])
    return m_hat * (np.sqrt(V_hat) + hyper["eps"]), V_hat


@pytest.mark.parametrize(
    ("T", "G_over_g", "P_over_G"), [(1, 1, 1), (5, 41, 0.122), (10, 91, 0.110), (20, 191, 0.105)]
)
def test_the_scales_in_the_first_round_and_in_the_steady_state(T, G_over_g, P_over_G):
    # In the steady state m = g, so P = T g, and G is what follows; the numbers are those quoted.
    G, P = (T - BETA1) / (1 - BETA1), T
    assert abs(G - G_over_g) < 1e-12
    assert abs(P / G - P_over_G) < 5e-4
    # In the first round m = (1 - β1^t) g after t steps, P is their sum, and 1 - β1 corrects it.
    first = sum(1 - BETA1**t for t in range(1, T + 1)) / (1 - BETA1)
    if T in (5, 10):
        assert first == pytest.approx({5: 13.1, 10: 41.4}[T], abs=0.05)

    hyper = ADAM | {"beta2": 0.9}  # so that V, too, is steady after LONG
    m_hat, V_hat = corrected(OnASlope(T, "fedda-adam", hyper).train(), hyper)
    ratio(m_hat[0], first * SLOPE)
    ratio(m_hat[-1], P * SLOPE)
    ratio(np.sqrt(V_hat[-1]), G * np.abs(SLOPE))
    ratio(m_hat[-1] / np.sqrt(V_hat[-1]), P / G * np.sign(SLOPE))


@pytest.mark.parametrize("T", LENGTHS)
def test_counting_steps_corrects_every_round_exactly(T):
    """A.8-14: with c_r = (1/T) Σ_t (1 - β1^{rT+t}), P / c_r = T g from the first round on."""
    m_hat, _ = corrected(OnASlope(T, "fedda-adam", ADAM, bias="steps").train(), ADAM)
    ratio(m_hat, np.tile(T * SLOPE, (LONG, 1)))


def test_full_batches_shrink_the_step_of_sgdm_by_the_number_of_steps():
    run = OnASlope(5, "fedda-sgdm", SGDM)
    before, after = run.train().params[-1], run.train(FULL).params
    ratio(after / before, np.full_like(after, 1 / 5))


@pytest.mark.parametrize(("T", "quoted"), [(5, 0.024), (10, 0.011)])
def test_full_batches_freeze_adagrad(T, quoted):
    """G shrinks by (1 - β1) / (T - β1); V never forgets, so the step stays as small."""
    shrunk = (1 - BETA1) / (T - BETA1)
    assert shrunk == pytest.approx(quoted, abs=5e-4)
    run = OnASlope(T, "fedda-adagrad", ADAGRAD)
    before, after = run.train(), run.train(FULL)
    G_before, G_after = (s.params * (np.sqrt(s.second) + EPS) for s in (before, after))
    ratio(G_after / G_before[-1], np.full_like(G_after, shrunk))
    # V is LONG G² at the switch, less what the first rounds' G lacked (below 1 %: they start from
    # m = 0), and grows by LONG (shrunk G)² until the end.
    steps = after.params / before.params[-1]
    assert (steps < shrunk).all()
    assert (steps > shrunk / np.sqrt(1 + 1.01 * shrunk**2)).all()


def test_full_batches_shrink_the_step_of_adam_which_then_grows():
    """V forgets G = ρg over 1 / (1 - β2) rounds: after k, V = (β2^k ρ² + 1 - β2^k) g²."""
    T, hyper = 5, ADAM | {"eps": TINY}
    run = OnASlope(T, "fedda-adam", hyper)
    before, after = run.train(times=10).params, run.train(FULL, times=3).params
    rho, k = (T - BETA1) / (1 - BETA1), np.arange(1, 3 * LONG + 1)[:, None]
    expected = 1 / np.sqrt(BETA2**k * rho**2 + 1 - BETA2**k)
    for rounds, quoted in ((1, 0.0245), (300, 0.11), (1000, 0.97)):
        assert expected[rounds - 1, 0] == pytest.approx(quoted, rel=0.01)
    unit = -ALPHA * ETA * np.sign(SLOPE)
    # The first rounds' G are remembered by 0.99^4000 = 3e-18, the bias correction by as much.
    ratio(before[-1] / unit, np.full(3, T / rho))
    ratio(after / unit, np.tile(expected, (1, 3)))


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("fedda-sgdm", {"local_unit": "epochs", "mu": 0.1}),
        ("fedda-adam", {"local_unit": "steps"}),
        ("fedda-adagrad", {"local_unit": "epochs", "mu": 0.1}),
    ],
    ids=["fedda-sgdm", "fedda-adam", "fedda-adagrad"],
)
def test_the_momentum_need_not_be_sent(name, work):
    """A.7: m is linear in M, so what M adds to it can be added by the server."""
    ends = [
        regression_states(name, **WORK | work | {"local_work": 2, "sends": sends})[-1]
        for sends in ("both", "model")
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-11), *ends)
    algorithm = algorithms.get(name, sends="model")
    params = {"w": jnp.zeros((3, 2))}
    hp = algorithm.Hyper()
    message = algorithm.phases[0].send(hp, algorithm.init(hp, params))
    assert [leaf.shape for leaf in jax.tree.leaves(message)] == [(3, 2)], "one model goes down"


@pytest.mark.parametrize("name", ["fedda-sgdm", "fedda-adam", "fedda-adagrad"])
def test_steps_that_are_lost_beside_the_weights_are_in_the_sum(name):
    """In float32 the steps of 2e-8 leave a w of 1 where it is. The server's is large enough."""
    gradient, rate, steps, move = 2e-5, 1e-3, 5, 1e6
    model = api.Model(lambda key: jnp.ones(1, jnp.float32), lambda w, x: x @ w)
    x = np.full((4, 1), gradient, np.float32)
    settings = {"client_lr": rate, "server_lr": move, "local_work": steps, "rounds": 1}
    if name != "fedda-sgdm":
        settings |= {"eps": 1.0}
    clients = [(x, np.zeros(4, np.float32))] * 2
    with jax.enable_x64(False):
        result = api.run(name, model, clients, height, cohort=2, **settings)
    # m = (1 - beta1^k) g after k steps, and V = G² or (1 - beta2) G², corrected.
    P = sum(1 - BETA1**k for k in range(1, steps + 1)) * gradient
    G = P / (1 - BETA1)
    change = {
        "fedda-sgdm": P,
        "fedda-adam": P / (1 - BETA1) / (G + 1),
        "fedda-adagrad": G / (G + 1),
    }[name]
    assert result.params.dtype == jnp.float32
    np.testing.assert_allclose(1 - np.asarray(result.params), move * rate * change, rtol=1e-5)
