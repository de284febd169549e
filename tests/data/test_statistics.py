"""Statistics of a federation, against brute force."""

import time
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from fedda.data import statistics
from fedda.data.federation import Ragged, from_clients
from fedda.data.statistics import describe


@pytest.mark.parametrize("classes", [4, 3])
def test_label_histogram(classes):
    """Labels past the last that is asked for are left out."""
    clients = [[0, 2, 2, 1], [], [3, 3], [1]]
    pairs = [(np.zeros((len(labels), 2)), np.array(labels, np.int32)) for labels in clients]
    expected = np.stack([np.bincount(labels, minlength=5)[:classes] for _, labels in pairs])
    counted = statistics.label_histogram(from_clients(pairs), classes)
    np.testing.assert_array_equal(counted, expected)


def test_label_histogram_of_many_labels_an_example():
    """Of three clients whose examples lie in another order than they do."""
    tags = Ragged(
        np.array([7, 0, 1, 1, 2], np.uint16), np.array([0, 1, 3, 3]), np.array([1, 2, 0, 2]), 2
    )
    shards = replace(
        from_clients([(np.zeros((1, 1)), np.zeros(1))]),
        y=tags,
        start=np.array([2, 0, 4]),
        count=np.array([2, 2, 0]),
    )
    counted = statistics.label_histogram(shards, 3)
    np.testing.assert_array_equal(counted, [[0, 1, 1], [1, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("seed", range(4))
def test_statistics_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    histogram = rng.poisson(rng.gamma(0.3, 2, (31, 6)))
    histogram[4] = 0
    count = histogram.sum(axis=1) + rng.integers(0, 3, 31)  # some examples have no label
    got = describe(count, histogram)
    ordered = sorted(count.tolist())
    assert got[:5] == (31, sum(ordered), ordered[0], ordered[15], ordered[-1])
    holders = [row for row in histogram.tolist() if sum(row)]
    assert len(holders) < 31
    entropies = [scipy.stats.entropy(row, base=2) for row in holders]
    assert got.client_entropy == pytest.approx(sum(entropies) / len(holders), rel=1e-12)
    whole = [sum(column) for column in zip(*histogram.tolist(), strict=True)]
    assert got.label_entropy == pytest.approx(scipy.stats.entropy(whole, base=2), rel=1e-12)
    distinct = [sum(value > 0 for value in row) for row in holders]
    assert got.distinct_labels == pytest.approx(sum(distinct) / len(holders), rel=1e-12)


def test_statistics_of_cases_known_by_heart():
    even = describe(np.array([4, 8]), np.array([[1, 1, 1, 1], [2, 2, 2, 2]], np.uint8))
    assert even == (2, 12, 4, 6.0, 8, 2.0, 2.0, 4.0)  # four labels alike: two bits
    apart = describe(np.array([5, 5]), np.array([[5, 0], [0, 5]], np.int32))
    assert apart == (2, 10, 5, 5.0, 5, 0.0, 1.0, 1.0)
    assert describe(np.array([3]), None) == (1, 3, 3, 3.0, 3, None, None, None)
    assert describe(np.array([0]), np.array([[0, 0]]))[5:] == (0.0, 0.0, 0.0)


def test_sums_of_small_integers_do_not_wrap():
    histogram = np.tile(np.array([200, 50], np.uint8), (300, 1))
    got = describe(histogram.sum(axis=1, dtype=np.uint8), histogram)
    assert got[:5] == (300, 75_000, 250, 250.0, 250)
    entropy = scipy.stats.entropy([4, 1], base=2)
    assert (got.client_entropy, got.label_entropy) == pytest.approx((entropy, entropy))


def test_statistics_of_as_many_clients_as_stack_overflow():
    clients = 342_477
    rng = np.random.default_rng(0)
    histogram = rng.integers(0, 5, (clients, 20), dtype=np.uint16)
    begin = time.perf_counter()
    got = describe(histogram.sum(axis=1), histogram)
    assert time.perf_counter() - begin < 5
    assert got.clients == clients
    assert got.examples == histogram.sum()
    some = scipy.stats.entropy(histogram[:1000], axis=1, base=2)
    # The first thousand are a sample of the rest.
    assert got.client_entropy == pytest.approx(some.mean(), abs=5 * some.std() / np.sqrt(1000))
