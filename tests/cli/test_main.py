"""The command `fedda`: help, version, and what it says when something is wrong."""

import re
import runpy
import signal
from pathlib import Path

import jax
import pytest

import fedda as package
from fedda.cli import main as cli
from fedda.experiments import run as experiment


def test_the_version(fedda):
    assert fedda("--version") == (0, f"fedda {package.__version__}\n", "")


def test_help_lists_the_commands_as_a_user_meets_them(fedda):
    _, out, _ = fedda("--help")
    listed = re.findall(r"^\W ([a-z]+)  +[A-Z]", out, re.M)
    assert listed[:3] == ["compare", "run", "sweep"]
    assert listed[: len(cli.ORDER)] == cli.ORDER
    assert {"bench", "reproduce"} <= {*listed[len(cli.ORDER) :]}, "of other packages"
    words = re.findall(r"[\w.,]+", fedda("compare", "--help")[1])
    assert "A new directory, or one to finish." in " ".join(words)


def test_a_wrong_command_has_one_suggestion(fedda):
    for words, meant in ((["rn"], "run"), (["data", "lst"], "list")):
        code, _, err = fedda(*words)
        assert code == 2
        assert f"unknown command '{words[-1]}'. Did you mean {meant}? Known: " in err
        assert err.count("Did you mean") == 1


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
        (["run", "partition=dirichlett:1"], "Did you mean dirichlet:ALPHA?"),
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
        (["report", "."], "contains no metrics.jsonl"),
        (["algorithms", "fedadan"], "unknown algorithm 'fedadan'. Did you mean"),
        (["algorithms", "fedadam"], "unknown algorithm 'fedadam': FedAdam is fedopt-adam here."),
        (["run", "algorithm=fedavgm"], "FedAvgM is fedopt-sgdm here."),
        (["compare", "FedAdagrad"], "FedAdagrad is fedopt-adagrad here."),
        (["sweep", "algorithm=fed_yogi"], "FedYogi is fedopt-yogi here."),
        (["run", "--rounds", "5"], "there is no option --rounds. Did you mean rounds=5?"),
        (["compare", "--local-work=3"], "no option --local-work. Did you mean local_work=3?"),
        (["sweep", "--client_lr"], "no option --client_lr. Did you mean client_lr=VALUE?"),
        (["run", "--outt", "x"], "there is no option --outt. --help lists the options."),
        (["run", "lr=0.1"], "The learning rate of the clients is client_lr, that of the server"),
        (["sweep", "--grid", "lr=0.1,1"], "The learning rate of the clients is client_lr"),
        (["run", "epochs=3"], "For N epochs give local_unit=epochs local_work=N."),
        (["run", "num_clients=9"], "The number of clients is clients."),
        (["compare", "batch_size=9"], "The number of examples in a mini-batch is batch."),
        (["run", "optimizer=adam"], "a part of the algorithm, as in fedda-adam and fedopt-adam"),
        (["run", "rounds=0"], "rounds must be at least 1, got 0."),
        (["run", "cohort=3000000000"], "cohort must be a whole number of less than 2**31"),
        (["run", "task=own"], "task own needs data=NAME"),
        (["run", "/.toml"], "there is no configuration file /.toml"),
        (["compare", "missing.py", "fedavg"], "missing.py (No such file or directory)"),
        (["export", ".", "m.npz"], "is not a run directory"),
    ],
)
def test_wrong_input_is_a_message(fedda, tmp_path: Path, words: list[str], message: str):
    code, out, err = fedda(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_what_is_no_file_or_no_run_is_said(fedda, tmp_path: Path):
    (tmp_path / "folder.toml").mkdir()
    told = "cannot read the configuration file folder.toml (Is a directory)."
    assert told in fedda("run", "folder.toml")[2]
    (tmp_path / "cmp").mkdir()
    (tmp_path / "cmp/comparison.toml").touch()
    told = "cmp is a comparison, not a run. Continue it with: fedda compare --out cmp"
    assert told in fedda("run", "--resume", "cmp")[2]


def test_the_package_is_the_command(fedda, capsys):
    fedda("--version")  # which sets the words of the command line
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fedda", run_name="__main__")
    assert stop.value.code == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "it is as it was"
    assert capsys.readouterr().out == f"fedda {package.__version__}\n"


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
