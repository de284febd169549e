"""Finished runs as files: what identifies them, what they hold, and what is wrong with them."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from fedda.algorithms import registry
from fedda.errors import InputError
from fedda.reports.runs import read_runs
from fedda.simulate import train
from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import cells
from helpers.finished_runs import SUMMARY

TINY = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}

# ------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("chunk", 3, True),
        ("devices", 2, True),
        ("memory_gb", 1.0, True),
        ("data_gb", 1.0, True),
        ("checkpoint_every", 1, True),
        ("stabilise", 0, True),  # an int for a float
        ("late_every", 0, True),
        ("late_every", 1, False),
        ("client_lr", 0.125, False),
        ("seed", 1, False),
        ("rounds", 5, False),
        ("eval_every", 4, False),
        ("precision", "bf16", False),
        ("partition_seed", 1, False),
        ("model", "mlp", False),
    ],
)
def test_what_a_name_depends_on(name, value, same):
    usual, other = config.resolve(TINY), config.resolve(TINY | {name: value})
    assert (cells.name(usual, "data") == cells.name(other, "data")) == same
    assert (cells.key(usual) == cells.key(other)) == same


def test_a_name_depends_on_the_data():
    run = config.resolve(TINY)
    assert len({cells.name(run, data) for data in (None, "a", "b")}) == 3


def test_names_stay_what_they_are():
    """A changed way to name cells would orphan those that exist."""
    values = {"task": "cifar100", "rounds": 4000, "pipeline": "fedopt", "precision": "bf16"}
    values |= {"client_lr": 0.03, "server_lr": 3.3, "local_work": 5, "local_unit": "steps"}
    data = "4a1224dd6f3976076658a720a1c0b6911aed903df72c6bc677155ee822bee81f"
    assert cells.name(config.resolve(values), data) == "fedda-sgdm-f6cd7827467b"


def corrected(monkeypatch, algorithm, version):
    variant = registry.variants()[algorithm]._replace(version=version)
    monkeypatch.setattr(registry, "variants", lambda: {algorithm: variant})


def test_a_corrected_algorithm_gets_new_cells_and_the_old_ones_are_known(tmp_path, monkeypatch):
    old = written(tmp_path)
    before = cells.read(old).group
    assert "version" not in cells.read(old).content["config"]
    assert not cells.read(old).outdated
    corrected(monkeypatch, "fedda-sgdm", 2)
    cell = cells.read(old)
    assert (cell.version, cell.outdated) == (1, True)
    new = cells.read(written(tmp_path))
    assert new.path != old
    assert (new.version, new.outdated) == (2, False)
    assert new.content["config"]["version"] == 2
    assert new.group == cell.group != before, "they are of one row"
    assert reproduce.missing([cell.config], [cell]) == 1
    assert reproduce.missing([cell.config], [cell, new]) == 0


def test_results_of_uncommitted_code_are_refused_in_the_repository(tmp_path, monkeypatch):
    dirty = "a" * 40 + "-dirty"
    monkeypatch.setitem(SUMMARY, "commit", dirty)
    assert cells.read(written(tmp_path)).uncommitted, "elsewhere they are allowed"
    monkeypatch.setattr(cells, "REPOSITORY", tmp_path)
    with pytest.raises(InputError, match=r"not committed.* Commit them first"):
        written(tmp_path, seed=1)
    monkeypatch.setattr(reproduce, "commit", lambda: dirty)
    with pytest.raises(InputError, match="Commit them first"):
        reproduce.fill([], tmp_path / "results")
    cells.refuse_uncommitted(tmp_path, "a" * 40)


def test_a_new_field_of_configurations_leaves_finished_runs_alone(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Newer(config.Config):
        colour: str = "red"

    old = written(tmp_path)
    before = cells.key(cells.read(old).config)
    for module in (config, cells):
        monkeypatch.setattr(module, "Config", Newer)
    monkeypatch.setitem(config.FIELDS, "colour", str)
    run = config.resolve(TINY)
    assert run.flat()["colour"] == "red"
    assert cells.path(tmp_path, run, None) == old
    assert cells.key(cells.read(old).config) == cells.key(run) == before
    other = config.resolve(TINY | {"colour": "blue"})
    assert cells.path(tmp_path, other, None) != old
    assert cells.read(written(tmp_path, colour="blue")).config.colour == "blue"


def test_groups_are_of_any_seed_and_precision():
    run = config.resolve(TINY)
    other = dataclasses.replace(run, seed=7, precision="bf16")
    assert cells.group(run) == cells.group(other)
    assert cells.group(run) != cells.group(dataclasses.replace(run, rounds=9))


# ------------------------------------------------------------------------------------- files


def history(rounds, every, value=lambda number: number / 1000):
    return [
        {"round": i, "train_loss": 1.0 if i else math.nan, "loss": 2.0, "accuracy": value(i)}
        for i in range(0, rounds + 1, every)
    ]


def written(folder, value=lambda number: number / 1000, **settings):
    run = config.resolve(TINY | settings)
    return cells.write(folder, run, history(run.rounds, run.eval_every, value), SUMMARY)


def test_a_cell_holds_what_was_measured(tmp_path):
    path = written(tmp_path, rounds=400, eval_every=50, value=lambda i: 0.1234567891 * (i % 350))
    cell = cells.read(path)
    assert cell.final() == 6.17284, "six digits"
    assert cell.mean() == pytest.approx(0.1234567891 * (0 + 50) / 2, rel=1e-5), "rounds 350, 400"
    assert cell.final(at=200) == pytest.approx(0.1234567891 * 200, rel=1e-5)
    assert cell.mean(at=200) == pytest.approx(0.1234567891 * 175, rel=1e-5)
    assert cell.content["history"]["train_loss"][:2] == [None, 1.0]
    assert cell.content["seconds"] == SUMMARY["seconds"]
    assert cell.data is None
    assert path.stat().st_size < 3000


def test_the_mean_of_the_last_100_rounds_has_100_evaluations(tmp_path):
    """The evaluation before those rounds is far off: it would show in a mean that had it."""
    value = lambda number: 1e6 if number == 300 else number  # noqa: E731
    cell = cells.read(written(tmp_path, rounds=400, eval_every=1, value=value))
    assert cell.mean() == (301 + 400) / 2
    assert cell.mean(at=100) == (51 + 100) / 2, "of fewer than 200 rounds, the second half"


def test_a_run_that_diverged_has_no_number(tmp_path):
    cell = cells.read(written(tmp_path, value=lambda i: math.nan if i == 4 else 0.5))
    assert (cell.final(), cell.mean()) == (None, None)


def test_a_short_run_does_not_count_its_untrained_model(tmp_path):
    cell = cells.read(written(tmp_path, rounds=1, eval_every=1))
    assert cell.mean() == 0.001


DAMAGE = {
    "cut off": (lambda text: text[:200], "is not whole"),
    "empty": (lambda text: "", "is not whole"),
    "another kind": (lambda text: "[]", "is not whole"),
    "changed": (lambda text: text.replace('"parameters": 1000', '"parameters": 1'), "was changed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_noticed(tmp_path, kind):
    damage, why = DAMAGE[kind]
    path = written(tmp_path)
    path.write_text(damage(path.read_text()))
    (found,) = cells.read_all(tmp_path).damaged
    assert found.path == path
    assert why in found.why


@pytest.mark.parametrize("lost", ["config", "history", "date", "data", "metric"])
def test_a_file_that_agrees_with_its_checksum_may_still_lack_something(tmp_path, lost):
    path = written(tmp_path)
    content = json.loads(path.read_text())
    del content[lost], content["checksum"]
    path.write_text(json.dumps(content | {"checksum": cells._hash(content)}))
    (found,) = cells.read_all(tmp_path).damaged
    assert (found.path, found.of_other_version) == (path, False)
    assert found.why == f"is not whole: the file lacks {lost}"


@pytest.mark.parametrize("place", ["digits/fedda-sgdm-000000000000.json", "emnist/{name}"])
def test_a_renamed_file_is_noticed(tmp_path, place):
    path = written(tmp_path)
    target = tmp_path / "cells" / place.format(name=path.name)
    target.parent.mkdir(exist_ok=True)
    os.replace(path, target)
    (found,) = cells.read_all(tmp_path).damaged
    assert "another configuration than its name says" in found.why


def test_a_cell_of_a_setting_that_is_gone_is_left_alone(tmp_path, monkeypatch):
    whole = cells.identity
    monkeypatch.setattr(cells, "identity", lambda run: whole(run) | {"gone": 1})
    written(tmp_path)
    monkeypatch.undo()
    (found,) = cells.read_all(tmp_path).damaged
    assert found.of_other_version
    assert "gone" in found.why


# ------------------------------------------------------------------------------------- adding


def run_directory(folder: Path, **settings) -> Path:
    run = config.resolve(TINY | settings)
    folder.mkdir()
    (folder / "config.toml").write_text(config.dump(run))
    totals = dict.fromkeys(train.TOTALS, 0)
    rows = history(run.rounds, run.eval_every)
    lines = (json.dumps(row | totals).replace("NaN", "null") for row in rows)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


def test_a_run_becomes_a_cell(tmp_path):
    run = run_directory(tmp_path / "run", chunk=3)
    os.utime(run / "summary.json", (86400, 86400))
    cell = cells.read(cells.add(tmp_path / "results", *read_runs([run])))
    assert cells.key(cell.config) == cells.key(config.resolve(TINY))
    assert cell.content["date"] == "1970-01-02T00:00:00Z"
    assert cell.final() == 0.004


def test_a_run_that_is_not_whole_becomes_none(tmp_path):
    whole = run_directory(tmp_path / "run")
    for name, change, message in (
        (
            "config.toml",
            lambda text: text.replace('precision = "tf32"\n', ""),
            "config.toml lacks precision",
        ),
        ("summary.json", None, "it is not finished"),
        (
            "summary.json",
            lambda text: text.replace('"bytes_up"', '"up"'),
            "summary.json lacks bytes_up",
        ),
        ("summary.json", lambda text: "[" * 9999, "nested too deeply"),
        ("summary.json", lambda text: text.replace("1000", '"many"'), "expected a whole number"),
        ("metrics.jsonl", lambda text: text.replace("loss", "lost"), "round 0 lacks train_loss"),
        ("metrics.jsonl", lambda text: text.replace("2.0", "[]"), "invalid line at .*:1"),
        ("metrics.jsonl", lambda text: "", "ended after 0"),
        ("metrics.jsonl", lambda text: text[: text.rindex("{")], "ended after 2"),
    ):
        part = tmp_path / "part"
        shutil.copytree(whole, part)
        text = (part / name).read_text()
        (part / name).unlink()
        if change is not None:
            (part / name).write_text(change(text))
        with pytest.raises(InputError, match=message):
            cells.add(tmp_path / "results", *read_runs([part]))
        shutil.rmtree(part)
    assert not (tmp_path / "results").exists()
