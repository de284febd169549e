"""A store gives back exactly what was written, and nothing that was not written whole."""

import copy
import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedda.data import store
from fedda.data.store import Rows, Source, Stale
from fedda.errors import InputError


def clients(rng, ids, ragged=False):
    for name in ids:
        count = int(rng.integers(0, 5))
        x = rng.integers(0, 255, (count, 3, 2)).astype(np.uint8)
        y = rng.integers(0, 9, count).astype(np.int64)
        if ragged:
            length = rng.integers(0, 4, count)
            x = Rows(rng.integers(0, 60000, length.sum()).astype(np.uint16), length)
        yield name, {"x": x, "y": y}


def same(got, expected):
    if isinstance(expected, Rows):
        np.testing.assert_array_equal(got.values, expected.values)
        np.testing.assert_array_equal(got.length, expected.length)
    else:
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype


@pytest.mark.parametrize("ragged", [False, True])
def test_round_trip_in_the_order_of_ids_as_text(tmp_path, ragged):
    ids = ["10", "9", "é", "100", "f0000_14", "0"]
    written = list(clients(np.random.default_rng(0), ids, ragged))
    source = Source({"train": written, "test": written[:3]}, texts=lambda: {"words.txt": "a\nb\n"})
    made = store.write(tmp_path / "mine", source, {"path": "here"})
    for opened in (made, store.open_store(tmp_path / "mine")):
        assert opened.text("words.txt") == "a\nb\n"
        assert opened.meta["origin"] == {"path": "here"}
        for name, expected in (("train", written), ("test", written[:3])):
            split = opened.splits[name]
            assert split.clients == sorted(each for each, _ in expected)
            assert split.num_examples == sum(len(own["y"]) for _, own in expected)
            for client, own in expected:
                place = split.clients.index(client)
                for column in "xy":
                    same(split.column(column, place), own[column])
    store.verify(tmp_path / "mine")


@pytest.mark.parametrize("ragged", [False, True])
def test_the_first_examples_of_a_client(tmp_path, ragged):
    rng = np.random.default_rng(1)
    length = np.array([2, 0, 3])
    x = Rows(np.arange(5, dtype=np.uint16), length) if ragged else rng.random((3, 2))
    made = store.write(tmp_path / "s", Source({"train": [("a", {"x": x, "y": length})]}), {})
    expected = Rows(x.values[:2], length[:2]) if ragged else x[:2]
    same(made.splits["train"].column("x", 0, most=2), expected)


def written(tmp_path):
    source = Source({"train": clients(np.random.default_rng(0), "abc")})
    store.write(tmp_path / "mine", source, {})
    return tmp_path / "mine"


def test_writing_again_replaces(tmp_path):
    path = written(tmp_path)
    store.write(path, Source({"train": clients(np.random.default_rng(3), ["z"] * 1 + ["y"])}), {})
    assert store.open_store(path).splits["train"].clients == ["y", "z"]
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_failing_reader_leaves_nothing_and_spares_what_was_there(tmp_path):
    path = written(tmp_path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def failing():
        yield from clients(np.random.default_rng(0), "ab")
        raise InputError("the file ends in the middle")

    for place in (path, tmp_path / "other"):
        with pytest.raises(InputError, match="in the middle"):
            store.write(place, Source({"train": failing()}), {})
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_truncated_file_is_not_opened(tmp_path):
    path = written(tmp_path)
    file = path / "train" / "x.values"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Stale, match=r"x\.values has .* bytes instead of"):
        store.open_store(path)


@pytest.mark.parametrize("name", ["train/start", "train/y.values", "meta.json"])
def test_a_missing_file_is_not_opened(tmp_path, name):
    path = written(tmp_path)
    (path / name).unlink()
    with pytest.raises(Stale, match=name.split("/")[-1]):
        store.open_store(path)


def test_another_version_is_not_opened(tmp_path):
    path = written(tmp_path)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"version": store.VERSION + 1}))
    with pytest.raises(Stale, match="another version"):
        store.open_store(path)
    (path / "meta.json").write_text(json.dumps({"version": store.VERSION}))
    with pytest.raises(Stale, match=r"is damaged .KeyError"):
        store.open_store(path)
    (path / "meta.json").write_text("{")
    with pytest.raises(Stale, match=r"is damaged .JSONDecodeError"):
        store.open_store(path)


def test_one_changed_byte_is_found(tmp_path):
    path = written(tmp_path)
    file = path / "train" / "x.values"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    store.open_store(path)  # reads no data
    with pytest.raises(Stale, match=r"x\.values has sha256"):
        store.verify(path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([("a", {"x": np.zeros((2, 3)), "y": np.zeros(1)})], "client a has 1 examples"),
        ([("a", {"x": np.zeros((0, 3)), "y": np.zeros(0)})], "holds no examples"),
        ([], "holds no examples"),
        (
            [(name, {"x": np.zeros((1, n)), "y": np.zeros(1)}) for name, n in (("a", 3), ("b", 4))],
            "client b has 1 examples of the form",
        ),
        ([("a", {"x": np.zeros((1, 3)), "y": np.zeros(1)})] * 2, "'a' occurs twice"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, wrong, words):
    with pytest.raises(InputError, match=words):
        store.write(tmp_path / "s", Source({"train": wrong}), {})
    assert not list(tmp_path.iterdir())


def test_a_client_id_is_bounded(tmp_path):
    """All ids of a split are stored as long as the longest: a long one would cost it many times."""
    one = {"x": np.zeros((1, 2)), "y": np.zeros(1)}
    longest = "é" * (store.LONGEST_ID // 2)
    made = store.write(tmp_path / "s", Source({"train": [(longest, one)]}), {})
    assert made.splits["train"].clients == [longest]
    short = "the client id 'aaa.* must be UTF-8 text of 1 to 1,024 bytes"
    with pytest.raises(InputError, match=short):
        store.write(tmp_path / "t", Source({"train": [("a" * 1025, one)]}), {})
    with pytest.raises(InputError, match=r"the client id 'a\\udcff' must be UTF-8"):
        store.write(tmp_path / "t", Source({"train": [("a\udcff", one)]}), {})
    for client in ("", "a\0b"):
        with pytest.raises(InputError, match="text of 1 to 1,024 bytes without the character NUL"):
            store.write(tmp_path / "t", Source({"train": [(client, one)]}), {})


# ------------------------------------------------------------------ metadata that was tampered with


def values_in(tree, path=()):
    """The paths to all values in nested dictionaries and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from values_in(value, (*path, key))


def with_value(tree, path, value):
    tree = copy.deepcopy(tree)
    part = tree
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return tree


WRONG = [None, [], {}, [1], {"a": 1}, "a", "O", "i4,f4", -1, 1.5, 10**30, "../x", "\0", [10**30]]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.filterwarnings("ignore:Data type alias 'a'")
def test_metadata_of_wrong_types_are_stale_or_harmless(tmp_path, ragged):
    """Every value in turn becomes each of many others."""
    path = tmp_path / "mine"
    source = Source({"train": clients(np.random.default_rng(0), "abc", ragged)})
    store.write(path, source, {"path": "here", "options": {"client": "c", "features": ["f"]}})
    meta = json.loads((path / "meta.json").read_text())
    stale = 0
    for place in values_in(meta):
        for value in WRONG:
            (path / "meta.json").write_text(json.dumps(with_value(meta, place, value)))
            try:
                opened = store.open_store(path)
                store.verify(path)
            except Stale:
                stale += 1
                continue
            # An empty shape may be right, and anything is true or false.
            harmless = place[0] in ("origin", "words") or {"shape", "ragged"} & set(place)
            assert harmless, (place, value)
            assert isinstance(opened.meta["words"], str)
            assert isinstance(opened.meta["origin"], dict)
    assert stale > 100
    (path / "meta.json").write_text("[" * 10**5)
    with pytest.raises(Stale, match=r"is damaged .RecursionError"):
        store.open_store(path)


# ------------------------------------------------------------------------------ killed replacements

# Replaces a store in one process after another. The k-th is killed before the k-th operation on
# the names of files and folders, of which Python tells by audit events, and before the exchange.
KILLED = """
import os, sys, types
from pathlib import Path

package = types.ModuleType("fedda")  # which would import JAX
package.__path__ = [sys.argv[1]]
sys.modules["fedda"] = package
from fedda.data import store
import numpy as np

path = Path(sys.argv[2]) / "mine"
def source(value):
    one = np.full(1, value)
    return store.Source({"train": [("a", {"x": one, "y": one})]})

def kill_at(number):
    left = number
    def event(name, arguments):
        nonlocal left
        if name in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "ctypes.dlsym"):
            left -= 1
            if left < 0:
                os._exit(9)
    sys.addaudithook(event)

store.write(path, source(0), {})
new = number = 0
while True:
    child = os.fork()
    if not child:
        kill_at(number)
        store.write(path, source(number + 1), {})
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = int(store.open_store(path).splits["train"].column("x", 0)[0])
    store.verify(path)
    assert found in (new, number + 1), (found, number)
    new, number = found, number + 1
    if ended == 0:
        break
left = [each.name for each in path.parent.iterdir()]
assert left == ["mine"], left
assert found == number
print(number)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="two folders are exchanged at once on Linux")
def test_a_replacement_killed_at_any_step_leaves_the_old_or_the_new_store(tmp_path):
    package = Path(store.__file__).parents[1]
    command = [sys.executable, "-c", KILLED, package, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 8, "as many steps"


def test_a_replacement_where_folders_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_exchange", lambda one, other: False)
    written(tmp_path)
    store.verify(written(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_folders_of_dead_imports_are_removed_and_those_of_live_ones_are_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    prefix = f"{store.WORK}{platform.node()}-"
    (tmp_path / f"{prefix}{dead.pid}-12345678" / "unpacked").mkdir(parents=True)
    elsewhere = f"{store.WORK}another.machine-{dead.pid}-12345678"
    (tmp_path / elsewhere).mkdir()
    (tmp_path / ".config-of-another-program").mkdir()
    with store.work_folder(tmp_path / "first") as live:
        written(tmp_path)
        assert live.exists()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"mine", ".config-of-another-program", elsewhere}
