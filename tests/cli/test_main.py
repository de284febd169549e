"""The command, as a person or a script uses it."""

import json
import os
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import fedda as package
from fedda import algorithms
from fedda.cli import main as cli
from fedda.cli.compare import COMPARED
from fedda.experiments import run as experiment
from fedda.tasks import config

QUICK = ["model=linear", "clients=12", "cohort=3", "rounds=4", "eval_every=2"]


def test_compare_prints_a_table_and_writes_a_report(fedda, tmp_path: Path):
    code, out, err = fedda("compare", *QUICK, "--seeds", "2", "--out", "cmp")
    assert code == 0
    for name in COMPARED:
        assert re.search(rf"^ *{name} ", out, re.MULTILINE), "full names at 80 columns"
        assert f"{name}, seed 1: round 4/4 train_loss " in err
    assert "…" not in out
    assert "± 95 % interval over 2 seeds" in out
    assert max(map(len, out.splitlines())) <= 80
    for name in ("report.html", "table.md", "metric.png", "metric.pdf"):
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
    (tmp_path / "mine/my-seed0").mkdir()
    code, _, err = fedda("compare", *words)
    assert code == 2
    assert "mine is not empty. Give another --out, or that of a comparison to finish." in err
    assert len(list((tmp_path / "mine").iterdir())) == 2
    (tmp_path / "mine/my-seed0").rename(tmp_path / "mine/fedprox-seed0")  # as left by a kill
    assert fedda("compare", *words)[0] == 0
    (tmp_path / "file").touch()
    assert "file is a file. Give another --out" in fedda("compare", "--out", "file")[2]


def test_rounds_to_a_threshold_are_shown_only_of_runs_that_have_one_to_reach(fedda):
    _, out, _ = fedda("run", *QUICK, "-q", "--out", "both/one")
    assert "fedda-sgdm" in out
    assert "rounds" not in out, "5 % short of itself says nothing"
    assert re.search(
        r"^ +rounds .*\n.* to\b", fedda("report", "both", "--threshold", "0.5")[1], re.M
    )
    fedda("run", *QUICK, "algorithm=fedavg", "-q", "--out", "both/other")
    assert re.search(r"^ .*\brounds\b", fedda("report", "both")[1], re.M)


def test_the_version(fedda):
    assert fedda("--version") == (0, f"fedda {package.__version__}\n", "")


def test_help_lists_the_commands_as_a_user_meets_them(fedda):
    _, out, _ = fedda("--help")
    listed = re.findall(r"^\W ([a-z]+)  +[A-Z]", out, re.M)
    assert listed[:3] == ["run", "compare", "report"]
    assert listed == list(cli.ORDER)
    words = re.findall(r"[\w.,]+", fedda("compare", "--help")[1])
    assert "A new directory, or one to finish." in " ".join(words)


def test_run_with_a_file_and_json(fedda, tmp_path: Path):
    (tmp_path / "mine.toml").write_text('algorithm = "fedprox"\nrounds = 9\nmu = 0.5\n')
    code, out, err = fedda("run", "mine.toml", *QUICK, "--json", "--out", "one")
    assert code == 0
    summary = json.loads(out)
    assert summary["algorithm"] == "fedprox"
    assert summary["rounds"] == 4, "words override the file"
    assert "fedprox: round 4/4" in err
    code, out, err = fedda("run", "--resume", "one", "--json")
    assert (code, json.loads(out)["final"]) == (0, summary["final"])
    assert "continued from round 4" in err


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
    (tmp_path / "cmp/comparison.toml").unlink()  # as of an earlier version
    assert fedda("compare", "fedavg", "stem", *words, "rounds=5")[0] == 2
    assert fedda("compare", "fedprox", *words)[0] == 0
    _, out, _ = fedda("compare", "--out", "cmp", "-q", "--json")
    runs = [(run["algorithm"], run["rounds"]) for run in json.loads(out)["runs"]]
    assert runs == [("fedavg", 4), ("fedprox", 4)]


def test_a_wrong_command_has_one_suggestion(fedda):
    for words, meant in ((["rn"], "run"), (["data", "lst"], "list")):
        code, _, err = fedda(*words)
        assert code == 2
        assert f"unknown command '{words[-1]}'. Did you mean {meant}? Known: " in err
        assert err.count("Did you mean") == 1


def test_help_of_run_tells_the_settings(fedda):
    words = re.findall(r"[\w=-]+", fedda("run", "--help")[1])
    shown = " ".join(words)
    assert "algorithm=fedda-sgdm task=digits" in shown
    assert "fedda algorithms NAME" in shown
    assert {*config.FIELDS, "client_lr", "server_lr"} <= set(words)


def test_data_of_ones_own_are_no_task(fedda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    numbers = np.arange(12)
    np.savez(tmp_path / "mine.npz", client=numbers % 3, x=numbers[:, None] / 12, y=numbers % 2)
    code, _, err = fedda("data", "import", "mine3", "mine.npz")
    assert code == 0, err
    for command in ("run", "compare"):
        _, _, err = fedda(command, "task=mine3")
        assert "unknown task 'mine3'. It is a data set: write task=own data=mine3" in err


def test_equations_are_not_broken(fedda):
    _, out, _ = fedda("algorithms", "fedda-adam")
    assert (algorithms.module_of("fedda-adam").__doc__ or "-").strip() in out


def test_a_narrow_terminal_shortens_no_number(fedda, monkeypatch: pytest.MonkeyPatch):
    fedda("run", *QUICK, "-q", "--out", "one")
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = fedda("report", "one")
    assert "fedda-sgdm" in out
    assert "…" not in out


def test_compare_json(fedda):
    code, out, err = fedda("compare", "fedavg", *QUICK, "--json", "--quiet", "--out", "cmp")
    assert code == 0
    printed = json.loads(out)
    assert [run["algorithm"] for run in printed["runs"]] == ["fedavg"]
    assert printed["table"][0]["final"][0] == printed["runs"][0]["final"]["accuracy"]
    assert err.splitlines() == ["Report: cmp/report.html"]


def test_report_of_an_existing_run(fedda, tmp_path: Path):
    fedda("run", *QUICK, "-q", "--out", "one")
    code, out, _ = fedda("report", "one", "--out", "elsewhere")
    assert code == 0
    assert "fedda-sgdm" in out
    assert (tmp_path / "elsewhere" / "report.html").exists()


def test_algorithms_lists_all_and_shows_each(fedda):
    _, out, _ = fedda("algorithms")
    for name in algorithms.names():
        assert name in out
        _, shown, _ = fedda("algorithms", name)
        assert "Communication" in shown
        for field in algorithms.get(name).Hyper._fields:
            assert field in shown
        for option in algorithms.options(name):
            assert option in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "algorithm=fedada"], "unknown algorithm 'fedada'. Did you mean"),
        (["run", "task=digit"], "unknown task 'digit'. Did you mean digits?"),
        (["run", "model=mpl"], "unknown model of digits 'mpl'. Did you mean mlp?"),
        (["run", "roundz=3"], "'roundz'. Did you mean rounds"),
        (["run", "client_lr=-1"], "client_lr of fedda-sgdm must be a positive number, got -1."),
        (["run", "client_lr=nan"], "client_lr of fedda-sgdm must be a positive number, got nan."),
        (["run", "cohort=101"], "cohort must be at most the number of clients, which is 100"),
        (["run", "partition=dirichlett:1"], "did you mean dirichlet?"),
        (["run", "devices=99"], "devices must be at most"),
        (["run", "nothing.toml"], "there is no configuration file nothing.toml"),
        (["run", "what"], "expected one CONFIG.toml at most"),
        (["run", "digits", "fedavg"], "Did you mean task=digits algorithm=fedavg?"),
        (["run", "algoritm=fedavg"], "fedda: unknown setting 'algoritm'. Did you mean algorithm?"),
        (["run", "--resume", "."], "is not a run directory"),
        (["compare", "fedavgg"], "unknown algorithm 'fedavgg'. Did you mean fedavg"),
        (["compare", "algorithm=fedavg"], "by name: fedda compare fedavg fedda-adam. Remove the"),
        (
            ["compare", "fedavg", "scaffold", "mu=1"],
            "none of the compared algorithms has the setting 'mu'. It is a setting of fedda-sgdm, ",
        ),
        (["compare", "task=[]"], "task must be text, got []."),
        (["compare", "seed=x"], "seed must be a whole number, got 'x'"),
        (["compare", "fedavg", "--all"], "give names of algorithms or --all"),
        (["run", "checkpoint_every=0"], "checkpoint_every must be at least 1"),
        (["run", "partition_seed=-1"], "partition_seed must be at least 0"),
        (["run", "--resume", "a", "--out", "b"], "--resume continues in its own directory"),
        (
            ["run", "--out", "/proc/none"],
            "cannot write to /proc/none (No such file or directory). Give another --out.",
        ),
        (["compare", "--out", "/proc/none"], "(No such file or directory). Give another --out."),
        (
            ["sweep", "--seeds", "2", "--out", "/proc/none"],
            "cannot write to /proc/none (No such file or directory). Give another --out.",
        ),
        (["compare", "epz=1"], "unknown setting 'epz'. Did you mean eps"),
        (["report", "."], "holds no metrics.jsonl"),
        (["algorithms", "fedadan"], "unknown algorithm 'fedadan'. Did you mean"),
        (["algorithms", "fedadam"], "unknown algorithm 'fedadam': FedAdam is fedopt-adam here."),
        (["run", "algorithm=fedavgm"], "FedAvgM is fedopt-sgdm here."),
        (["compare", "FedAdagrad"], "FedAdagrad is fedopt-adagrad here."),
        (["sweep", "algorithm=fed_yogi"], "FedYogi is fedopt-yogi here."),
        (["run", "--rounds", "5"], "and settings key=value, got '--rounds 5'"),
        (["compare", "--local-work=3"], "unknown setting '--local-work'. Did you mean local_work?"),
        (["sweep", "--client_lr"], "and settings key=value, got '--client_lr'"),
        (["run", "--outt", "x"], "and settings key=value, got '--outt x'"),
    ],
)
def test_wrong_input_is_a_message(fedda, tmp_path: Path, words: list[str], message: str):
    code, out, err = fedda(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_an_algorithm_that_does_not_say_what_it_sends_is_listed(fedda, monkeypatch):
    monkeypatch.setattr(algorithms.module_of("fedavg"), "__doc__", "Mine.")
    code, out, _ = fedda("algorithms")
    assert code == 0
    assert re.search(r"fedavg +- +FedAvg", out)
    assert re.search(r"scaffold +2/2", out)


def test_the_package_is_the_command(fedda, capsys):
    fedda("--version")  # which sets the words of the command line
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fedda", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedda {package.__version__}\n"


WILD = ["client_lr=3e38", "local_work=5"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_trained_nothing_fails_and_keeps_its_files(fedda, tmp_path, as_json):
    words = ["run", "algorithm=fedavg", *QUICK, *WILD, "-q", "--out", "wild"]
    code, out, err = fedda(*words, *(["--json"] if as_json else []))
    assert code == 1
    assert "fedda: nothing was trained: all 4 rounds were skipped, as uploads were not" in err
    assert (tmp_path / "wild" / "summary.json").exists()
    if as_json:
        assert json.loads(out)["directory"] == "wild"
        assert json.loads(out)["skipped_rounds"] == 4
    code, _, err = fedda("run", "--resume", "wild", "-q")
    assert code == 1
    assert "all 4 rounds were skipped" in err


def test_a_comparison_names_the_runs_that_trained_nothing(fedda):
    """`fedprox` with a huge mu diverges, and its neighbour does not."""
    words = ["compare", "fedavg", "fedprox", *QUICK, "local_work=5", "mu=1e38", "-q", "--out", "c"]
    code, out, err = fedda(*words)
    assert code == 0
    assert "fedprox-seed0: nothing was trained: all 4 rounds were skipped" in err
    assert "fedavg-seed0" not in err
    assert re.search(r"skipped", out)
    assert fedda("compare", "fedavg", *QUICK, *WILD, "-q", "--out", "d")[0] == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 16.0 GiB"),
        jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 11031623530448 bytes."),
    ],
)
def test_too_little_memory_is_a_message(fedda, monkeypatch, error: Exception):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(experiment, "run", refuse)
    code, _, told = fedda("run", "-q")
    assert code == 1
    assert f"fedda: there is not enough memory ({error}). Lower batch, cohort, clients" in told
    error = jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access was encountered")
    with pytest.raises(jax.errors.JaxRuntimeError):  # what is no lack of memory is not hidden
        fedda("run", "-q")


def test_on_a_terminal_there_is_a_bar_and_ctrl_c_says_how_to_go_on(tmp_path: Path):
    """A real terminal (a pty), a real interrupt, and the advice it prints, followed."""
    main, worker = pty.openpty()
    words = ["run", *QUICK[:3], "rounds=100000", "eval_every=50", "checkpoint_every=1"]
    command = [sys.executable, "-m", "fedda.cli.main"]
    process = subprocess.Popen(
        [*command, *words, "--out", "long"],
        cwd=tmp_path,
        stdin=worker,
        stdout=worker,
        stderr=worker,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(worker)
    shown = b""
    deadline = time.monotonic() + 600
    interrupted = False
    while time.monotonic() < deadline:
        try:
            chunk = os.read(main, 4096)
        except OSError:  # the other end is closed: the process has ended
            break
        shown += chunk
        if not interrupted and b"rounds/s" in shown:
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(main)
    assert process.wait(60) == 130
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    told = r"/100000 train_loss [-0-9.e]+ accuracy [0-9.]+ [0-9]+ rounds/s +[0-9]+:[0-9]+"
    assert re.search(r"fedda-sgdm .*" + told, text), "round, loss, metric, pace and time left"
    assert "Continue with: fedda run --resume long" in text
    assert "Traceback" not in text
    assert (tmp_path / "long" / "checkpoints").exists()
    assert not (tmp_path / "long" / "summary.json").exists()


def test_sigterm_says_how_to_go_on(tmp_path: Path, in_quick_processes):
    words = ["run", *QUICK[:3], "rounds=100000", "eval_every=50", "--out", "long"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedda.cli.main", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert "round 0/100000" in process.stderr.readline()
        process.terminate()
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 143
    assert err.splitlines()[-1] == "Terminated. Continue with: fedda run --resume long"
    assert "Traceback" not in err
