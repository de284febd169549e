"""TensorFlow Federated's files, in HDF5 and in SQLite, are read exactly or refused in words.

The writers here know nothing of the readers: h5py, sqlite3, and a protocol-buffer encoder made of
struct and the documented wire format.
"""

import os
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from fedda.data import store
from fedda.data.readers import tff_hdf5, tff_sqlite
from fedda.data.readers.tf_example import decode
from fedda.errors import InputError
from helpers import sandboxed

READERS = {"h5": tff_hdf5, "sqlite": tff_sqlite}
PREFIX = {
    "emnist": "fed_emnist",
    "emnist-digits": "fed_emnist_digitsonly",
    "cifar100": "fed_cifar100",
    "stackoverflow": "stackoverflow",
}
SQLITE = {
    "emnist": ("emnist_all.sqlite", {"train": "all_train", "test": "all_test"}),
    "emnist-digits": (
        "emnist_all.sqlite",
        {"train": "digits_only_train", "test": "digits_only_test"},
    ),
    "cifar100": ("cifar100.sqlite", {"train": "train", "test": "test"}),
    "stackoverflow": (
        "stackoverflow.sqlite",
        {"train": "train", "held_out": "heldout", "test": "test"},
    ),
}


# A tf.train.Example, byte by byte.


def varint(number):
    number &= 2**64 - 1  # two's complement
    groups = []
    while True:
        number, low = number >> 7, number & 127
        groups.append(low | (128 if number else 0))
        if not number:
            return bytes(groups)


def sized(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values, packed=True):
    if isinstance(values, list):
        return sized(1, b"".join(sized(1, each) for each in values))
    if values.dtype.kind == "f":
        parts, kind, wire = [struct.pack("<f", each) for each in values], 2, 5
    else:
        parts, kind, wire = [varint(int(each)) for each in values], 3, 0
    if packed:
        return sized(kind, sized(1, b"".join(parts)))
    return sized(kind, b"".join(varint(1 << 3 | wire) + part for part in parts))


def entry(name, value):
    return sized(1, sized(1, name.encode()) + sized(2, value))


def example(features, packed=True):
    return sized(1, b"".join(entry(name, feature(each, packed)) for name, each in features.items()))


FEATURES = {
    "floats": np.array([0.1, -0.0, np.inf, np.nan, 3e-45], np.float32),
    "ints": np.array([0, 1, -1, 127, 128, -(2**63), 2**63 - 1, 300], np.int64),
    "small": np.array([7, 0, 127], np.int64),
    "one": np.array([-5], np.int64),
    "mixed": np.array([3, 200], np.int64),
    "none": np.array([], np.float32),
    "strings": [b"", b"\xff\x00", b"how do i"],
}


def assert_same(got, expected):
    if isinstance(expected, list):
        assert (got.dtype, got.tolist()) == (object, expected)
    else:
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()  # bitwise, so NaN and -0 as well


@pytest.mark.parametrize("packed", [True, False])
def test_every_kind_of_feature_is_decoded_bit_by_bit(packed):
    got = decode(example(FEATURES, packed), FEATURES)
    for name in FEATURES.keys() - ({"none"} if not packed else set()):
        assert_same(got[name], FEATURES[name])
    assert len(got["none"]) == 0


def test_the_bytes_of_the_documented_wire_format():
    # Tags are number * 8 + wire type, wire type 2 is followed by a length. 150 is 0x96 0x01 as a
    # varint (0b1_0010110: the seven low bits with the top bit set, then the 1), -1 is 64 ones:
    # nine times 0xff (63 bits), then 0x01.
    data = (
        b"\x0a\x18"  # Example.features, 24 bytes
        b"\x0a\x16"  # Features.feature, 22 bytes
        b"\x0a\x01a"  # key "a"
        b"\x12\x11"  # value, 17 bytes
        b"\x1a\x0f"  # Feature.int64_list, 15 bytes
        b"\x0a\x0d"  # Int64List.value packed, 13 bytes
        b"\x96\x01\x05\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    )
    assert decode(data, ["a"])["a"].tolist() == [150, 5, -1]


@pytest.mark.parametrize("data", [b"", example({"b": [b""]}), b"\x08\x01"])
def test_examples_without_a_feature_are_refused(data):
    with pytest.raises(LookupError, match="no feature 'a'"):
        decode(data, ["a"])


def test_damaged_bytes_give_values_or_an_error():
    rng = np.random.default_rng(0)
    data = example(FEATURES)
    refused = 0
    for _ in range(3000):
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[rng.integers(len(data), size=rng.integers(1, 4))] = rng.integers(256)
        try:
            for value in decode(damaged.tobytes(), FEATURES).values():
                assert value.dtype in (np.float32, np.int64, object)
        except (DecodeError, LookupError):
            refused += 1
    assert refused > 1000


# Whole files.


def write_h5(folder, name, splits):
    for split, clients in splits.items():
        with h5py.File(folder / f"{PREFIX[name]}_{split}.h5", "w") as file:
            examples = file.create_group("examples")
            for client, features in clients.items():
                group = examples.create_group(client)
                for each, values in features.items():
                    strings = h5py.string_dtype("ascii") if isinstance(values, list) else None
                    group.create_dataset(each, data=values, dtype=strings)


def rows_of(features):
    """A client's examples, one by one, as the SQLite files flatten them."""
    count = len(next(iter(features.values())))
    for row in range(count):
        yield {
            name: [values[row]]
            if isinstance(values, list)
            else np.asarray(values[row]).ravel().astype("f4" if values.dtype.kind == "f" else "i8")
            for name, values in features.items()
        }


def write_sqlite(folder, name, splits, packed=True, extra=0):
    file, names = SQLITE[name]
    examples, metadata = [], []
    for split, clients in splits.items():
        for client, features in clients.items():
            rows = [example(row, packed) for row in rows_of(features)]
            examples.append([(names[split], client, row) for row in rows])
            metadata.append((client, names[split], len(rows) + extra))
    # Rows of different clients alternate, and clients are not in their order.
    mixed = [own.pop(0) for _ in range(1000) for own in examples[::-1] if own]
    with closing(sqlite3.connect(folder / file)) as base, base:
        base.execute(
            "CREATE TABLE IF NOT EXISTS examples "
            "(split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        base.execute(
            "CREATE TABLE IF NOT EXISTS client_metadata "
            "(client_id TEXT, split_name TEXT, num_examples INTEGER)"
        )
        base.executemany("INSERT INTO examples VALUES (?, ?, ?)", mixed)
        base.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)


WRITE = {"h5": write_h5, "sqlite": write_sqlite}


def images(name, rng, counts):
    clients = {}
    for client, count in counts.items():
        if name == "cifar100":
            own = {
                "image": rng.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8),
                "label": rng.integers(0, 100, count),
                "coarse_label": rng.integers(0, 20, count),
            }
        else:
            classes = 62 if name == "emnist" else 10
            own = {
                "label": rng.integers(0, classes, count).astype(np.int32),
                "pixels": rng.integers(0, 256, (count, 28, 28)).astype(np.float32)
                / np.float32(255),
            }
        clients[client] = own
    return clients


def some(name, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "train": images(name, rng, {"f10_1": 3, "f2_0": 12, "é": 1}),
        "test": images(name, rng, {"f2_0": 2, "none": 0}),
    }


def converted(tmp_path, form, name, path=None):
    source = READERS[form].read(path or tmp_path, name)
    return store.write(tmp_path / "store", source, {})


FORMS = pytest.mark.parametrize("form", ["h5", "sqlite"])


@FORMS
@pytest.mark.parametrize("name", ["emnist", "emnist-digits", "cifar100"])
def test_images_are_stored_exactly(tmp_path, form, name):
    splits = some(name)
    WRITE[form](tmp_path, name, splits)
    assert READERS[form].files(tmp_path, name)
    made = converted(tmp_path, form, name)
    assert made.meta["splits"].keys() == splits.keys()
    for split, clients in splits.items():
        got = made.splits[split]
        assert got.clients == sorted(clients, key=str.encode)
        for place, client in enumerate(got.clients):
            own = clients[client]
            x, y = got.column("x", place), got.column("y", place)
            assert (x.dtype, y.dtype) == (np.uint8, np.int32)
            np.testing.assert_array_equal(y, own["label"])
            if name == "cifar100":
                np.testing.assert_array_equal(x, own["image"])
                np.testing.assert_array_equal(got.column("coarse", place), own["coarse_label"])
                assert got.column("coarse", place).dtype == np.int32
            else:
                again = x.astype(np.float32) / np.float32(255)
                assert again.tobytes() == own["pixels"].tobytes()


@FORMS
def test_images_that_are_no_bytes_stay_floats_in_every_split(tmp_path, form):
    splits = some("emnist")
    odd = splits["test"]["f2_0"]["pixels"]  # the last image that is looked at
    odd[-1, 27, 27] = np.nextafter(odd[-1, 27, 27], np.float32(0.5))
    WRITE[form](tmp_path, "emnist", splits)
    made = converted(tmp_path, form, "emnist")
    for split, clients in splits.items():
        got = made.splits[split]
        for place, client in enumerate(got.clients):
            assert got.column("x", place).dtype == np.float32
            assert got.column("x", place).tobytes() == clients[client]["pixels"].tobytes()


def test_both_data_sets_of_emnist_lie_in_one_sqlite_file(tmp_path):
    for seed, name in enumerate(["emnist", "emnist-digits"]):
        write_sqlite(tmp_path, name, some(name, seed), packed=bool(seed))
    (tmp_path / "emnist_all.sqlite").rename(tmp_path / "mine")  # is known by its first bytes
    for seed, name in enumerate(["emnist", "emnist-digits"]):
        assert tff_sqlite.files(tmp_path / "mine", name)
        got = converted(tmp_path, "sqlite", name, tmp_path / "mine").splits["train"]
        expected = some(name, seed)["train"]["f2_0"]["label"]
        np.testing.assert_array_equal(got.column("y", got.clients.index("f2_0")), expected)


POSTS = {
    "train": {
        "7": {
            "tokens": [b"how do i", b"use it ?", "na\u00efve".encode()],
            "title": [b"the title", b"", b"do"],
            "tags": [b"c|python", b"python", b""],
            "score": np.array([-3, 0, 2**40]),
        },
        "12": {
            "tokens": [b"do"],
            "title": [b"the"],
            "tags": [b"c"],
            "score": np.array([1]),
        },
    },
    "held_out": {
        "10": {
            "tokens": [b"new do"],
            "title": [b"word"],
            "tags": [b"rust|c"],
            "score": np.array([1]),
        }
    },
    "test": {
        "7": {"tokens": [b"i"], "title": [b"i"], "tags": [b"python|c"], "score": np.array([4])}
    },
}


def posts_of(made, split):
    words, tags = (made.text(name).splitlines() for name in ("words.txt", "tags.txt"))
    got, posts = made.splits[split], {}
    for place, client in enumerate(got.clients):
        texts = []
        for column, known in (("x", words), ("y", tags)):
            values, length = got.column(column, place)
            names = [known[rank] if rank < len(known) else "?" for rank in values]
            stops = np.cumsum(length)
            texts.append([names[a:b] for a, b in zip(stops - length, stops, strict=True)])
        posts[client] = list(zip(*texts, strict=True))
    return posts


@FORMS
@pytest.mark.parametrize("counted", [True, False])
def test_posts_are_tokens_then_title_with_their_tags(tmp_path, form, counted):
    WRITE[form](tmp_path, "stackoverflow", POSTS)
    if not counted:
        (tmp_path / "stackoverflow.word_count").write_text("the 9\ndo 5\ni 2\n")
        (tmp_path / "stackoverflow.tag_count").write_text('{"c": 1, "python": 8}')
    assert READERS[form].files(tmp_path, "stackoverflow")
    made = converted(tmp_path, form, "stackoverflow")
    if not counted:
        assert made.text("words.txt") == "the\ndo\ni\n"
        assert made.text("tags.txt") == "python\nc\n"
    known = made.text("words.txt").split()
    for split, clients in POSTS.items():
        expected = {
            client: [
                (
                    [word if word in known else "?" for word in f"{body} {title}".split()],
                    [tag for tag in tags.split("|") if tag in ("c", "python")],
                )
                for body, title, tags in zip(
                    *([each.decode() for each in own[key]] for key in ("tokens", "title", "tags")),
                    strict=True,
                )
            ]
            for client, own in clients.items()
        }
        assert posts_of(made, split) == expected
    assert ("how" in known) == counted


def test_strings_of_one_length_in_hdf5(tmp_path):
    splits = {
        split: {
            client: {name: np.array(own[name], bytes) for name in ("tokens", "title", "tags")}
            for client, own in clients.items()
        }
        for split, clients in POSTS.items()
    }
    write_h5(tmp_path, "stackoverflow", splits)
    made = converted(tmp_path, "h5", "stackoverflow")
    assert posts_of(made, "test") == {"7": [(["i", "i"], ["python", "c"])]}


def refused(tmp_path, form, name, words, path=None):
    """The message names the file, and nothing is written."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=words) as raised:
        converted(tmp_path, form, name, path)
    assert sorted(tmp_path.iterdir()) == before
    file = SQLITE[name][0] if form == "sqlite" else PREFIX[name]
    assert file in str(raised.value)
    return str(raised.value)


def change(name, wanted, values):
    def changed(own):
        own[name] = values if wanted is None else own[name].copy()
        if wanted is not None:
            own[name][wanted] = values

    return changed


@FORMS
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("emnist", lambda own: own.pop("pixels"), "no feature 'pixels'|'pixels' is missing"),
        ("emnist", lambda own: own.pop("label"), "no feature 'label'|'label' is missing"),
        ("cifar100", lambda own: own.pop("coarse_label"), "no feature 'coarse|'coarse_label' is m"),
        ("emnist", change("label", 1, 62), "'label' is 62 in example 1, expected 0 to 61"),
        ("emnist", change("label", 2, -1), "'label' is -1 in example 2, expected 0 to 61"),
        ("emnist-digits", change("label", 0, 10), "'label' is 10 .* expected 0 to 9"),
        ("cifar100", change("label", 0, 100), "'label' is 100 .* expected 0 to 99"),
        ("cifar100", change("coarse_label", 0, 20), "'coarse_label' is 20 .* expected 0 to 19"),
        ("emnist", change("pixels", (0, 3, 3), np.nan), "'pixels' has values outside of 0..1"),
        ("emnist", change("pixels", (0, 3, 3), 1.01), "'pixels' has values outside of 0..1"),
        ("emnist", change("pixels", (0, 3, 3), -0.01), "'pixels' has values outside of 0..1"),
        ("emnist", change("pixels", None, np.zeros((3, 28, 27))), r"'pixels' .* \(3, 28, 27\)|756"),
        ("emnist", change("pixels", None, np.zeros((3, 28, 28), int)), "'pixels' .* floats"),
        ("emnist", change("label", None, np.zeros(3)), "'label' is .*float.* expected .*integers"),
        ("cifar100", change("image", None, np.zeros((3, 32, 32, 3))), "'image' .* integers"),
        ("cifar100", change("image", None, np.full((3, 32, 32, 3), 256)), "outside of 0..255"),
        ("cifar100", change("image", None, np.full((3, 32, 32, 3), -1)), "outside of 0..255"),
    ],
)
def test_wrong_features_are_refused(tmp_path, form, name, damage, words):
    splits = some(name)
    damage(splits["train"]["f10_1"])
    WRITE[form](tmp_path, name, splits)
    assert "f10_1" in refused(tmp_path, form, name, words)


@FORMS
@pytest.mark.parametrize("name", ["tokens", "title", "tags"])
def test_text_that_is_not_utf8_is_refused(tmp_path, form, name):
    splits = {split: {key: dict(own) for key, own in each.items()} for split, each in POSTS.items()}
    splits["held_out"]["10"][name] = [b"caf\xe9"]
    WRITE[form](tmp_path, "stackoverflow", splits)
    message = refused(
        tmp_path, form, "stackoverflow", "expected tokens and title and tags as .* UTF-8"
    )
    assert "client '10'" in message


@pytest.mark.parametrize("title", [np.array([3]), [b"one", b"two"], np.array([[b"one", b"two"]])])
def test_posts_without_one_text_each_are_refused_in_hdf5(tmp_path, title):
    odd = {"7": {"tokens": [b"a"], "title": title, "tags": [b"c"]}}
    write_h5(tmp_path, "stackoverflow", POSTS | {"test": odd})
    refused(tmp_path, "h5", "stackoverflow", "client '7': expected tokens and title and tags as")


@pytest.mark.parametrize(
    ("name", "features", "words"),
    [
        ("stackoverflow", {"tokens": np.array([3])}, "'tokens' is 1 integers, expected 1 byte str"),
        ("stackoverflow", {"tokens": [b"a", b"b"]}, "'tokens' is 2 byte strings, expected 1 byte"),
        ("stackoverflow", {"tokens": []}, "'tokens' is 0 byte strings, expected 1 byte"),
        ("emnist", {"pixels": np.zeros(785, "f4")}, "'pixels' is 785 floats, expected 784 floats"),
        ("emnist", {"pixels": np.zeros(784, int)}, "'pixels' is 784 integers, expected 784 floats"),
        ("emnist", {"label": np.zeros(2, int)}, "'label' is 2 integers, expected 1 integers"),
        ("emnist", {"label": [b"1"]}, "'label' is 1 byte strings, expected 1 integers"),
    ],
)
def test_examples_without_one_value_each_are_refused_in_sqlite(tmp_path, name, features, words):
    splits = POSTS if name == "stackoverflow" else some(name)
    write_sqlite(tmp_path, name, splits)
    good = next(rows_of(next(iter(splits["test"].values()))))
    file, names = SQLITE[name]
    with closing(sqlite3.connect(tmp_path / file)) as base, base:
        base.execute(
            "UPDATE examples SET serialized_example_proto = ? WHERE split_name = ?",
            (example(good | features), names["test"]),
        )
    refused(tmp_path, "sqlite", name, f"example 0: the feature {words}")


@FORMS
def test_a_missing_split_and_a_missing_file(tmp_path, form):
    assert not READERS[form].files(tmp_path, "emnist")
    assert not READERS[form].files(tmp_path / "absent", "emnist")
    assert not READERS[form].files(tmp_path, "mnist")
    WRITE[form](tmp_path, "emnist", {"train": some("emnist")["train"]})
    assert READERS[form].files(tmp_path, "emnist")
    assert bool(READERS[form].files(tmp_path, "emnist-digits")) == (form == "sqlite")
    words = "has no file fed_emnist_test.h5|has no split 'all_test'"
    message = refused(tmp_path, form, "emnist", words)
    assert not re.search("digits|cifar|stackoverflow", message), "of this data set alone"


@FORMS
@pytest.mark.parametrize("name", PREFIX)
def test_the_layout_in_words_is_of_one_data_set(tmp_path, form, name):
    splits = POSTS if name == "stackoverflow" else some(name)
    WRITE[form](tmp_path, name, splits)
    for count in ("stackoverflow.word_count", "stackoverflow.tag_count"):
        (tmp_path / count).write_text("")
    layout = READERS[form].layout(name)
    found = {file.name for file in READERS[form].files(tmp_path, name)}
    assert found == {word.strip("(),") for word in layout.split() if "_" in word or "." in word}
    assert len(found) == (1 if form == "sqlite" else len(splits)) + 2 * (name == "stackoverflow")


@FORMS
def test_truncated_files_are_refused(tmp_path, form):
    splits = some("emnist")
    splits["test"].pop("none")
    WRITE[form](tmp_path, "emnist", splits)
    file = next(tmp_path.glob("*_train.h5" if form == "h5" else "*.sqlite"))
    data = file.read_bytes()
    for share in (0, 0.01, 0.3, 0.6, 0.9, 1 - 1 / len(data)):
        file.write_bytes(data[: int(share * len(data))])
        refused(tmp_path, form, "emnist", "is damaged")
    file.write_bytes(b"<html>" + data)
    refused(tmp_path, form, "emnist", "is damaged")


def test_damaged_bytes_of_sqlite_never_end_in_a_traceback(tmp_path):
    rng = np.random.default_rng(0)
    write_sqlite(tmp_path, "emnist", some("emnist"))
    file = tmp_path / "emnist_all.sqlite"
    data = np.fromfile(file, np.uint8)
    structure = np.flatnonzero(data)[:4000]  # where the headers are
    failed = 0
    for _ in range(40):
        damaged = data.copy()
        damaged[rng.choice(structure, 20)] = rng.integers(0, 256, 20)
        damaged.tofile(file)
        try:
            converted(tmp_path, "sqlite", "emnist")
        except InputError:
            failed += 1
    assert failed > 10


def test_damaged_compression_in_hdf5(tmp_path):
    splits = some("emnist")
    write_h5(tmp_path, "emnist", splits)
    path = tmp_path / "fed_emnist_train.h5"
    with h5py.File(path, "a") as file:
        del file["examples/f10_1/pixels"]
        pixels = file["examples/f10_1"].create_dataset(
            "pixels",
            data=splits["train"]["f10_1"]["pixels"],
            chunks=(3, 28, 28),
            compression="gzip",
        )
        chunk = pixels.id.get_chunk_info(0)
    assert converted(tmp_path, "h5", "emnist").splits["train"].num_examples == 16
    data = bytearray(path.read_bytes())
    middle = chunk.byte_offset + chunk.size // 2
    data[middle : middle + 9] = b"no images"
    path.write_bytes(data)
    refused(tmp_path, "h5", "emnist", "damaged or of another format")


def write_odd_h5(tmp_path, change):
    write_h5(tmp_path, "emnist", some("emnist"))
    with h5py.File(tmp_path / "fed_emnist_train.h5", "a") as file:
        change(file)


def moved(file):
    file.move("examples", "clients")


def no_client(file):
    file["examples/zz"] = [1, 2]


def fewer_labels(file):
    del file["examples/f10_1/label"]
    file["examples/f10_1/label"] = [1, 2]


def one_number(file):
    del file["examples/f10_1/pixels"]
    file["examples/f10_1/pixels"] = 0.5


def no_array(file):
    del file["examples/f10_1/pixels"]
    file["examples/f10_1/pixels"] = h5py.Empty("f")


def names_no_text(file):
    file["examples"].move("f10_1", b"\xff\xfe")


def strings(file):
    del file["examples/f10_1/label"]
    file["examples/f10_1/label"] = ["1", "2", "3"]


def replaced(file, name, make):
    """Replaces a client's images, which another file has as well."""
    other = Path(file.filename).with_name("other.h5")
    with h5py.File(other, "w") as outside:
        outside["outside"] = file[name][()]
    del file[name]
    make(file, name, other)


def linked_outside(file):
    def make(file, name, other):
        file[name] = h5py.ExternalLink(other, "/outside")

    replaced(file, "examples/f10_1/pixels", make)


def linked_inside(file):
    file["elsewhere"] = file["examples/f10_1"]
    del file["examples/f10_1"]
    file["examples/f10_1"] = h5py.SoftLink("/elsewhere")


def stored_outside(file):
    def make(file, name, other):
        raw = [(str(other), 0, 3 * 784 * 4)]
        file.create_dataset(name, (3, 28, 28), np.float32, external=raw)

    replaced(file, "examples/f10_1/pixels", make)


def seen_outside(file):
    def make(file, name, other):
        whole = h5py.VirtualLayout((3, 28, 28), np.float32)
        whole[:] = h5py.VirtualSource(other, "outside", shape=(3, 28, 28))
        file.create_virtual_dataset(name, whole)

    replaced(file, "examples/f10_1/pixels", make)


def nothing_stored(file):
    del file["examples/f10_1"]
    group = file.create_group("examples/f10_1")
    group.create_dataset("pixels", (10**6, 28, 28), np.float32, fillvalue=1)
    group.create_dataset("label", (10**6,), np.int32)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (linked_outside, "'pixels' is a ExternalLink, expected a Dataset in the file itself"),
        (linked_inside, "'f10_1' is a SoftLink, expected a Group in the file itself"),
        (stored_outside, "'pixels' is stored in another file"),
        (seen_outside, "'pixels' is stored in another file"),
        (moved, "'examples' is missing, expected a Group"),
        (no_client, "'zz' is a Dataset, expected a Group"),
        (fewer_labels, r"'label' is int64 of the shape \(2,\), expected .* \(3,\)"),
        (one_number, r"'pixels' has the shape \(\)"),
        (no_array, "'pixels' is of the dtype object, expected floats"),
        (names_no_text, "id .* is not UTF-8"),
        (strings, "'label' is of the dtype object, expected integers"),
    ],
)
def test_odd_hdf5_files_are_refused(tmp_path, damage, words):
    write_odd_h5(tmp_path, damage)
    assert "another format" not in refused(tmp_path, "h5", "emnist", words)


def test_arrays_of_which_nothing_is_stored_meet_the_limit_on_memory(tmp_path):
    """A few kilobytes that would be read as gigabytes of fill values."""
    write_odd_h5(tmp_path, nothing_stored)
    assert (tmp_path / "fed_emnist_train.h5").stat().st_size < 10**6
    assert sandboxed.outcomes("tff_hdf5", "emnist", [tmp_path]) == ["memory"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM examples WHERE rowid = 3", r"has \d+ rows .* but client_metadata says \d+"),
        (
            "INSERT INTO examples SELECT * FROM examples WHERE rowid = 3",
            r"has \d+ rows .* but client_metadata says \d+",
        ),
        ("DELETE FROM client_metadata WHERE client_id = 'f10_1'", "has 3 rows .* says 0"),
        ("INSERT INTO client_metadata VALUES ('b', 'all_train', 2)", "'b' has 0 rows .* says 2"),
        ("UPDATE client_metadata SET num_examples = NULL", "says None"),
        (
            "UPDATE client_metadata SET client_id = x'00'",
            "client_metadata says .*; or its id is not text",
        ),
        (
            "UPDATE examples SET serialized_example_proto = 5",
            "example 0 is .* expected bytes, int found",
        ),
        ("UPDATE examples SET serialized_example_proto = 'a'", "expected bytes, str found"),
        ("UPDATE examples SET serialized_example_proto = NULL", "expected bytes, NoneType"),
        ("UPDATE examples SET serialized_example_proto = x'0a05'", "example 0 is .*DecodeError"),
        ("UPDATE client_metadata SET client_id = CAST(x'ff' AS TEXT)", "decode|id is not text"),
        ("DROP TABLE examples", "no such table: examples"),
        ("ALTER TABLE examples RENAME client_id TO client", "no such column: client_id"),
        ("DROP TABLE client_metadata", "no such table: client_metadata"),
    ],
)
def test_odd_sqlite_files_are_refused(tmp_path, change, words):
    write_sqlite(tmp_path, "emnist", some("emnist"))
    with closing(sqlite3.connect(tmp_path / "emnist_all.sqlite")) as base, base:
        base.executescript(change)
    refused(tmp_path, "sqlite", "emnist", words)


def test_a_view_without_end_meets_the_limit_on_memory_or_time(tmp_path):
    write_sqlite(tmp_path, "emnist", some("emnist"))
    with closing(sqlite3.connect(tmp_path / "emnist_all.sqlite")) as base, base:
        base.executescript(
            "DROP TABLE client_metadata; CREATE VIEW client_metadata AS WITH RECURSIVE n(k) AS "
            "(SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT 'c' || k AS client_id, "
            "'all_train' AS split_name, 0 AS num_examples FROM n"
        )
    (found,) = sandboxed.outcomes("tff_sqlite", "emnist", [tmp_path])
    assert found in ("memory", "SIGALRM")


def test_a_sqlite_file_is_read_where_nothing_can_be_written(tmp_path):
    write_sqlite(tmp_path, "emnist", some("emnist"))
    file = tmp_path / "emnist_all.sqlite"
    with closing(sqlite3.connect(file)) as base:
        base.execute("PRAGMA journal_mode = WAL")  # a reader of this would make files beside it
    before = file.read_bytes()
    clients = tff_sqlite.read(tmp_path, "emnist").splits["train"]
    next(iter(clients))
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_clients_come_one_at_a_time(tmp_path, monkeypatch):
    splits = some("cifar100")
    write_sqlite(tmp_path, "cifar100", splits)
    calls = []

    def counting(data, names):
        calls.append(names)
        return decode(data, names)

    monkeypatch.setattr(tff_sqlite, "decode", counting)
    clients = iter(tff_sqlite.read(tmp_path, "cifar100").splits["train"])
    assert (next(clients)[0], len(calls)) == ("f10_1", 3)
    assert (next(clients)[0], len(calls)) == ("f2_0", 15)


@pytest.mark.skipif(
    "FEDDA_TEST_DATA" not in os.environ, reason="FEDDA_TEST_DATA names no folder of official data"
)
def test_the_official_files_of_emnist(tmp_path):
    folder = Path(os.environ["FEDDA_TEST_DATA"])
    made = store.write(tmp_path / "store", tff_hdf5.read(folder, "emnist"), {})
    for split, count in (("train", 54503), ("test", 6254)):
        got = made.splits[split]
        assert (got.num_clients, got.num_examples) == (396, count)
        with h5py.File(folder / f"fed_emnist_{split}.h5") as file:
            assert got.clients == sorted(file["examples"])
            for place, client in enumerate(got.clients):
                x = got.column("x", place)
                assert x.dtype == np.uint8
                original = file["examples"][client]
                np.testing.assert_array_equal(
                    x.astype(np.float32) / np.float32(255), original["pixels"][()]
                )
                np.testing.assert_array_equal(got.column("y", place), original["label"][()])
