"""What private uploads hide, measured; and epsilon against its definition, integrated with NumPy.

Statistics are of fixed keys, so they pass or fail for good. Their bounds are such that sound noise
fails with one in a million sets of keys.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import optimize, stats

import fedda
from fedda import algorithms, api
from fedda.core import tree
from fedda.core.algorithm import Phase, Seen
from fedda.core.local import Weighted, is_counter
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.transforms import compression, privacy
from helpers.variants import VARIANTS

RARE = 1e-6
FEDAVG, FEDDA = algorithms.get("fedavg"), algorithms.get("fedda-sgdm")


# ---------------------------------------------------------------------------------- the federation

COUNTS = (12, 3, 7, 5, 9, 1)


def init(key):
    return {"kernel": 0.1 * random.normal(key, (16, 16)), "bias": jnp.zeros(16)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


MODEL = fedda.Model(init, apply)
TASK = Task(MODEL, squared_error, Plan(4, 2))
SETTINGS = {"batch": 4, "local_work": 2, "cohort": len(COUNTS)}


def data(number, count, scale=1.0):
    rng = np.random.default_rng(number)
    return scale * rng.normal(size=(count, 16)), scale * rng.normal(size=(count, 16))


def clients(counts=COUNTS):
    return [data(number, count) for number, count in enumerate(counts)]


def run(algorithm, found=None, **settings):
    found = clients() if found is None else found
    return fedda.run(algorithm, MODEL, found, squared_error, **(SETTINGS | settings))


@functools.partial(jax.jit, static_argnames="algorithm")
def sent(algorithm, shards, client):
    """What one client sends in the first round."""
    hp = api.traced(algorithm.Hyper(), MODEL)
    (phase,) = algorithm.phases
    message = phase.send(hp, algorithm.init(hp, init(random.key(0))))
    shard = shards.shard(client)
    return phase.work(hp, TASK, message, (), shard, random.fold_in(random.key(0), client))


def uploads(algorithm, found):
    """What each client sends."""
    shards = from_clients(found)
    return [sent(algorithm, shards, client)[0] for client in range(len(found))]


def flat(values):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(values)])


def mean(part):
    return flat(part.sum) / float(part.weight)


def assert_near(one, other, tolerance=1e-12):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), one, other)


# ---------------------------------------------------------------------------------------- clipping


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("algorithm", [FEDAVG, FEDDA], ids=["fedavg", "fedda-sgdm"])
def test_uploads_are_means_cut_to_the_clip(algorithm):
    plain = uploads(algorithm, clients())
    norms = [np.linalg.norm(mean(each)) for each in plain]
    clip = float(np.median(norms))  # so that some are cut and some are not
    hidden = uploads(privacy.private(algorithm, clip, 0.0), clients())
    for one, other, norm in zip(plain, hidden, norms, strict=True):
        expected = mean(one) * min(1, clip / norm)
        np.testing.assert_allclose(mean(other), expected, rtol=0, atol=1e-13 * norm)
    assert [each.weight for each in plain] == list(COUNTS)
    assert [each.weight for each in hidden] == [1] * len(COUNTS)


@pytest.mark.usefixtures("x64")
def test_one_client_moves_the_sum_by_no_more_than_its_clip():
    clip = 0.7
    found = [data(number, 1 + number % 9, scale=10.0 ** (number % 4 - 2)) for number in range(40)]
    hidden = uploads(privacy.private(FEDDA, clip, 0.0), found)
    for own, other in zip(hidden[:20], reversed(hidden[20:]), strict=True):
        assert np.linalg.norm(mean(own)) <= clip * (1 + 1e-12)  # if it comes, or goes
        assert np.linalg.norm(mean(own) - mean(other)) <= 2 * clip * (1 + 1e-12)  # if it changes
        assert own.weight == other.weight == 1
    assert max(np.linalg.norm(mean(each)) for each in hidden) > clip * (1 - 1e-12)


@pytest.mark.usefixtures("x64")
def test_an_upload_that_is_not_finite_is_a_zero_like_any_other():
    x, y = data(0, 5)
    (plain,), (hidden,) = (
        uploads(algorithm, [(1e200 * x, y)])
        for algorithm in (FEDDA, privacy.private(FEDDA, 1.0, 0.0))
    )
    assert not np.isfinite(flat(plain)).all()
    assert (mean(hidden) == 0).all()
    assert hidden.weight == 1


def test_nothing_else_is_told():
    _, kept, seen = sent(privacy.private(FEDDA, 1.0, 1.0), from_clients(clients()), 0)
    assert kept == ()
    assert (seen.loss, seen.examples) == (0, 0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["fedda-sgdm", "fedda-adam"])
def test_without_noise_and_clipping_it_is_the_algorithm_with_equal_weights(name):
    algorithm = algorithms.get(name)
    hiding = privacy.private(algorithm, 1e9, 0.0, len(COUNTS))
    alike = clients([6] * 6)
    assert_near(run(algorithm, alike, rounds=5).state, run(hiding, alike, rounds=5).state)

    def equal(*given):
        found, memory, seen = algorithm.phases[0].work(*given)
        values = jax.tree.map(lambda leaf: leaf / found.weight, found.sum)
        return Weighted(values, jnp.ones(())), memory, seen

    uniform = algorithm._replace(phases=(algorithm.phases[0]._replace(work=equal),))
    assert_near(run(uniform, rounds=5).state, run(hiding, rounds=5).state)


# ------------------------------------------------------------------------------------------- noise


def noises(algorithm, draws, participants):
    """[draws, participants, numbers]: what clients send whose own uploads are 0."""
    still = FEDAVG._replace(phases=(Phase(FEDAVG.phases[0].send, zeros, FEDAVG.phases[0].merge),))
    (phase,) = algorithm(still).phases

    def one(key):
        found, _, _ = phase.work(None, None, None, (), None, key)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found.sum)])

    keys = random.split(random.key(7), (draws, participants))
    return np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(keys), np.float64)


def zeros(hp, task, message, memory, shard, key):
    part = Weighted({"a": jnp.zeros((5, 4)), "b": jnp.zeros((5, 4))}, jnp.ones(()))
    return part, memory, Seen(jnp.zeros(()), jnp.zeros(()))


def assert_deviation(values, deviation):
    """Normal numbers with this deviation around 0, all independent."""
    values = values.ravel() / deviation
    low, high = stats.chi2.ppf([RARE / 2, 1 - RARE / 2], values.size)
    assert low < values @ values < high
    assert abs(values.sum()) < stats.norm.isf(RARE / 2) * np.sqrt(values.size)
    assert stats.kstest(values, "norm").pvalue > RARE


@pytest.mark.parametrize(("where", "clients"), [("central", 16), ("local", 16), ("central", 1)])
def test_noise_has_its_deviation(where, clients):
    clip, noise = 3.0, 1.5
    found = noises(lambda plain: privacy.private(plain, clip, noise, clients, where), 500, 16)
    alone = noise * clip / (np.sqrt(clients) if where == "central" else 1)
    assert_deviation(found, alone)
    assert_deviation(found.sum(1), alone * 4)  # so that the 16 are independent
    if (where, clients) == ("central", 16):
        assert_deviation(found.sum(1), noise * clip)
    # The two arrays of an upload have noise of their own, and so have two draws.
    assert_deviation(found[..., :20] - found[..., 20:], np.sqrt(2) * alone)
    assert_deviation(found[::2] - found[1::2], np.sqrt(2) * alone)


@pytest.mark.usefixtures("x64")
def test_noise_leaves_batches_alone_and_follows_the_seed():
    quiet, faint = (privacy.private(FEDDA, 1.0, noise, 6) for noise in (0.0, 1e-6))
    assert_near(run(quiet, rounds=3).state, run(faint, rounds=3).state, tolerance=1e-3)
    one, again, other = (run(faint, rounds=1, seed=seed).params for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert (np.asarray(one["bias"]) != np.asarray(other["bias"])).all()


def test_fedda_learns_under_noise():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(16, 16))
    found = [(x, x @ truth) for x in rng.normal(size=(20, 10, 16))]
    settings = {"cohort": 20, "rounds": 200, "eval_every": 200, "client_lr": 0.1}
    settings["test"] = tuple(np.concatenate(column) for column in zip(*found, strict=True))
    first, last = run(privacy.private(FEDDA, 3.0, 0.1, 20), found, **settings).history
    assert last["loss"] < first["loss"] / 20


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mime-sgdm", "with one phase, got one with 2"),
        ("climb", "with one phase"),
        ("scaffold", "without client memory"),
    ],
)
def test_what_cannot_be_hidden_is_refused(name, words):
    with pytest.raises(InputError, match=words):
        privacy.private(algorithms.get(name), 1.0, 1.0)


def test_only_the_sum_of_central_noise_is_private():
    central = privacy.private(FEDAVG, 1.0, 1.0, 10)
    for wrap in (
        lambda: compression.compressed(central, compression.quantised(8)),
        lambda: privacy.bounded(central, 1.0),
        lambda: privacy.private(central, 1.0, 1.0),
        lambda: privacy.private(compression.compressed(FEDAVG, compression.quantised(8)), 1.0, 1.0),
        lambda: privacy.private(privacy.bounded(FEDAVG, 1.0), 1.0, 1.0),
    ):
        with pytest.raises(InputError, match=r"where='local'"):
            wrap()


def test_what_is_private_by_itself_may_be_compressed():
    local = privacy.private(FEDAVG, 1.0, 0.1, where="local")
    assert np.isfinite(
        flat(run(compression.compressed(local, compression.quantised(8)), rounds=1).state)
    ).all()
    assert all(
        phase.secret for phase in compression.compressed(local, compression.top_k(0.1)).phases
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": 0.0}, "clip must be a positive number"),
        ({"clip": np.inf}, "clip must be a positive number"),
        ({"noise": -1.0}, "noise must be zero or a positive number"),
        ({"clients": 0}, "clients must be a whole number"),
        ({"where": "centrally"}, "Did you mean central"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(InputError, match=words):
        privacy.private(FEDAVG, **({"clip": 1.0, "noise": 1.0} | settings))


# --------------------------------------------------------------------------------------- counters

SLOPE = np.full(3, 0.002)  # every gradient: so small that no upload is longer than the clip


def slope_run(algorithm):
    """Ten rounds of five steps each, with constant gradients."""
    model = fedda.Model(lambda key: jnp.zeros(3), lambda w, x: x @ w)
    found = [(np.stack([SLOPE] * 4), np.zeros(4))] * 3
    values = {"client_lr": 0.01} if "client_lr" in algorithm.Hyper._fields else {}
    return fedda.run(
        algorithm, model, found, lambda outputs, y: outputs, rounds=10, cohort=3, batch=4,
        local_work=5, **values,
    )  # fmt: skip


def with_counters():
    """Every variant that can be private; few whose uploads hold counters are fast tests."""
    for variant in VARIANTS:
        algorithm = variant.algorithm
        try:
            privacy.private(algorithm, 1.0, 0.0)
        except InputError:
            continue
        (upload,) = compression._uploads(algorithm, algorithm.Hyper(), jnp.zeros(3))
        counts = [
            part.value for part in jax.tree.leaves(upload, is_leaf=is_counter) if is_counter(part)
        ]
        slow = variant.is_slow or not tree.size(counts)
        yield pytest.param(variant, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("variant", list(with_counters()), ids=str)
def test_what_counts_work_is_neither_clipped_nor_noisy(variant):
    """Five local steps, and beta1^5 = 0.59, are above the clip; what is learnt is far below it.

    So clipping changes nothing, as all clients weigh the same.
    """
    algorithm, clip = variant.algorithm, 0.1
    plain = slope_run(algorithm)
    assert np.abs(plain.params).max() > 1e-5
    for guarded in (privacy.private(algorithm, clip, 0.0), privacy.bounded(algorithm, clip)):
        assert_near(slope_run(guarded).state, plain.state, 1e-15)


@pytest.mark.usefixtures("x64")
def test_noise_spares_counters():
    """With clients that all take 2 steps, the mean of the noisy uploads still says 2."""
    for name, options in (("fedda-adam", {"bias": "steps"}), ("stem", {}), ("mfl-adam", {})):
        algorithm = privacy.private(algorithms.get(name, **options), 1.0, 5.0, len(COUNTS))
        for upload in uploads(algorithm, clients()):
            assert upload.weight == 1
            steps = upload.sum.steps.value
            assert steps == (1 if name == "stem" else 2)  # STEM's first round has one step
        noisy = upload.sum.moved if name == "stem" else upload.sum[0]
        assert np.linalg.norm(flat(noisy)) > 1  # the noise is there


# -------------------------------------------------------------------------------------- bounded


@pytest.mark.usefixtures("x64")
def test_bounded_cuts_what_arrives_and_keeps_its_weight():
    plain = uploads(FEDDA, clients())
    norms = [np.linalg.norm(mean(each)) for each in plain]
    most = float(np.median(norms))
    (phase,) = privacy.bounded(FEDDA, most).phases
    for one, norm in zip(plain, norms, strict=True):
        found = phase.decode(one)
        assert found.weight == one.weight
        expected = mean(one) * min(1, most / norm)
        np.testing.assert_allclose(mean(found), expected, rtol=0, atol=1e-13 * norm)


@pytest.mark.usefixtures("x64")
def test_a_poisoned_client_moves_a_bounded_server_by_its_share_of_the_bound():
    most = 2.0
    poisoned = clients()
    poisoned[1] = data(1, COUNTS[1], scale=1e3)
    guarded = privacy.bounded(FEDAVG, most)
    start = flat(init(random.fold_in(random.key(0), 0)))
    sound, moved = (flat(run(guarded, found, rounds=1).params) for found in (clients(), poisoned))
    share = COUNTS[1] / sum(COUNTS)
    assert np.linalg.norm(moved - start) <= most + 1e-9
    assert 0.1 * share * most < np.linalg.norm(moved - sound) <= 2 * share * most + 1e-9
    unbounded = flat(run(FEDAVG, poisoned, rounds=1).params)
    assert np.linalg.norm(unbounded - start) > 1e3


@pytest.mark.usefixtures("x64")
def test_bounded_leaves_the_rest_as_it_was():
    # Nested weights, memory, several phases, packets; and clients that are not finite are counted.
    for algorithm in (
        algorithms.get("scaffold"),
        algorithms.get("mime-sgdm"),
        compression.compressed(FEDDA, compression.top_k(0.5)),
    ):
        guarded = privacy.bounded(algorithm, 1e9)
        assert_near(run(algorithm, rounds=3).state, run(guarded, rounds=3).state)
    x, y = data(0, 5)
    found = [*clients(), (1e200 * x, y)]  # whose gradients overflow
    guarded = run(privacy.bounded(FEDDA, 1.0), found, cohort=len(found), rounds=2, eval_every=2)
    assert guarded.history[-1]["nonfinite_clients"] == 2
    assert np.isfinite(flat(guarded.state)).all()


# -------------------------------------------------------------------------------------- epsilon


@pytest.fixture
def accounting():
    return pytest.importorskip("dp_accounting")


def gaussian_delta(epsilon, noise):
    """Of one sum with this noise and sensitivity 1 (Balle and Wang, 2018)."""
    return stats.norm.cdf(0.5 / noise - epsilon * noise) - np.exp(epsilon) * stats.norm.cdf(
        -0.5 / noise - epsilon * noise
    )


@pytest.mark.usefixtures("accounting")
@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (4.0, 1), (8.0, 50)])
def test_epsilon_of_full_cohorts_is_the_closed_form(noise, rounds):
    # Rounds of equal noise are one with noise / sqrt(rounds).
    delta = 1e-5
    expected = optimize.brentq(
        lambda epsilon: gaussian_delta(epsilon, noise / np.sqrt(rounds)) - delta, 0, 50
    )
    found = privacy.epsilon(noise, rounds, 1.0, delta)
    assert expected <= found < expected + 2e-3


X = np.linspace(-15, 15, 6001)


def normal(centre, noise):
    return stats.norm.pdf(X, centre, noise)


def delta_after(p, q, rounds, epsilon):
    """The integral of max(0, P - e^epsilon Q), for products of so many densities p and q on X."""
    weight = p * (X[1] - X[0])
    kept = weight > 1e-25
    loss = np.log(p[kept]) - np.log(q[kept])
    grid = np.linspace(-20, 20, 4001)
    after = np.maximum(0, 1 - np.exp(grid))  # of no round
    for _ in range(rounds):
        after = np.array([weight[kept] @ np.interp(at - loss, grid, after) for at in grid])
    return np.interp(epsilon, grid, after)


@pytest.mark.usefixtures("accounting")
@pytest.mark.parametrize("rounds", [1, 3])
def test_epsilon_of_drawn_cohorts_is_its_definition_integrated(rounds):
    noise, rate, delta = 1.0, 0.2, 1e-3
    found = privacy.epsilon(noise, rounds, rate, delta)
    drawn = rate * normal(1, noise) + (1 - rate) * normal(0, noise)
    worst = max(
        delta_after(drawn, normal(0, noise), rounds, found),
        delta_after(normal(0, noise), drawn, rounds, found),
    )
    assert worst == pytest.approx(delta, rel=0.02)


@pytest.mark.usefixtures("accounting")
def test_epsilon_of_fixed_cohorts_is_a_bound_where_the_other_is_none():
    # Half of the clients are drawn. All upload -1, in units of the clip, but one, which uploads 1
    # or 0: so the sum is higher by 2 or 1 if it is drawn.
    noise, rate, delta = 1.0, 0.5, 1e-5
    with_one, without = (
        rate * normal(height, noise) + (1 - rate) * normal(0, noise) for height in (2, 1)
    )

    def leaks(epsilon):
        return max(
            delta_after(with_one, without, 1, epsilon), delta_after(without, with_one, 1, epsilon)
        )

    assert leaks(privacy.epsilon(noise, 1, rate, delta)) > delta
    assert leaks(privacy.epsilon(noise, 1, rate, delta, cohorts="fixed")) < delta


@pytest.mark.usefixtures("accounting")
def test_epsilon_of_fixed_full_cohorts_is_from_renyi_divergences():
    # Of order a, a Gaussian with twice the sensitivity has 2 a / noise^2 a round; then Canonne et
    # al. (2020), proposition 12.
    noise, rounds, delta = 3.0, 10, 1e-5

    def converted(order):
        spent = rounds * 2 * order / noise**2
        return spent + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)

    best = optimize.minimize_scalar(converted, bounds=(1.01, 60), method="bounded").fun
    found = privacy.epsilon(noise, rounds, 1.0, delta, cohorts="fixed")
    assert best <= found < best * 1.01


def test_no_noise_is_no_privacy():
    assert privacy.epsilon(0.0, 1, 0.1, 1e-5) == np.inf


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise": -1}, "noise must be zero or a positive number"),
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"sampling_rate": 1.1}, "sampling_rate must be at most 1"),
        ({"delta": 0}, "delta must be a positive number"),
        ({"cohorts": "poison"}, "Did you mean poisson"),
    ],
)
def test_what_is_accounted_for_is_checked(settings, words):
    with pytest.raises(InputError, match=words):
        privacy.epsilon(
            **({"noise": 1.0, "rounds": 1, "sampling_rate": 0.1, "delta": 1e-5} | settings)
        )


def test_the_accountant_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'fedda\[privacy\]'"):
        privacy.epsilon(1.0, 1, 0.1, 1e-5)
