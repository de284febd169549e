"""A federation's examples: what goes in comes out, and what is wrong is named."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda.core.losses import cross_entropy
from fedda.data.federation import from_clients, from_partition
from fedda.errors import InputError


def client(count, features=(3,), dtype=np.float32):
    rng = np.random.default_rng(count)
    x = rng.integers(0, 200, size=(count, *features)).astype(dtype)
    return x, rng.integers(0, 4, size=count)


def refuses(clients, message):
    with pytest.raises(InputError, match=re.escape(message)):
        from_clients(clients)


# ------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_clients_of_very_different_sizes_come_back(dtype):
    counts = [3, 0, 1000, 1, 0, 17]
    clients = [client(count, (2, 5), dtype) for count in counts]
    shards = from_clients(clients)
    assert shards.num_clients == len(counts)
    assert shards.max_count == 1000
    assert shards.x.shape == (sum(counts), 2, 5)  # nothing is padded
    assert shards.x.dtype == dtype
    for number, (x, y) in enumerate(clients):
        shard = shards.shard(number)
        assert shard.count == len(y)
        found_x, found_y = shard.rows(jnp.arange(len(y)))
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_array_equal(found_y, y)


def test_rows_are_counted_from_the_clients_first():
    clients = [client(4), client(6)]
    x, y = from_clients(clients).shard(1).rows(jnp.array([5, 0, 5]))
    np.testing.assert_array_equal(x, clients[1][0][[5, 0, 5]])
    np.testing.assert_array_equal(y, clients[1][1][[5, 0, 5]])


@pytest.mark.parametrize("past", [2, 100, np.iinfo(np.int32).max])
def test_an_id_past_the_last_is_an_absent_client(past):
    shards = from_clients([client(4), client(6)])
    assert shards.shard(past).count == 0
    assert shards.shard(jnp.asarray(past)).count == 0


def test_a_partition_gives_each_client_its_rows():
    x, y = client(10)
    partition = [np.array([7, 2]), np.array([], int), np.array([0, 1, 9])]
    shards = from_partition(x, y, partition)
    np.testing.assert_array_equal(shards.count, [2, 0, 3])
    for number, rows in enumerate(partition):
        found_x, found_y = shards.shard(number).rows(jnp.arange(len(rows)))
        np.testing.assert_array_equal(found_x, x[rows])
        np.testing.assert_array_equal(found_y, y[rows])


def test_lists_of_numbers_are_arrays():
    shards = from_clients([([[1.0, 2.0]], [3]), ([[4.0, 5.0], [6.0, 7.0]], [8, 9])])
    np.testing.assert_array_equal(shards.x, [[1, 2], [4, 5], [6, 7]])
    np.testing.assert_array_equal(shards.y, [3, 8, 9])


def test_a_table_of_numbers_and_booleans_is_an_array():
    """What NumPy makes of a data frame with a column of booleans is an array of objects."""
    table = np.array([[1.5, True], [2, np.False_], [np.float32(0.5), True]], object)
    shards = from_clients([(table, np.array([True, False, True], object))])
    np.testing.assert_array_equal(shards.x, np.float32([[1.5, 1], [2, 0], [0.5, 1]]))
    np.testing.assert_array_equal(shards.y, [True, False, True])
    run = fedda.run(
        "fedavg",
        fedda.Model(lambda key: jnp.zeros((2, 2)), lambda params, x: x @ params),
        [(table, np.array([1, 0, 1], object))],
        fedda.losses.cross_entropy,
        cohort=1,
        rounds=1,
    )
    assert np.isfinite(run.params).all()
    empty = np.zeros((0, 2), object)
    assert from_clients([(table, [0, 1, 0]), (empty, [])]).x.shape == (3, 2)


# --------------------------------------------------------------------------------- what is wrong


def test_no_clients():
    refuses([], "clients must hold at least one example, got 0 clients with none.")


def test_only_empty_clients():
    message = "clients must hold at least one example, got 2 clients with none."
    refuses([client(0), client(0)], message)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [(np.zeros((2, 3)), "ndarray"), ((np.zeros(2),), "tuple"), (None, "NoneType"), ("xy", "str")],
)
def test_not_a_pair(wrong, got):
    refuses([client(2), wrong], f"client 1 must be a pair (x, y) of arrays, got {got}.")


def test_ragged_rows_of_a_client():
    message = "is ragged or not numeric; expected one array whose first axis counts examples."
    refuses([client(2), ([[1.0, 2.0, 3.0], [1.0]], [0, 1])], f"x of client 1 {message}")
    refuses([([[1.0], [2.0]], [[0], [0, 1]]), client(2)], f"y of client 0 {message}")
    refuses([(5.0, 1)], f"x of client 0 {message}")
    refuses([(np.array([None, None]), [0, 1])], f"x of client 0 {message}")


def test_clients_with_different_features():
    refuses(
        [client(2), client(3), client(2, (4,))],
        "x of client 2 has examples of shape (4,), but others have shape (3,). "
        "All need the same shape: pad or crop before.",
    )
    refuses(
        [client(2), (client(2)[0], np.zeros((2, 5)))],
        "y of client 1 has examples of shape (5,), but others have shape ().",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value):
    x, y = client(5)
    x[3, 1] = value
    refuses(
        [client(2), (x, y)],
        "x of client 1 has a non-finite value in row 3. Remove the row or replace the value",
    )
    targets = np.zeros(4)
    targets[2] = value
    refuses([(np.zeros((4, 1)), targets)], "y of client 0 has a non-finite value in row 2.")


@pytest.mark.parametrize(("value", "kind"), [(2**40, np.int64), (2**32, np.uint64)])
def test_whole_numbers_that_the_device_would_wrap_around(value, kind):
    """The second would be a label 0."""
    large = np.array([1, value], kind)
    refuses([(np.zeros((2, 1)), large)], "y of client 0 has whole numbers that do not fit into")
    refuses([client(2), (large[:, None], [0, 0])], "x of client 1 has whole numbers that do not")
    assert from_clients([(large[:1, None], [0])]).x.dtype.itemsize == 4


def test_x_and_y_of_different_lengths():
    x, y = client(5)
    refuses([client(2), (x, y[:4])], "client 1 has 5 rows in x but 4 in y.")


MODEL = fedda.Model(lambda key: random.normal(key, (3, 4)), lambda params, x: x @ params)


@pytest.mark.parametrize(
    ("y", "got"),
    [(np.zeros(5), "float32 of shape ()"), (np.zeros((5, 2), int), "int32 of shape (2,)")],
)
def test_labels_that_are_none(y, got):
    message = f"the class of each example, a whole number, for cross_entropy; got {got}"
    with pytest.raises(InputError, match=re.escape(message)):
        fedda.run("fedavg", MODEL, [(client(5)[0], y)], cross_entropy, cohort=1)


@pytest.mark.parametrize("label", [4, -1])
def test_labels_the_model_has_no_output_for(label):
    x, y = client(5)
    wrong = y.copy()
    wrong[2] = label
    message = (
        f"has label {label} in row 2, but the model has outputs for 0..3. Relabel, or give the "
        "model more outputs."
    )
    with pytest.raises(InputError, match=re.escape(f"y of client 1 {message}")):
        fedda.run("fedavg", MODEL, [client(3), (x, wrong)], cross_entropy, cohort=1)
    with pytest.raises(InputError, match=re.escape(f"y of the test set {message}")):
        fedda.run("fedavg", MODEL, [(x, y)], cross_entropy, cohort=1, test=(x, wrong))


@pytest.mark.parametrize(
    ("sizes", "even"), [((3, 3, 3), True), ((3, 2, 3), False), ((0, 3), False)]
)
def test_clients_of_one_size_are_known_to_be(sizes, even):
    clients = [(np.zeros((size, 2)), np.zeros(size)) for size in sizes]
    assert from_clients(clients).even is even
