"""A table becomes a federation: the same one from every kind of source."""

import re
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedda
from fedda.errors import InputError
from helpers import hospitals

TABLE = hospitals.columns(rows=400)


def frame(**changed):
    return pd.DataFrame(TABLE | changed)


def made(source=None, **options):
    source = frame() if source is None else source
    return fedda.federation(source, **{"client": "hospital", "label": "outcome", **options})


def assert_same(one, other):
    assert (one.names, one.classes, one.features) == (other.names, other.classes, other.features)
    assert one.preparation == other.preparation
    for split in ("clients", "test"):
        for own, others in zip(getattr(one, split), getattr(other, split), strict=True):
            np.testing.assert_array_equal(own[0], others[0])
            np.testing.assert_array_equal(own[1], others[1])


def test_pandas_and_polars_give_the_same_federation():
    assert_same(made(frame()), made(pl.DataFrame(TABLE)))


def test_every_row_is_in_the_split_of_its_client_once():
    table = frame(row=range(400))
    found = made(table, features=["row"], prepare=False)
    assert found.names == sorted(set(TABLE["hospital"]))
    for name, train, test in zip(found.names, found.clients, found.test, strict=True):
        own = table[table.hospital == name]
        both = np.concatenate([train[0], test[0]])[:, 0]
        assert sorted(both) == own.row.tolist()
        for x, y in (train, test):
            assert np.all(np.diff(x[:, 0]) > 0)  # in the order of the table
            answers = [found.classes[number] for number in y]
            assert answers == table.outcome[x[:, 0].astype(int)].tolist()


@pytest.mark.parametrize(
    ("share", "counts"),
    [(0.2, [0, 0, 1, 1, 1, 2, 20]), (0.5, [0, 1, 2, 2, 4, 4, 50]), (0.9, [0, 1, 2, 3, 6, 7, 90])],
)
def test_the_test_share_is_the_nearest_number_of_rows_and_leaves_one(share, counts):
    sizes = [1, 2, 3, 4, 7, 8, 100]
    table = {
        "client": np.repeat(list("abcdefg"), sizes),
        "f": range(125),
        "label": [0, 1, 2, 3, 4] * 25,
    }
    found = fedda.federation(pd.DataFrame(table), test=share)
    assert [len(y) for _, y in found.test] == counts
    assert [len(y) for _, y in found.clients] == [n - m for n, m in zip(sizes, counts, strict=True)]


def test_the_choice_of_test_rows_depends_on_the_seed_and_not_on_other_clients():
    table = frame(row=range(400))
    options = {"features": ["row"], "prepare": False}
    rows = [x[:, 0].tolist() for x, _ in made(table, **options).test]
    assert rows == [x[:, 0].tolist() for x, _ in made(table, **options).test]
    assert rows != [x[:, 0].tolist() for x, _ in made(table, seed=1, **options).test]
    without = made(table[table.hospital != "hospital 00"], **options)
    assert rows[1:] == [x[:, 0].tolist() for x, _ in without.test]


@pytest.mark.parametrize("share", [None, 0])
def test_no_test_examples(share):
    found = made(test=share)
    assert sum(len(y) for _, y in found.test) == 0
    assert sum(len(y) for _, y in found.clients) == 400
    model = fedda.models.linear(found.num_features, found.num_classes)
    result = fedda.run("fedavg", model, found, fedda.losses.cross_entropy, rounds=1)
    assert "loss" not in result.history[-1]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["b", "a", "c", "a"], ["a", "b", "c"]),
        ([7, 3, -1, 3], [-1, 3, 7]),
        ([True, False, True, False], [False, True]),
        (pd.Categorical(["x", "y", "x", "y"]), ["x", "y"]),
        (np.array([2, 1, 2, 1], np.uint8), [1, 2]),
    ],
)
def test_labels_that_are_classes(labels, classes):
    table = {"client": list("abab"), "f": [1, 2, 3, 5], "label": labels}
    found = fedda.federation(pd.DataFrame(table), test=None)
    assert found.classes == classes
    for (_, y), own in zip(found.clients, (slice(0, None, 2), slice(1, None, 2)), strict=True):
        assert y.dtype == np.int32
        assert [classes[number] for number in y] == list(labels)[own]


def test_labels_that_are_floats_are_for_regression():
    table = pd.DataFrame({"client": list("abab"), "f": [1, 2, 3, 5], "label": [0.5, 2, 1e3, -1]})
    found = fedda.federation(table, test=None)
    assert (found.classes, found.num_classes) == ([], 0)
    assert (found.clients[1][1].dtype, found.clients[1][1].tolist()) == (np.float32, [[2], [-1]])
    assert fedda.federation(table, test=None, target="classes").classes == [-1, 0.5, 2, 1000]
    assert "regression" in repr(found)


def test_many_whole_numbers_are_classes_or_numbers_as_asked():
    table = pd.DataFrame({"client": [0, 1] * 101, "f": [1, 2] * 101, "label": range(202)})
    with pytest.raises(InputError, match=r"202 different values.* target=\"numbers\""):
        fedda.federation(table)
    assert fedda.federation(table, target="numbers").clients[0][1].shape == (81, 1)
    assert fedda.federation(table, target="classes").num_classes == 202


def test_a_dictionary_of_arrays_is_used_as_it_is():
    rng = np.random.default_rng(0)
    source = {
        name: (rng.normal(size=(n, 2, 3)), [0, 1] * (n // 2)) for name, n in (("z", 4), ("a", 6))
    }
    found = fedda.federation(source, test=None)
    assert (found.names, found.features, found.preparation) == (["z", "a"], [], None)
    assert (found.num_features, found.num_classes) == (6, 2)
    for (x, y), given in zip(found.clients, source.values(), strict=True):
        np.testing.assert_array_equal(x, given[0].astype(np.float32))
        np.testing.assert_array_equal(y, given[1])
    assert fedda.federation({1: ([1, 2], [0, 1]), 2: ([3], [1])}).clients[1][0].shape == (1, 1)


def test_a_dictionary_of_frames_is_prepared_as_one_table():
    table = frame()
    inputs = [name for name in TABLE if name not in ("hospital", "outcome")]
    groups = {name: (own[inputs], own.outcome) for name, own in table.groupby("hospital")}
    assert_same(made(groups), made(table.sort_values("hospital", kind="stable")))


def test_run_takes_a_federation_and_evaluates_on_its_test_examples():
    found = made(frame())
    model = fedda.models.linear(found.num_features, found.num_classes)
    options = {"loss": fedda.losses.cross_entropy, "metrics": [fedda.losses.accuracy], "rounds": 3}
    result = fedda.run("fedavg", model, found, **options)
    x, y = (np.concatenate(arrays) for arrays in zip(*found.test, strict=True))
    expected = fedda.run("fedavg", model, found.clients, test=(x, y), **options)
    assert result.history[-1]["accuracy"] == expected.history[-1]["accuracy"]
    by_name = dict(zip(found.names, found.clients, strict=True))
    again = fedda.run("fedavg", model, by_name, test=(x, y), **options)
    np.testing.assert_array_equal(*(r.history[-1]["loss"] for r in (again, expected)))


def test_a_wrong_client_of_a_dictionary_is_named():
    clients = {"north": (np.ones((2, 1)), [0, 1]), "south": (np.ones((2, 1)), [0])}
    model = fedda.Model(lambda key: jnp.zeros((1, 2)), lambda params, x: x @ params)
    with pytest.raises(InputError, match="client 'south' has 2 rows in x but 1 in y"):
        fedda.run("fedavg", model, clients, fedda.losses.cross_entropy, cohort=1)


def test_repr_has_the_sizes():
    test = sum(round(0.2 * size) for size in Counter(TABLE["hospital"]).values())
    features = 4 + 2 + 4 + 3  # numbers, sexes, wards and marks of missing values
    assert repr(made()) == (
        f"Federation(50 clients, {400 - test} examples to train on, {test} to test on, "
        f"{features} features, 2 classes)"
    )


def with_value(name, row, value):
    return {name: [value if i == row else v for i, v in enumerate(TABLE[name])]}


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"client": "hospitals"}, "unknown column 'hospitals'. Did you mean hospital?"),
        ({}, {"label": "outcom"}, "unknown column 'outcom'. Did you mean outcome?"),
        ({}, {"features": ["agee"]}, "unknown column 'agee'. Did you mean age?"),
        ({}, {"ignore": ["agee"]}, "unknown column 'agee'. Did you mean age?"),
        ({}, {"features": "age"}, "features must be a list of columns, got 'age'. Write [\"age\"]"),
        (
            {},
            {"features": ["age", "outcome"]},
            "a column is named twice: hospital, outcome, age, o",
        ),
        ({}, {"features": ["age", "age"]}, "a column is named twice"),
        ({}, {"ignore": [*hospitals.NUMBERS, *hospitals.TEXTS]}, "has no columns of features"),
        ({}, {"test": 1}, "test must be a share of each client's rows from 0 to below 1, got 1."),
        ({}, {"test": "0.2"}, "test must be a share"),
        ({}, {"seed": -1}, "seed must be a whole number of at least 0, got -1."),
        ({}, {"target": "class"}, "unknown value of target 'class'. Did you mean classes"),
        ({}, {"prepare": False}, "column 'pressure' has nan in the table, row"),
        ({}, {"prepare": False, "features": ["sex"]}, "column 'sex' holds"),
        (
            with_value("hospital", 7, None),
            {},
            "'hospital' has no value in the table, row 7 (from 0)",
        ),
        (with_value("outcome", 9, None), {}, "'outcome' has no value in the table, row 9 (from 0)"),
        (with_value("age", 3, np.inf), {}, "column 'age' has inf in the table, row 3 (from 0)"),
        (with_value("age", 3, "old"), {}, "and 'old' in the table, row 3 (from 0), expected only"),
        ({"hospital": ["a"] * 400}, {}, "there is only one client, 'a'"),
        ({"hospital": np.arange(400) / 7}, {}, "the client column 'hospital' holds float64"),
        ({"on": pd.date_range("2024", periods=400)}, {}, "column 'on' holds dates or times"),
        (
            {"on": ["2024-01-31"] * 399 + ["2024-02-01"]},
            {},
            "'on' holds dates, such as '2024-01-31'",
        ),
        ({"id": [f"p{i}" for i in range(400)]}, {"test": 0}, "text with 400 different values"),
        ({"z": ["1,5"] * 399 + ["2,0"]}, {}, "'z' holds numbers with a comma, such as '1,5'"),
        ({"z": [None] * 400}, {"prepare": False, "features": ["z"]}, "column 'z' holds None in"),
        ({"z": [1j] * 400}, {}, "column 'z' holds complex128"),
    ],
)
def test_a_wrong_table_is_refused(changed, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        made(frame(**changed), **options)


def test_two_columns_of_one_name_are_refused():
    table = pd.concat([frame(), frame()[["age"]]], axis=1)
    with pytest.raises(InputError, match="more than one column 'age'"):
        made(table)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "there are no rows"),
        ({"a": (np.ones((2, 1)), [0, 1])}, "there is only one client, 'a'"),
        ({"a": np.ones((2, 1))}, "client 'a' must be a pair (x, y), got ndarray."),
        ({"a": (np.ones((2, 1)), [0])}, "client 'a': 'x' has 2 rows, but 'y' has 1."),
        (
            {"a": (np.ones((2, 1)), [0, 1]), "b": (np.ones((2, 3)), [0, 1])},
            "client 'b': 'x' has examples of the shape (3,), but those of client 'a' have (1,).",
        ),
        (
            {"a": (np.ones((2, 1)), [0, 1]), "b": (np.full((2, 1), np.nan), [0, 1])},
            "column 'x' has nan in client 'b', row 0 (from 0), expected finite numbers",
        ),
        (pd.DataFrame({"client": [], "label": [], "f": []}), "there are no rows"),
        (7, "got int, expected a pandas or Polars DataFrame"),
    ],
)
def test_a_wrong_source_is_refused(source, message):
    with pytest.raises(InputError, match=re.escape(message)):
        fedda.federation(source)
