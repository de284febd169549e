"""A user's own table becomes clients, or is refused by file, column and row."""

import contextlib
import hashlib
import os
import pickle
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fedda.data import store
from fedda.data.readers import table
from fedda.errors import InputError

pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")

# Rows of clients are scattered; there are ints and floats.
CLIENT = ["b", "a", "b", "c", "a", "b", "b", "a", "b", "b"]
LABEL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
HEIGHT = np.arange(10) / 4
WIDTH = np.arange(10, 20)
COLUMNS = {
    "height": HEIGHT,
    "client": CLIENT,
    "label": LABEL,
    "width": WIDTH,
}


def parquet(path, columns=COLUMNS, rows=slice(None), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {name: list(column) for name, column in columns.items()}
    start, stop, _ = rows.indices(len(own["client"]))
    pq.write_table(pa.table(own).slice(start, stop - start), path, **options)
    return path


def npz(path, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def read(path, name="mine", **options):
    return table.read(path, name, **{"prepare": False, **options})


def clients(path, split="train", **options):
    return dict(read(path, "mine", **options).splits[split])


def whole(path, **options):
    """Both splits together, as {client: rows of (label, features)} in order of the labels."""
    together = {}
    for split in ("train", "test"):
        for name, own in clients(path, split, **options).items():
            rows = zip(own["y"].tolist(), own["x"].tolist(), strict=True)
            together.setdefault(name, []).extend(rows)
    return {name: sorted(rows) for name, rows in together.items()}


def expected(features):
    together = {}
    for owner, label, row in zip(CLIENT, LABEL, features, strict=True):
        together.setdefault(owner, []).append((label, np.asarray(row).tolist()))
    return together


BOTH = np.stack([HEIGHT, WIDTH], 1)


@pytest.mark.parametrize("row_group_size", [None, 3])
@pytest.mark.parametrize(
    ("features", "x", "dtype"),
    [
        ((), BOTH, np.float32),  # all numbers but the client and the label, in file order
        (("width", "height"), BOTH[:, ::-1], np.float32),
        (("width",), BOTH[:, 1:], np.float32),
    ],
)
def test_parquet_file(tmp_path, features, x, dtype, row_group_size):
    path = parquet(tmp_path / "mine.parquet", row_group_size=row_group_size)
    assert table.files(path, "mine")
    assert whole(path, features=features) == expected(x)
    own = clients(path, features=features)["b"]
    assert (own["x"].dtype, own["y"].dtype) == (dtype, np.int32)


def test_rows_of_a_client_keep_their_order(tmp_path):
    parquet(tmp_path / "train" / "1.parquet")
    parquet(tmp_path / "test" / "1.parquet")
    for split in ("train", "test"):
        found = clients(tmp_path, split)
        assert {name: own["y"].tolist() for name, own in found.items()} == {
            "a": [1, 4, 7],
            "b": [0, 2, 5, 6, 8, 9],
            "c": [3],
        }
        np.testing.assert_array_equal(found["a"]["x"], BOTH[[1, 4, 7]])


def test_folder_of_parquet_files(tmp_path):
    parquet(tmp_path / "2.parquet", rows=slice(4, 10))
    parquet(tmp_path / "1.parquet", rows=slice(0, 4))
    parquet(tmp_path / "3.parquet", rows=slice(0, 0))
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".1.parquet.crc").touch()
    (tmp_path / "._1.parquet").write_bytes(b"not of ours")
    assert table.files(tmp_path, "mine")
    assert whole(tmp_path) == expected(BOTH)


@pytest.mark.parametrize("ids", [[7, -3, 7, 10**12], ["7", "-3", "7", "1000000000000"]])
@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_ids_may_be_numbers_or_text(tmp_path, ids, kind):
    if kind == "parquet":
        for split in ("train", "test"):
            parquet(tmp_path / f"{split}.parquet", {"client": ids, "label": [0] * 4, "f": [1] * 4})
    else:
        for split in ("train", "test"):
            npz(tmp_path / f"{split}.npz", client=ids, y=[0] * 4, x=[1] * 4)
    found = clients(tmp_path)
    assert {name: len(own["y"]) for name, own in found.items()} == {
        "7": 2,
        "-3": 1,
        "1000000000000": 1,
    }


def test_categories_and_binary_text(tmp_path):
    columns = {
        "client": pa.array(["x", "y", "x"]).dictionary_encode(),
        "label": pa.array([b"dog", b"cat", b"dog"]),
        "f": pa.array([1, 2, 1]).dictionary_encode(),
    }
    for split in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{split}.parquet")
    found = clients(tmp_path, features=["f"])
    assert found["x"]["y"].tolist() == [1, 1]
    assert found["y"]["x"].tolist() == [[2]]


def images(count):
    return np.arange(count * 6).reshape(count, 2, 3)


LISTS = {
    "lists": pa.array(images(5).tolist(), pa.list_(pa.list_(pa.uint8()))),
    "large lists": pa.array(images(5).tolist(), pa.large_list(pa.large_list(pa.uint8()))),
    "fixed lists": pa.array(images(5).tolist(), pa.list_(pa.list_(pa.uint8(), 3), 2)),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(images(5).astype(np.uint8)),
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("row_group_size", [None, 2])
def test_one_column_of_nested_lists(tmp_path, kind, row_group_size):
    columns = {"client": ["a", "b", "a", "a", "b"], "label": [0, 1, 0, 1, 0], "image": LISTS[kind]}
    for split in ("train", "test"):
        pq.write_table(
            pa.table(columns), tmp_path / f"{split}.parquet", row_group_size=row_group_size
        )
    found = clients(tmp_path, features=["image"])
    np.testing.assert_array_equal(found["a"]["x"], images(5)[[0, 2, 3]])
    np.testing.assert_array_equal(found["b"]["x"], images(5)[[1, 4]])
    assert found["a"]["x"].dtype == np.uint8
    np.testing.assert_array_equal(clients(tmp_path)["a"]["x"], found["a"]["x"])


def test_a_pandas_index_is_no_feature(tmp_path):
    parquet(tmp_path / "mine.parquet", {**COLUMNS, "__index_level_0__": LABEL})
    assert clients(tmp_path / "mine.parquet")["b"]["x"].shape[1] == 2


def test_npz_file(tmp_path):
    x = np.random.default_rng(0).random((10, 2, 3))
    path = npz(tmp_path / "mine.npz", x=x, y=LABEL, client=CLIENT)
    assert table.files(path, "mine")
    assert whole(path) == expected(x.astype(np.float32))
    renamed = npz(tmp_path / "other.npz", images=x, digit=LABEL, writer=np.array(CLIENT, "S1"))
    assert whole(renamed, client="writer", label="digit", features=["images"]) == whole(path)


def test_npz_columns_of_single_numbers_are_stacked(tmp_path):
    path = npz(tmp_path / "mine.npz", h=HEIGHT, w=WIDTH, y=LABEL, client=CLIENT)
    assert whole(path, features=["w", "h"]) == expected(BOTH[:, ::-1])


def test_one_npz_file_for_each_client(tmp_path):
    x = np.random.default_rng(0).random((10, 4)).astype(np.float32)
    for split in ("train", "test"):
        npz(tmp_path / split / "anna.npz", x=x[:3], y=["up", "down", "up"])
        npz(tmp_path / split / "7.npz", x=x[3:7], y=["left", "up", "up", "down"])
        npz(tmp_path / split / "nobody.npz", x=x[:0], y=np.array([], "U4"))
    npz(tmp_path / "test" / "only here.npz", x=x[:2], y=["side", "up"])
    source = read(tmp_path, "mine")
    assert "One client for each file" in source.description
    train, test = (dict(source.splits[split]) for split in ("train", "test"))
    assert (train.keys(), test.keys()) == ({"anna", "7"}, {"anna", "7", "only here"})
    # The classes of both splits together: down, left, side, up.
    assert source.texts() == {"labels.txt": "down\nleft\nside\nup"}
    assert train["7"]["y"].tolist() == [1, 3, 3, 0]
    assert test["only here"]["y"].tolist() == [2, 3]
    np.testing.assert_array_equal(train["7"]["x"], x[3:7])
    whole_store = store.write(tmp_path / "store", read(tmp_path, "mine"), {})
    assert whole_store.text("labels.txt") == "down\nleft\nside\nup"
    assert whole_store.splits["train"].clients == ["7", "anna"]


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (np.array([0.5, 1.0]), np.float32),
        (np.array([0.5, 1.0], ">f8"), np.float32),
        (np.array([0.5, 1.0], np.longdouble), np.float32),
        (np.array([0.5, 1.0], np.float32), np.float32),
        (np.array([0.5, 1.0], np.float16), np.float16),
        (np.array([3, -1]), np.float32),
        (np.array([2**40, 3], np.uint64), np.float32),
        (np.array([3, -1], ">i4"), np.int32),
        (np.array([3, 2**31], np.uint32), np.uint32),
        (np.array([3, 1], ">u2"), np.uint16),
        (np.array([3, 255], np.uint8), np.uint8),
        (np.array([True, False]), np.float32),
    ],
)
def test_dtypes_of_features(tmp_path, values, stored):
    for split in ("train", "test"):
        npz(tmp_path / f"{split}.npz", x=values[:, None], y=[0, 1], client=["a", "a"])
        npz(tmp_path / "each" / split / "a.npz", x=values[:, None], y=[0, 1])
    for path in (tmp_path, tmp_path / "each"):
        x = clients(path)["a"]["x"]
        assert x.dtype == stored
        assert x.dtype.isnative
        np.testing.assert_array_equal(x[:, 0], values)


@pytest.mark.parametrize("dtypes", [("i4", "u4"), ("i4", "f4"), ("u1", "?"), ("i8", "i1")])
def test_no_feature_wraps_on_the_device(tmp_path, dtypes):
    """Such as milliseconds since 1970, or what is promoted where columns are stacked."""
    first, second = (np.array([1, 0], dtype) for dtype in dtypes)
    first[1] = {"i4": -(2**31), "u1": 255, "i8": 1_700_000_000_171}[dtypes[0]]
    for split in ("train", "test"):
        npz(tmp_path / split / "a.npz", a=first, b=second, y=[0, 1])
    x = clients(tmp_path, features=["a", "b"])["a"]["x"]
    assert x.dtype == np.float32
    np.testing.assert_array_equal(jnp.asarray(x), x)
    np.testing.assert_allclose(x[:, 0], first.astype(float), rtol=1e-7)


@pytest.mark.parametrize("kind", ["npz", "parquet", "each"])
def test_several_numbers_to_predict(tmp_path, kind):
    targets = np.arange(8.0).reshape(4, 2) / 4
    for split in ("train", "test"):
        if kind == "parquet":
            columns = {"client": list("abab"), "label": targets.tolist(), "f": range(4)}
            parquet(tmp_path / f"{split}.parquet", columns)
        elif kind == "npz":
            npz(tmp_path / f"{split}.npz", x=range(4), y=targets, client=list("abab"))
        else:
            for place, name in enumerate("ab"):
                npz(tmp_path / split / f"{name}.npz", x=range(2), y=targets[place::2])
    made = store.write(tmp_path / "store", read(tmp_path, "mine"), {})
    for place, rows in enumerate((slice(0, None, 2), slice(1, None, 2))):
        y = made.splits["train"].column("y", place)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, targets[rows])


@pytest.mark.parametrize("kind", ["grouped", "each"])
def test_as_many_numbers_to_predict_everywhere(tmp_path, kind):
    for numbers in (2, 3):
        arrays = {"x": range(4), "y": np.ones((4, numbers))}
        own = {"client": list("abab")} if kind == "grouped" else {}
        npz(tmp_path / f"{numbers}.npz", **arrays, **own)
    words = r"3\.npz: 'y' has examples of the shape \(3,\), but those of .*2\.npz have \(2,\)"
    with pytest.raises(InputError, match=words):
        read(tmp_path, "mine")


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (np.array([3, 0], np.int64), np.array([1, 0], np.int32)),
        (np.array([3, 2**63 - 1], np.uint64), np.array([0, 1], np.int32)),
        (np.array([True, False]), np.array([1, 0], np.int32)),
        (np.array([0.5, -1.0]), np.array([[0.5], [-1.0]], np.float32)),
        (np.array([0.5, 2.0], np.float16), np.array([[0.5], [2.0]], np.float32)),
        (np.array(["é", "b"]), np.array([1, 0], np.int32)),
    ],
)
def test_kinds_of_labels(tmp_path, values, stored):
    for split in ("train", "test"):
        npz(tmp_path / f"{split}.npz", x=[1, 2], y=values, client=["a", "a"])
        columns = {"client": ["a", "a"], "label": values.tolist(), "f": [1, 2]}
        parquet(tmp_path / "p" / f"{split}.parquet", columns)
    for path in (tmp_path, tmp_path / "p"):
        y = clients(path)["a"]["y"]
        np.testing.assert_array_equal(y, stored)
        assert y.dtype == stored.dtype


def fifth(name, count):
    """The rows that are held out, from the rule in words."""
    ranked = sorted((hashlib.sha256(f"0:{name}:{i}".encode()).hexdigest(), i) for i in range(count))
    return sorted(i for _, i in ranked[: round(count / 5)])


def test_a_fifth_is_held_out_where_there_is_no_test_split(tmp_path):
    sizes = {"a": 1, "b": 2, "c": 3, "d": 7, "e": 8, "f": 1000}
    owner = np.repeat(list(sizes), list(sizes.values()))
    row = np.concatenate([np.arange(size) for size in sizes.values()])
    shuffled = np.random.default_rng(0).permutation(len(row))
    shuffled = shuffled[np.argsort(row[shuffled], kind="stable")]  # clients mixed, rows in order
    path = npz(
        tmp_path / "train" / "mine.npz", x=row[shuffled], y=row[shuffled], client=owner[shuffled]
    )
    assert "held out" in read(path, "mine", target="classes").description
    for place in (path, tmp_path):
        train, test = (clients(place, split, target="classes") for split in ("train", "test"))
        assert train.keys() == set(sizes)
        assert test.keys() == {"c", "d", "e", "f"}  # a fifth of 1 or 2 is nearest to none
        for name, own in test.items():
            held = fifth(name, sizes[name])
            assert len(held) == {"c": 1, "d": 1, "e": 2, "f": 200}[name]
            assert own["y"].tolist() == held
            kept = [i for i in range(sizes[name]) if i not in held]
            assert train[name]["y"].tolist() == kept
            assert train[name]["x"][:, 0].tolist() == kept


def test_nothing_is_held_out_where_there_is_a_test_split(tmp_path):
    parquet(tmp_path / "train" / "a.parquet")
    parquet(tmp_path / "test" / "a.parquet", rows=slice(0, 2))
    source = read(tmp_path, "mine")
    assert "held out" not in source.description
    assert {name: len(own["y"]) for name, own in source.splits["train"]} == {"a": 3, "b": 6, "c": 1}
    assert {name: len(own["y"]) for name, own in source.splits["test"]} == {"a": 1, "b": 1}


def test_too_little_to_hold_out(tmp_path):
    path = npz(tmp_path / "mine.npz", x=[1, 2], y=[0, 1], client=["a", "b"])
    with pytest.raises(InputError, match="no client has three examples"):
        clients(path, "test")


def test_other_files_are_not_found(tmp_path):
    assert not table.files(tmp_path, "mine")
    assert not table.files(tmp_path / "nowhere", "mine")
    (tmp_path / "a.txt").touch()
    assert not table.files(tmp_path, "mine")
    assert not table.files(tmp_path / "a.txt", "mine")
    npz(tmp_path / "test" / "a.npz", x=[1], y=[1])
    with pytest.raises(InputError, match="holds no table to train on"):
        read(tmp_path, "mine")
    npz(tmp_path / "train" / "a.npz", x=[1], y=[1])
    parquet(tmp_path / "train" / "b.parquet")
    with pytest.raises(InputError, match=re.escape("both .npz and .parquet files")):
        read(tmp_path, "mine")


TEN = {"x": np.zeros((10, 2)), "y": LABEL, "client": CLIENT}


def at(value, row, dtype=float):
    column = np.zeros((10, 2), dtype)
    column[row, 1] = value
    return column


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": at(np.nan, 7)}, "column 'x' has nan in .*, row 7"),
        ({"x": at(np.inf, 3)}, "column 'x' has inf in .*, row 3"),
        ({"x": at(1e39, 4)}, "column 'x' has inf in .*, row 4"),  # too large for float32
        ({"x": np.zeros((10, 2), complex)}, "column 'x' holds complex128 in .*, expected numbers"),
        ({"x": np.array([["a"]] * 10)}, "column 'x' has <U1 of the shape .*expected numbers"),
        ({"x": np.zeros(10, "M8[s]")}, "column 'x' holds dates or times"),
        ({"x": np.zeros((10, 0))}, r"column 'x' has the shape \(10, 0\)"),
        ({"x": np.zeros((9, 2))}, "'x' has 9 rows, but 'client' has 10"),
        ({"x": np.float64(1)}, "'x' has 1 rows, but 'client' has 10"),
        ({"y": LABEL[:9]}, "'y' has 9 rows, but 'client' has 10"),
        ({"y": np.zeros((10, 2), int)}, r"'y' holds int64 of the shape \(10, 2\).* label"),
        ({"y": np.zeros((10, 2, 2))}, r"'y' holds float64 of the shape \(10, 2, 2\)"),
        ({"y": np.zeros((10, 0))}, r"'y' has the shape \(10, 0\)"),
        ({"y": at(np.inf, 6)}, "column 'y' has inf in .*, row 6"),
        ({"y": at(np.nan, 5)[:, 1]}, "column 'y' has no value in .*, row 5"),
        ({"client": np.arange(10) / 2}, "client column 'client' holds float64.* client"),
        ({"client": np.array([b"\xff"] * 10)}, r"column 'client' has '\\udcff' in .*, row 0"),
        ({"client": np.array(["a"] * 9 + ["\ud800"])}, "column 'client' has .* in .*, row 9"),
    ],
)
def test_wrong_arrays(tmp_path, changed, message):
    path = npz(tmp_path / "mine.npz", **{**TEN, **changed})
    with pytest.raises(InputError, match=message) as caught:
        read(path, "mine")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("label", ["a\nb", "a\r", "a\x85b", "a\u2028b", "a\x0bb", "a\x1eb", ""])
def test_a_label_that_is_not_a_line_is_refused(tmp_path, label):
    """What reads labels.txt splits it where Python ends a line."""
    path = npz(tmp_path / "mine.npz", **{**TEN, "y": ["ok"] * 9 + [label]})
    with pytest.raises(InputError, match=re.escape(f"the label {label!r} is not one line")):
        read(path, "mine")


def nulls(row, values):
    return [None if i == row else value for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("changed", "features", "message"),
    [
        ({"height": nulls(6, HEIGHT)}, (), "column 'height' has nan in .*, row 6"),
        ({"client": nulls(1, CLIENT)}, (), "column 'client' has no value in .*, row 1"),
        ({"label": nulls(9, LABEL)}, (), "column 'label' has no value in .*, row 9"),
        ({"height": at(np.nan, 5)[:, 1]}, (), "column 'height' has nan in .*, row 5"),
        ({"note": list("abcdefghij")}, ["note"], "column 'note' holds 'a' in .*, row 0"),
        ({}, ["height", "heigth"], "unknown column 'heigth'. Did you mean height"),
        ({}, ["label"], "a column is named twice: client, label, label"),
        (
            {"l": [[1, 2]] * 8 + [[1]] + [[1, 2]]},
            ["l"],
            "column 'l' has a list of another length in row 8",
        ),
        (
            {"l": [[1, 2]] * 5 + [[1]] * 5},
            ["l"],
            "column 'l' has a list of another length in row 5",
        ),
        (
            {"l": [[[1], [2]]] * 7 + [[[1], [2, 3]]] * 3},
            ["l"],
            "column 'l' has a list of another length in row 7",
        ),
        ({"l": [[1, 2]] * 7 + [[1, None]] * 3}, ["l"], "column 'l' has a missing value in row 7"),
        ({"l": [[1, 2]] * 7 + [None] * 3}, ["l"], "column 'l' has a missing value in row 7"),
        ({"l": [[1, np.nan]] * 10}, ["l"], "column 'l' has nan in .*, row 0"),
        ({"l": [["a"]] * 10}, ["l"], "column 'l'"),
        ({"l": [[]] * 10}, ["l"], "column 'l'"),
        ({"l": [{"a": 1}] * 10}, ["l"], "column 'l' holds {'a': 1} in .*, row 0"),
        ({"l": [[1, 2]] * 10}, ["l", "height"], "got both kinds: l, height"),
        ({"client": HEIGHT}, (), "client column 'client' holds float64"),
        ({"label": [{"a": 1}] * 10}, (), "column 'label' holds {'a': 1} in .*, row 0"),
    ],
)
@pytest.mark.parametrize("row_group_size", [None, 1, 5])
def test_wrong_columns(tmp_path, changed, features, message, row_group_size):
    path = parquet(tmp_path / "mine.parquet", {**COLUMNS, **changed}, row_group_size=row_group_size)
    with pytest.raises(InputError, match=message) as caught:
        read(path, "mine", features=features)
    assert "twice" in message or "kinds" in message or str(path) in str(caught.value)


def test_two_columns_of_one_name(tmp_path):
    arrays = [pa.array(CLIENT), pa.array(LABEL), pa.array(HEIGHT), pa.array(HEIGHT)]
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.Table.from_arrays(arrays, names=["client", "label", "f", "f"]), path)
    with pytest.raises(InputError, match="more than one column 'f'"):
        read(path, "mine", features=["f"])


def test_the_file_is_named_in_a_folder_of_several(tmp_path):
    parquet(tmp_path / "1.parquet", rows=slice(0, 5))
    bad = parquet(tmp_path / "2.parquet", {**COLUMNS, "height": nulls(6, HEIGHT)}, slice(5, 10))
    with pytest.raises(InputError, match=re.escape(f"'height' has nan in {bad}, row 1 (from 0)")):
        read(tmp_path, "mine")
    parquet(bad, {**COLUMNS, "label": list("abcdefghij")}, slice(5, 10))
    with pytest.raises(
        InputError, match=r"holds 0 in .*1\.par.*, row 0 .* 'f' in .*2\.par.*, row 0"
    ):
        read(tmp_path, "mine")


def test_train_and_test_must_have_one_form(tmp_path):
    npz(tmp_path / "train.npz", **TEN)
    npz(tmp_path / "test.npz", **{**TEN, "x": np.zeros((10, 3))})
    with pytest.raises(InputError, match=r"test\.npz: 'x' has examples of the shape \(3,\)"):
        store.write(tmp_path / "store", read(tmp_path, "mine"), {})
    assert not (tmp_path / "store").exists()


def test_files_of_clients_must_agree(tmp_path):
    npz(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[0, 1, 2])
    npz(tmp_path / "b.npz", x=np.zeros((3, 4)), y=[0, 1, 2])
    with pytest.raises(InputError, match=r"b\.npz: 'x' has examples of the shape \(4,\)"):
        clients(tmp_path)
    npz(tmp_path / "b.npz", x=np.zeros((3, 2)), y=[0, 1, 2], client=["c", "c", "d"])
    with pytest.raises(
        InputError, match=r"b\.npz has a column 'client', but the first file has none"
    ):
        clients(tmp_path)
    npz(tmp_path / "b.npz", x=np.zeros((2, 2)), y=[0, 1, 2])
    with pytest.raises(InputError, match=r"b\.npz: 'x' has 2 rows, but 'y' has 3"):
        clients(tmp_path)


def test_a_file_whose_name_is_not_utf8_is_no_client(tmp_path):
    """Its name would be the client's id."""
    for name in (b"anna", b"caf\xe9"):
        npz(tmp_path / os.fsdecode(name + b".npz"), x=np.eye(5), y=np.arange(5) % 2)
    with pytest.raises(InputError, match=r"'client' has 'caf\\udce9' in .* in UTF-8"):
        store.write(tmp_path / "store", read(tmp_path, "mine"), {})


def test_columns_of_booleans_are_zeros_and_ones(tmp_path):
    flags = np.arange(10) % 3 == 0
    path = parquet(tmp_path / "mine.parquet", COLUMNS | {"height": flags})
    both = np.stack([flags, WIDTH], axis=1).astype(np.float32)
    assert whole(path) == expected(both)


def test_a_misspelt_client_is_not_taken_for_files_of_clients(tmp_path):
    npz(tmp_path / "a.npz", writer=CLIENT, **{key: TEN[key] for key in "xy"})
    words = r"unknown column 'writr'\. Did you mean writer\?"
    with pytest.raises(InputError, match=words):
        read(tmp_path, "mine", client="writr")
    with pytest.raises(InputError, match="unknown column 'client'"):
        read(tmp_path / "a.npz", "mine")


def test_empty_tables(tmp_path):
    path = parquet(tmp_path / "mine.parquet", rows=slice(0, 0))
    with pytest.raises(InputError, match="there are no rows"):
        read(path, "mine")


class Touch:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_in_an_npz_file_is_not_read(tmp_path):
    marker = tmp_path / "marker"
    objects = np.array([Touch(marker)] * 10, object)
    pickle.loads(pickle.dumps(objects))
    assert marker.exists()  # it would work
    marker.unlink()
    for name in ("x", "y", "client"):
        path = npz(tmp_path / "mine.npz", **{**TEN, name: objects})
        with pytest.raises(InputError, match=r"mine\.npz is damaged .*allow_pickle"):
            read(path, "mine")
    path.write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(InputError, match=r"mine\.npz is damaged or of another format"):
        read(path, "mine")
    np.save(tmp_path / "one.npy", LABEL)
    os.replace(tmp_path / "one.npy", path)
    with pytest.raises(InputError, match=r"mine\.npz is damaged or of another format"):
        read(path, "mine")
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_cut_short_anywhere(tmp_path, kind):
    path = tmp_path / f"mine.{kind}"
    if kind == "parquet":
        parquet(path)
    else:
        npz(path, **TEN)
    data = path.read_bytes()
    for cut in {*range(0, len(data), 37), *range(len(data) - 30, len(data))}:
        path.write_bytes(data[:cut])
        with pytest.raises(InputError, match=path.name):
            read(path, "mine")


def test_a_changed_byte_in_an_npz_file(tmp_path):
    # A zip has a sum for each array: damage to one that is read does not go unseen.
    path = npz(tmp_path / "mine.npz", **TEN)
    good, data = whole(path), path.read_bytes()
    for place in range(0, len(data), 29):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            assert whole(path) == good


def test_without_pyarrow(tmp_path, monkeypatch):
    path = parquet(tmp_path / "mine.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert table.files(path, "mine")
    with pytest.raises(InputError, match=re.escape("pip install 'fedda[parquet]'")):
        read(path, "mine")


def test_many_clients_at_once(tmp_path):
    rng = np.random.default_rng(0)
    owner = rng.integers(0, 5000, 60_000)
    for split in ("train", "test"):
        npz(tmp_path / f"{split}.npz", x=np.arange(60_000), y=owner % 7, client=owner)
    found = clients(tmp_path)
    assert sum(len(own["y"]) for own in found.values()) == 60_000
    for name in list(found)[::500]:
        np.testing.assert_array_equal(found[name]["x"][:, 0], np.flatnonzero(owner == int(name)))
