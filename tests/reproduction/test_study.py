"""The study: equal draws and coordinates for all, data apart, and files that can be trusted."""

import json
import runpy
import sys

import jax
import numpy as np
import pytest

import fedda
from fedda import algorithms
from fedda.data import digits
from fedda.errors import InputError
from fedda_reproduction.study import design, federations, study, training
from fedda_reproduction.study.design import AXES, METHODS, Condition

TINY = Condition("digits", "0.1", 5, 10, 20, 40)


def test_all_methods_are_tried_at_points_that_cover_every_axis():
    points = design.wave(AXES, 0)
    assert len(points) == design.LANES
    for name, axis in AXES.items():
        share = np.log([point[name] / axis.low for point in points]) / np.log(axis.high / axis.low)
        # A Sobol sequence has one of 16 points in every sixteenth.
        assert sorted(np.floor(16 * share).astype(int)) == list(range(16))


def test_the_second_wave_is_beyond_the_first():
    at = design.ends({"client_lr": 0.99, "step": 3.0, "horizon": 1.01, "eps": 0.01}, AXES, [*AXES])
    assert at == [("client_lr", "high")]  # a horizon of 1 is no momentum: nothing is beyond
    axes = design.widened(AXES, at)
    assert axes["client_lr"].high == pytest.approx(10 ** (2 / 3))
    assert {name: axis for name, axis in axes.items() if name != "client_lr"} == {
        name: axis for name, axis in AXES.items() if name != "client_lr"
    }
    assert all(1 < point["client_lr"] <= 4.65 for point in design.wave(axes, 1, AXES))


@pytest.mark.parametrize("name", METHODS)
def test_every_point_is_allowed(name):
    method = METHODS[name]
    record = method.algorithm
    if isinstance(record, str):
        record = algorithms.get(record, **method.options)
    for point in design.wave(AXES, 0):
        algorithms.hyper(name, record, method.hyper(point, 5))
    assert set(method.hyper(point, 5)) <= set(record.Hyper._fields)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "pair", [("fedda-adam", "fedadam"), ("fedda-adagrad", "fedadagrad-gradient")]
)
def test_a_point_means_the_same_for_both(pair):
    """Where every gradient is equal, after the momentum has filled, both take the same step."""
    slope = np.array([0.5, -2.0, 0.03])
    model = fedda.Model(lambda key: jax.numpy.zeros(3), lambda w, x: x @ w)
    clients = [(np.tile(slope, (4, 1)), np.zeros(4))] * 2
    point = {"client_lr": 0.3, "step": 2.0, "horizon": 3.0, "eps": 0.1}
    steps = []
    for method in (METHODS[name] for name in pair):
        ends = [
            fedda.run(
                method.algorithm, model, clients, lambda outputs, y: outputs, cohort=2, batch=2,
                rounds=rounds, local_work=4, **method.options, **method.hyper(point, 4),
            ).params
            for rounds in (2000, 2001)
        ]  # fmt: skip
        steps.append(ends[1] - ends[0])
    # Adam forgets the start: 0.99^2000 is 2e-9. AdaGrad's sum of squares holds it, a part in 2,000.
    tolerance = 1e-6 if pair[1] == "fedadam" else 1e-3
    np.testing.assert_allclose(steps[0], steps[1], rtol=tolerance)


def test_blocks_and_held_out_examples_are_apart():
    federation = federations.load(TINY, 2)
    shards, clients = federation.shards, federation.clients
    count = np.asarray(shards.count).reshape(3, clients)
    for total in (count[0].sum() + len(federation.held_out[1]), count[1].sum(), count[2].sum()):
        assert total == len(digits.load().train_y)
    ends = np.asarray(shards.start) + np.asarray(shards.count)
    assert (ends[:-1] <= np.asarray(shards.start)[1:]).all()
    for block in (1, 2):
        drawn = federation.sample(block * federations.STRIDE, 3, 10**6, 10)
        assert {int(client) // clients for client in drawn} == {block}


def test_synthetic_blocks_have_the_same_clients_and_other_examples():
    federation = federations.load(Condition("synthetic", "1,1", 5, 10, 10, 40), 1)
    (x0, y0), (x1, y1) = federation.tests
    assert not np.array_equal(x0, x1)
    per_client = [x.reshape(30, 50, -1).mean(1) for x in (x0, x1)]
    # The mean of 50 inputs of standard deviation 1 or less is within 5 / sqrt(50) of the client's.
    assert np.abs(per_client[0] - per_client[1]).max() < 2 * 5 / np.sqrt(50)
    assert [np.bincount(y, minlength=10).argmax() for y in (y0, y1)]


@pytest.fixture
def scores(monkeypatch):
    """Training that takes no time: the held-out metric is best at the smallest client_lr."""
    calls = []

    def tuned(condition, method, federation, points):
        calls.append((method.name, "tuned"))
        rates = [point["client_lr"] for point in points]
        return {"metric": [-rate for rate in rates], "loss": rates}

    def ended(condition, method, federation, point, seeds):
        calls.append((method.name, "ended"))
        return {name: {"metric": [0.5] * seeds, "loss": [1.0] * seeds} for name in training.ENDINGS}

    monkeypatch.setattr(training, "tuned", tuned)
    monkeypatch.setattr(training, "ended", ended)
    monkeypatch.setattr(study, "_loaded", lambda *arguments: None)
    monkeypatch.setattr(study, "commit", lambda: "a" * 40)
    return calls


PLAN = study.Plan([TINY], ["fedavg", "fedavgm"], seeds=3)


def test_the_study_widens_for_all_continues_and_repeats_nothing(scores, tmp_path):
    study.run(PLAN, tmp_path, report=lambda line: None)
    names = [*PLAN.methods]
    expected = [(name, what) for what in ("tuned", "tuned", "ended") for name in names]
    assert scores == expected
    path = tmp_path / f"{TINY.name}.json"
    cell = study.read(path)
    assert "client_lr low" in cell["ends of wave 1"]
    waves = [record["waves"] for record in cell["methods"].values()]
    assert waves[0][1]["points"] == waves[1][1]["points"]
    study.run(PLAN, tmp_path, report=lambda line: None)
    assert scores == expected  # nothing was made again
    cell["methods"]["fedavgm"]["version"] = "fedopt-sgdm 0"
    path.write_text(json.dumps(cell))
    study.run(PLAN, tmp_path, report=lambda line: None)
    assert scores[len(expected) :] == [("fedavgm", what) for what in ("tuned", "tuned", "ended")]


def test_code_that_is_not_committed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "commit", lambda: "a" * 40 + "-dirty")
    with pytest.raises(InputError, match="not committed"):
        study.run(PLAN, tmp_path)


def test_results_of_a_copy_without_git_get_the_commit_of_the_same_code(
    scores, monkeypatch, tmp_path
):
    def commits():
        records = study.read(tmp_path / f"{TINY.name}.json")["methods"].values()
        return {
            part["commit"] for record in records for part in (*record["waves"], record["finals"])
        }

    monkeypatch.setattr(study, "commit", lambda: "unknown")
    study.run(PLAN, tmp_path, report=lambda line: None)
    count = len(scores)
    monkeypatch.setattr(study, "commit", lambda: "b" * 40)
    with monkeypatch.context() as patch:
        patch.setattr(study, "digest", lambda: "other code")
        study.run(PLAN, tmp_path, report=lambda line: None)
    assert commits() == {"unknown"}
    study.run(PLAN, tmp_path, report=lambda line: None)
    assert commits() == {"b" * 40}
    assert len(scores) == count


@pytest.mark.slow
def test_processes_compute_the_same_as_one(tmp_path):
    """Whole small runs: each process computes, and only the first writes."""
    conditions = [TINY._replace(variety=variety) for variety in ("0.1", "0.3", "inf")]
    plan = study.Plan(conditions, ["fedavg"], seeds=2, small=True)
    lines: list[str] = []
    assert study.run(plan, tmp_path / "2", None, lines.append, workers=2) == []
    done = [line.rsplit(",", 1)[0] for line in lines]
    # If the time ends, the first conditions are complete: the last one waits for one of them.
    last, *first = (f"{condition.name}, FedAvg" for condition in reversed(conditions))
    complete = [done.index(f"{name}: seeds") for name in first]
    assert min(complete) < done.index(f"{last}: wave 1")

    plan = study.Plan([TINY], ["fedavg"], seeds=2, small=True)
    assert study.run(plan, tmp_path / "1", None, lambda line: None) == []
    alone, together = (
        study.read(tmp_path / str(workers) / f"{TINY.name}.json")["methods"]["fedavg"]
        for workers in (1, 2)
    )
    assert alone["chosen"] == together["chosen"]
    for ending in training.ENDINGS:  # a process with one core may round differently
        pair = (record["endings"][ending]["metric"] for record in (alone, together))
        np.testing.assert_allclose(*pair, atol=0.02)


def test_the_module_runs_the_study(scores, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path), "--small", "--time", "60"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedda_reproduction.study", run_name="__main__")
    assert ended.value.code == 0
    assert len(list(tmp_path.glob("*.json"))) == len(study.SMALL.conditions)


def test_the_digest_is_of_what_the_results_depend_on(tmp_path):
    for name in study.CODE[1:]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a") if "." in name else (tmp_path / name).mkdir()
    (tmp_path / "src").mkdir()
    digests = []
    for text in ("a", "b"):
        (tmp_path / "src" / "code.py").write_text(text)
        digests.append(study.digest(tmp_path))
    (tmp_path / "src" / "code.pyc").write_text("compiled")
    assert digests[0] != digests[1] == study.digest(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "cell.json"
    path.write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        study.read(path)


def test_no_finite_point_is_an_error():
    wave = {"points": [{}], "metric": [None], "loss": [None]}
    with pytest.raises(InputError, match="no point of the method is finite"):
        study.chosen({"waves": [wave]})


def test_an_ending_is_of_the_seeds_runs():
    """The averaged model is of the plain run, and seeds on the same data would be the same."""
    federation = federations.load(TINY, 2)
    point = {"client_lr": 0.3, "step": 3.0, "horizon": 2.0, "eps": 0.01}
    found = training.ended(TINY, METHODS["fedavgm"], federation, point, 2)
    assert set(found) == set(training.ENDINGS)
    plain = found["plain"]["metric"]
    assert len(plain) == 2
    assert plain[0] != plain[1]
    setup = training.prepared(TINY, METHODS["fedavgm"], federation)
    hp = algorithms.get("fedopt-sgdm", form="paper").Hyper(**METHODS["fedavgm"].hyper(point, 5))
    (*_, last) = training.train(setup, hp, [federations.STRIDE])
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[None], last.run.state.params)
    alone = training._measured(federation, params, [federation.tests[1]])
    # Trained alone and with others, the same seed differs by rounding: at most one test example.
    assert alone["metric"][0] == pytest.approx(plain[0], abs=1.5 / 360)
