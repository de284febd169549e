"""The preparation computes what scikit-learn and pandas compute, and nothing from test examples."""

import datetime
import re
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedda
from fedda.errors import InputError
from helpers import hospitals

TABLE = pd.DataFrame(hospitals.columns(rows=800)).assign(row=range(800))


def made(table=TABLE, **options):
    options = {"client": "hospital", "label": "outcome", "ignore": ["row"], **options}
    return fedda.federation(table, **options)


def split_rows(split):
    """The rows of the table that are in a split, in the order of the clients."""
    found = made(features=["row"], ignore=(), prepare=False)
    return np.concatenate([x[:, 0] for x, _ in getattr(found, split)]).astype(int)


def stacked(pairs):
    return np.concatenate([x for x, _ in pairs])


def column(found, name):
    return stacked(found.test)[:, found.features.index(name)]


def test_numbers_are_imputed_and_scaled_as_by_scikit_learn():
    found, names = made(), list(hospitals.NUMBERS)
    train, test = (TABLE.iloc[split_rows(split)][names] for split in ("clients", "test"))
    oracle = make_pipeline(SimpleImputer(strategy="median"), StandardScaler()).fit(train)
    places = [found.features.index(name) for name in names]
    for split, rows in (("clients", train), ("test", test)):
        ours = stacked(getattr(found, split))[:, places]
        np.testing.assert_allclose(ours, oracle.transform(rows), rtol=1e-5, atol=1e-6)


def test_missing_numbers_are_marked_as_by_scikit_learn():
    found, names = made(), list(hospitals.NUMBERS)
    train, test = (TABLE.iloc[split_rows(split)][names] for split in ("clients", "test"))
    oracle = MissingIndicator(error_on_new=False).fit(train)
    marked = [names[place] for place in oracle.features_]
    assert marked == ["pressure", "creatinine"]
    ours = np.stack([column(found, f"{name} missing") for name in marked], axis=1)
    np.testing.assert_array_equal(ours, oracle.transform(test))


def test_text_is_one_hot_as_by_scikit_learn_and_pandas():
    found = made()
    train, test = (TABLE.iloc[split_rows(split)] for split in ("clients", "test"))
    oracle = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(train[["sex"]])
    ours = np.stack([column(found, f"sex={sex}") for sex in "FM"], axis=1)
    np.testing.assert_array_equal(ours, oracle.transform(test[["sex"]]))
    dummies = pd.get_dummies(test.ward, prefix="ward", prefix_sep="=", dummy_na=True)
    for ward in hospitals.WARDS:
        np.testing.assert_array_equal(column(found, f"ward={ward}"), dummies[f"ward={ward}"])
    np.testing.assert_array_equal(column(found, "ward missing"), dummies["ward=nan"])


def test_the_statistics_are_those_of_the_training_examples_alone():
    test = split_rows("test")
    changed = TABLE.copy()
    changed.loc[test, "age"] *= 1000
    changed.loc[test, "ward"] = "unheard of"
    assert made(changed).preparation == made().preparation
    ours = stacked(made(changed).test)
    wards = [made().features.index(f"ward={ward}") for ward in hospitals.WARDS]
    assert not ours[:, wards].any()  # an unknown category is all zeros


def rows_of(kind):
    table = TABLE.iloc[:40].drop(columns=["hospital", "outcome"])
    if kind == "pandas":
        return table
    if kind == "nullable pandas":
        return table.convert_dtypes()
    if kind == "polars":
        return pl.from_pandas(table)
    plain = table.astype(object).where(table.notna(), None)
    if kind == "columns":
        return {name: plain[name].tolist() for name in plain}
    if kind == "dictionaries":
        return plain.to_dict("records")
    names = [column.name for column in made().preparation.columns]
    return plain[names].to_numpy() if kind == "array of rows" else plain[names].values.tolist()


@pytest.mark.parametrize(
    "kind",
    ["nullable pandas", "polars", "columns", "dictionaries", "lists of values", "array of rows"],
)
def test_new_rows_may_come_in_any_form(kind):
    preparation = made().preparation
    expected = preparation.apply(rows_of("pandas"))
    assert (expected.shape, expected.dtype) == ((40, 13), np.float32)
    np.testing.assert_array_equal(preparation.apply(rows_of(kind)), expected)


def test_new_rows_give_what_the_federation_has():
    found = made()
    expected = found.preparation.apply(TABLE.iloc[split_rows("test")])
    np.testing.assert_array_equal(stacked(found.test), expected)


def test_no_rows_give_no_examples():
    assert made().preparation.apply([]).shape == (0, 13)


def test_one_row_may_be_a_dictionary_of_values():
    preparation = made().preparation
    first = TABLE.iloc[0].to_dict()
    np.testing.assert_array_equal(preparation.apply(first), preparation.apply(TABLE.iloc[:1]))


def test_json_brings_the_preparation_back():
    preparation = made().preparation
    again = fedda.Preparation.from_json(preparation.to_json())
    assert again == preparation
    np.testing.assert_array_equal(again.apply(TABLE[:9]), preparation.apply(TABLE[:9]))


def small(**columns):
    size = len(next(iter(columns.values())))
    label = np.arange(size) % 2
    table = {"client": np.arange(size) % 2, "label": label, **columns}
    return fedda.federation(pd.DataFrame(table), test=None)


def test_constant_columns_are_dropped_with_a_note():
    found = small(same=[3, 3, 3, 3], a=[1, 2, 3, 4], none=[None] * 4, text=["x"] * 4)
    assert found.features == ["a"]
    assert repr(found.preparation).splitlines() == [
        "Preparation of 4 columns, 1 features",
        "  same: constant, dropped",
        "  a: (value - 2.5) / 1.118, missing values become 2.5",
        "  none: constant, dropped",
        "  text: constant, dropped",
    ]


def test_a_constant_column_with_missing_values_says_where_they_are():
    found = small(a=[3, None, 3, 3], b=["x", "x", "x", None])
    assert found.features == ["a missing", "b missing"]
    assert found.clients[0][0].tolist() == [[0, 0], [0, 0]]
    assert found.clients[1][0].tolist() == [[1, 0], [0, 1]]


def test_a_table_without_a_column_that_varies_is_refused():
    with pytest.raises(InputError, match="all columns of features are constant: a, b"):
        small(a=[3] * 4, b=["x"] * 4)


@pytest.mark.parametrize(
    ("values", "features"),
    [
        ([True, False, True, True], ["c=False", "c=True"]),
        ([True, None, False, True], ["c=False", "c=True", "c missing"]),
        (pd.Categorical([1, 2, 1, 10]), ["c=1", "c=10", "c=2"]),
        (pd.Categorical([1, None, 1, 10]), ["c=1", "c=10", "c missing"]),
        (pd.array(["a", None, "b", "a"], "string"), ["c=a", "c=b", "c missing"]),
        (pd.array([1, None, 2, 3], "Int64"), ["c", "c missing"]),
        ([Decimal("1.5"), Decimal(2), None, Decimal(3)], ["c", "c missing"]),
        (np.array([1, 2, 3, 4], np.float16), ["c"]),
    ],
)
def test_kinds_of_columns(values, features):
    assert small(c=values).features == features


def test_large_numbers_are_standardised_in_double_precision():
    found = small(time=1.7e12 + np.arange(4))
    ours = np.sort(stacked(found.clients)[:, 0])
    np.testing.assert_allclose(ours, (np.arange(4) - 1.5) / np.std(np.arange(4)), rtol=1e-6)


def test_spaces_around_a_text_count_nowhere(tmp_path):
    """A CSV file, a DataFrame and new rows are prepared alike."""
    path = tmp_path / "visits.csv"
    TABLE.assign(ward=" " + TABLE["ward"] + "  ").to_csv(path, index=False)
    of_file, of_table = made(path), made(pd.read_csv(path))
    assert of_file.preparation == of_table.preparation
    np.testing.assert_array_equal(
        of_file.preparation.apply(pd.read_csv(path)), of_file.preparation.apply(TABLE)
    )


def test_text_among_numbers_is_named():
    low = TABLE.assign(age=["<5" if row % 20 == 0 else f"{row}.5" for row in range(len(TABLE))])
    with pytest.raises(InputError, match="'age' holds numbers, but also the text '<5'; expected"):
        made(low)
    with pytest.raises(InputError, match=r"'age' holds numbers as text, such as '0\.5'"):
        made(TABLE.assign(age=[f"{row}.5" for row in range(len(TABLE))]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"age": [1]}, "the new rows lack the columns 'pressure', 'creatinine', "),
        ([[1, 2]], "row 0 (from 0) must have 6 values: age, pressure"),
        ("new.csv", "got str, expected a DataFrame, a dictionary of columns or a list of rows"),
        (TABLE.assign(age="old"), "column 'age' has 'old' in row 0 (from 0), expected numbers"),
        (TABLE.assign(age=np.inf), "column 'age' has inf in row 0 (from 0), expected finite"),
        (TABLE.assign(age=datetime.date(2024, 1, 1)), "column 'age' holds dates or times"),
    ],
)
def test_wrong_new_rows_are_refused(rows, message):
    with pytest.raises(InputError, match=re.escape(message)):
        made().preparation.apply(rows)


def test_columns_of_different_lengths_are_refused():
    rows = {name: TABLE[name][:3] for name in (*hospitals.NUMBERS, "sex", "ward")}
    with pytest.raises(InputError, match=r"the new rows: 'income' has 2 rows, but '.*' has 3"):
        made().preparation.apply(rows | {"income": [1, 2]})
