"""LEAF's FEMNIST is read exactly from its JSON files, or refused in words."""

import json

import numpy as np
import pytest

from fedda.data import store
from fedda.data.readers import leaf
from fedda.errors import InputError


def writers(seed, counts):
    """Pixels as integers and labels: what LEAF starts from."""
    rng = np.random.default_rng(seed)
    return {
        writer: (rng.integers(0, 256, (count, 784)), rng.integers(0, 62, count))
        for writer, count in counts.items()
    }


def table(own, as_json):
    return {
        "users": list(own),
        "num_samples": [len(y) for _, y in own.values()],
        "user_data": {writer: {"x": as_json(x), "y": y.tolist()} for writer, (x, y) in own.items()},
    }


def divided(x):  # in double precision, as the script does
    return [[pixel / 255 for pixel in row] for row in x.tolist()]


def integers(x):
    return x.tolist()


def halved(x):  # no such pixel is a multiple of 1/255, but for the even ones
    return [[pixel / 510 for pixel in row] for row in x.tolist()]


def save(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def converted(tmp_path):
    return store.write(tmp_path / "store", leaf.read(tmp_path, "emnist"), {})


def assert_holds(split, own, dtype=np.uint8, scale=1):
    assert split.clients == sorted(own)
    for place, writer in enumerate(split.clients):
        x, y = own[writer]
        expected = x.reshape(-1, 28, 28)
        if dtype == np.float32:
            expected = (expected / (255 * scale)).astype(np.float32)
        got = split.column("x", place)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)
        assert split.column("y", place).dtype == np.int32
        np.testing.assert_array_equal(split.column("y", place), y)


@pytest.mark.parametrize("second", [divided, integers])
@pytest.mark.parametrize("first", [divided, integers])
def test_files_of_a_split_are_stored_exactly(tmp_path, first, second):
    a, b = writers(0, {"f10_1": 3, "f2_0": 5}), writers(1, {"f1_2": 1, "none": 0})
    c = writers(2, {"f2_0": 2, "é": 4})
    save(tmp_path / "train" / "all_data_0_niid_0_keep_0_train_9.json", table(a, first))
    save(tmp_path / "train" / "all_data_1_niid_0_keep_0_train_9.json", table(b, second))
    save(tmp_path / "test" / "all_data_0_niid_0_keep_0_test_9.json", table(c, second))
    assert leaf.files(tmp_path, "emnist")
    made = converted(tmp_path)
    assert_holds(made.splits["train"], a | b)
    assert_holds(made.splits["test"], c)


def test_every_pixel_value_that_the_script_writes_is_a_byte(tmp_path):
    every = np.resize(np.arange(256), (1, 784))
    for split in ("train", "test"):
        save(tmp_path / split / "a.json", table({"a": (every, np.array([61]))}, divided))
    split = converted(tmp_path).splits["train"]
    assert_holds(split, {"a": (every, [61])})
    again = split.column("x", 0).astype(np.float32) / np.float32(255)
    assert again.ravel()[:256].tolist() == [float(np.float32(each / 255)) for each in range(256)]


def test_pixels_that_are_no_bytes_stay_floats(tmp_path):
    a, b = writers(0, {"a": 3}), writers(1, {"b": 2})
    save(tmp_path / "train" / "0.json", table(a, halved))
    save(tmp_path / "train" / "1.json", table(b, halved))
    save(tmp_path / "test" / "0.json", table(a, integers))
    made = converted(tmp_path)
    assert_holds(made.splits["train"], a | b, np.float32, scale=2)
    assert_holds(made.splits["test"], a, np.float32)


def test_files_that_disagree_on_their_pixels_are_refused(tmp_path):
    save(tmp_path / "train" / "0.json", table(writers(0, {"a": 3}), divided))
    save(tmp_path / "train" / "1.json", table(writers(0, {"b": 3}), halved))
    save(tmp_path / "test" / "0.json", table(writers(0, {"a": 3}), divided))
    refused(tmp_path, r"client b has 3 examples of the form .*f4.*expected 3 of .*u1.* Correct the")


@pytest.mark.parametrize("folder", [".", "all_data"])
def test_without_a_split_the_last_tenth_of_each_writer_is_for_testing(tmp_path, folder):
    # Number of images -> how many of them are for testing.
    expected = {1: 0, 2: 1, 9: 1, 10: 1, 19: 1, 20: 2, 35: 3}
    own = writers(0, {f"w{count}": count for count in expected})
    names = list(own)
    for number, part in enumerate((names[:4], names[4:])):
        content = table({name: own[name] for name in part}, integers)
        save(tmp_path / folder / f"all_data_{number}.json", content)
    assert leaf.files(tmp_path, "emnist")
    made = converted(tmp_path)
    cut = {name: len(own[name][1]) - expected[len(own[name][1])] for name in names}
    assert_holds(made.splits["train"], {n: (own[n][0][: cut[n]], own[n][1][: cut[n]]) for n in own})
    del own["w1"]  # has nothing for testing
    assert_holds(made.splits["test"], {n: (own[n][0][cut[n] :], own[n][1][cut[n] :]) for n in own})
    assert "last tenth" in made.meta["words"]


def test_one_file_is_open_at_a_time(tmp_path, monkeypatch):
    for name in "abc":
        save(tmp_path / "train" / f"{name}.json", table(writers(0, {name: 1}), divided))
    save(tmp_path / "test" / "a.json", table(writers(0, {"a": 1}), divided))
    read = []
    load = json.load
    monkeypatch.setattr(json, "load", lambda file: read.append(file.name[-6]) or load(file))
    clients = iter(leaf.read(tmp_path, "emnist").splits["train"])
    assert read == ["a"]
    assert [next(clients)[0] for _ in "ab"] == ["a", "b"]
    assert read == ["a", "a", "b"]


def test_what_is_not_leaf_is_not_found(tmp_path):
    assert not leaf.files(tmp_path, "emnist")
    assert not leaf.files(tmp_path / "absent", "emnist")
    save(tmp_path / "train" / "a.json", {})
    assert leaf.files(tmp_path, "emnist")
    assert not leaf.files(tmp_path, "cifar100")
    with pytest.raises(InputError, match="no files for the split 'test'"):
        leaf.read(tmp_path, "emnist")


def refused(tmp_path, words):
    """The message says why, and nothing is written."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=words) as raised:
        converted(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    return str(raised.value)


def setting(*keys, value):
    def damage(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return damage


X = ("user_data", "b", "x")
Y = ("user_data", "b", "y")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content.pop("user_data"), "KeyError: 'user_data'"),
        (setting("user_data", value=["a"]), "TypeError"),
        (setting(*Y, value=[1]), r"'y' is int64 of the shape \(1,\), expected"),
        (setting(*Y, value=[1, 62]), "'y' is 62 in example 1, expected 0 to 61"),
        (setting(*Y, value=[-1, 2]), "'y' is -1 in example 0"),
        (setting(*Y, value=[1.5, 2]), "'y' is float64"),
        (setting(*Y, value=["1", "2"]), "'y' is <U1"),
        (setting(*Y, value=[[1], [2, 3]]), "ValueError"),
        (setting(*Y, value=None), r"'y' is int64 of the shape \(0,\)"),
        (setting("user_data", "b", value={"x": []}), "KeyError: 'y'"),
        (setting(*X, 0, value=[0.5] * 783), "ValueError"),
        (setting(*X, value=[[0.5] * 783] * 2), "cannot reshape"),
        (setting(*X, value=[0.5, 0.5]), "cannot reshape"),
        (setting(*X, value=[[0.5] * 392] * 2), r"'y' is int64 of the shape \(2,\), expected"),
        (setting(*X, value=[["0.5a"] * 784] * 2), "ValueError: could not convert string"),
        (setting(*X, 1, 5, value=None), r"'x' has values outside of 0\.\.1"),
        (setting(*X, 1, 5, value=float("nan")), r"'x' has values outside of 0\.\.1"),
        (setting(*X, 1, 5, value=1e300), "overflow"),
        (setting(*X, 1, 5, value=-0.1), r"'x' has values outside of 0\.\.1"),
        (setting(*X, 1, 5, value=256), "has fractions, but the file has values above 1"),
        (setting(*X, 1, 5, value=1.25), "has fractions, but the file has values above 1"),
        (setting(*X, 1, 5, value=200), "has fractions, but the file has values above 1"),
    ],
)
def test_wrong_files_are_refused(tmp_path, damage, words):
    content = table(writers(0, {"a": 2, "b": 2}), divided)
    save(tmp_path / "test" / "a.json", content)
    damage(content)
    save(tmp_path / "train" / "bad.json", content)
    assert "Download" not in refused(tmp_path, rf"bad\.json.*{words}"), "LEAF's is made by scripts"


def test_a_client_id_that_is_no_text(tmp_path):
    for split in ("train", "test"):
        save(tmp_path / split / "a.json", table(writers(0, {"\ud800": 1}), divided))
    refused(tmp_path, r"id '\\ud800' must be UTF-8")


@pytest.mark.parametrize("bad", ["cut", "latin", "html", "list", "deep"])
def test_what_is_no_json_is_refused(tmp_path, bad):
    content = json.dumps(table(writers(0, {"a": 2}), divided))
    save(tmp_path / "test" / "a.json", json.loads(content))
    (tmp_path / "train").mkdir()
    damaged = {
        "cut": content[: len(content) // 2].encode(),
        "latin": content.replace('"a"', '"\xe9"').encode("latin-1"),
        "html": b"<html>",
        "list": b"[1]",
        "deep": b"[" * 100_000,
    }[bad]
    (tmp_path / "train" / "bad.json").write_bytes(damaged)
    refused(tmp_path, r"bad\.json is damaged or of another format")


def test_a_writer_in_two_files_of_a_split(tmp_path):
    for file in ("train/a", "train/b", "test/a"):
        save(tmp_path / f"{file}.json", table(writers(0, {"a": 2}), divided))
    refused(tmp_path, "'a' occurs twice")
