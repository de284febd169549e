"""`fedda reproduce` as a person calls it."""

import json
import os
import re
import shutil
import signal
import types
from functools import partial
from pathlib import Path

import pytest

from fedda.algorithms import registry
from fedda.experiments import run as experiment
from fedda.simulate import train
from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import cells, experiments, training
from fedda_reproduction.paper.verdicts import Verdict
from helpers.finished_runs import RESULTS

FOLDER = Path("reproduction/results")  # the default


def names(folder):
    return sorted(path.stem for path in (folder / "cells").glob("*/*.json"))


@pytest.fixture
def fedda(fedda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`fedda reproduce`, where there are no data."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    return partial(fedda, "reproduce")


# ------------------------------------------------------------------------------------- listing


def test_it_lists_the_experiments(fedda, tmp_path):
    code, out, _ = fedda("--list")
    assert code == 0
    for name in experiments.experiments():
        assert re.search(rf"^ +{name} .* 0 *$", out, re.MULTILINE), name
    assert list(tmp_path.iterdir()) == [], "to look leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("table3", "digits"), ["table3", "digits"]),
        (("all",), list(experiments.experiments())),
        (("table3", "digits", "--only", "digits"), ["digits"]),
        (("table3", "digits", "--only", "digits, fedavg"), ["digits"]),
    ],
)
def test_the_list_is_of_what_is_named(fedda, words, names):
    code, out, _ = fedda("--list", *words)
    assert code == 0
    listed = re.findall(r"^ +(\S+) .* \d+ +0 *$", out, re.MULTILINE)
    assert listed == names


def test_the_list_counts_the_runs_of_the_rounds_asked_for(fedda, tmp_path):
    experiment.run(config.resolve({"rounds": 2, "algorithm": "fedavg"}), tmp_path / "run")
    fedda("--add", "run")
    for words, done in ((("--rounds", "2"), 1), (("--rounds", "3"), 0), ((), 0)):
        code, out, _ = fedda("--list", *words)
        assert code == 0
        assert re.search(rf"^ +digits .* {done} *$", out, re.MULTILINE), words


def test_the_list_names_what_it_does_not_count(fedda):
    path = FOLDER / "cells/digits/fedavg-0.json"
    path.parent.mkdir(parents=True)
    path.write_text("")
    code, _, err = fedda("--list")
    assert code == 0
    assert f"{path} is not whole" in err
    assert path.exists(), "to look changes nothing"


# ------------------------------------------------------------------------------------- running


def test_a_table_and_one_more_seed(fedda):
    words = ("digits", "--rounds", "2", "--only", "fedavg,fedda-sgdm")
    code, out, err = fedda(*words)
    assert code == 0
    assert "digits fedavg seed 0: accuracy" in err
    assert "2 of 2 runs are done, 0 are missing." in out
    assert "These are after 2 rounds, not 200: do not compare them." in out
    (line,) = (line for line in out.splitlines() if "FedAvg" in line)
    (cell,) = (FOLDER / "cells/digits").glob("fedavg-*.json")
    assert f"{json.loads(cell.read_text())['final']['accuracy']:.4f}" in line
    before = {path: path.stat().st_mtime_ns for path in FOLDER.glob("cells/*/*.json")}
    code, out, err = fedda(*words, "--quiet")
    assert (code, err) == (0, "")
    code, out, err = fedda(*words, "--seeds", "2")
    assert code == 0
    assert "seed 0: accuracy" not in err
    assert err.count("seed 1: accuracy") == 2
    assert "4 of 4 runs are done" in out
    assert re.search(r"FedAvg .* ± .* 2 ", out)
    after = {path: path.stat().st_mtime_ns for path in FOLDER.glob("cells/*/*.json")}
    assert len(after) == 4
    assert before.items() <= after.items(), "the first are as they were"
    assert fedda("--write")[0] == 0
    assert (FOLDER / "README.md").read_text().startswith("# Results")
    assert [path.name for path in (FOLDER / ".work").iterdir()] == [".gitignore"], "nothing is left"
    assert fedda("digits", "--rounds", "3", "--only", "fedavg", "-q")[0] == 0
    assert len(names(FOLDER)) == 5, "other rounds are other cells"


def test_a_run_is_added_and_found(fedda, tmp_path, monkeypatch):
    experiment.run(config.resolve({"rounds": 2, "algorithm": "fedavg"}), tmp_path / "run")
    code, out, _ = fedda("--add", "run")
    assert code == 0
    assert f"run is {FOLDER}/cells/digits/{names(FOLDER)[0]}.json" in out
    monkeypatch.setattr(training, "train_one", None)  # nothing is trained
    code, out, _ = fedda("digits", "--rounds", "2", "--only", "fedavg")
    assert code == 0
    assert "1 of 1 runs are done" in out


def test_a_folder_of_runs_is_added_as_one_of_them_is(fedda, tmp_path):
    for name in ("fedavg", "fedprox"):
        run = config.resolve({"rounds": 2, "algorithm": name})
        experiment.run(run, tmp_path / "cmp" / name)
    code, out, _ = fedda("--add", "cmp")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["cmp/fedavg", "cmp/fedprox"]
    assert len(names(FOLDER)) == 2


def test_without_its_data_the_way_to_get_them_is_the_last_that_is_said(fedda):
    code, out, err = fedda("table9", "--only", "emnist,cifar100")
    assert code == 2
    missing = ["emnist: the data set emnist", "cifar100: the data set cifar100"]
    said = [line.split(" (")[0] for line in err.splitlines()]
    assert said == [*missing, f"fedda: {missing[0]}", missing[1]], "at once, and at the end"
    assert out == "0 of 8 runs are done, 8 are missing.\n", "no table of nothing"


def test_what_can_be_run_is_shown_before_what_cannot(fedda):
    code, out, err = fedda("digits", "table3", "--rounds", "2", "--only", "fedavg")
    assert code == 2
    assert re.search(r"FedAvg .*\d\.\d{4} ", out)
    assert "1 of 2 runs are done, 1 are missing." in out
    assert err.splitlines()[-1].startswith("fedda: emnist: the data set emnist")


def test_the_command_says_what_other_processes_are_working_on(fedda):
    words = ("digits", "--rounds", "2", "--only", "fedavg")
    (run,) = reproduce.wanted(experiments.chosen(["digits"], ["fedavg"]), 1, 2, None)
    (FOLDER / ".work").mkdir(parents=True)
    with reproduce._lock(FOLDER, cells.name(run, None)):
        code, out, err = fedda(*words)
    assert (code, out) == (0, "0 of 1 runs are done, 1 are missing.\n")
    assert err == "Other processes are working on 1 of the runs.\n"


def test_a_run_is_made_again_when_its_algorithm_was_corrected(fedda, monkeypatch):
    words = ("digits", "--rounds", "2", "--only", "fedprox")
    fedda(*words, "-q")
    made = names(FOLDER)
    variants = registry.variants()
    newer = variants["fedprox"]._replace(version=variants["fedprox"].version + 1)
    monkeypatch.setattr(registry, "variants", lambda: variants | {"fedprox": newer})
    done = "--list", *words
    assert fedda(*done)[1].split()[-1] == "0", "it is no longer done"
    _, out, _ = fedda(*words, "-q")
    assert "1 of 1 runs are done, 0 are missing." in out
    assert len(names(FOLDER)) == 2
    assert {*made} < {*names(FOLDER)}
    assert fedda(*done)[1].split()[-1] == "1"


# ------------------------------------------------------------------------------------- stopping


@pytest.fixture
def signals(monkeypatch):
    """Gives a list: its signals come before the evaluation at round 40."""
    row, to_come = train._row, []

    def row_after_signals(setup, together, sent, number, *rest):
        while number == 40 and to_come:
            signal.raise_signal(to_come.pop())
        return row(setup, together, sent, number, *rest)

    monkeypatch.setattr(train, "_row", row_after_signals)
    return to_come


TOGETHER = ("digits", "--only", "fedavg", "--rounds", "60", "--seeds", "2")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_runs_together_are_interrupted_at_an_evaluation_and_kept(fedda, signals, number, code):
    signals.append(number)
    stopped, _, err = fedda(*TOGETHER)
    assert stopped == code
    assert "round 40/60" in err
    assert "round 60/60" not in err
    assert err.endswith("Continue with the same command.\n")
    code, out, err = fedda(*TOGETHER)
    assert code == 0
    assert "2 together (seed 0, 1): continued from round 40" in err
    assert "2 of 2 runs are done, 0 are missing." in out


def test_the_command_says_what_was_stopped(fedda, monkeypatch):
    fill, now = reproduce.fill, [0.0]
    monkeypatch.setattr(reproduce, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def ticking(runs, folder, seconds, report, warn):
        def report_in_a_second(line):
            report(line)
            now[0] += 1

        return fill(runs, folder, seconds, report_in_a_second, warn)

    monkeypatch.setattr(reproduce, "fill", ticking)
    words = ("digits", "--only", "fedavg,fedprox", "--rounds", "60", "--time")
    for seconds, stopped in (("0.5", 1), ("-1", 0)):
        code, out, err = fedda(*words, seconds)
        assert code == 0
        assert err.splitlines()[-1] == (
            f"The time is over. Runs left: 2; of these stopped on the way: {stopped}. The same "
            "command continues them."
        )
        assert out == "0 of 2 runs are done, 2 are missing.\n"
    code, out, err = fedda(*words, "99")
    assert code == 0
    assert "The time is over" not in err
    assert "2 of 2 runs are done, 0 are missing." in out


# ------------------------------------------------------------------------------------- writing


def test_the_pages_are_written_from_the_cells(fedda, tmp_path):
    shutil.copytree(RESULTS / "cells/digits", tmp_path / "few/cells/digits")
    code, out, _ = fedda("--write", "--report", "page", "--results", "few")
    assert code == 0
    assert out == "Written to few/README.md\nWritten to page/results.html\n"
    for page in (tmp_path / "few/README.md", tmp_path / "page/results.html"):
        text = page.read_text()
        assert "Handwritten digits" in text
        assert "FedOpt, Yogi" in text
        assert "Table 2" not in text


def test_an_outdated_verdict_is_replaced_when_the_page_is_written(fedda, tmp_path):
    shutil.copytree(RESULTS / "cells/digits", tmp_path / "few/cells/digits")
    page = tmp_path / "few/README.md"
    page.write_text("<!-- table: claims -->\n\n| F9 | More rounds. | confirmed |\n\n<!-- end -->\n")
    assert fedda("--write", "--results", "few")[0] == 0
    (line,) = re.findall(r"^\| F9 \|.*$", page.read_text(), re.MULTILINE)
    assert line.split(" | ")[2] == Verdict.UNDECIDED


@pytest.mark.parametrize("words", [("--list",), ("--write",), ("--report", "page"), ("digits",)])
def test_a_file_is_no_folder_of_results(fedda, tmp_path, words):
    (tmp_path / "file").write_text("")
    code, out, err = fedda(*words, "--results", "file")
    assert (code, out) == (2, "")
    assert "--results is file, a file: expected the folder of finished runs" in err


def test_help_speaks_of_runs(fedda):
    assert "cell" not in fedda("--help")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to reproduce, such as table3"),
        (["table22"], "unknown experiment 'table22'. Did you mean table2"),
        (["--list", "table22"], "unknown experiment 'table22'. Did you mean table2"),
        (["--list", "--only", "fedavgg"], "'fedavgg'. Did you mean fedavg"),
        (["table2", "--only", "fedavgg"], "'fedavgg'. Did you mean fedavg"),
        (["all", "--only", ""], "unknown algorithm or task of these experiments ''. Known"),
        (["all", "--only", "fedavg,"], "unknown algorithm or task of these experiments ''. Known"),
        (["--add"], "--add needs directories"),
        (["--add", "nothing"], "nothing, which contains no metrics.jsonl; expected a run"),
        (["digits", "--only", "fedavg", "--write"], "leave out --rounds and --only"),
        (["--write"], f"nothing to write about: {FOLDER}/cells holds no finished runs. Run fedda "),
        (["--report", "page"], f"nothing to write about: {FOLDER}/cells holds no finished runs."),
        (["digits", "--rounds", "2", "--report", "page"], "leave out --rounds and --only"),
        (["table3", "--precision", "bf17"], "fedda: unknown precision 'bf17'"),
        (["digits", "--results", "/proc/none"], "cannot write to /proc/none (No such file or dir"),
    ],
)
def test_wrong_input_is_a_message(fedda, words, message):
    code, out, err = fedda(*words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------- real data

FILES = os.environ.get("FEDDA_TEST_DATA")


@pytest.mark.slow
@pytest.mark.skipif(FILES is None, reason="FEDDA_TEST_DATA names no folder with the files")
@pytest.mark.xdist_group("real data")
def test_a_run_of_table_3(fedda):
    from fedda.data import datasets

    datasets.import_files("emnist", Path(FILES))
    code, out, _ = fedda("table3", "--rounds", "2", "--only", "fedavg")
    assert code == 0
    assert re.search(r"FedAvg +0\.850 +0\.849 +0\.\d{4} .* 1 +0 +tf32", out)
    (cell,) = cells.read_all(FOLDER).finished
    assert cell.content["data"]["name"] == "emnist"
    assert len(cell.data) == 64
    assert fedda("table3", "--rounds", "2", "--only", "fedavg", "-q")[2] == ""
