"""The synthetic federation follows its formulas, and the published procedure draw by draw."""

import itertools

import numpy as np
import pytest

from fedda.data import synthetic
from fedda.errors import InputError

VARIANCES = np.array([j**-1.2 for j in range(1, 61)])


@pytest.fixture(scope="module")
def half():
    """Synthetic(0.5, 0.5), large enough for statistics: some 150,000 examples."""
    return synthetic.generate(0.5, 0.5, clients=400, seed=7)


def same(one, other):
    ours, theirs = ([*itertools.chain(*data.train), *data[1:]] for data in (one, other))
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def published(alpha, beta, clients, seed, iid):
    """All examples of each client as the paper defines them, drawn one client after the other.

    In the order of the published programs: sizes, u_k, B_k, all v_k, then W_k, b_k and x of each.
    """
    rng = np.random.RandomState(seed)
    sizes = [int(size) + 50 for size in rng.lognormal(4, 2, clients)]
    if iid:
        v = [np.zeros(60)] * clients
        everyones = rng.normal(0, 1, (60, 10)), rng.normal(0, 1, 10)
    else:
        u = [rng.normal(0, alpha) for _ in range(clients)]
        centres = [rng.normal(0, beta) for _ in range(clients)]
        v = [rng.normal(centre, 1, 60) for centre in centres]
    result = []
    for k in range(clients):
        w, b = everyones if iid else (rng.normal(u[k], 1, (60, 10)), rng.normal(u[k], 1, 10))
        x = rng.multivariate_normal(v[k], np.diag(VARIANCES), sizes[k])
        scores = np.exp(x @ w + b)
        result.append((x, np.argmax(scores / scores.sum(axis=1, keepdims=True), axis=1)))
    return result


@pytest.mark.parametrize(
    ("alpha", "beta", "iid"), [(0, 0, False), (0.5, 0.5, False), (1, 2, False), (0, 0, True)]
)
def test_examples_are_those_of_the_published_procedure(alpha, beta, iid):
    data = synthetic.generate(alpha, beta, clients=6, seed=3, iid=iid)
    expected = published(alpha, beta, 6, 3, iid)
    test = 0
    for (x, y), (all_x, all_y) in zip(data.train, expected, strict=True):
        kept = int(0.9 * len(all_x))
        rest = len(all_x) - kept
        test_x, test_y = data.test_x[test : test + rest], data.test_y[test : test + rest]
        np.testing.assert_allclose(np.concatenate([x, test_x]), all_x, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(np.concatenate([y, test_y]), all_y)
        assert len(x) == kept
        test += rest
    assert test == len(data.test_x) == len(data.test_y)


def test_shapes_and_types():
    data = synthetic.generate(1, 1, seed=2)
    assert len(data.train) == 30
    for x, y in [*data.train, (data.test_x, data.test_y)]:
        assert x.shape == (len(y), 60)
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        assert y.min() >= 0
        assert y.max() <= 9
    assert data.weights.shape == (30, 60, 10)
    assert data.biases.shape == (30, 10)


def test_labels_follow_the_rule_that_is_given_with_them():
    data = synthetic.generate(1, 1, seed=4)
    for (x, y), weights, bias in zip(data.train, data.weights, data.biases, strict=True):
        scores = [x.astype(np.float64) @ weights[:, label] + bias[label] for label in range(10)]
        np.testing.assert_array_equal(np.stack(scores).argmax(axis=0), y)


def test_sizes_are_log_normal_from_fifty_on(half):
    # Of the examples for training, which are nine tenths of all.
    sizes = np.array([len(y) for _, y in half.train])
    assert sizes.min() >= 45
    # Half of all log-normal(4, 2) lie below e^4 = 54.6, and 84 % below e^6 = 403.4.
    for limit, share in ((np.exp(4), 0.5), (np.exp(6), 0.8413)):
        below = (sizes < 0.9 * (limit + 50)).mean()
        assert abs(below - share) < 4 * np.sqrt(share * (1 - share) / 400)


def test_inputs_vary_within_a_client_as_given(half):
    within = [x.astype(np.float64) - x.mean(axis=0, dtype=np.float64) for x, _ in half.train]
    free = sum(map(len, within)) - len(within)
    variances = sum((part**2).sum(axis=0) for part in within) / free
    # A variance of n normal numbers has a relative standard error of sqrt(2 / n).
    np.testing.assert_allclose(variances, VARIANCES, rtol=5 * np.sqrt(2 / free))
    # Independent coordinates: a correlation has a standard error of 1 / sqrt(n).
    correlations = np.corrcoef(np.concatenate(within).T)[np.triu_indices(60, 1)]
    assert np.abs(correlations).max() < 5.5 / np.sqrt(free)


def test_beta_is_the_standard_deviation_of_the_input_centres(half):
    means = np.stack([x.mean(axis=0, dtype=np.float64) for x, _ in half.train])
    # Each of 60 coordinates of v_k is B_k plus a standard normal number: 1 / 60 on the mean.
    expected = 0.5**2 + 1 / 60
    assert means.mean(axis=1).var(ddof=1) == pytest.approx(expected, rel=5 * np.sqrt(2 / 399))
    # About their own centre, coordinates have variance 1 and a little from averaging examples.
    assert means.var(axis=1, ddof=1).mean() == pytest.approx(1, abs=5 * np.sqrt(2 / 59 / 400))


def test_alpha_is_the_standard_deviation_of_the_rule_means(half):
    of_weights, of_biases = half.weights.mean(axis=(1, 2)), half.biases.mean(axis=1)
    expected = 0.5**2 + 1 / 600
    assert of_weights.var(ddof=1) == pytest.approx(expected, rel=5 * np.sqrt(2 / 399))
    # W_k and b_k share u_k, so only their own noise is left in the difference.
    expected = 1 / 600 + 1 / 10
    difference = of_weights - of_biases
    assert difference.var(ddof=1) == pytest.approx(expected, rel=5 * np.sqrt(2 / 399))
    spread = half.weights - of_weights[:, None, None]
    assert spread.var() == pytest.approx(1, abs=5 * np.sqrt(2 / spread.size) + 1 / 600)


def mean_pairwise_distance(values):
    return np.abs(values[:, None] - values[None]).mean()


def test_clients_differ_more_with_alpha_and_beta():
    by_alpha, by_beta = [], []
    for value in (0, 0.5, 1, 2, 4):
        rules = synthetic.generate(value, 0, seed=1).weights.mean(axis=(1, 2))
        by_alpha.append(mean_pairwise_distance(rules))
        train = synthetic.generate(0, value, seed=1).train
        by_beta.append(mean_pairwise_distance(np.array([x.mean() for x, _ in train])))
    for distances in (by_alpha, by_beta):
        assert all(less < more for less, more in itertools.pairwise(distances))
        assert distances[-1] > 4 * distances[0]


def test_only_iid_gives_all_clients_one_rule_and_one_mean():
    zero = synthetic.generate(0, 0, seed=5)
    alike = synthetic.generate(0, 0, seed=5, iid=True)
    assert (alike.weights == alike.weights[0]).all()
    assert (alike.biases == alike.biases[0]).all()
    assert len({each.tobytes() for each in zero.weights}) == 30

    def worst(data):
        """The farthest mean of a client from 0, in standard errors, over all coordinates."""
        errors = [np.abs(x.mean(axis=0)) * np.sqrt(len(x) / VARIANCES) for x, _ in data.train]
        return np.max(errors)

    assert worst(alike) < 5  # of 1,800 normal numbers
    assert worst(zero) > 50


def test_same_seed_same_data():
    np.random.seed(11)  # the global state must not matter
    first = synthetic.generate(1, 1, seed=9)
    np.random.seed(12)
    assert same(first, synthetic.generate(1, 1, seed=9))
    assert not same(first, synthetic.generate(1, 1, seed=10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha": -0.1}, "alpha must be a finite number, 0 or more, got -0.1"),
        ({"beta": -1}, "beta must be a finite number, 0 or more, got -1"),
        ({"alpha": float("nan")}, "alpha .* got nan"),
        ({"beta": float("inf")}, "beta .* got inf"),
        ({"clients": 0}, "clients must be a whole number of at least 1, got 0"),
        ({"seed": -1}, r"seed must be 0 or more and below 2\*\*32, got -1"),
        ({"seed": 2**32}, "seed must be"),
        ({"iid": True}, "alpha must be 0 if iid is true, got 1"),
        ({"iid": True, "alpha": 0}, "beta must be 0 if iid is true, got 1"),
    ],
)
def test_bad_settings_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        synthetic.generate(**{"alpha": 1, "beta": 1} | change)
