"""How batches are drawn, and what their gradients are."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from fedda.core import local
from fedda.core.algorithm import Seen
from fedda.core.losses import squared_error
from fedda.core.task import Batch, Batches, Plan, Task
from fedda.data.federation import Shards
from fedda.models import Model
from helpers.batches import most_of, read

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
    """A client's batches, by one program: their number, rows and masks, and their keys."""
    batches, most = task.batches(client, key), most_of(task.plan, client)
    keys = jax.vmap(lambda step: random.key_data(batches.at(step).key))(jnp.arange(most))
    return *read(batches, most), keys


# ------------------------------------------------------------------- a client and its federation


@pytest.mark.parametrize("plan", [Plan(4, 3), Plan(4, 3, "epochs"), Plan(4, unit="full")], ids=str)
def test_a_client_draws_the_same_batches_alone_as_in_any_federation(plan):
    def batches(max_count):
        found = drawn(Task(MODEL, squared_error, plan), shard(5, max_count), random.key(3))
        steps, rows, mask, keys = jax.device_get(found)
        return steps, rows.ravel(), mask.ravel(), keys[:steps]

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


@pytest.mark.parametrize("plan", [Plan(4, 3), Plan(4, 3, "epochs"), Plan(8, 1, "epochs")], ids=str)
def test_a_gpu_draws_the_same_batches_before_the_first_step(monkeypatch, plan):
    def of(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        return drawn(Task(MODEL, squared_error, plan), shard(5, 7), random.key(3))

    jax.tree.map(np.testing.assert_array_equal, of("gpu"), of("cpu"))
    batches = Task(MODEL, squared_error, plan).batches
    for backend, loops in (("gpu", 0), ("cpu", 1)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        program = jax.make_jaxpr(lambda key: batches(shard(5, 7), key).at(0).rows)(random.key(3))
        assert str(program).count("while") == loops


# ---------------------------------------------------------------------------- cutting into batches


def test_steps_never_end_in_a_short_batch():
    # Three steps of 4 from 5 examples: 12 numbers, two epochs and the beginning of a third.
    steps, rows, mask, _ = drawn(task(4, 3), shard(5, 8), random.key(0))
    assert steps == 3
    assert rows.shape == mask.shape == (3, 1, 4)
    assert mask.all()
    stream = np.asarray(rows).ravel()
    assert sorted(stream[:5]) == sorted(stream[5:10]) == list(range(5))
    assert len(set(stream[10:])) == 2


@pytest.mark.parametrize(("size", "epochs"), [(2, 1), (4, 3), (10, 2)])
def test_epochs_take_every_example_that_often(size, epochs):
    largest = 7

    @jax.jit
    @jax.vmap
    def draw(count):
        return drawn(task(size, epochs, "epochs"), shard(count, largest), random.key(5))[:3]

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

    two_epochs, client, key = task(4, 2, "epochs"), shard(7, 9), random.key(5)
    start = (jnp.zeros(7, "int32"), jnp.zeros(2, "int32"))

    @jax.jit
    def visit(start):
        return local.steps(step, start, two_epochs.batches(client, key))

    (visited, order), seen = visit(start)
    np.testing.assert_array_equal(visited, np.full(7, 2))
    np.testing.assert_array_equal(order, drawn(two_epochs, client, key)[1][2:4, 0, 0])
    assert seen == (4, 14, ())


@pytest.mark.parametrize(
    ("backend", "amount", "loops"), [("cpu", 4, 1), ("gpu", 5, 0), ("gpu", 12, 1)]
)
def test_steps_may_be_written_out(monkeypatch, backend, amount, loops):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows = np.random.default_rng(0).integers(0, 7, amount)

    def step(carry, row):  # the order of the batches, as the digits of a number
        return 3 * carry + row.astype(float), Seen(jnp.ones(()), jnp.ones(()))

    def number(start):
        return local.steps(step, start, Batches(amount, jnp.asarray(rows).__getitem__))

    expected = 0
    for row in rows:
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
    assert not read(absent, 4)[2].any()


def test_full_covers_each_row_once():
    for count, largest in ((7, 7), (7, 10), (1, 10), (3, 3)):
        batches = task(3, 5, "full").batches(shard(count, largest), random.key(0))
        rows, mask = (np.asarray(part) for part in batches.at(0)[1:3])
        assert batches.steps == 1  # whatever the amount
        assert rows.shape == (-(-largest // 3), 3)
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
    batches = work.batches(client, random.key(2))
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
        batch = work.batches(client, random.key(2)).at(0)
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
        batch = work.batches(client, random.key(2)).at(0)
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
    order_key = random.fold_in(random.split(random.key(0))[0], 0)
    assert not np.array_equal(random.key_data(order_key), random.key_data(first.key))


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
