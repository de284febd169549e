"""Runs of the command: what their directories hold, and how they are resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import pytest

from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.storage.files import sealed
from fedda.tasks import config

SMALL = {
    "algorithm": "fedda-adam",
    "model": "linear",
    "clients": 12,
    "cohort": 3,
    "rounds": 12,
    "eval_every": 2,
    "checkpoint_every": 1,
    "stabilise": 3,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    experiment.run(config.resolve(SMALL), directory)
    return directory


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def end_of(directory: Path) -> bytes:
    """The arrays of the last checkpoint: parameters, momenta, counters."""
    path = directory / "checkpoints" / f"round-{config.read(directory / 'config.toml')['rounds']}"
    return path.read_bytes().partition(b"\n")[2][:-32]  # without the times, and their checksum


def assert_same_end(directory: Path, reference: Path) -> None:
    assert end_of(directory) == end_of(reference)
    for name in ("config.toml", "metrics.jsonl"):
        assert (directory / name).read_bytes() == (reference / name).read_bytes()


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_run_directory_says_everything(finished: Path):
    written = tomllib.loads((finished / "config.toml").read_text())
    assert SMALL.items() <= written.items()
    assert written["beta1"] == 0.9, "defaults are written out"
    assert written["units"] == "grad"
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 2, 4, 6, 8, 10, 12]
    assert list(rows[1])[:4] == ["round", "train_loss", "loss", "accuracy"]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["final"] == {key: rows[-1][key] for key in ("train_loss", "loss", "accuracy")}
    parameters = 64 * 10 + 10
    assert summary["parameters"] == parameters
    assert summary["bytes_down"] == 12 * 3 * 2 * parameters * 4, "rounds, cohort, W and m, float32"
    assert summary["bytes_up"] == 12 * 3 * (2 * parameters + 1) * 4, "P, m and the weight"
    assert summary["seconds"]["total"] > 0
    assert summary["versions"]["jax"] == jax.__version__
    for key in ("device", "commit", "nonfinite_clients", "skipped_rounds", "seed", "task"):
        assert key in summary


def test_the_last_rounds_are_full_batch(finished: Path, tmp_path: Path):
    experiment.run(config.resolve(SMALL | {"stabilise": 0}), tmp_path / "plain")
    ours, plain = (
        (directory / "metrics.jsonl").read_text().splitlines()
        for directory in (finished, tmp_path / "plain")
    )
    assert ours[:5] == plain[:5], "rounds 0 to 8 come before the switch at round 9"
    assert ours[5] != plain[5]


def start(directory: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fedda", "run", "--quiet", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.usefixtures("in_quick_processes")
def test_kill_at_any_moment_and_resume(tmp_path: Path):
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    settings = SMALL | {"rounds": 60, "eval_every": 1, "checkpoint_every": rng.choice([1, 3])}
    words = [f"{key}={value}" for key, value in settings.items()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, *words, "--out", str(whole)).wait() == 0

    arguments, kills = [*words, "--out", str(killed)], 0
    for _ in range(4):
        if (killed / "summary.json").exists():  # a busy machine may kill too late
            break
        process = start(killed, *arguments)
        enough = lines(killed / "metrics.jsonl") + rng.randrange(1, 16)
        while lines(killed / "metrics.jsonl") < enough and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)  # most of a round is spent writing its checkpoint
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if (killed / "config.toml").exists():
            arguments = ["--resume", str(killed)]
    assert kills
    assert start(killed, *arguments).wait() == 0
    assert (killed / "summary.json").exists()
    assert_same_end(killed, whole)


def test_resume_of_a_finished_run_changes_nothing(copy: Path):
    before = content(copy)
    outcome = experiment.resume(copy)
    assert outcome.notes == ["continued from round 12"]
    assert content(copy) == before, "the summary names the versions that did it"
    assert outcome.summary == json.loads((copy / "summary.json").read_text())


def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(copy: Path, finished: Path):
    """As killed after round 10: lines after the checkpoint are written again."""
    (copy / "checkpoints" / "round-12").unlink()
    (copy / "summary.json").unlink()
    outcome = experiment.resume(copy)
    assert outcome.notes == ["continued from round 10"]
    assert_same_end(copy, finished)
    shutil.rmtree(copy / "checkpoints")
    assert experiment.resume(copy).notes == []
    assert_same_end(copy, finished)


@pytest.mark.parametrize("name", ["checkpoints/round-12", "metrics.jsonl", "config.toml"])
def test_damage_is_refused_and_everything_left(copy: Path, name: str):
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole.replace(b"0", b"1", 1))
    before = content(copy)
    with pytest.raises(InputError, match=rf"{copy / name} (is damaged|was changed or damaged)"):
        experiment.resume(copy)
    assert content(copy) == before


def test_an_edited_setting_is_refused_with_every_checksum_but_its_own(copy: Path):
    """As if somebody had written a whole new configuration in its place."""
    path = copy / "config.toml"
    settings = config.resolve(config.read(path) | {"batch": 11})
    path.write_text(sealed(config.dump(settings)))
    with pytest.raises(InputError, match=r"round-12 belongs to a run with another config\.toml"):
        experiment.resume(copy)


def test_another_default_type_of_jax_is_refused(copy: Path, x64: None):
    before = content(copy)
    message = r"Set JAX_ENABLE_X64 as it was|of JAX with another jax_enable_x64"
    with jax.numpy_dtype_promotion("standard"), pytest.raises(InputError, match=message):
        experiment.resume(copy)
    assert content(copy) == before


def test_resume_refuses_another_configuration(copy: Path):
    before = content(copy)
    with pytest.raises(InputError, match=r"is a run with client_lr = 0\.1, got 0\.5"):
        experiment.resume(copy, {"client_lr": 0.5})
    with pytest.raises(InputError, match="is a run of 12 rounds with"):
        experiment.resume(copy, {"rounds": 13})
    with pytest.raises(InputError, match=r"is a run with algorithm = 'fedda-adam', got 'fedavg'"):
        experiment.resume(copy, {"algorithm": "fedavg"})
    assert experiment.resume(copy, {"rounds": 12}).notes == ["continued from round 12"]
    assert content(copy) == before


def test_resume_may_keep_checkpoints_at_another_pace(copy: Path, finished: Path):
    shutil.rmtree(copy / "checkpoints")
    experiment.resume(copy, {"checkpoint_every": 2})
    kept = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert kept == ["round-10", "round-12", "round-6"], "every second evaluation and the last"
    assert_same_end(copy, finished)


def test_resume_refuses_what_is_not_a_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.toml"):
        experiment.resume(tmp_path)


def test_a_new_run_never_overwrites(finished: Path):
    with pytest.raises(InputError, match=r"is not empty.*--resume"):
        experiment.run(config.resolve(SMALL), finished)


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(InputError, match=r"unknown task 'digit'\. Did you mean digits"):
        experiment.run(config.resolve(SMALL | {"task": "digit"}), tmp_path / "new")
    with pytest.raises(InputError, match="cohort must be at most"):
        experiment.run(config.resolve(SMALL | {"cohort": 13}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_configuration_may_ask_for_an_evaluation_of_each_client(tmp_path: Path):
    small = config.resolve({"per_client": True, "clients": 12, "rounds": 2, "model": "linear"})
    outcome = experiment.run(small, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["per_client"]
    assert found == outcome.result.per_client.to_json()
    assert (found["on"], found["clients"]) == ("train", list(range(12)))
    assert {name: len(values) for name, values in found["metrics"].items()} == {
        "loss": 12, "accuracy": 12
    }  # fmt: skip


def test_a_diverging_run_is_written_as_null_and_counted(tmp_path: Path):
    wild = {"algorithm": "fedavg", "client_lr": 1e38, "server_lr": 1e38, "stabilise": 0}
    settings = {key: value for key, value in SMALL.items() if key != "algorithm"} | wild
    experiment.run(config.resolve(settings), tmp_path / "wild")
    rows = (tmp_path / "wild" / "metrics.jsonl").read_text()
    assert "NaN" not in rows
    assert "Infinity" not in rows
    summary = json.loads((tmp_path / "wild" / "summary.json").read_text())
    assert summary["nonfinite_clients"] + summary["skipped_rounds"] > 0


def test_a_checkpoint_that_has_no_room_is_left_out_and_told(tmp_path, monkeypatch):
    """There is none in the first half of the run; the run goes on, and can be continued."""
    room = iter([100, 100, 100])
    monkeypatch.setattr("fedda.storage.directory.free_memory.of_host", lambda: next(room, 10**15))
    outcome = experiment.run(config.resolve(SMALL), tmp_path / "run")
    assert len(outcome.notes) == 3
    assert outcome.notes[0].startswith("no checkpoint of round 0: it takes ")
    assert outcome.notes[0].endswith(" GB of memory, and 1e-07 GB are free")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["round-10", "round-12", "round-8"]
    assert outcome.result.history[-1]["round"] == SMALL["rounds"]
