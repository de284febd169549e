"""The command `fedda compare`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fedda.cli.compare import COMPARED
from fedda.experiments import run
from fedda.storage.files import locked
from fedda.tasks.config import Config
from helpers.commands import QUICK, WILD


def test_compare_prints_a_table_and_writes_a_report(fedda, tmp_path: Path):
    code, out, err = fedda("compare", *QUICK, "--seeds", "2", "--out", "cmp")
    assert code == 0
    for name in COMPARED:
        assert re.search(rf"^ *{name} ", out, re.MULTILINE), "full names at 80 columns"
        assert f"{name}, seed 1: round 4/4 accuracy " in err
    assert "…" not in out
    assert "± is the 95 % interval over 2 seeds" in out
    *table, verdict = out.splitlines()
    assert max(map(len, table)) <= 80
    assert " ends highest: accuracy " in verdict
    assert re.search(rf"^ *{verdict.split()[0]} +best ", out, re.MULTILINE)
    assert not (tmp_path / "cmp" / "metric.pdf").exists()
    for name in ("report.html", "table.md", "metric.png"):
        assert (tmp_path / "cmp" / name).stat().st_size > 500
    first_rows = {
        (tmp_path / "cmp" / f"{name}-seed0" / "metrics.jsonl").read_text().splitlines()[0]
        for name in COMPARED
    }
    assert len(first_rows) == 1, "all start from the same model"


def test_compare_gives_each_algorithm_the_settings_it_has(fedda, tmp_path: Path):
    code, *_ = fedda("compare", "fedavg", "fedda-adam", *QUICK, "eps=0.5", "-q", "--out", "cmp")
    assert code == 0
    assert "\neps" not in (tmp_path / "cmp/fedavg-seed0/config.toml").read_text()
    assert "eps = 0.5" in (tmp_path / "cmp/fedda-adam-seed0/config.toml").read_text()


def test_compare_tells_whom_a_setting_is_given_to(fedda):
    words = ["fedavg", "fedda-sgdm", "fedda-adam", *QUICK, "rounds=2", "eps=0.5", "mu=0.1", "-q"]
    _, _, err = fedda("compare", *words, "--out", "cmp")
    told = [line for line in err.splitlines() if "given to" in line]
    assert told == [
        "eps is given to fedda-adam: the others have no such setting.",
        "mu is given to fedda-sgdm, fedda-adam: the others have no such setting.",
    ]


def test_compare_writes_only_into_what_is_empty_or_a_comparison(fedda, tmp_path: Path):
    words = ["fedavg", *QUICK, "-q", "--out", "mine"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    code, _, err = fedda("compare", *words)
    assert code == 2
    assert "mine is not empty. Give another --out, or that of a comparison to finish." in err
    assert len(list((tmp_path / "mine").iterdir())) == 1
    (tmp_path / "file").touch()
    assert "file is a file. Give another --out" in fedda("compare", "--out", "file")[2]


def test_an_interrupted_compare_is_finished_by_the_same_command(fedda, tmp_path: Path):
    words = ["fedavg", "fedprox", *QUICK, "-q", "--out", "cmp"]
    fedda("compare", *words)
    whole = (tmp_path / "cmp/fedavg-seed0/metrics.jsonl").read_bytes()
    before = (tmp_path / "cmp/fedavg-seed0/summary.json").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "cmp/fedprox-seed0")
    code, out, _ = fedda("compare", *words)
    assert code == 0
    assert "fedprox" in out
    assert (tmp_path / "cmp/fedavg-seed0/metrics.jsonl").read_bytes() == whole
    assert (tmp_path / "cmp/fedavg-seed0/summary.json").stat().st_mtime_ns == before
    code, _, err = fedda("compare", *words, "rounds=5")
    assert code == 2
    assert "is a run with rounds = 4, got 5" in err


def test_an_interrupted_compare_is_finished_from_its_folder_alone(fedda, tmp_path: Path):
    """Algorithms, seeds and settings are written there, also those of runs that had not begun."""
    fedda("compare", "fedavg", "fedda-adam", *QUICK, "eps=0.5", "--seeds", "2", "--out", "cmp")
    whole = {path.parent.name: path.read_bytes() for path in tmp_path.glob("cmp/*/metrics.jsonl")}
    assert len(whole) == 4
    for name in ("fedda-adam-seed0", "fedda-adam-seed1"):
        shutil.rmtree(tmp_path / "cmp" / name)
    code, out, err = fedda("compare", "--out", "cmp", "--json")
    assert code == 0
    assert "fedda-adam, seed 1: round 4/4 " in err
    assert [run["algorithm"] for run in json.loads(out)["runs"]] == [
        *("fedavg", "fedavg", "fedda-adam", "fedda-adam")
    ]
    assert "eps = 0.5" in (tmp_path / "cmp/fedda-adam-seed1/config.toml").read_text()
    again = {path.parent.name: path.read_bytes() for path in tmp_path.glob("cmp/*/metrics.jsonl")}
    assert again == whole


def test_a_comparison_keeps_what_it_was_begun_with(fedda, tmp_path: Path):
    """More may join it; what is refused leaves no trace, in its folder or as a folder."""
    words = [*QUICK, "-q", "--out", "cmp"]
    assert fedda("compare", "fedavg", *words, "cohort=13")[0] == 2
    assert not (tmp_path / "cmp").exists()
    fedda("compare", "fedavg", *words)
    assert fedda("compare", "fedavg", "stem", *words, "rounds=5")[0] == 2
    assert fedda("compare", "fedprox", *words)[0] == 0
    _, out, _ = fedda("compare", "--out", "cmp", "-q", "--json")
    runs = [(run["algorithm"], run["rounds"]) for run in json.loads(out)["runs"]]
    assert runs == [("fedavg", 4), ("fedprox", 4)]


def test_one_comparison_at_a_time_has_a_directory(fedda, tmp_path: Path):
    words = ["compare", "fedavg", *QUICK, "-q", "--out", "cmp"]
    with locked(tmp_path / "cmp"):
        code, _, err = fedda(*words)
        assert code == 2
        assert f"cmp is in use by process {os.getpid()} on " in err
        assert [path.name for path in (tmp_path / "cmp").iterdir()] == [".lock"]
    assert fedda(*words)[0] == 0
    with locked(tmp_path / "cmp"):
        assert fedda("compare", "--out", "cmp")[0] == 2
        assert fedda("run", "--resume", "cmp/fedavg-seed0", "-q")[0] == 0, "its runs are finished"


@pytest.mark.slow
@pytest.mark.usefixtures("in_quick_processes")
def test_of_two_comparisons_at_once_one_runs(tmp_path: Path):
    words = ["compare", "fedavg", "fedprox", *QUICK, "rounds=2000", "-q", "--out", "cmp"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "fedda", *words],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert "cmp is in use by process" in "".join(errors)
    for name in ("fedavg", "fedprox"):
        lines = (tmp_path / f"cmp/{name}-seed0/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(0, 2001, 2))


def test_the_programs_of_a_comparison_are_compiled_once_and_ahead(
    fedda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """One for all seeds of an algorithm, and none for runs that have finished."""
    words = ["compare", "fedavg", "fedda-adam", *QUICK, "batch=7", "--seeds", "2", "--out", "cmp"]
    compiled, usual = [], run.compile_ahead

    def compile_ahead(plan: Config) -> None:
        with jax.log_compiles():  # of this thread
            usual(plan)
        compiled.append((plan.algorithm, caplog.text.count("compilation of jit(segment)")))

    monkeypatch.setattr(run, "compile_ahead", compile_ahead)
    with jax.log_compiles():
        assert fedda(*words)[0] == 0
    assert sorted(name for name, _ in compiled) == ["fedavg", "fedda-adam"]
    assert caplog.text.count("compilation of jit(segment)") == max(n for _, n in compiled) == 2
    assert fedda(*words)[0] == 0
    assert len(compiled) == 2


def test_compare_json(fedda):
    code, out, err = fedda("compare", "fedavg", *QUICK, "--json", "--quiet", "--out", "cmp")
    assert code == 0
    printed = json.loads(out)
    assert [run["algorithm"] for run in printed["runs"]] == ["fedavg"]
    assert printed["table"][0]["final"][0] == printed["runs"][0]["final"]["accuracy"]
    assert err.splitlines() == ["Report: cmp/report.html"]


def test_a_comparison_names_the_runs_that_trained_nothing(fedda):
    """`fedprox` with a huge mu diverges, and its neighbour does not."""
    words = ["compare", "fedavg", "fedprox", *QUICK, "local_work=5", "mu=1e38", "-q", "--out", "c"]
    code, out, err = fedda(*words)
    assert code == 0
    assert "fedprox-seed0: nothing was trained: all 4 rounds were skipped" in err
    assert "fedavg-seed0" not in err
    assert re.search(r"skipped", out)
    assert fedda("compare", "fedavg", *QUICK, *WILD, "-q", "--out", "d")[0] == 1
