"""EMNIST's own files give upright, dark-on-white images, and damage is told from data."""

import gzip
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from fedda.data import store
from fedda.data.readers import emnist_original
from fedda.errors import InputError
from helpers import sandboxed

RNG = np.random.default_rng(0)
COUNT = {"train": 9, "test": 4}
UPRIGHT = {split: RNG.integers(0, 256, (n, 28, 28)).astype(np.uint8) for split, n in COUNT.items()}
LABELS = {split: RNG.integers(0, 10, n) for split, n in COUNT.items()}
WRITERS = {"train": [7, 2410, 7, 33, 33, 7, 100, 7, 33], "test": [33, 8, 33, 33]}


def as_published(images):
    """Bright ink on black, and the first column of an image first."""
    return np.stack([np.array([255 - row for row in image]).T for image in images])


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + bytes(
        array.ravel().tolist()
    )


def published(split):
    return {
        f"{split}-images-idx3-ubyte": idx(as_published(UPRIGHT[split])),
        f"{split}-labels-idx1-ubyte": idx(LABELS[split].astype(np.uint8)),
    }


def idx_folder(path, packed=False, part="byclass", **changed):
    """The four files; `changed` replaces the bytes of some, None leaves one out."""
    path.mkdir(parents=True, exist_ok=True)
    files = published("train") | published("test")
    files |= {name.replace("_", "-"): data for name, data in changed.items()}
    for name, data in files.items():
        if data is not None:
            data = gzip.compress(data) if packed else data
            (path / f"emnist-{part}-{name}{'.gz' if packed else ''}").write_bytes(data)
    return path


def dataset(split):
    return {
        "images": as_published(UPRIGHT[split]).reshape(-1, 784),
        "labels": LABELS[split].astype(np.float64)[:, None],
        "writers": np.array(WRITERS[split], np.uint16)[:, None],
    }


def mat_folder(path, part="byclass", packed=True, **changed):
    path.mkdir(parents=True, exist_ok=True)
    mapping = np.stack([np.arange(62), np.arange(62)], 1)
    content = {"train": dataset("train"), "test": dataset("test"), "mapping": mapping} | changed
    savemat(path / f"emnist-{part}.mat", {"dataset": content}, do_compression=packed)
    return path


def clients(path, split="train", name="emnist"):
    return dict(emnist_original.read(path, name).splits[split])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inner", ["", "gzip"])
@pytest.mark.parametrize(("name", "part"), [("emnist", "byclass"), ("emnist-digits", "digits")])
def test_idx_files(tmp_path, packed, inner, name, part):
    idx_folder(tmp_path / inner, packed, part)
    assert emnist_original.files(tmp_path, name)
    other = "emnist" if name == "emnist-digits" else "emnist-digits"
    assert not emnist_original.files(tmp_path, other)
    for split in COUNT:
        found = clients(tmp_path, split, name)
        assert list(found) == ["all"]
        x, y = found["all"]["x"], found["all"]["y"]
        np.testing.assert_array_equal(x, UPRIGHT[split])
        np.testing.assert_array_equal(y, LABELS[split])
        assert (x.dtype, y.dtype, x.flags.c_contiguous) == (np.uint8, np.int32, True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inner", ["", "matlab"])
@pytest.mark.parametrize(("name", "part"), [("emnist", "byclass"), ("emnist-digits", "digits")])
def test_matlab_file(tmp_path, packed, inner, name, part):
    folder = mat_folder(tmp_path / inner, part, packed)
    for path in (tmp_path, folder / f"emnist-{part}.mat"):
        assert emnist_original.files(path, name)
        assert not emnist_original.files(path, "cifar100")
        for split, writers in WRITERS.items():
            found = clients(path, split, name)
            assert found.keys() == {str(writer) for writer in writers}
            for writer, own in found.items():
                mine = [row for row, each in enumerate(writers) if str(each) == writer]
                np.testing.assert_array_equal(own["x"], UPRIGHT[split][mine])
                np.testing.assert_array_equal(own["y"], LABELS[split][mine])
                assert (own["x"].dtype, own["y"].dtype) == (np.uint8, np.int32)


def test_a_letter_is_upright(tmp_path):
    # An L: a column of ink on the left, and a row at the bottom.
    letter = np.full((1, 28, 28), 255, np.uint8)
    letter[0, 4:24, 6] = letter[0, 23, 6:18] = 0
    # As published: bright ink, and the left column is the first of the 28 runs of 28 bytes.
    raw = np.zeros(784, np.uint8)
    raw[6 * 28 + 4 : 6 * 28 + 24] = 255
    raw[[column * 28 + 23 for column in range(6, 18)]] = 255
    one = {"images": raw[None], "labels": np.array([[21]]), "writers": np.array([[5]])}
    found = clients(mat_folder(tmp_path / "m", train=one))
    np.testing.assert_array_equal(found["5"]["x"], letter)
    assert found["5"]["y"] == [21]
    files = {
        "train_images_idx3_ubyte": idx(raw.reshape(1, 28, 28)),
        "train_labels_idx1_ubyte": idx(np.array([21], np.uint8)),
    }
    np.testing.assert_array_equal(clients(idx_folder(tmp_path / "i", **files))["all"]["x"], letter)


def element(order, kind, data):
    """An element of a MATLAB file; MATLAB itself puts up to four bytes beside their length."""
    if 0 < len(data) <= 4:
        return struct.pack(f"{order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matrix(order, what, shape, name, content):
    head = element(order, 6, struct.pack(f"{order}II", what, 0))
    dims = element(order, 5, struct.pack(f"{order}2i", *shape))
    return element(order, 14, head + dims + element(order, 1, name) + content)


def record(order, name, fields):
    names = b"".join(each.encode().ljust(16, b"\0") for each in fields)
    width = element(order, 5, struct.pack(f"{order}i", 16))
    return matrix(
        order, 2, (1, 1), name, width + element(order, 1, names) + b"".join(fields.values())
    )


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("packed", [True, False])
def test_matlab_file_as_matlab_writes_it(tmp_path, order, packed):
    # Doubles (class 6) that are whole and small lie in the file as bytes (kind 2).
    def part(split):
        images = as_published(UPRIGHT[split]).reshape(-1, 784)
        writers = struct.pack(f"{order}{len(images)}H", *WRITERS[split])
        fields = {
            "images": matrix(order, 9, images.shape, b"", element(order, 2, images.tobytes("F"))),
            "labels": matrix(
                order, 6, (len(images), 1), b"", element(order, 2, bytes(LABELS[split].tolist()))
            ),
            "writers": matrix(order, 6, (len(images), 1), b"", element(order, 4, writers)),
        }
        return record(order, b"", fields)

    content = record(order, b"dataset", {split: part(split) for split in COUNT})
    if packed:
        content = zlib.compress(content)
        content = struct.pack(f"{order}II", 15, len(content)) + content
    other = matrix(order, 6, (1, 1), b"other", element(order, 2, b"\7"))
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}HH", 0x0100, 0x4D49)
    file = tmp_path / "emnist-byclass.mat"
    file.write_bytes(head + other + content)
    oracle = loadmat(file)["dataset"]["test"][0, 0]
    np.testing.assert_array_equal(oracle["labels"][0, 0][:, 0], LABELS["test"])
    for split, writers in WRITERS.items():
        found = clients(tmp_path, split)
        assert found.keys() == {str(writer) for writer in writers}
        rows = np.argsort([str(writer) for writer in writers], kind="stable")
        together = [found[writer] for writer in sorted(found)]
        np.testing.assert_array_equal(
            np.concatenate([own["x"] for own in together]), UPRIGHT[split][rows]
        )
        np.testing.assert_array_equal(
            np.concatenate([own["y"] for own in together]), LABELS[split][rows]
        )


def matlab_outcomes(tmp_path, files):
    """The outcomes of reading MATLAB files in a child, as SciPy may crash at hostile ones."""
    paths = []
    for number, content in enumerate(files):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "emnist-byclass.mat").write_bytes(content)
        paths.append(tmp_path / str(number))
    return Counter(sandboxed.outcomes("emnist_original", "emnist", paths))


HEAD = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49)
ENDINGS = {"refused", "memory", "SIGSEGV", "SIGABRT", "SIGALRM", "SIGFPE", "SIGBUS"}


def test_lengths_in_a_matlab_file_that_are_none(tmp_path):
    """The shape of an array (6) or a struct (2), or the width of a struct's names."""
    one, width = (5, struct.pack("<2i", 1, 1)), (5, struct.pack("<i", 16))
    files = []
    for dims, names in (
        ((7, struct.pack("<2f", 1, 1)), width),
        ((9, struct.pack("<2d", 1, 1)), width),
        ((5, struct.pack("<2i", -1, -1)), width),
        ((5, struct.pack("<2i", 2**31 - 1, 2**31 - 1)), width),
        ((13, struct.pack("<2Q", 2**63, 0)), width),
        (one, (7, struct.pack("<f", 16))),
        (one, (5, struct.pack("<i", -16))),
    ):
        for what in (2, 6):
            content = element("<", 6, struct.pack("<II", what, 0)) + element("<", *dims)
            content += element("<", 1, b"dataset") + element("<", *names)
            files.append(HEAD + element("<", 14, content + element("<", 1, bytes(16))))
    found = matlab_outcomes(tmp_path, files)
    assert found.keys() <= ENDINGS, found


def test_a_matlab_file_of_another_level(tmp_path):
    head = b"MATLAB 7.3 MAT-file".ljust(124) + struct.pack("<HH", 0x0200, 0x4D49)
    (tmp_path / "emnist-byclass.mat").write_bytes(head + bytes(512))
    with pytest.raises(InputError, match=r"another format \(NotImplementedError: .* v7.3 files"):
        clients(tmp_path)


def test_a_packed_matlab_file_that_grows_without_end_meets_the_limit_on_memory(tmp_path):
    images = matrix("<", 9, (10**9, 1), b"dataset", struct.pack("<II", 2, 10**9) + bytes(10**6))
    packer = zlib.compressobj()
    packed = packer.compress(images) + b"".join(packer.compress(bytes(10**7)) for _ in range(100))
    packed += packer.flush()
    content = HEAD + struct.pack("<II", 15, len(packed)) + packed
    assert len(content) < 2 * 10**6
    assert matlab_outcomes(tmp_path, [content]) == {"memory": 1}


def test_the_file_with_writers_is_preferred(tmp_path):
    mat_folder(idx_folder(tmp_path / "gzip").parent / "matlab")
    assert clients(tmp_path).keys() == {"7", "33", "100", "2410"}


@pytest.mark.parametrize("make", [idx_folder, mat_folder])
def test_the_reader_fills_a_store(tmp_path, make):
    source = emnist_original.read(make(tmp_path / "data"), "emnist")
    made = store.write(tmp_path / "store", source, {})
    assert {name: split.num_examples for name, split in made.splits.items()} == COUNT


def test_other_names_and_folders(tmp_path):
    assert not emnist_original.files(tmp_path, "emnist")
    assert not emnist_original.files(tmp_path / "nowhere", "emnist")
    assert not emnist_original.files(idx_folder(tmp_path / "l", part="letters"), "emnist")


@pytest.mark.parametrize("split", COUNT)
@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_a_missing_file_is_named(tmp_path, split, kind):
    path = idx_folder(tmp_path, **{f"{split}-{kind}-ubyte": None})
    assert len(emnist_original.files(path, "emnist")) == 3
    with pytest.raises(InputError, match=f"no file emnist-byclass-{split}-{kind}-ubyte") as caught:
        emnist_original.read(path, "emnist")
    assert "digits" not in str(caught.value)


GOOD = published("train")
IMAGES, LABEL_FILE = GOOD["train-images-idx3-ubyte"], GOOD["train-labels-idx1-ubyte"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "requires a buffer of 16 bytes"),
        (IMAGES[:15], "requires a buffer of 16 bytes"),
        (LABEL_FILE[:8] + bytes(9), "begins with 00000801 .*, expected 00000803"),
        (b"\0\0\x0d\3" + IMAGES[4:], "begins with 00000d03"),
        (struct.pack("<I", 0x803) + IMAGES[4:], "begins with 03080000"),
        (idx(UPRIGHT["train"][:, :27]), r"lengths \(9, 27, 28\)"),
        (IMAGES[:4] + struct.pack(">III", 2**32 - 1, 28, 28), "cannot reshape"),
        (IMAGES[:4] + struct.pack(">III", 1_999_999, 28, 28), "cannot reshape"),
        (IMAGES + b"\0", "cannot reshape array of size 7057"),
        (idx(as_published(UPRIGHT["test"])), r"shape \(9,\), expected .* shape \(4,\), one for"),
        (IMAGES[:4] + struct.pack(">III", 0, 28, 28), r"shape \(9,\), expected .* shape \(0,\)"),
    ],
)
def test_wrong_images(tmp_path, data, message, packed):
    path = idx_folder(tmp_path, packed, train_images_idx3_ubyte=data)
    with pytest.raises(InputError, match=message) as caught:
        clients(path)
    assert "emnist-byclass-train-" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "label"), [("emnist", "byclass", 62), ("emnist-digits", "digits", 10)]
)
def test_a_label_out_of_range(tmp_path, name, part, label):
    labels = np.array([0, 1, label, 3, 4, 5, 6, 7, label], np.uint8)
    idx_folder(tmp_path / "i", part=part, train_labels_idx1_ubyte=idx(labels))
    mat_folder(tmp_path / "m", part, train={**dataset("train"), "labels": labels[:, None]})
    for folder in "im":
        with pytest.raises(InputError, match=f"is {label} in example 2, expected 0 to {label - 1}"):
            clients(tmp_path / folder, name=name)
    labels[[2, 8]] = label - 1
    idx_folder(tmp_path / "i", part=part, train_labels_idx1_ubyte=idx(labels))
    assert clients(tmp_path / "i", name=name)["all"]["y"][2] == label - 1


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_cut_short_anywhere(tmp_path, packed):
    path = idx_folder(tmp_path, packed)
    file = next(path.glob("*train-images*"))
    whole = file.read_bytes()
    for cut in {*range(40), *range(40, len(whole), 97), *range(len(whole) - 20, len(whole))}:
        file.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="train-images"):
            clients(path)


def test_a_changed_byte_in_a_packed_file(tmp_path):
    # gzip has a sum at its end: no damage to the content goes unseen.
    path = idx_folder(tmp_path, packed=True)
    file = next(path.glob("*train-images*"))
    whole = file.read_bytes()
    for place in range(20, len(whole), 61):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="train-images"):
            clients(path)


def changed(**fields):
    return {"train": {**dataset("train"), **fields}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": 3}, "damaged or of another format"),
        ({"train": {"images": dataset("train")["images"]}}, "KeyError: 'labels'"),
        (changed(images=np.zeros((9, 783), np.uint8)), r"images is uint8 of the shape \(9, 783\)"),
        (changed(images=np.zeros((9, 784))), "images is float64 of the shape"),
        (changed(images="none"), "images is <U4 of the shape"),
        (changed(labels=np.arange(8)), r"labels is int64 of the shape \(8,\), expected integers"),
        (changed(labels=np.full(9, 0.5)), "labels is float64 of .*, expected integers"),
        (changed(labels=np.full(9, -1)), "labels is -1 in example 0"),
        (changed(writers=np.full(9, np.nan)), "writers is float64 of .*, expected integers"),
        (changed(writers=np.full(9, np.inf)), "writers is float64 of .*, expected integers"),
        (changed(writers=np.full(9, 1e12)), "writers is float64 of .*, expected integers"),
        (changed(writers=list("abcdefghi")), "writers is <U1 of .*, expected integers"),
    ],
)
def test_wrong_fields(tmp_path, content, message):
    path = mat_folder(tmp_path, **content)
    with pytest.raises(InputError, match=message) as caught:
        clients(path)
    assert "emnist-byclass.mat" in str(caught.value)


def test_a_matlab_file_of_something_else(tmp_path):
    savemat(tmp_path / "emnist-byclass.mat", {"other": 1})
    with pytest.raises(InputError, match="KeyError: 'dataset'"):
        clients(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_a_matlab_file_cut_short_anywhere_is_never_read(tmp_path, packed):
    whole = (mat_folder(tmp_path, packed=packed) / "emnist-byclass.mat").read_bytes()
    # Few: each takes a process. `make soak` has as many as time allows.
    cuts = {*range(0, 400, 31), *range(400, len(whole), 1999), *range(len(whole) - 2, len(whole))}
    found = matlab_outcomes(tmp_path, [whole[:cut] for cut in sorted(cuts)])
    assert found.keys() <= ENDINGS, found
    assert found["refused"] > len(cuts) / 2


def test_changed_bytes_in_a_matlab_file_give_images_or_end_the_child(tmp_path):
    whole = (mat_folder(tmp_path, packed=False) / "emnist-byclass.mat").read_bytes()
    rng = np.random.default_rng(1)
    files = []
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.integers(0, 700)] = rng.integers(256)
        files.append(bytes(damaged))
    found = matlab_outcomes(tmp_path, files)
    assert found.keys() <= ENDINGS | {"read"}, found
    assert found["refused"] > 5
