"""The orders of a client's examples: permutations, as random as those of a fair shuffle.

The tests are chi-square tests with fixed seeds. A fair shuffle fails each once in a million seeds.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from fedda.core.shuffle import shuffled_rows


@partial(jax.jit, static_argnums=(1, 2))
@partial(jax.vmap, in_axes=(0, None, None))
def orders(key, count, epochs):
    """The first epochs of a client, for each key."""
    slots = jnp.arange(count * epochs, dtype="int32")
    rows = shuffled_rows(key, jnp.int32(count), slots // count, slots % count)
    return rows.reshape(epochs, count)


def drawn(count, draws, epochs=1, seed=0):
    return np.asarray(orders(random.split(random.key(seed), draws), count, epochs))


def plausible(observed, freedom=None):
    """Whether all outcomes are equally likely."""
    observed = np.ravel(observed)
    expected = observed.sum() / len(observed)
    assert expected > 4, "too few draws for the chi-square distribution"
    statistic = np.sum((observed - expected) ** 2) / expected
    assert stats.chi2.sf(statistic, freedom or len(observed) - 1) > 1e-6, statistic


def codes(orders):
    """The number of each order among all orders of its length."""
    count = orders.shape[-1]
    number = np.full(count**count, -1)
    for i, order in enumerate(itertools.permutations(range(count))):
        number[np.dot(order, count ** np.arange(count))] = i
    return number[orders @ count ** np.arange(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 20, 63, 64, 65, 1000, 50_001])
def test_every_epoch_is_a_permutation(count):
    found = drawn(count, draws=10, epochs=3)
    assert (np.sort(found) == np.arange(count)).all()


def test_the_largest_client_has_no_row_twice_and_none_of_another_client():
    count, positions = 2**31 - 1, np.arange(2**31 - 10_001, 2**31 - 1).astype("int32")
    rows = np.asarray(shuffled_rows(random.key(0), jnp.int32(count), 0, jnp.asarray(positions)))
    assert len(set(rows.tolist())) == len(rows)
    assert 0 <= rows.min() < rows.max() < count
    plausible(np.histogram(rows, bins=50, range=(0, count))[0])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_orders_are_equally_likely(count):
    found = codes(drawn(count, draws=40_000)[:, 0])
    plausible(np.bincount(found, minlength=len(list(itertools.permutations(range(count))))))


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 4)])
def test_epochs_of_a_client_are_independent(one, other):
    found = codes(drawn(3, draws=40_000, epochs=5))
    plausible(np.bincount(6 * found[:, one] + found[:, other], minlength=36))


def test_clients_are_independent():
    """Clients of a round: their keys are folded from one key with consecutive numbers."""
    keys = jax.vmap(partial(random.fold_in, random.key(0)))(np.arange(40_001))
    found = codes(np.asarray(orders(keys, 3, 1))[:, 0])
    plausible(np.bincount(6 * found[:-1] + found[1:], minlength=36))


@pytest.mark.parametrize("count", [10, 20, 97])
def test_positions_and_neighbours_are_uniform(count):
    found = drawn(count, draws=20_000)[:, 0]
    at = np.bincount((count * found + np.arange(count)).ravel(), minlength=count**2)
    plausible(at, freedom=(count - 1) ** 2)  # the sums of rows and columns are fixed
    pairs = np.bincount((count * found[:, :-1] + found[:, 1:]).ravel(), minlength=count**2)
    plausible(pairs.reshape(count, count)[~np.eye(count, dtype=bool)])


def test_a_large_client_is_shuffled_as_well():
    count = 5000
    found = drawn(count, draws=400)[:, 0]
    for part in (
        found[:, 0],
        found[:, -1],
        found[:, 1] - found[:, 0],
        found[:, 1:] - found[:, :-1],
    ):
        plausible(np.histogram(part % count, bins=25, range=(0, count))[0])
    # The number of examples that stay where they are has mean 1 and variance 1.
    stay = (found == np.arange(count)).sum(axis=1)
    assert abs(stay.mean() - 1) < 5 / np.sqrt(len(stay))


def test_one_epoch_for_all_positions_is_the_same_as_one_for_each():
    rows = shuffled_rows(random.key(3), jnp.int32(9), 2, jnp.arange(9, dtype="int32"))
    np.testing.assert_array_equal(rows, orders(random.key(3)[None], 9, 3)[0, 2])


def test_a_gpu_draws_the_same_rows(monkeypatch):
    """It writes the rounds out instead of looping over them."""
    looped = shuffled_rows(random.key(1), jnp.int32(50), 0, jnp.arange(50, dtype="int32"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    written = shuffled_rows(random.key(1), jnp.int32(50), 0, jnp.arange(50, dtype="int32"))
    np.testing.assert_array_equal(looped, written)
