"""Run directories: one writer, settings that stay, and checkpoints that may fail."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedda.errors import InputError
from fedda.simulate import client_state
from fedda.storage import directory, files, interrupts, snapshot
from fedda.storage.directory import RunDirectory

SETTINGS = {"name": "a", "rate": 0.1, "members": ["x", "y"], "odd key": True, "nothing": None}
STATE = {"w": np.arange(3.0)}


def kept(path: Path, rounds: int = 3, **more: Any) -> RunDirectory:
    """A run of some rounds, closed."""
    with RunDirectory(path, SETTINGS, **more) as run:
        assert run.read_back(lambda: STATE) is None
        for number in range(rounds):
            run.log({"round": number, "loss": 1 / (number + 1)})
            run.save(number, STATE, {"serial": number})
    return run


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


# -------------------------------------------------------------------------------------- settings


def test_settings_are_written_with_the_first_row_and_verified(tmp_path: Path):
    with RunDirectory(tmp_path / "run", SETTINGS) as run:
        assert names(tmp_path / "run") == [files.LOCK]
        run.log({"round": 0})
        assert names(tmp_path / "run") == [files.LOCK, "config.toml", "metrics.jsonl"]
    written = {name: value for name, value in SETTINGS.items() if value is not None}
    assert snapshot.read_settings(tmp_path / "run") == written
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("rate = 0.1", "rate = 0.2"))
    with pytest.raises(InputError, match=r"config\.toml was changed or damaged after it was writ"):
        RunDirectory(tmp_path / "run", SETTINGS | {"rate": 0.2})
    path.unlink()
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.toml"):
        snapshot.read_settings(tmp_path / "run")
    with pytest.raises(InputError, match=r"is not empty\. Choose another directory"):
        RunDirectory(tmp_path / "run", SETTINGS)


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path):
    with RunDirectory(tmp_path / "run", SETTINGS):
        pass
    assert names(tmp_path) == []
    (tmp_path / "mine").mkdir()
    with RunDirectory(tmp_path / "mine", SETTINGS):
        pass
    assert names(tmp_path / "mine") == []


def test_a_process_that_was_killed_in_its_first_moment_is_no_dead_end(tmp_path: Path):
    (tmp_path / files.LOCK).touch()
    (tmp_path / ".config.toml.123").touch()
    kept(tmp_path)
    assert {"checkpoints", "config.toml", "metrics.jsonl"} < set(names(tmp_path))


def test_settings_that_cannot_be_read_back_are_refused(tmp_path: Path):
    for value in (float("nan"), float("inf"), {"a": 1}):
        with pytest.raises(InputError, match="cannot be kept"):
            RunDirectory(tmp_path / "run", {"value": value})
    assert names(tmp_path) == []


def test_the_first_setting_that_differs_is_named(tmp_path: Path):
    kept(tmp_path)
    for changes, message in (
        ({"rate": 0.2}, r"is a run with rate = 0\.1, got 0\.2\. A resumed run keeps its settings"),
        ({"members": ["x"]}, r"is a run with members = \['x', 'y'\], got \['x'\]"),
        ({"rate": None}, r"is a run with rate = 0\.1, got None"),
        ({"nothing": 1}, "is a run with nothing = None, got 1"),
        ({"more": 1, "rate": 0.3}, "is a run with rate = "),
    ):
        with pytest.raises(InputError, match=message):
            RunDirectory(tmp_path, SETTINGS | changes)
    RunDirectory(tmp_path, SETTINGS | {"rate": 0.2}, changeable=["rate"]).close()
    RunDirectory(tmp_path, SETTINGS | {"rate": 0.1}).close()


# ---------------------------------------------------------------------------------------- locked

HOLD = """
import sys
from pathlib import Path
from fedda.storage.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_the_lock_until_it_ends(tmp_path: Path):
    kept(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on .* stop it;"):
            RunDirectory(tmp_path, SETTINGS)
        process.kill()
        process.wait()
    with RunDirectory(tmp_path, SETTINGS) as run:
        assert run.read_back(lambda: STATE) is not None


def test_a_directory_that_was_refused_is_not_locked(tmp_path: Path):
    kept(tmp_path)
    with pytest.raises(InputError, match="is a run with rate"):
        RunDirectory(tmp_path, SETTINGS | {"rate": 3})
    with RunDirectory(tmp_path, SETTINGS):
        before = list(interrupts.finish_first)
    assert len(before) == 1
    assert interrupts.finish_first == []


# ------------------------------------------------------------------------------------- read back


def test_what_is_read_back_is_what_was_kept(tmp_path: Path):
    first = kept(tmp_path, rounds=5)
    with RunDirectory(tmp_path, SETTINGS) as run:
        found = run.read_back(lambda: STATE)
        assert (found.round, found.progress, run.resumed_at) == (4, {"serial": 4}, 4)
        np.testing.assert_array_equal(found.run["w"], STATE["w"])
        assert run.history == first.history
        run.log({"round": 5, "loss": float("inf")})
    assert run.history[-1] == {"round": 5, "loss": None}, "as it will be read"
    assert names(tmp_path / "checkpoints") == ["round-2", "round-3", "round-4"]
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        assert run.history == first.history, "the row after the last checkpoint was cut off"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_without_a_directory_everything_is_in_memory():
    with RunDirectory(None, {}) as run:
        assert run.read_back(lambda: pytest.fail("there is nothing")) is None
        run.log({"round": 0, "loss": float("inf")})
        run.save(0, STATE)
        run.wait()
        summary = run.finish(lambda: {"rounds": 1})
    assert run.history == [{"round": 0, "loss": float("inf")}]
    assert {"rounds", "seconds", "versions", "commit", "device"} == summary.keys()


def test_other_processes_get_what_the_first_has_read(tmp_path: Path):
    kept(tmp_path)
    shared: list[bytes] = []
    with RunDirectory(tmp_path, SETTINGS) as run:
        first = run.read_back(lambda: STATE, lambda read: shared.append(read()) or shared[-1])
    with RunDirectory(None, SETTINGS) as other:
        found = other.read_back(lambda: STATE, lambda read: shared.pop(0))
    assert str(found) == str(first)
    assert other.history == run.history


def test_another_default_type_of_jax_is_refused(tmp_path: Path):
    """Also where all arrays are of the same types, for a program would round differently."""
    with jax.enable_x64(True):
        kept(tmp_path)
    message = "is a run with float64 as JAX's default type, here it is float32"
    with RunDirectory(tmp_path, SETTINGS) as run, pytest.raises(InputError, match=message):
        run.read_back(lambda: STATE)


def test_a_finished_run_keeps_its_summary(tmp_path: Path):
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        run.log({"round": 1})
        run.save(1, STATE, {"finished": True})
        summary = run.finish(lambda: {"end": 1})
    written = (tmp_path / "summary.json").read_bytes()
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        assert run.finish(lambda: {"end": 2}) == summary
    assert (tmp_path / "summary.json").read_bytes() == written
    (tmp_path / "summary.json").write_text("[")
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        with pytest.raises(InputError, match=r"summary\.json is damaged: .* Delete it, and resume"):
            run.finish(lambda: {"end": 2}, {"end": int})
    (tmp_path / "summary.json").unlink()
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        again = run.finish(lambda: {"end": 1})
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}, "of the versions that did the work"


def test_seconds_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(directory.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(directory, "compile_seconds", lambda: now[0] / 10)
    for number in range(2):
        with RunDirectory(tmp_path, SETTINGS) as run:
            run.read_back(lambda: STATE)
            now[0] += 50
            run.save(number, STATE)
            summary = run.finish(dict)
    assert summary["seconds"] == pytest.approx({"total": 100, "compile": 10})


# ---------------------------------------------------------------------------- no disk, no memory


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, the system refuses to write more, in a way that needs no rights to try."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_checkpoint_that_cannot_be_written_is_a_note(tmp_path: Path, capfd):
    """The run goes on, and no part of the checkpoint is left."""
    large = {"w": np.random.default_rng(0).normal(size=(4, 10_000))}
    with files_of_at_most(20_000), RunDirectory(tmp_path, SETTINGS) as run:
        run.save(1, large)
        run.save(2, STATE)
        note = f"no checkpoint of round 1: cannot write to {tmp_path} (File too large)"
        assert run.notes == [note]
        run.save(3, large)
    assert run.notes == [note, note.replace("round 1", "round 3")]
    assert capfd.readouterr() == ("", "")
    assert names(tmp_path / "checkpoints") == ["round-2"]
    with RunDirectory(tmp_path, SETTINGS) as run:
        assert run.read_back(lambda: STATE).round == 2


def test_a_row_that_cannot_be_written_names_the_file(tmp_path: Path):
    with files_of_at_most(1000), RunDirectory(tmp_path, SETTINGS) as run:
        run.log({"round": 0})
        run.save(0, STATE)
        with pytest.raises(OSError, match="File too large") as raised:
            run.log({"round": 1, "words": "x" * 1000})
    assert raised.value.filename == str(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").stat().st_size == 1000, "a part of a line"
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.read_back(lambda: STATE)
        assert run.history == [{"round": 0}]


def test_a_checkpoint_takes_no_more_memory_than_is_asked_for(tmp_path, monkeypatch):
    """Of client memory on the host, whose leaves are copies; without room nothing is copied."""
    numbers = np.ones((100, 100_000), np.float32)
    memory = client_state.HostMemory(np.zeros(100_000, np.float32))
    memory.put(np.arange(100), numbers)
    with RunDirectory(tmp_path, SETTINGS) as run:

        def most_bytes(number: int) -> int:
            run.wait()
            tracemalloc.start()
            run.save(number, {"memory": memory, "steps": np.zeros(3)})
            run.wait()
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        most = most_bytes(1)
        assert run.notes == []
        assert memory.nbytes < most < directory.COPIES * memory.nbytes
        monkeypatch.setattr("fedda.storage.directory.free_memory.of_host", lambda: most)
        assert most_bytes(2) < numbers.nbytes / 10
    (note,) = run.notes
    assert note.startswith("no checkpoint of round 2: it takes 0.16 GB of memory, and 0.0")
    assert names(tmp_path / "checkpoints") == ["round-1"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch):
    """The end of the run waits for it, and so does a process that receives SIGTERM."""
    may_write, write = threading.Event(), directory.checkpoint.write

    def slowly(*arguments: Any) -> None:
        assert may_write.wait(10)
        write(*arguments)

    monkeypatch.setattr(directory.checkpoint, "write", slowly)
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.save(1, STATE)
        assert not (tmp_path / "checkpoints" / "round-1").exists()
        (finish,) = interrupts.finish_first
        threading.Timer(0.05, may_write.set).start()
        finish()
        assert (tmp_path / "checkpoints" / "round-1").exists()
        may_write.clear()
        run.save(2, STATE)
        threading.Timer(0.05, may_write.set).start()
    assert (tmp_path / "checkpoints" / "round-2").exists()


# ------------------------------------------------------------------------------------ other files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    files.write_whole(tmp_path / "file", "old")

    def fail() -> None:
        with files.replacing(tmp_path / "file") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]
    files.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_new_directories_are_told_from_old_ones(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.make_directory(Path("a/b/c"))
    assert not files.make_directory(Path("a/b"))
    assert files.make_directory(Path("a/b/d"))
    assert os.path.isdir("a/b/d")


def test_json_in_directories_is_strict(tmp_path: Path):
    with RunDirectory(tmp_path, SETTINGS) as run:
        run.log({"round": 0, "loss": float("nan"), "other": -float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"round": 0, "loss": None, "other": None}


# ------------------------------------------------------------------------------------ crafted files


@pytest.mark.parametrize("text", ["a", "a = ", "a = " + "[" * 5000, "a = 1\na = 2"])
def test_settings_with_a_right_checksum_that_are_no_toml_are_refused(text: str, tmp_path: Path):
    (tmp_path / "config.toml").write_text(files.sealed(text))
    with pytest.raises(InputError, match="was changed or damaged"):
        snapshot.read_settings(tmp_path)


@pytest.mark.parametrize(
    "first_line",
    [
        *(b"", b"{", b"[]", b'{"round": 1}', b"\xff", b"[" * 5000, b'{"arrays": 3}'),
        b'{"round": 1, "arrays": [["w", "float32", [1e9]]], "notes": {}}',
        b'{"round": 1, "arrays": [["w", "nothing", [3]]], "notes": {}}',
        b'{"round": 1, "arrays": [["w", "datetime64[s]", [3]]], "notes": {}}',
        b'{"round": 1, "arrays": [["w", "S4", [1]]], "notes": {}}',
        b'{"round": 1, "arrays": [["w", "float128", [1]]], "notes": {}}',
        b'{"round": 1, "arrays": [[["w"], "O", [1]]], "notes": {}}',
        b'{"round": 1, "arrays": [], "notes": {"settings": 3}}',
        b'{"round": 1, "arrays": [], "notes": []}',
    ],
)
def test_a_checkpoint_with_a_right_checksum_and_a_wrong_content_is_refused(
    first_line: bytes, tmp_path: Path
):
    path = kept(tmp_path / "run").path
    content = first_line + b"\n" + bytes(24)
    content += hashlib.sha256(content).digest()
    (path / "checkpoints" / "round-2").write_bytes(content)
    message = "the newest checkpoint in .* cannot be read"
    with pytest.raises(InputError, match=message):
        snapshot.read_newest(path)
    with RunDirectory(path, SETTINGS) as run, pytest.raises(InputError, match=message):
        run.read_back(dict)
    assert (path / "checkpoints" / "round-2").read_bytes() == content
