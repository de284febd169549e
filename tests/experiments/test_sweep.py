"""Many runs at once: in batches that fit, in one program, written down and continued."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import random
from scipy import stats

import fedda
from fedda import api, tasks
from fedda.core.losses import squared_error
from fedda.data.streaming import Feed, resident
from fedda.errors import InputError
from fedda.experiments import sweep
from fedda.simulate import grid as together
from fedda.simulate.train import averaged
from fedda.tasks import config
from helpers.stored import MODEL as FED_MODEL
from helpers.stored import written

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(count, 3)), RNG.normal(size=(count, 2))) for count in (4, 7, 2, 5, 6)]
TEST = (RNG.normal(size=(9, 3)), RNG.normal(size=(9, 2)))
MODEL = fedda.Model(
    lambda key: {"w": random.normal(key, (3, 2))}, lambda params, x: x @ params["w"]
)
SETTINGS = {"rounds": 4, "eval_every": 3, "cohort": 3, "batch": 2, "test": TEST}
GRID, SEEDS = {"client_lr": [0.05, 0.1, 0.2], "server_lr": [0.5, 1.0]}, (4, 1)  # twelve runs


def grid(name="scaffold", model=MODEL, clients=CLIENTS, **settings):
    return fedda.run_grid(
        name, model, clients, squared_error, grid=GRID, seeds=SEEDS, **SETTINGS | settings
    )


def assert_near(points, others):
    close = {"rtol": 2e-5, "atol": 1e-6}
    for one, other in zip(points, others, strict=True):
        assert (one.hyper, one.seed) == (other.hyper, other.seed)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, **close),
            one.result.state,
            other.result.state,
        )
        for row, other_row in zip(one.result.history, other.result.history, strict=True):
            assert list(row) == list(other_row)
            assert {type(value) for value in row.values()} == {int, float}
            np.testing.assert_allclose(list(row.values()), list(other_row.values()), **close)


# --------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def whole():
    return grid(together=12)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each call of the trainer was given."""
    seen: list[int] = []

    def counted(setup, hp, seeds, *more, original=together.train):
        seen.append(len(seeds))
        return original(setup, hp, seeds, *more)

    monkeypatch.setattr(together, "train", counted)
    return seen


@pytest.mark.parametrize(("most", "expected"), [(1, [1] * 12), (5, [4] * 3), (99, [12])])
def test_batches_are_even_and_change_only_rounding(whole, sizes, most, expected):
    assert_near(grid(together=most), whole)
    assert sizes == expected


def test_sizes_of_batches():
    for count, most in itertools.product(range(1, 30), repeat=2):
        size = together._even_size(count, most)
        batches = -(-count // size)
        assert size <= most
        assert batches == -(-count // most), "as few batches as there can be"
        assert size * batches - count < batches, "less than one filler a batch"


def test_data_that_stay_on_disk_are_batched_too(tmp_path):
    split = written(tmp_path / "s", ragged=True)
    settings = {"name": "fedda-sgdm", "model": FED_MODEL, "test": None}
    assert_near(grid(clients=Feed(split), together=5, **settings),
                grid(clients=resident(split), **settings))  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2])
def test_one_program_serves_all_batches(monkeypatch, compilations, devices):
    """And it is compiled before the clock starts that tells the runs' own time."""
    # Of a new function, or a program of an earlier test would do.
    model = fedda.Model(lambda key: MODEL.init(key), MODEL.apply)
    settings = SETTINGS | {"stabilise": 2 - devices, "devices": devices}
    setup, hyper = api.prepare("fedavg", model, CLIENTS, squared_error, **settings)
    hypers = [hyper._replace(client_lr=rate) for rate in np.linspace(0.1, 0.2, 11)]
    kinds = 3 - devices  # of rounds: with mini-batches, and in one case with all data

    def programs():
        return [compilations.count(f"jit({name})") for name in ("initial", "segment", "evaluate")]

    def train(*arguments, original=together.train):
        assert programs() == [1, kinds, 1]
        yield from original(*arguments)
        assert programs() == [1, kinds, 1]

    monkeypatch.setattr(together, "train", train)
    compilations.clear()
    batches = api.train_grid(setup, hypers, range(11), together=4)
    found = [next(batches)]
    monkeypatch.undo()
    compilations.clear()
    found += batches
    assert compilations == []
    assert [batch.members for batch in found] == [range(4), range(4, 8), range(8, 11)]
    assert [len(batch.histories) for batch in found] == [4, 4, 3]
    alone = fedda.run(
        "fedavg", model, CLIENTS, squared_error, seed=10, **settings, **hypers[10]._asdict()
    )
    assert str(found[2].histories[2]) != str(found[2].histories[1])
    np.testing.assert_allclose(found[2].states()[2].params["w"], alone.params["w"], rtol=1e-5)


# ---------------------------------------------------------------------------------------- memory


def out_of_memory(above, kind="RESOURCE_EXHAUSTED"):
    """A trainer that fails as XLA does, in the middle of a run, where there are too many runs."""

    def train(setup, hp, seeds, *more, original=together.train):
        for number, evaluation in enumerate(original(setup, hp, seeds, *more)):
            if number == 1 and len(seeds) > above:
                raise jax.errors.JaxRuntimeError(f"{kind}: Out of memory while trying to allocate")
            yield evaluation

    return train


def test_a_batch_that_runs_out_of_memory_is_halved(whole, sizes, monkeypatch):
    monkeypatch.setattr(together, "train", out_of_memory(above=1))  # which calls the counting one
    assert_near(grid(together=4), whole)
    assert sizes == [4, 2, *[1] * 12]


def test_a_later_batch_that_runs_out_of_memory_keeps_those_before(whole, monkeypatch):
    setup, _ = api.prepare("scaffold", MODEL, CLIENTS, squared_error, **SETTINGS)
    hypers = [fedda.algorithms.get("scaffold").Hyper(**point.hyper) for point in whole]
    batches = api.train_grid(setup, hypers, [point.seed for point in whole], together=4)
    first = next(batches)
    monkeypatch.setattr(together, "train", out_of_memory(above=3))
    rest = list(batches)
    assert [batch.members for batch in (first, *rest)] == [
        range(4), range(4, 6), range(6, 8), range(8, 10), range(10, 12)
    ]  # fmt: skip
    histories = [history for batch in (first, *rest) for history in batch.histories]
    losses = [history[-1]["loss"] for history in histories]
    expected = [point.result.history[-1]["loss"] for point in whole]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_one_run_that_is_too_large_and_other_errors(monkeypatch):
    monkeypatch.setattr(together, "train", out_of_memory(above=0))
    with pytest.raises(InputError, match="a single run needs more memory than the device has"):
        grid(together=1)
    monkeypatch.undo()
    monkeypatch.setattr(together, "train", out_of_memory(above=0, kind="INTERNAL"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        grid(together=4)


def test_the_largest_batch_that_fits_is_chosen(sizes, monkeypatch):
    setup, hyper = api.prepare("scaffold", MODEL, CLIENTS, squared_error, **SETTINGS)
    hypers = api.traced(jax.tree.map(lambda value: np.full(8, value), hyper), MODEL)
    needed = {size: together.compile_batch(setup, hypers, range(8), size) for size in (2, 4, 8)}
    # The server's two models, and five clients' variates, each run has for itself.
    assert all(needed[size] >= size * (2 * 6 + 5 * 6) * 4 for size in needed)
    assert needed[2] < needed[4] < needed[8]
    rooms = {needed[8]: 8, needed[8] - 1: 4, needed[4]: 4, needed[4] - 1: 3, 1: 1}
    for room, expected in rooms.items():
        monkeypatch.setattr(together, "_room", lambda setup, room=room: room)
        sizes.clear()
        next(together.train_grid(setup, 8 * [hyper], range(8)))
        assert sizes == [expected], "and one run is tried whatever is estimated"


def test_a_program_that_cannot_even_be_compiled(sizes, monkeypatch):
    def compiled(setup, hypers, seeds, size):
        if size > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while autotuning")
        return 1

    monkeypatch.setattr(together, "compile_batch", compiled)
    grid()
    assert sizes == [1] * 12, "12, 6 and 3 are too many"


# ---------------------------------------------------------------------------- the sweep's directory

SMALL = {
    "algorithm": "fedda-adam",
    "model": "linear",
    "clients": 12,
    "cohort": 3,
    "rounds": 7,
    "devices": 1,
    "seed": 5,
}
RATES = {"client_lr": [0.1, 0.3], "eps": [1e-3, 1e-2, 1e-1]}


def lines_of(directory: Path):
    return [json.loads(line) for line in (directory / "points.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweeps") / "whole"
    sweep.run(config.resolve(SMALL), RATES, 2, directory, together=4)
    return directory


def test_a_sweep_equals_single_runs(finished: Path):
    """And the loss of a line is the mean over the last three of seven rounds."""
    lines = lines_of(finished)
    order = itertools.product(*RATES.values(), (5, 6))
    assert [(*line["hyper"].values(), line["seed"]) for line in lines] == list(order)
    problem = tasks.load(config.resolve(SMALL))
    shared = {name: SMALL[name] for name in ("rounds", "cohort")}
    written = config.resolve(SMALL)
    for line in lines[::5]:
        alone = fedda.run(
            SMALL["algorithm"], problem.model, problem.shards, problem.loss,
            test=problem.test, metrics=problem.metrics, seed=line["seed"], eval_every=1,
            batch=written.batch, local_work=written.local_work,
            **shared, **{**written.chosen, **line["hyper"]},
        )  # fmt: skip
        last = alone.history[-1]
        losses = [row["train_loss"] for row in alone.history]
        np.testing.assert_allclose(line["train_loss"], np.mean(losses[-3:]), rtol=1e-4)
        for name in ("loss", "accuracy", "bytes_up", "bytes_down"):
            np.testing.assert_allclose(line[name], last[name], rtol=1e-4)
        assert (line["round"], line["failures"]) == (7, 0)


def test_the_summary_follows_the_rule_from_the_points_file(finished: Path):
    summary = json.loads((finished / "summary.json").read_text())
    means = {}
    for line in lines_of(finished):
        means.setdefault(tuple(line["hyper"].items()), []).append(line["train_loss"])
    means = {hyper: sum(losses) / 2 for hyper, losses in means.items()}
    order = sorted(means, key=means.get)
    assert [tuple(point["hyper"].items()) for point in summary["ranking"]] == order
    for point in summary["ranking"]:
        values = point["hyper"]
        assert point["train_loss"] == pytest.approx(means[tuple(values.items())], rel=1e-12)
        ends = ["eps"] * (values["eps"] != 1e-2)  # of two rates, both would be ends
        assert point["at_the_end"] == ends
        own = [each["train_loss"] for each in lines_of(finished) if each["hyper"] == values]
        # Of two, the deviation is |a - b| / sqrt(2), and that of their mean half of |a - b|.
        half = stats.t.ppf(0.975, 1) * abs(own[0] - own[1]) / 2
        assert point["spread"] == pytest.approx(half)
    assert summary["best"] == summary["ranking"][0]
    assert summary["seeds"] == [5, 6]
    assert (summary["by"], summary["averaged_rounds"]) == ("train_loss", 3)
    assert (summary["runs"], summary["together"]) == (12, [4, 4, 4])
    assert summary["runs_x_rounds_per_second"] > 12 * 7 / summary["seconds"]["total"]
    assert {"device", "versions", "commit", "data"} <= summary.keys()


def test_the_last_row_is_about_the_averaged_rounds():
    for rounds in (*range(1, 450), 1500, 4000):
        last, every = averaged(rounds), sweep.evaluate_every(rounds)
        assert last == max(1, min(100, rounds // 2))
        rows = [*range(0, rounds, every), rounds]
        assert rows[-2] == rounds - last
        assert len(rows) <= 12, "evaluations take time"


def point(loss, failures=0, **values):
    row = {"train_loss": loss, "failures": failures}
    return {"hyper": values, "seed": 0, "round": 9, **row}


def test_points_that_failed_come_last():
    lines = [point(0.5, a=1.0), point(0.1, 2, a=2.0), point(None, 1, a=3.0), point(0.4, a=4.0)]
    ranking = sweep.rank(lines, {"a": [1, 2, 3, 4]}, "train_loss", higher_is_better=False)
    assert [each["hyper"]["a"] for each in ranking] == [4, 1, 3, 2]
    assert [each["at_the_end"] for each in ranking] == [["a"], ["a"], [], []]
    ranking = sweep.rank(lines, {"a": [1, 2, 3, 4]}, "train_loss", higher_is_better=True)
    assert [each["hyper"]["a"] for each in ranking] == [1, 4, 3, 2]


def test_the_preset_is_a_run_of_the_best_point(tmp_path: Path):
    """With the evaluations that were asked for, and not those of the sweep."""
    asked = SMALL | {"eval_every": 2, "late_every": 1, "units": "delta", "seed": 5}
    summary = sweep.run(config.resolve(asked), {"eps": [1e-3, 1e-2]}, 2, tmp_path / "s")
    path = tmp_path / "s/preset.toml"
    best = summary["best"]["hyper"]
    assert config.resolve(config.read(path)) == config.resolve(asked | best)
    comment = path.read_text().splitlines()[0]
    assert comment == "# fedda sweep chose it by train_loss. Points: 2. Seeds: 5, 6."


def test_a_sweep_that_diverges_everywhere_has_no_best(tmp_path: Path):
    wild = {"client_lr": [1e37, 1e38], "server_lr": [1e37, 1e38]}
    summary = sweep.run(config.resolve(SMALL), wild, 1, tmp_path / "wild")
    assert summary["best"] is None
    assert all(line["failures"] > 0 for line in lines_of(tmp_path / "wild"))
    assert "NaN" not in (tmp_path / "wild/points.jsonl").read_text()


def test_more_points_are_added_and_finished_ones_left(finished: Path, sizes, tmp_path: Path):
    directory = Path(shutil.copytree(finished, tmp_path / "copy"))
    before = (directory / "points.jsonl").read_text()
    again = sweep.run(config.resolve(SMALL), RATES, 2, directory)
    assert sizes == []
    first = json.loads((finished / "summary.json").read_text())
    assert {**again, "seconds": 0} == {**first, "seconds": 0}, "of who did the work"
    assert again["seconds"]["total"] <= first["seconds"]["total"]
    other = sweep.run(config.resolve(SMALL), RATES, 2, directory, by="accuracy")
    assert sizes == []
    accuracies = [each["accuracy"] for each in other["ranking"]]
    assert accuracies == sorted(accuracies, reverse=True)
    larger = RATES | {"eps": [*RATES["eps"], 1.0]}
    more = sweep.run(config.resolve(SMALL), larger, 2, directory)
    assert (sizes, len(more["ranking"])) == ([4], 8)
    after = (directory / "points.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 16
    assert (more["runs"], more["together"]) == (16, [4, 4, 4, 4]), "of all processes"
    (directory / "points.jsonl").write_text(after + after[:30])  # the start of a line
    sweep.run(config.resolve(SMALL), larger, 2, directory)
    assert sizes == [4]
    assert (directory / "points.jsonl").read_text() == after
    (directory / "points.jsonl").write_text(after.replace("0.1", "0.2", 1))
    with pytest.raises(InputError, match=r"points\.jsonl is damaged: .*round-16 was written after"):
        sweep.run(config.resolve(SMALL), larger, 2, directory)


@pytest.mark.parametrize(
    ("settings", "grid", "message"),
    [
        ({"rounds": 8}, RATES, "is a run with rounds = 7, got 8"),
        ({"beta1": 0.5}, RATES, r"is a run with beta1 = 0\.9, got 0\.5"),
        ({}, {"eps": [0.1, 0.3]}, r"with grid = \['client_lr', 'eps'\], got \['eps'\]"),
    ],
)
def test_a_directory_of_another_sweep(finished: Path, settings, grid, message):
    before = (finished / "points.jsonl").read_bytes()
    with pytest.raises(InputError, match=message):
        sweep.run(config.resolve(SMALL | settings), grid, 2, finished)
    assert (finished / "points.jsonl").read_bytes() == before


def start(directory: Path, *words: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "fedda", "sweep", "--quiet", "--out", str(directory)]
    return subprocess.Popen([*command, *words], env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_kill_and_continue(finished: Path, tmp_path: Path):
    directory = tmp_path / "killed"
    words = [f"{key}={value}" for key, value in SMALL.items()]
    words += ["--grid", "client_lr=0.1,0.3", "--grid", "eps=1e-3,1e-2,1e-1", "--seeds", "2"]
    words += ["--together", "1"]
    process = start(directory, *words)
    deadline = time.monotonic() + 120
    path = directory / "points.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    assert 2 <= len(kept.splitlines()) < 12
    assert not (directory / "summary.json").exists()
    assert start(directory, *words).wait(120) == 0
    assert path.read_bytes().startswith(kept)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["runs"] == 12
    for line, other in zip(lines_of(directory), lines_of(finished), strict=True):
        assert (line["hyper"], line["seed"]) == (other["hyper"], other["seed"])
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)


# ----------------------------------------------------------------------------------- the command


@pytest.fixture
def fedda_sweep(fedda):
    return partial(fedda, "sweep")


def test_the_command_prints_the_best_first(fedda, fedda_sweep, tmp_path: Path):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    grids = ["--grid", "client_lr=0.1,0.3", "--grid", "eps=1e-3,1e-2,1e-1", "--seeds", "2"]
    code, out, err = fedda_sweep(*words, *grids, "--together", "4", "--out", "s")
    assert code == 0
    summary = json.loads((tmp_path / "s/summary.json").read_text())
    best = summary["best"]
    table = [line.split() for line in out.splitlines() if "±" in line]
    assert len(table) == 6
    values = [f"{value:g}" for value in best["hyper"].values()]
    assert table[0][:3] == [*values, f"{best['train_loss']:.4g}"]
    assert "train_loss, train_accuracy: means over the last rounds (3) and the seeds (2)" in out
    assert "Best by train_loss: client_lr=" in out
    assert best["at_the_end"] == ["eps"]
    assert "At an end of the grid: eps. Try values beyond it." in out
    assert "compiling ..." in err
    assert "runs 9-12 of 12: round 7/7" in err
    used = out.splitlines()[-1].removeprefix("Use it: fedda ").split()
    assert used == ["run", "s/preset.toml"]
    code, _, err = fedda(*used, "--quiet", "--out", "r")
    assert (code, err) == (0, "")
    run = config.read(tmp_path / "r/config.toml")
    assert {name: run[name] for name in best["hyper"]} == best["hyper"]
    code, out, err = fedda_sweep(*words, *grids, "--by", "loss", "--out", "s", "--json")
    assert json.loads(out)["directory"] == "s"
    assert json.loads(out)["by"] == "loss"
    assert err == ""
    code, out, _ = fedda_sweep(*words, *grids, "--by", "train_accuracy", "--out", "s")
    assert code == 0
    assert "chosen on the test set" not in out
    summary = json.loads((tmp_path / "s/summary.json").read_text())
    values = [point["train_accuracy"] for point in summary["ranking"]]
    assert values == sorted(values, reverse=True)
    assert summary["best"]["train_accuracy"] == max(values)
    assert 0 < min(values) < max(values) < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "local_work=1,5"], "local_work is fixed when a program is compiled, so runs"),
        (["--grid", "units=grad,delta", "algorithm=fedda-adam"], "units is fixed when"),
        (["--grid", "seed=1,2"], "unknown hyper-parameter of fedda-sgdm 'seed'"),
        (["--grid", "client_rl=1,2"], "unknown hyper-parameter of fedda-sgdm 'client_rl'. Did you"),
        (["--grid", "client_lr=0.1,x"], "of fedda-sgdm must be a positive number, got 'x'"),
        (["--grid", "client_lr=0.1,,1"], "of fedda-sgdm must be a positive number, got ''"),
        (["--grid", "client_lr=1,1.0"], "the grid has a value twice"),
        (["--grid", "client_lr"], "--grid must look like client_lr=0.01,0.1,1, got 'client_lr'."),
        (["--grid", "client_lr=1", "--grid", "client_lr=2"], "--grid client_lr is given twice"),
        (["--grid", "client_lr=1"], "a sweep trains at least two runs, got 1."),
        ([], "a sweep trains at least two runs, got 1."),
        (["--seeds", "2", "--by", "acuracy"], "unknown rule to choose by 'acuracy'. Did you mean"),
        (["--seeds", "2", "seed=2147483647"], "seed must be below 2**31"),
        (["--seeds", "2", "roundz=3"], "'roundz'. Did you mean rounds"),
        (["--seeds", "2", "cohort=101"], "cohort must be at most the number of clients"),
        (["--seeds", "2", "algorithm=scaffold", "memory_gb=1e-9"], "keep client memory on the de"),
        (["--seeds", "2", "a.toml", "b.toml"], "expected one CONFIG.toml at most"),
        (["fedda-sgdm"], "got 'fedda-sgdm'. Did you mean algorithm=fedda-sgdm?"),
    ],
)  # fmt: skip
def test_wrong_input_is_a_message(fedda_sweep, tmp_path: Path, words, message):
    code, out, err = fedda_sweep(*words)
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_directory_of_something_else(fedda, fedda_sweep, tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").touch()
    code, _, err = fedda_sweep("--seeds", "2", "--out", "d")
    assert (code, [path.name for path in (tmp_path / "d").iterdir()]) == (2, ["notes.txt"])
    assert "d is not empty. Choose another directory." in err
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert fedda("run", *words, "-q", "--out", "r")[0] == 0
    _, _, err = fedda_sweep(*words, "--seeds", "2", "--out", "r")
    assert "r is a run with grid = None, got []" in err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cohort": [1, 2]}, "cohort is fixed when a program is compiled"),
        ({"units": ["grad", "delta"]}, "units is fixed when a program is compiled"),
    ],
)
def test_what_run_grid_cannot_train_together(values, message):
    with pytest.raises(InputError, match=message):
        fedda.run_grid("fedda-adam", MODEL, CLIENTS, squared_error, grid=values, **SETTINGS)


@pytest.mark.parametrize("most", [0, 1.5, True])
def test_together_is_a_whole_number(most):
    with pytest.raises(InputError, match="together must be a whole number of at least 1, got"):
        grid(together=most)
