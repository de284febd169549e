"""The CIFAR-100 archive is read exactly, and a hostile pickle is refused before it can act."""

import os
import pickle
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedda.data import store
from fedda.data.readers import cifar_python
from fedda.errors import InputError
from helpers import sandboxed

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 3072)).astype(np.uint8)
FINE = [0, 99, 5, 5, 17, 3, 42]
COARSE = [19, 0, 3, 3, 1, 2, 7]
TABLE = {
    b"filenames": [f"image_{i}.png".encode() for i in range(7)],
    b"batch_label": b"training batch 1 of 1",
    b"fine_labels": FINE,
    b"coarse_labels": COARSE,
    b"data": IMAGES,
}


def short(text):
    """A string as Python 2 pickles it."""
    return b"U" + bytes([len(text)]) + text


def array_of(raw, shape, dtype=b"u1", module=b"numpy.core.multiarray"):
    """An array as Python 2 and its NumPy pickled it."""
    return (
        b"c" + module + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R("
        b"K\x01" + b"".join(b"J" + struct.pack("<i", n) for n in shape) + b"\x86"
        b"cnumpy\ndtype\n" + short(dtype) + b"K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )


def list_of(parts):
    return b"](" + b"".join(parts) + b"e"


def python_2(data=None, **changed):
    """A file as the official ones are, byte by byte."""
    fields = {
        "filenames": list_of(short(name) for name in TABLE[b"filenames"]),
        "batch_label": short(TABLE[b"batch_label"]),
        "fine_labels": list_of(b"K" + bytes([label]) for label in FINE),
        "coarse_labels": list_of(b"K" + bytes([label]) for label in COARSE),
        "data": data or array_of(IMAGES.tobytes(), IMAGES.shape),
    } | changed
    items = b"".join(short(key.encode()) + value for key, value in fields.items())
    return b"\x80\x02}q\x01(" + items + b"u."


def item_by_item():
    """The same with instructions for one item, which pickles of short lists have."""
    labels = b"".join(b"K" + bytes([label]) + b"a" for label in FINE)
    coarse = list_of(b"K" + bytes([label]) for label in COARSE)
    items = (b"fine_labels", b"]" + labels), (b"coarse_labels", coarse)
    data = short(b"data") + array_of(IMAGES.tobytes(), IMAGES.shape) + b"s"
    return b"\x80\x02}" + b"".join(short(key) + own + b"s" for key, own in items) + data + b"."


def as_text(table):
    return {key.decode(): value for key, value in table.items()}


FILES = {
    "python 2": python_2(),
    "item by item": item_by_item(),
    "numpy 2": python_2(array_of(IMAGES.tobytes(), IMAGES.shape, module=b"numpy._core.multiarray")),
    **{f"protocol {n}": pickle.dumps(TABLE, protocol=n) for n in (2, 3, 4)},
    **{f"text, protocol {n}": pickle.dumps(as_text(TABLE), protocol=n) for n in (2, 3, 4)},
    "columns first": pickle.dumps({**TABLE, b"data": np.asfortranarray(IMAGES)}, protocol=2),
}


def folder(tmp_path, train, test=FILES["protocol 2"]):
    path = tmp_path / "cifar-100-python"
    path.mkdir(exist_ok=True)
    (path / "train").write_bytes(train)
    (path / "test").write_bytes(test)
    return tmp_path


def clients(path, split="train"):
    return list(cifar_python.read(path, "cifar100").splits[split])


@pytest.mark.parametrize("made_by", FILES)
@pytest.mark.parametrize("inside", [True, False])
def test_every_pixel_and_label(tmp_path, made_by, inside):
    assert pickle.loads(FILES["python 2"], encoding="bytes").keys() == TABLE.keys()
    path = folder(tmp_path, FILES[made_by])
    path = path if inside else path / "cifar-100-python"
    assert cifar_python.files(path, "cifar100")
    ((name, columns),) = clients(path)
    assert name == "all"
    assert columns["x"].shape == (7, 32, 32, 3)
    for image, row, column, channel in [(0, 0, 0, 0), (6, 31, 30, 2), (3, 5, 9, 1)]:
        place = channel * 1024 + row * 32 + column
        assert columns["x"][image, row, column, channel] == IMAGES[image, place]
    np.testing.assert_array_equal(columns["x"].transpose(0, 3, 1, 2).reshape(7, -1), IMAGES)
    np.testing.assert_array_equal(columns["y"], FINE)
    np.testing.assert_array_equal(columns["coarse"], COARSE)
    assert [columns[each].dtype for each in ("x", "y", "coarse")] == [np.uint8, np.int32, np.int32]


def test_the_reader_fills_a_store(tmp_path):
    path = folder(tmp_path, FILES["python 2"], pickle.dumps({**TABLE, b"fine_labels": [1] * 7}, 2))
    made = store.write(tmp_path / "store", cifar_python.read(path, "cifar100"), {})
    assert {name: split.num_examples for name, split in made.splits.items()} == {
        "train": 7,
        "test": 7,
    }
    np.testing.assert_array_equal(made.splits["test"].column("y", 0), [1] * 7)


def test_other_folders_are_not_found(tmp_path):
    assert not cifar_python.files(tmp_path, "cifar100")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").write_bytes(b"PAR1")
    assert not cifar_python.files(tmp_path, "cifar100")
    assert not cifar_python.files(tmp_path / "test", "cifar100")


def test_a_missing_split_is_named(tmp_path):
    path = folder(tmp_path, FILES["python 2"])
    (path / "cifar-100-python" / "test").unlink()
    assert cifar_python.files(path, "cifar100")
    with pytest.raises(InputError, match="has no file test"):
        cifar_python.read(path, "cifar100")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({b"data": None}, "'NoneType' object has no attribute 'values'"),
        ({b"data": IMAGES.tobytes()}, "'bytes' object has no attribute 'values'"),
        ({b"data": IMAGES[:, :3071].copy()}, r"'data' has the shape \(7, 3071\)"),
        ({b"data": IMAGES[0]}, r"'data' has the shape \(3072,\)"),
        ({b"data": IMAGES[:0]}, "'fine_labels' is int64 of the shape"),
        ({b"data": IMAGES.astype(np.int16)}, "an array of 'i2', expected u1"),
        ({b"data": IMAGES.astype(np.float64)}, "an array of 'f8', expected u1"),
        ({b"data": IMAGES.astype(bool)}, "an array of 'b1', expected u1"),
        ({b"fine_labels": FINE[1:]}, r"'fine_labels' is int64 of the shape \(6,\), expected"),
        ({b"fine_labels": [*FINE[:6], 100]}, "'fine_labels' is 100 in example 6, expected 0 to 99"),
        ({b"fine_labels": [-1, *FINE[1:]]}, "'fine_labels' is -1 in example 0"),
        ({b"coarse_labels": [*COARSE[:6], 20]}, "'coarse_labels' is 20 in example 6"),
        ({b"fine_labels": [b"a", *FINE[1:]]}, "'fine_labels' is .* expected integers"),
        ({b"fine_labels": None}, "'fine_labels' is object of .* expected integers"),
        ({b"fine_labels": [2**70, *FINE[1:]]}, "'fine_labels' is object of"),
    ],
)
def test_wrong_fields(tmp_path, changed, message):
    path = folder(tmp_path, pickle.dumps({**TABLE, **changed}, protocol=4))
    with pytest.raises(InputError, match=message) as caught:
        clients(path)
    assert str(path / "cifar-100-python" / "train") in str(caught.value)


@pytest.mark.parametrize("field", [b"data", b"fine_labels", b"coarse_labels"])
def test_missing_fields(tmp_path, field):
    path = folder(
        tmp_path, pickle.dumps({key: TABLE[key] for key in TABLE if key != field}, protocol=2)
    )
    with pytest.raises(InputError, match=f"KeyError: '{field.decode()}'"):
        clients(path)


@pytest.mark.parametrize("made_by", ["python 2", "protocol 2", "protocol 4"])
def test_cut_short_anywhere(tmp_path, made_by):
    whole = FILES[made_by]
    for cut in {*range(0, 300), *range(300, len(whole), 401), *range(len(whole) - 99, len(whole))}:
        with pytest.raises(InputError):
            clients(folder(tmp_path, whole[:cut]))


def read_in_a_child(tmp_path, files):
    """The outcomes of reading files, which may ask for any amount of memory."""
    paths = []
    for number, content in enumerate(files):
        (tmp_path / str(number)).mkdir()
        paths.append(folder(tmp_path / str(number), content))
    return sandboxed.outcomes("cifar_python", "cifar100", paths)


@pytest.mark.parametrize("made_by", ["python 2", "protocol 2", "protocol 4"])
def test_changed_bytes_give_a_table_or_a_plain_error(tmp_path, made_by):
    # Pixels may have any value, so change what comes before them. Protocol 2 has them as UTF-8.
    whole, rng = FILES[made_by], np.random.default_rng(1)
    first = IMAGES[0, :9].tobytes()
    pixels = max(whole.find(first), whole.find(first.decode("latin-1").encode()))
    assert pixels > 100
    files = []
    for _ in range(400):
        damaged = bytearray(whole)
        for place in rng.integers(0, pixels, 2):
            damaged[place] = rng.integers(256)
        files.append(bytes(damaged))
    found = Counter(read_in_a_child(tmp_path, files))
    assert found.keys() <= {"read", "refused", "memory"}, found
    assert min(found["read"], found["refused"]) > 10


class Call:
    """Pickled as a call of a function, which `pickle` makes when it reads it."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __call__(self):
        """Only what can be called may be pickled as a function: the outcome of another call."""

    def __reduce__(self):
        return self.call


def attacks(marker):
    """Pickles that leave a file behind when `pickle` reads them."""
    touch = f"touch {marker}"
    act = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    yield "system", Call(os.system, touch)
    yield "eval", Call(eval, act)
    yield "exec", Call(exec, act)
    yield "getattr", Call(Call(getattr, Call(__import__, "os"), "system"), touch)
    yield "touch", Call(Path.touch, Path(marker))
    yield "open", Call(open, str(marker), "w")
    yield "a label", {**TABLE, b"fine_labels": [Call(os.system, touch), *FINE[1:]]}
    yield "data", {**TABLE, b"data": Call(os.system, touch)}
    yield "unused", {**TABLE, b"more": Call(os.system, touch)}
    yield "a key", {Call(os.system, touch): 1, **TABLE}
    yield "of objects", {**TABLE, b"data": np.array([Call(os.system, touch)], object)}


def by_hand(marker):
    """The same with instructions that `pickle.dumps` does not write."""
    command = short(f"touch {marker}".encode())
    yield "inst", b"\x80\x02(" + command + b"iposix\nsystem\n."
    yield "obj", b"\x80\x02(cposix\nsystem\n" + command + b"o."
    yield "stack global", b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + command + b"\x85R."
    yield "dotted", b"\x80\x04\x8c\x05numpy\x8c\x0adtype.type\x93" + command + b"\x85R."
    state = b"}" + short(b"x") + b"cposix\nsystem\n" + command + b"\x85Rs"
    yield "build", b"\x80\x02cnumpy\nndarray\n" + state + b"b."


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("attack", [name for name, _ in attacks("")])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an opened file that nobody closes
def test_nothing_in_a_file_is_run(tmp_path, attack, protocol):
    marker = tmp_path / "marker"
    payload = pickle.dumps(dict(attacks(marker))[attack], protocol=protocol)
    pickle.loads(payload, encoding="bytes")
    assert marker.exists()  # the attack works where it can
    marker.unlink()
    with pytest.raises(InputError):
        clients(folder(tmp_path, payload))
    assert not marker.exists()


@pytest.mark.parametrize("attack", [name for name, _ in by_hand("")])
def test_nothing_is_run_by_rarer_instructions(tmp_path, attack):
    marker = tmp_path / "marker"
    payload = dict(by_hand(marker))[attack]
    if attack in ("inst", "obj", "stack global"):
        pickle.loads(payload, encoding="latin-1")
        assert marker.exists()
        marker.unlink()
    with pytest.raises(InputError, match="harm"):
        clients(folder(tmp_path, payload))
    assert not marker.exists()


def array_with_state(dtype_state):
    """An array of bytes whose type has a state of somebody's choice."""
    plain = array_of(IMAGES.tobytes(), IMAGES.shape)
    usual = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    assert plain.count(usual) == 1
    return plain.replace(usual, dtype_state + b"b")


# The state of a structured type with an object in it that is declared to have none (flags 0): NumPy
# would take bytes of the file for the address of an object.
FORGED = (
    b"(K\x03U\x01|NU\x02f0\x85}" + short(b"f0") + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    b"K\x00\x86sK\x08K\x01K\x00t"
)


def text(value):
    """Text, as Python 3 pickles it. Only text can be the name of an attribute."""
    return b"X" + struct.pack("<I", len(value)) + value


INTERFACE = (
    b"}" + text(b"__array_interface__") + b"}(" + text(b"shape") + b"K\x07\x85"
    b"" + text(b"typestr") + text(b"<i8") + text(b"version") + b"K\x03"
    b"" + text(b"data") + b"K\x08\x89\x86us"
)


@pytest.mark.parametrize(
    "name", [b"numpy\nndarray", b"numpy\ndtype", b"_codecs\nencode"], ids=bytes.decode
)
@pytest.mark.parametrize("slots", [False, True])
def test_a_pickle_cannot_change_the_classes_it_is_read_with(tmp_path, name, slots):
    """Such as by a state with an address, from which NumPy would read an array."""
    before = [dict(vars(kind)) for kind in cifar_python._STAND_INS.values()]
    state = b"N" + INTERFACE + b"\x86" if slots else INTERFACE
    payload = python_2(fine_labels=b"c" + name + b"\n" + state + b"b")
    with pytest.raises(InputError):
        clients(folder(tmp_path, payload))
    assert [dict(vars(kind)) for kind in cifar_python._STAND_INS.values()] == before


def test_the_state_of_a_type_is_not_believed(tmp_path):
    ((_, columns),) = clients(folder(tmp_path, python_2(array_with_state(FORGED))))
    np.testing.assert_array_equal(columns["x"].transpose(0, 3, 1, 2).reshape(7, -1), IMAGES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"cnumpy\nload\n" + short(b"/etc/passwd") + b"\x85R", "numpy.load"),
        (b"cnumpy\nmatrix\n", "numpy.matrix"),
        (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nmatrix\n", "numpy.matrix"),
        (b"cnumpy\nndarray\nK\x02\x85R", "no attribute 'values'"),
        (b"cnumpy\nndarray\nK\x02\x85\x81", "no attribute 'values'"),
        (b"cnumpy\ndtype\nU\x01OK\x00K\x01\x87R", "array of b'O'"),
        (b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R", "array of b'O8'"),
        (b"cnumpy\ndtype\n" + short(b"u1,O") + b"K\x00K\x01\x87R", "array of b'u1,O'"),
        (b"cnumpy\ndtype\ncnumpy\nndarray\n\x85R", "array of <class"),
        (array_of(IMAGES.tobytes(), IMAGES.shape, b"i1"), "array of b'i1'"),
        (array_of(IMAGES.tobytes()[1:], IMAGES.shape), "cannot reshape array of size 21503"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R", "text in 'zlib'"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R", "text in 'rot13'"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00a\x85R", "missing 1 required"),
        (b"c_codecs\ndecode\n", "_codecs.decode"),
        (b"ccodecs\nencode\n", "codecs.encode"),
        (b"K\x01K\x01\x85R", "'int' object is not callable"),
        (b"K\x01}b", "'int' object has no attribute '__dict__'"),
        (b"Pmine\n", "persistent"),
        (b"\x82\x01", "unregistered extension code"),
        (b"\x97", "out-of-band"),
        (b"\x8f", "'set' object has no attribute 'values'"),
        (b"Vtext\n", "'str' object has no attribute 'values'"),
        (b"\xff", "invalid load key"),
    ],
)
def test_what_a_file_may_not_ask_for(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        clients(folder(tmp_path, python_2(value)))


def repeated_text(times):
    """One text, then many calls that each turn it into bytes anew."""
    text = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000
    calls = b"h\x00h\x01h\x02\x86R" * times
    return b"c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02" + calls


BOMBS = {
    "bytes": b"\x8e" + struct.pack("<Q", 2**62),
    "more bytes than fit": b"\x8e" + struct.pack("<Q", 2**64 - 1),
    "short of bytes": b"B" + struct.pack("<I", 2**32 - 1),
    "string": b"T" + struct.pack("<i", 2**31 - 1),
    "negative string": b"T" + struct.pack("<i", -1),
    "text": b"X" + struct.pack("<I", 2**32 - 1),
    "long text": b"\x8d" + struct.pack("<Q", 2**62),
    "bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "integer": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "memo": b"Nr" + struct.pack("<I", 2**32 - 1),
    "frame": b"\x95" + struct.pack("<Q", 2**62),
    "shape": array_of(b"", (2**31 - 1, 2**31 - 1)),
    "shape less than nothing": array_of(b"abc", (-1, -3)),
    "constants": b"N" * 2_000_000,
    "marks": b"(" * 2_000_000,
    "nested tuples": b"K\x01" + b"\x85" * 2_000_000,
    "nested lists": b"]" * 500_000 + b"a" * 500_000,
    "a nested key": b"}K\x01" + b"\x85" * 900 + b"Ns",
    "copies of the stack": b"N" + b"q\x00h\x00h\x00\x86" * 300_000,
    "encoding": repeated_text(1500),
}


def test_bombs_end_in_the_child(tmp_path):
    """They are refused, or meet a limit on memory or time. None harms this process."""
    found = dict(zip(BOMBS, read_in_a_child(tmp_path, map(python_2, BOMBS.values())), strict=True))
    assert set(found.values()) <= {"refused", "memory", "SIGALRM"}, found
    assert "memory" in found.values(), "or this proves nothing"


def test_the_real_archive():
    if "FEDDA_TEST_DATA" not in os.environ:
        pytest.skip("set FEDDA_TEST_DATA to a folder with cifar-100-python")
    path = Path(os.environ["FEDDA_TEST_DATA"])
    assert cifar_python.files(path, "cifar100")
    for split, count in (("train", 50_000), ("test", 10_000)):
        ((_, columns),) = clients(path, split)
        assert columns["x"].shape == (count, 32, 32, 3)
        np.testing.assert_array_equal(np.bincount(columns["y"]), np.full(100, count // 100))
        np.testing.assert_array_equal(np.bincount(columns["coarse"]), np.full(20, count // 20))
        assert len(np.unique(np.stack([columns["y"], columns["coarse"]]), axis=1).T) == 100
        if split == "train":
            # The known means and deviations of red, green and blue, to five digits.
            histogram = [np.bincount(columns["x"][..., c].ravel(), minlength=256) for c in range(3)]
            share = np.array(histogram) / (count * 1024)
            values = np.arange(256) / 255
            mean = share @ values
            np.testing.assert_allclose(mean, (0.50708, 0.48655, 0.44092), atol=6e-6)
            deviation = np.sqrt(share @ values**2 - mean**2)
            np.testing.assert_allclose(deviation, (0.26733, 0.25644, 0.27615), atol=6e-6)
