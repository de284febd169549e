"""Whatever a parser does in the child process, the caller gets a result or an error in time."""

import os
import signal
import time

import numpy as np
import pytest

from fedda.data import datasets, sandbox
from fedda.data.sandbox import Limits
from fedda.errors import InputError
from helpers import sandboxed

LIMITS = Limits(memory=10**9, seconds=60)


def call(function, *arguments, limits=LIMITS, tell=lambda message: None):
    return sandbox.call(function, arguments, "the file", limits, tell)


def test_a_result_and_messages_come_back_and_jax_is_not_imported():
    told = []
    found = call(sandboxed.add, 2, 3, tell=told.append)
    assert found == {"sum": 5, "jax": False, "memory": 10**9}
    assert told == ["adding 2 and 3"]


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (sandboxed.refuse, (), "^the file \udcff is wrong.$"),
        (sandboxed.fail, (), r"^the file cannot be read \(KeyError: 'offset'\). It is damaged or"),
        (sandboxed.recurse, (), "^the file cannot be read .RecursionError: "),
        (sandboxed.allocate, (10**10,), "^the file takes more than the 1.0 GB .* with --memory.$"),
        (sandboxed.crash, (), r"^the file made its reader crash \(SIGSEGV\). It is damaged, or "),
    ],
    ids=["refused", "unexpected", "too deep", "too large", "crash"],
)
def test_every_failure_is_a_refusal(function, arguments, words):
    with pytest.raises(InputError, match=words):
        call(function, *arguments)


def test_what_the_system_refuses_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError) as caught:
        call(sandboxed.open_nothing)
    assert caught.value.filename == "/nowhere/at/all"


def test_what_hangs_is_killed_when_the_time_is_over():
    begin, told = time.monotonic(), []
    with pytest.raises(InputError, match=r"takes more than the 1 seconds .* with --minutes.$"):
        call(sandboxed.spin, limits=Limits(10**9, 1), tell=told.append)
    assert time.monotonic() - begin < 30
    assert has_ended(told[0])


def test_ctrl_c_ends_what_hangs():
    told = []

    def interrupt(message):
        told.append(message)
        signal.raise_signal(signal.SIGINT)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(sandboxed.spin, tell=interrupt)
    assert time.monotonic() - begin < 30
    assert has_ended(told[0])


def has_ended(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    return False


# ---------------------------------------------------------------------------------- whole imports


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def npz_bomb(path):
    """Unpacks to 300 times its size."""
    pixels = 10**8
    np.savez_compressed(path, x=np.zeros((1, pixels), np.uint8), y=np.zeros(1, int), client=["a"])


def parquet_bomb(path):
    """Ten million rows of one value, which take hardly more bytes than one row."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(np.zeros(10**7))
    names = pyarrow.DictionaryArray.from_arrays(np.zeros(10**7, np.int8), ["a"])
    parquet.write_table(pyarrow.table({"client": names, "label": column, "f": column}), path)


@pytest.mark.parametrize("bomb", [npz_bomb, parquet_bomb])
def test_files_that_unpack_to_much_more_than_their_size_are_refused(root, tmp_path, bomb):
    file = tmp_path / ("bomb.npz" if bomb is npz_bomb else "bomb.parquet")
    bomb(file)
    assert file.stat().st_size < 10**6
    with pytest.raises(InputError, match=r"takes more than the 0\.2 GB of memory"):
        datasets.import_files("mine", file, memory=2 * 10**8)
    assert not list(root.iterdir()), "not even a temporary folder"


def test_an_import_that_takes_too_long_is_refused_and_leaves_nothing(root, tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, x=np.eye(4), y=np.arange(4), client=np.zeros(4, int))
    with pytest.raises(InputError, match=r"mine in .*a\.npz takes more than the .* seconds"):
        datasets.import_files("mine", file, seconds=0.01)
    assert not list(root.iterdir())
    assert datasets.import_files("mine", file).splits["train"].num_examples == 3


def test_the_usual_limits_grow_with_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.free_memory, "of_host", lambda: 10**10)
    file = tmp_path / "a.npz"
    for size, memory, seconds in (
        (10**6, 2 * 10**9, 120 + 20),
        (10**8, 5 * 10**9, 120 + 2000),
        (10**9, 10**10, 120 + 20_000),  # no more than the machine has
    ):
        file.touch()
        os.truncate(file, size)
        assert datasets._limits("mine", file, None, None) == (memory, seconds)
    assert datasets._limits("mine", file, 5, 7) == (5, 7)
