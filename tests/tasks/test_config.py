"""Configurations: where values come from, and what is refused."""

import dataclasses
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedda import algorithms
from fedda.errors import InputError, writing
from fedda.storage.files import write_whole
from fedda.tasks import config


def test_files_and_words_override_presets_which_override_defaults():
    tuned = config.preset("digits", "mlp")["fedda-adam"]
    resolved = config.resolve({"algorithm": "fedda-adam", "beta2": 0.5})
    assert resolved.chosen["client_lr"] == tuned["client_lr"]
    assert resolved.chosen["beta2"] == 0.5
    assert resolved.chosen["beta1"] == 0.9
    assert resolved.chosen["bias"] == "rounds"
    assert config.resolve({"client_lr": 7.0}).chosen["client_lr"] == 7.0
    untuned = config.resolve({"algorithm": "fedda-adam", "model": "cnn"})
    assert untuned.chosen["client_lr"] == 0.1, "what was tuned for one model is not for another"


@pytest.mark.parametrize("name", algorithms.names())
def test_dump_and_read_back(name: str, tmp_path: Path):
    resolved = config.resolve({"algorithm": name, "stabilise": 0.25, "partition": 'a "b" \\ c'})
    (tmp_path / "config.toml").write_text(config.dump(resolved))
    assert config.resolve(config.read(tmp_path / "config.toml")) == resolved


def test_every_preset_is_of_a_known_algorithm_and_allowed():
    for path in config.PRESETS.glob("*.toml"):
        for name, values in tomllib.loads(path.read_text()).items():
            own = {key: value for key, value in values.items() if key not in config.FIELDS}
            algorithms.configure(name, own)  # which refuses what it does not know


def test_no_setting_of_an_algorithm_or_a_task_hides_another():
    of_tasks = set().union(*map(config.task_settings, config.tasks()))
    assert not of_tasks & config.FIELDS.keys()
    for name in algorithms.names():
        own = {*algorithms.options(name), *algorithms.get(name).Hyper._fields}
        assert not own & (config.FIELDS.keys() | of_tasks)


def test_a_task_brings_defaults_and_settings_and_its_pipeline_more_of_them():
    resolved = config.resolve({"task": "cifar100"})
    assert (resolved.model, resolved.rounds, resolved.batch) == ("resnet18", 4000, 20)
    assert resolved.options == {"l2": 1e-4, "pipeline": "fedopt", "augment": True, "affine": True}
    assert resolved.chosen["server_lr"] == 3.3
    other = config.resolve({"task": "cifar100", "pipeline": "tff21", "affine": True, "rounds": 3})
    assert other.options == resolved.options | {"pipeline": "tff21", "augment": False}
    assert other.rounds == 3


@pytest.mark.parametrize("task", config.tasks())
def test_every_task_file_is_of_known_keys_and_survives_a_dump(task: str, tmp_path: Path):
    resolved = config.resolve({"task": task})
    assert config.about(task)["description"]
    (tmp_path / "config.toml").write_text(config.dump(resolved))
    assert config.resolve(config.read(tmp_path / "config.toml")) == resolved
    assert (config.TASKS / f"{task.replace('-', '_')}.py").exists()


ABSURD = [
    *("[[[", "[" * 5000, "[]", "[[1]]", "{}", "{a = 1}", "", '"', "\\", "true", "1979-05-27"),
    *("9" * 5000, "-" + "9" * 5000, "1" * 4000, "18446744073709551616", "-18446744073709551616"),
    *("1e400", "-1e400", "nan", "inf", "-inf", "5e-324", "1.7e308", "0.1", "1"),
    *("\U0001f600", "\udc80", "a\x00b", "a\nb", "\x7f", "\x85", "x" * 100_000),
    *('"a\\u0000b"', "1\nseed = 2"),
]


@pytest.mark.parametrize(
    ("task", "also"), [("cifar100", config.FIELDS), ("stackexchange", ()), ("synthetic", ())]
)
def test_a_setting_is_refused_or_reads_back_as_it_is(task: str, also: Iterable[str]):
    """What neither is trained to its end, and then lost: nobody can read its config.toml."""
    own = {*also, *config.task_settings(task), *algorithms.settings("fedda-adam", {})}
    kept = longest = 0
    for name, value in itertools.product(sorted(own - {"task", "algorithm"}), ABSURD):
        given = config.parse([f"task={task}", "algorithm=fedda-adam", f"{name}={value}"])
        try:
            resolved = config.resolve(given)
        except InputError as error:
            longest = max(longest, len(str(error)))
            continue
        assert config.resolve(tomllib.loads(config.dump(resolved))) == resolved
        kept += 1
    assert kept > 10
    assert 0 < longest < 1000, "a message repeats no page of input"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("memory_gb=inf", "memory_gb must be a finite number, got inf."),
        ("data_gb=nan", "data_gb must be a finite number, got nan."),
        ("data_gb=1" + "0" * 400, "data_gb must be a finite number, got 1000"),
        ("batch=18446744073709551616", "batch must be a whole number of less than 2**31 in size, "),
        ("seed=[[[", "seed must be a whole number, got '[[['."),
        ("seed=" + "9" * 5000, "seed must be a whole number, got '999"),
        ("model=a\x07b", "text of at most 255 characters, without control characters, got 'a\\x07"),
        ("pipeline=[]", "pipeline must be text, got []."),
        ("client_lr=1e39", "must be a positive number, got 1e+39, which is inf in float32."),
        ("client_lr=1" + "0" * 400, "client_lr of fedda-sgdm must be a positive number, got 1000"),
    ],
)
def test_absurd_values_have_a_message(word: str, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        config.resolve({"task": "cifar100"} | config.parse([word]))


def test_a_configuration_that_would_not_read_back_is_not_written():
    for lost in ({"memory_gb": math.inf}, {"data_gb": math.nan}, {"model": "\x7f"}):
        with pytest.raises(InputError, match=r"reading config\.toml back would give other values"):
            config.dump(dataclasses.replace(config.resolve({}), **lost))


def test_names_may_have_any_letters(tmp_path: Path):
    resolved = config.resolve({"task": "own", "data": "\U00020000 Zoë ☃"})
    write_whole(tmp_path / "config.toml", config.dump(resolved))
    assert config.resolve(config.read(tmp_path / "config.toml")) == resolved


def test_a_file_of_brackets_or_digits_is_no_configuration(tmp_path: Path):
    for text in ("seed = " + "[" * 5000, "seed = " + "9" * 5000, "\xff"):
        (tmp_path / "a.toml").write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match="is not valid TOML"):
            config.read(tmp_path / "a.toml")


def test_words():
    parsed = config.parse(["rounds=5", "client_lr=1e-3", "task=digits", "partition=dirichlet:0.3"])
    assert parsed == {
        "rounds": 5,
        "client_lr": 1e-3,
        "task": "digits",
        "partition": "dirichlet:0.3",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "fedavgg"}, "unknown algorithm 'fedavgg'. Did you mean fedavg"),
        ({"round": 3}, "unknown setting 'round'. Did you mean rounds"),
        (
            {"eps": 0.1},
            "fedda-sgdm on digits has no setting 'eps'. It is a setting of .*fedda-adam.* 7 more",
        ),
        (
            {"augment": True},
            r"fedda-sgdm on digits has no setting 'augment'. It is a setting of cifar100\.$",
        ),
        ({"task": "cifar"}, "unknown task 'cifar'. Did you mean cifar100"),
        ({"task": "cifar100", "augment": 1}, "augment must be true or false, got 1"),
        ({"task": "cifar100", "l2": True}, "l2 must be a number, got True"),
        ({"task": "cifar100", "pipeline": "tff"}, "unknown pipeline of cifar100 'tff'"),
        ({"clients": -1}, "clients must be at least 0, got -1"),
        ({"rounds": "many"}, "rounds must be a whole number, got 'many'"),
        ({"rounds": 2.5}, r"rounds must be a whole number, got 2\.5"),
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"task": 3}, "task must be text, got 3"),
        ({"stabilise": "some"}, "stabilise must be a number, got 'some'"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"rounds": -5}, "rounds must be at least 1, got -5"),
        ({"late_every": -1}, "late_every must be at least 0, got -1"),
        ({"partition_seed": -1}, "partition_seed must be at least 0, got -1"),
        (
            {"beta1": 1 - 1e-12},
            r"beta1 .* must be a number in \[0, 1\), got .* which is 1 in float32",
        ),
        ({"client_lr": 1e-50}, "client_lr .* must be a positive number, got 1e-50, which is 0"),
        ({"client_lr": -1}, "client_lr of fedda-sgdm must be a positive number, got -1"),
        ({"client_lr": float("nan")}, "client_lr of fedda-sgdm must be a positive number, got nan"),
        ({"beta1": 1}, r"beta1 of fedda-sgdm must be a number in \[0, 1\), got 1"),
        (
            {"algorithm": "fedda-adam", "units": "gradd"},
            "unknown value of units of fedda-adam 'gradd'. Did you mean grad",
        ),
    ],
)
def test_refused(values: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        config.resolve(values)


def test_bad_files_and_words(tmp_path: Path):
    with pytest.raises(InputError, match="there is no configuration file"):
        config.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"bad\.toml is not valid TOML: .*line 1"):
        config.read(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="a setting must look like key=value, got '=3'"):
        config.parse(["=3"])


def test_what_cannot_be_written_is_told_with_the_option_that_named_it(tmp_path: Path):
    (tmp_path / "file").touch()
    told = r"cannot write to .*/file/run \(Not a directory\)\. Give another --out\.$"
    with pytest.raises(InputError, match=told), writing("--out"):
        (tmp_path / "file" / "run").mkdir()
    for error in (PermissionError(13, "no", str(tmp_path / "file")), OSError(5, "I/O error")):
        with pytest.raises(type(error)) as raised, writing("--out"):
            raise error  # a file that may be one to read, or no file at all
        assert raised.value is error


def test_a_full_disk_is_told_with_the_folder_and_not_with_a_temporary_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    told = (
        rf"^cannot write to {tmp_path} \(No space left on device\)\. "
        r"Free some space there, or give another --out\.$"
    )
    with pytest.raises(InputError, match=told), writing("--out"):
        write_whole(tmp_path / "bench.json", "{}")
    assert list(tmp_path.iterdir()) == []
