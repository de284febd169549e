"""Data that stay on disk train as data on the device do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data import streaming
from fedda.data.federation import Ragged
from fedda.data.store import Rows
from fedda.data.streaming import Feed
from fedda.simulate.evaluation import evaluate_blocks
from fedda.simulate.train import evaluate
from helpers.stored import COUNTS, MODEL, written


def rows(column, count):
    """The examples of a column, as lists without padding."""
    taken = np.asarray(column[jnp.arange(count)])
    return [[each for each in row if each != np.iinfo(taken.dtype).max] for row in taken.tolist()]


def plain(column):
    """The same of what a store gives."""
    if isinstance(column, Rows):
        return [part.tolist() for part in np.split(column.values, np.cumsum(column.length)[:-1])]
    return column.tolist()


@pytest.mark.parametrize("ragged", [False, True])
def test_everything_on_the_device_is_what_the_store_holds(tmp_path, ragged):
    split = written(tmp_path / "s", ragged)
    shards = streaming.resident(split)
    x, y = streaming.union(split)
    assert shards.num_clients == 8
    assert shards.max_count == 12
    everything = []
    for client in range(8):
        shard = shards.shard(client)
        assert shard.count == COUNTS[client]
        got, labels = shard.rows(jnp.arange(COUNTS[client]))
        np.testing.assert_array_equal(labels, split.column("y", client))
        if COUNTS[client]:
            own = plain(split.column("x", client))
            assert [[each for each in row if each < 10] for row in got.tolist()] == own
            everything += own
    assert rows(jnp.asarray(x) if not ragged else x, 39) == everything
    np.testing.assert_array_equal(y, np.concatenate([split.column("y", each) for each in range(8)]))
    first, _ = streaming.union(split, most=5)
    assert rows(jnp.asarray(first) if not ragged else first, first.shape[0]) == everything[:5]


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_gathered_clients_are_those_of_the_store(tmp_path, ragged, most):
    split = written(tmp_path / "s", ragged)
    source = Feed(split, most)
    shards = source.gather(np.array([1, 4, 6]), slots=5)
    for client in range(10):  # also those that are not here, or nowhere
        shard = shards.shard(client)
        expected = min(COUNTS[client], most or 99) if client in (1, 4, 6) else 0
        assert shard.count == expected
        got, labels = shard.rows(jnp.arange(expected))
        if expected:
            np.testing.assert_array_equal(labels, split.column("y", client, most))
            own = plain(split.column("x", client, most))
            assert [[each for each in row if each < 10] for row in got.tolist()] == own


@pytest.mark.parametrize("size", [1, 7, 13, 39, 64])
@pytest.mark.parametrize("ragged", [False, True])
def test_blocks_cover_a_split_once(tmp_path, ragged, size):
    split = written(tmp_path / "s", ragged)
    found = []
    for block in streaming.blocks(split, size):
        assert len(block.y) == size
        found += zip(rows(block.x, block.examples), block.y.tolist(), strict=False)
    expected = [
        pair
        for client in range(8)
        if COUNTS[client]
        for pair in zip(
            plain(split.column("x", client)), split.column("y", client).tolist(), strict=True
        )
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("width", [6, 11])
def test_padding_is_no_value(width):
    column = Ragged(
        jnp.array([5, 6, 7, 65534], jnp.uint16), jnp.array([0, 2, 2]), jnp.array([2, 0, 2]), width
    )
    got = jax.jit(lambda column, rows: column[rows])(column, jnp.array([[2, 1], [0, 0]]))
    pad = [65535] * (width - 2)
    assert got.tolist() == [[[7, 65534, *pad], [65535] * width], [[5, 6, *pad], [5, 6, *pad]]]
    assert got.dtype == jnp.uint16


def history(clients, algorithm="fedda-adam", **changes):
    settings = {
        "rounds": 13,
        "cohort": 3,
        "batch": 2,
        "local_work": 2,
        "eval_every": 5,
        "stabilise": 4,
    }
    result = fedda.run(algorithm, MODEL, clients, squared_error, seed=3, **settings | changes)
    return result.params["w"], [row["train_loss"] for row in result.history]


@pytest.mark.parametrize(
    ("ragged", "rounds", "algorithm"),
    [(False, 2, "fedda-adam"), (True, 1, "fedda-adam"), (True, 5, "scaffold")],
)
def test_training_from_disk_equals_training_on_the_device(
    tmp_path, monkeypatch, ragged, rounds, algorithm
):
    monkeypatch.setattr(Feed, "rounds", lambda self, cohort: rounds)
    split = written(tmp_path / "s", ragged)
    params, losses = history(streaming.resident(split), algorithm)
    fed, fed_losses = history(Feed(split), algorithm)
    np.testing.assert_allclose(fed, params, rtol=1e-6)  # the programs have other shapes
    np.testing.assert_allclose(fed_losses, losses, rtol=1e-6)


def test_a_cap_is_the_first_examples(tmp_path):
    split = written(tmp_path / "s", ragged=True)
    by_hand = streaming.resident(written(tmp_path / "t", ragged=True))
    params, _ = history(Feed(split, most=2), local_unit="epochs")
    expected, _ = history(streaming.resident(split, most=2), local_unit="epochs")
    uncapped, _ = history(by_hand, local_unit="epochs")
    np.testing.assert_array_equal(params, expected)
    assert not np.array_equal(params, uncapped)


def test_two_devices_and_two_seeds(tmp_path):
    split = written(tmp_path / "s", ragged=True)
    params, _ = history(streaming.resident(split))
    spread, _ = history(Feed(split), devices=2)
    np.testing.assert_allclose(spread, params, rtol=1e-5)
    common = {"rounds": 4, "cohort": 3, "batch": 2, "local_work": 2, "eval_every": 2}
    grid = partial(
        fedda.run_grid,
        "fedda-sgdm",
        MODEL,
        loss=squared_error,
        grid={"client_lr": [0.1]},
        seeds=[3, 4],
        **common,
    )
    for one, other in zip(
        grid(clients=Feed(split)), grid(clients=streaming.resident(split)), strict=True
    ):
        np.testing.assert_allclose(one.result.params["w"], other.result.params["w"], rtol=1e-5)


def test_few_programs_serve_cohorts_of_all_sizes(tmp_path):
    """Sizes double, and never shrink: at most one program for each doubling."""
    counts = np.random.default_rng(1).integers(1, 200, 60)
    split = written(tmp_path / "s", ragged=True, counts=counts.tolist())
    source = Feed(split)
    shapes = set()
    for number in range(200):
        asked = np.sort(np.random.default_rng(number).choice(60, 3, replace=False))
        shapes.add(jax.tree.map(jnp.shape, source.gather(asked, 3).x))
    assert len(shapes) <= 6


def test_evaluation_in_blocks_is_evaluation_of_the_whole(tmp_path):
    split = written(tmp_path / "s", ragged=True)
    params = MODEL.init(jax.random.key(0))

    def share(outputs, y):  # a ratio of two sums
        return outputs * y, 1 + y

    task = Task(MODEL, squared_error, Plan(2), (share,))
    whole = evaluate(task, False, None)(params, *streaming.union(split))
    parts = evaluate_blocks(task, params, streaming.blocks(split, 7))
    assert parts == pytest.approx({name: float(value) for name, value in whole.items()}, rel=1e-5)
    outputs = np.asarray(MODEL.apply(params, streaming.union(split)[0][jnp.arange(39)]))
    y = streaming.union(split)[1]
    assert parts["share"] == pytest.approx((outputs * y).sum() / (1 + y).sum(), rel=1e-5)
