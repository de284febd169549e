"""How batches are drawn, and what their gradients are."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from fedda.core import local
from fedda.core.algorithm import Seen
from fedda.core.losses import squared_error
from fedda.core.task import Batch, Plan, Task, shuffled, shuffled_epochs
from fedda.data.federation import Shards
from fedda.models import Model

MODEL = Model(
    lambda key: {"w": random.normal(key, (3, 2)), "b": jnp.ones(2)},
    lambda params, x: jnp.tanh(x @ params["w"]) + params["b"][None],
)


def shard(count, max_count, start=0, rows=1):
    """One client's view of a store of `rows` random rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))
    start, count = jnp.asarray(start, "int32"), jnp.asarray(count, "int32")
    x, y = jax.device_put((x, y))
    return Shards(x=x, y=y, start=start, count=count, max_count=max_count, num_clients=1)


def task(*plan, **rest):
    return Task(MODEL, squared_error, Plan(*plan), **rest)


@partial(jax.jit, static_argnums=0)
def drawn(task, client, key):
    """A client's batches, by one program."""
    return task.batches(client, key)


def plausible(observed, expected, freedom):
    """A chi-square test that a fair generator fails once in a million."""
    observed = np.asarray(observed)
    statistic = np.sum((observed - expected) ** 2 / expected)
    assert stats.chi2.sf(statistic, freedom) > 1e-6, statistic


# ---------------------------------------------------------------------------- order of examples


def test_one_epoch_alone_is_the_first_of_many():
    @jax.jit
    def orders(key, client):
        return shuffled(key, client, 4), shuffled_epochs(key, client, 27, 4)

    for count in (1, 5, 9):
        for number in range(20):
            alone, many = jax.device_get(orders(random.key(number), shard(count, 9)))
            np.testing.assert_array_equal(alone[:count], many[:count])


def test_every_epoch_is_a_permutation():
    largest, epochs = 9, 4

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0))
    @partial(jax.vmap, in_axes=(0, None))
    def orders(key, count):
        return shuffled_epochs(key, shard(count, largest), epochs * largest + 1, 5)

    rows = np.asarray(orders(random.split(random.key(0), 20), jnp.arange(1, largest + 1)))
    assert rows.shape == (largest, 20, 40)  # 37 numbers, and more to fill batches of 5
    for count in range(1, largest + 1):
        whole = 40 // count
        for order in rows[count - 1]:
            for epoch in order[: whole * count].reshape(whole, count):
                assert sorted(epoch) == list(range(count))
            begun = order[whole * count :]
            assert len(set(begun)) == len(begun)
            assert set(begun) <= set(range(count))


def test_permutations_are_uniform_and_epochs_independent():
    # Three examples and two epochs: all 6 x 6 pairs of permutations are equally likely. Neither a
    # larger client elsewhere nor the epochs that follow may change that.
    draws = 7200

    @jax.jit
    @jax.vmap
    def orders(key):
        return shuffled_epochs(key, shard(3, 7), 14, 1)

    rows = np.asarray(orders(random.split(random.key(1), draws)))
    number = {order: i for i, order in enumerate(itertools.permutations(range(3)))}
    pairs = np.zeros((6, 6))
    for order in rows:
        pairs[number[tuple(order[:3])], number[tuple(order[3:6])]] += 1
    plausible(pairs, draws / 36, freedom=35)


def test_an_epoch_that_is_only_begun_is_as_random():
    # The first number of a second epoch that goes no further: each of five, equally often.
    draws = 5000

    @jax.jit
    @jax.vmap
    def orders(key):
        return shuffled_epochs(key, shard(5, 5), 6, 1)

    rows = np.asarray(orders(random.split(random.key(2), draws)))
    assert rows.shape == (draws, 6)
    plausible(np.bincount(rows[:, 5], minlength=5), draws / 5, freedom=4)


@pytest.mark.parametrize("plan", [Plan(4, 3), Plan(4, 3, "epochs"), Plan(4, unit="full")], ids=str)
def test_a_client_draws_the_same_batches_alone_as_in_any_federation(plan):
    def batches(max_count):
        found = drawn(Task(MODEL, squared_error, plan), shard(5, max_count), random.key(3))
        keys = jax.vmap(lambda step: random.key_data(found.at(step).key))(np.arange(found.steps))
        return jax.device_get((found.steps, found.rows.ravel(), found.mask.ravel(), keys))

    steps, rows, mask, keys = batches(5)
    used = int(mask.sum())
    assert mask[:used].all()
    for max_count in (6, 23):
        other_steps, other_rows, other_mask, other_keys = batches(max_count)
        assert steps == other_steps
        np.testing.assert_array_equal(rows[:used], other_rows[:used])
        assert other_mask[:used].all()
        assert other_mask.sum() == used
        np.testing.assert_array_equal(keys, other_keys)


# ---------------------------------------------------------------------------- cutting into batches


def test_steps_never_end_in_a_short_batch():
    # Three steps of 4 from 5 examples: 12 numbers, two epochs and the beginning of a third.
    batches = task(4, 3).batches(shard(5, 8), random.key(0))
    assert batches.steps == 3
    assert batches.rows.shape == batches.mask.shape == (3, 1, 4)
    assert batches.mask.all()
    stream = np.asarray(batches.rows).ravel()
    assert sorted(stream[:5]) == sorted(stream[5:10]) == list(range(5))
    assert len(set(stream[10:])) == 2


@pytest.mark.parametrize(("size", "epochs"), [(2, 1), (4, 3), (10, 2)])
def test_epochs_take_every_example_that_often(size, epochs):
    largest = 7

    @jax.jit
    @jax.vmap
    def draw(count):
        batches = task(size, epochs, "epochs").batches(shard(count, largest), random.key(5))
        return batches.steps, batches.rows, batches.mask

    counts = np.arange(largest + 1)
    for count, steps, rows, mask in zip(counts, *jax.device_get(draw(counts)), strict=True):
        assert rows.shape[1:] == (1, size)
        assert steps == -(-epochs * count // size)  # T = ceil(E n / B)
        # The mask is exact: full batches, then the remainder, then nothing. Where it is false the
        # client's own first row stands, never another client's.
        np.testing.assert_array_equal(mask.ravel(), np.arange(mask.size) < epochs * count)
        assert not rows[~mask].any()
        times = np.bincount(rows[mask], minlength=count)
        np.testing.assert_array_equal(times, np.full(count, epochs))


def test_local_steps_take_every_batch_once():
    # Two epochs of 7 in batches of 4, in order; what is seen adds up over the steps.
    def step(carry, batch):
        visited, last = carry
        visited = visited.at[batch.rows.ravel()].add(batch.mask.ravel().astype("int32"))
        order = last.at[0].set(last[1]).at[1].set(batch.rows[0, 0])
        return (visited, order), Seen(jnp.ones(()), batch.mask.sum(dtype=float))

    batches = drawn(task(4, 2, "epochs"), shard(7, 9), random.key(5))
    start = (jnp.zeros(7, "int32"), jnp.zeros(2, "int32"))
    (visited, order), seen = jax.jit(partial(local.steps, step))(start, batches)
    np.testing.assert_array_equal(visited, np.full(7, 2))
    np.testing.assert_array_equal(order, batches.rows[2:4, 0, 0])
    assert seen == (4, 14, ())


@pytest.mark.parametrize(
    ("backend", "amount", "loops"), [("cpu", 4, 1), ("gpu", 5, 0), ("gpu", 12, 1)]
)
def test_steps_may_be_written_out(monkeypatch, backend, amount, loops):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    batches = task(2, amount).batches(shard(7, 9), random.key(5))

    def step(carry, batch):  # the order of the batches, as the digits of a number
        return 3 * carry + batch.rows[0, 0].astype(float), Seen(jnp.ones(()), jnp.ones(()))

    def number(start):
        return local.steps(step, start, batches)

    expected = 0
    for row in np.asarray(batches.rows[:, 0, 0]):
        expected = 3 * expected + row
    found, seen = jax.jit(number)(jnp.zeros(()))
    assert (found.item(), seen.loss.item()) == (expected, amount)
    program = jax.jit(number).lower(jnp.zeros(())).as_text()
    assert program.count("stablehlo.while") == loops


def test_clients_of_one_size_have_a_known_number_of_steps():
    plan = task(4, 2, "epochs")
    assert plan.batches(replace(shard(7, 7), even=True), random.key(5)).steps == 4
    uneven = plan.batches(shard(7, 7), random.key(5))
    assert isinstance(uneven.steps, jax.Array)
    # An absent client has no example that counts, also where it takes the others' steps.
    absent = plan.batches(replace(shard(0, 7), even=True), random.key(5))
    assert absent.steps == 4
    assert not absent.mask.any()


def test_full_covers_each_row_once():
    for count, largest in ((7, 7), (7, 10), (1, 10), (3, 3)):
        batches = drawn(task(3, 5, "full"), shard(count, largest), random.key(0))
        rows, mask = np.asarray(batches.rows), np.asarray(batches.mask)
        assert batches.steps == 1  # whatever the amount
        assert rows.shape == (1, -(-largest // 3), 3)
        assert sorted(rows[mask].tolist()) == list(range(count))
        assert not rows[~mask].any()


# ------------------------------------------------------------------------------------- gradients

START, COUNT, ROWS = 4, 7, 40
PARAMS = {"w": np.linspace(-1, 1, 6).reshape(3, 2), "b": np.array([0.3, -0.2])}


GRADIENT = jax.jit(Task.gradient, static_argnums=0)


def params():
    return jax.device_put(PARAMS)


@partial(jax.jit, static_argnums=0)
def expected(reduce, params, x, y):
    """The gradient and the sum of the losses of these examples, with no mask in sight."""

    def losses(params):
        return squared_error(MODEL.apply(params, x), y)

    return jax.grad(lambda params: reduce(losses(params)))(params), losses(params).sum()


def check_gradient(task, batch, client, rows, reduce, factor=1.0):
    gradient, seen = GRADIENT(task, params(), batch)
    where = START + np.asarray(rows)
    x, y = np.asarray(client.x)[where], np.asarray(client.y)[where]
    reference, loss = expected(reduce, params(), x, y)
    # Sums of at most a dozen numbers near 1, in float64.
    for name, values in gradient.items():
        np.testing.assert_allclose(values, factor * reference[name], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(seen.loss, loss, rtol=1e-12)
    assert seen.examples == len(rows)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_a_mini_batch_is_that_of_its_examples(reduction):
    # Two epochs of 7 in batches of 4: three full batches and one of two examples.
    client = shard(COUNT, 9, START, ROWS)
    work = task(4, 2, "epochs", reduction=reduction)
    batches = drawn(work, client, random.key(2))
    sizes = []
    for number in range(int(batches.steps)):
        batch = batches.at(number)
        rows = np.asarray(batch.rows)[np.asarray(batch.mask)]
        sizes.append(len(rows))
        check_gradient(work, batch, client, rows, getattr(jnp, reduction))
    assert sizes == [4, 4, 4, 2]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("largest", [7, 9, 30])
def test_gradient_of_all_data_in_several_parts(largest):
    # As a mean, that of the client's objective. As a sum, as long as that of one mini-batch.
    client = shard(COUNT, largest, START, ROWS)
    for reduction, factor in (("mean", 1), ("sum", 3)):
        work = task(3, 1, "full", reduction=reduction)
        batch = drawn(work, client, random.key(2)).at(0)
        assert batch.rows.shape[0] > 1
        check_gradient(work, batch, client, range(COUNT), jnp.mean, factor)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("largest", [7, 30], ids=["one part", "several parts"])
def test_gradient_of_all_data_of_a_client_smaller_than_a_batch(largest):
    # 7 examples in batches of 10: the same, whether or not someone else has more than 10.
    client = shard(COUNT, largest, START, ROWS)
    # As a sum, it is the sum of all 7, as in the one batch of an epoch.
    for reduction, factor in (("mean", 1), ("sum", COUNT)):
        work = task(10, 1, "full", reduction=reduction)
        batch = drawn(work, client, random.key(2)).at(0)
        check_gradient(work, batch, client, range(COUNT), jnp.mean, factor)


def test_masked_examples_have_exactly_no_effect():
    client = shard(COUNT, 9, START, ROWS)
    mask = jnp.array([[True, True, True, False]])
    batch = Batch(client, jnp.array([[1, 5, 2, 0]]), mask, random.key(0))
    other = batch._replace(rows=jnp.array([[1, 5, 2, 6]]))
    gradients = [GRADIENT(task(4), params(), each) for each in (batch, other)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_a_batch_of_nobody_has_no_gradient():
    rows, mask = jnp.zeros((1, 4), int), jnp.zeros((1, 4), bool)
    nobody = Batch(shard(0, 9, START, ROWS), rows, mask, random.key(0))
    gradient, seen = GRADIENT(task(4), params(), nobody)
    assert all((leaf == 0).all() for leaf in gradient.values())
    assert seen == (0, 0, ())


# ------------------------------------------------------------------------------------------- noise


def noisy(params, x, key):
    return MODEL.apply(params, x) + random.normal(key, (x.shape[0], 2))


NOISY = Task(MODEL._replace(train=noisy), squared_error, Plan(4, 2))


def gradient_at(batch, task=NOISY):
    gradient, _ = GRADIENT(task, params(), batch)
    return np.asarray(gradient["b"])


def test_noise_belongs_to_the_batch():
    client = shard(4, 4, START, ROWS)
    batches = NOISY.batches(client, random.key(0))
    first, second = batches.at(0), batches.at(1)
    np.testing.assert_array_equal(gradient_at(first), gradient_at(first))
    # Both batches hold all four examples; their rows given the same order, only the noise differs.
    assert not np.array_equal(gradient_at(first), gradient_at(second._replace(rows=first.rows)))
    # Another round is another key.
    again = NOISY.batches(client, random.key(1)).at(0)
    assert not np.array_equal(gradient_at(first), gradient_at(again._replace(rows=first.rows)))
    # The order of the examples uses another key than the noise.
    order_key, _ = random.split(random.key(0))
    assert not np.array_equal(random.key_data(order_key), random.key_data(batches.key))


def test_parts_of_a_batch_have_noise_of_their_own():
    # Twice the same four examples: with equal noise, the mean of both parts would be that of one.
    rows, mask = jnp.arange(4)[None], jnp.ones((1, 4), bool)
    one = Batch(shard(4, 4, START, ROWS), rows, mask, random.key(0))
    twice = one._replace(rows=jnp.tile(rows, (2, 1)), mask=jnp.tile(mask, (2, 1)))
    assert np.abs(gradient_at(twice) - gradient_at(one)).max() > 0.1


# -------------------------------------------------------------------------------------- evaluation


def first_output(outputs, y):
    """A metric with a name of its own."""
    return outputs[:, 0] * y[:, 1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("total", "batch"), [(1, 3), (7, 3), (6, 3), (5, 8), (40, 512)])
def test_evaluation_is_the_plain_mean(total, batch):
    data = shard(0, 0, rows=total)
    work = NOISY._replace(metrics=(first_output,))  # evaluation has no noise
    values = jax.jit(partial(work.evaluate, batch=batch))(params(), data.x, data.y)
    x, y = np.asarray(data.x), np.asarray(data.y)
    outputs = np.tanh(x @ PARAMS["w"]) + PARAMS["b"]
    assert list(work.measures) == ["loss", "first_output"]
    assert set(values) == set(work.measures)
    np.testing.assert_allclose(values["loss"], ((outputs - y) ** 2).mean(), rtol=1e-12)
    np.testing.assert_allclose(values["first_output"], (outputs[:, 0] * y[:, 1]).mean(), rtol=1e-12)
