"""`fedda bench`: that what it measures is what it says, not how fast anything is."""

import json
import re
import statistics
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import Mesh

from fedda.core import losses, tree
from fedda.core.task import Batch, Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.models import linear
from fedda_bench import bench, cases

FEATURES, CLASSES, BATCH, STEPS, COHORT = 512, 64, 8, 2, 3


def linear_case(loss=losses.cross_entropy, penalty=None):
    rng = np.random.default_rng(0)
    clients = from_clients(
        (rng.normal(size=(12, FEATURES)), rng.integers(0, CLASSES, 12)) for _ in range(5)
    )
    model = linear(FEATURES, CLASSES)._replace(penalty=penalty)
    sizes = {"batch": BATCH, "steps": STEPS, "cohort": COHORT, "rounds": 3}
    return bench.Case(model=model, central=model, clients=clients, loss=loss, **sizes)


def check_agreement(measured, repetitions):
    """Check that the numbers of a case agree with one another."""
    examples = measured["cohort"] * measured["batch"] * measured["steps"]
    assert measured["examples_per_round"] == examples
    programs = measured["programs"]
    assert list(programs) == ["floor", "fedavg", "fedda-sgdm"]
    middle = {}
    for name, program in programs.items():
        seconds = program["seconds_per_round"]
        assert len(seconds["all"]) == repetitions
        middle[name] = statistics.median(seconds["all"])
        assert seconds["median"] == middle[name]
        assert seconds["min"] == min(seconds["all"])
        assert seconds["spread"] == max(seconds["all"]) - min(seconds["all"])
        assert program["examples_per_second"] * middle[name] == pytest.approx(examples)
        assert program["flops_per_second"] * middle[name] == pytest.approx(
            measured["flops_per_round"]
        )
        assert program["ratio_to_floor"] == pytest.approx(middle[name] / middle["floor"])
    assert measured["fedda_to_fedavg"] == pytest.approx(middle["fedda-sgdm"] / middle["fedavg"])


def test_operations_are_those_of_the_layer():
    # The outputs, and the gradient of the kernel; there is none of the inputs.
    by_hand = STEPS * 2 * 2 * COHORT * BATCH * FEATURES * CLASSES
    assert bench.flops(linear_case()) == pytest.approx(by_hand, rel=0.03)
    assert bench.flops(linear_case()) > by_hand, "the loss takes some too"


def test_the_floor_and_the_rounds_see_as_many_examples():
    seen = []

    def counting(outputs, labels):
        jax.debug.callback(lambda labels: seen.append(labels.shape[0]), labels)
        return losses.cross_entropy(outputs, labels)

    case = linear_case(counting)._replace(cohort=4)  # as 3 may leave a place in a chunk empty
    for program in (bench.federated(case, "fedda-sgdm"), bench.centralised(case, None)):
        for rounds in (1, 3):
            seen.clear()
            program.seconds(rounds)
            jax.effects_barrier()
            assert sum(seen) == rounds * 4 * BATCH * STEPS


def test_the_floor_takes_the_gradient_that_a_client_takes():
    def penalty(params):
        return 0.1 * jnp.square(params["out"]["kernel"]).sum()

    case = linear_case(penalty=penalty)
    shard = case.clients.shard(0)
    rows = jnp.arange(BATCH)[None]
    key = random.key(0)
    params = case.model.init(key)
    batch = Batch(shard, rows, jnp.ones((1, BATCH), bool), key)
    expected, _ = jax.jit(Task(case.model, case.loss, Plan(BATCH)).gradient)(params, batch)
    got = jax.jit(partial(bench.central_gradient, case))(params, *shard.rows(rows[0]), key)
    assert tree.size(got) == FEATURES * CLASSES + CLASSES
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, expected)


def test_devices_share_the_floor():
    case = linear_case()._replace(batch=400)
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    shared, alone = (bench.centralised(case, devices) for devices in (mesh, None))
    assert shared.seconds(2) > 0
    assert shared.program_bytes < 0.8 * alone.program_bytes, "each device has half of a batch"


@pytest.mark.parametrize(
    ("once", "per_round", "most", "least", "upto"),
    [
        (0, 1e-3, 10_000, 1000, 2000),
        (0.05, 1e-4, 50_000, 9500, 20_000),  # what a program takes to start must not mislead
        (0, 1.0, 1000, 1, 1),
        (0, 1e-3, 30, 30, 30),
    ],
)
def test_a_repetition_is_long_enough(once, per_round, most, least, upto):
    program = bench.Program(0, 0, lambda rounds: once + per_round * rounds)
    assert least <= bench.enough(program, most) <= upto


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch):
    """Replace the programs by ones that take longer and longer; return the order of the calls."""
    calls: list[str] = []

    def fake(name: str) -> bench.Program:
        def seconds(rounds: int) -> float:
            calls.append(name)
            return 1.0 + len(calls) ** 2

        return bench.Program(0, 0, seconds)

    monkeypatch.setattr(bench, "federated", lambda case, name: fake(name))
    monkeypatch.setattr(bench, "centralised", lambda case, mesh: fake("floor"))
    return calls


def test_programs_are_timed_in_turns(order: list[str]):
    check_agreement(bench.measure(linear_case(), 4, peak=1e9), 4)
    assert order[-12:] == ["floor", "fedavg", "fedda-sgdm"] * 4
    assert set(order[:-12]) == set(order[-12:]), "each was warm"


def test_the_peak_of_the_machine_is_plausible():
    peak = bench.machine_peak("tf32", 1)
    assert 1e8 < peak["flops_per_second"] < 1e16
    assert 1e8 < peak["bytes_per_second"] < 1e14


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("backend", "operations", "devices"), [("gpu", 5.0, 2), ("cpu", 5.0, 1), ("gpu", None, 2)]
)
def test_a_share_is_of_all_devices_that_were_used(monkeypatch, backend, operations, devices):
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    monkeypatch.setattr(bench, "mesh_for", lambda *_: mesh)
    monkeypatch.setattr(bench, "flops", lambda case: operations)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    measured = bench.measure(linear_case(), 3, peak=10.0)
    assert measured["devices"] == 2
    for program in measured["programs"].values():
        seconds = program["seconds_per_round"]["median"]
        expected = operations and pytest.approx(operations / seconds / (devices * 10))
        assert program["share_of_peak"] == expected


@pytest.mark.parametrize(
    ("name", "parameters", "batch", "steps", "shape", "dtype"),
    [
        ("mlp", 4_810, 10, 5, (8, 8, 1), "uint8"),
        ("cnn-small", 1_206_590, 20, 5, (28, 28), "uint8"),
        ("cnn", 1_206_590, 20, 10, (28, 28), "uint8"),
        ("autoencoder", 2_837_314, 20, 10, (28, 28), "uint8"),
        ("logistic", 5_000_500, 100, 10, (64,), "uint16"),
        ("resnet18", 11_227_812, 20, 5, (32, 32, 3), "uint8"),
    ],
)
def test_cases_are_the_papers(name, parameters, batch, steps, shape, dtype):
    case = cases.CASES[name]("tf32")
    assert (case.cohort, case.batch, case.steps) == (10, batch, steps)
    assert set(np.asarray(case.clients.count)) == {batch * steps}, "one epoch"
    assert int(case.clients.start[-1]) + batch * steps == case.clients.y.shape[0]
    x, y = jax.eval_shape(lambda: case.clients.shard(3).rows(jnp.arange(batch)))
    assert (x.shape, x.dtype.name) == ((batch, *shape), dtype)
    for model in (case.model, case.central):
        params = jax.eval_shape(model.init, random.key(0))
        assert tree.size(params) == parameters
        outputs = jax.eval_shape(model.apply, params, x)
        assert jax.eval_shape(case.loss, outputs, y).shape == (batch,)


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_only_the_floor_of_an_accelerator_has_the_usual_convolution(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    def usual(model) -> bool:
        params, x = jax.eval_shape(model.init, random.key(0)), case.clients.x[:2]
        return "conv_general_dilated" in str(jax.make_jaxpr(model.apply)(params, x))

    case = cases.CASES[name]("tf32")
    assert not usual(case.model)
    assert not usual(case.central), "in a loop on a CPU it takes twenty times as long"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    case = cases.CASES[name]("tf32")
    assert not usual(case.model)
    assert usual(case.central)


def test_words_are_drawn_in_and_out_of_the_vocabulary():
    words = np.asarray(cases.CASES["logistic"]("tf32").clients.x.values)
    known = (words < cases.WORDS).mean()
    assert 0.5 < known < 0.95
    assert words.min() == 0
    assert words.max() < np.iinfo(words.dtype).max, "which is padding"


@pytest.fixture
def fedda(fedda):
    """The command, which turns the cache of compiled programs off."""
    cached = jax.config.jax_enable_compilation_cache
    yield fedda
    jax.config.update("jax_enable_compilation_cache", cached)


def test_the_command_prints_a_table_and_writes_one_file(fedda, tmp_path: Path):
    options = ["--quick", "--repetitions", "2", "--precision", "fp32", "--out", "b.json"]
    code, out, err = fedda("bench", "mlp", "mlp", *options)
    assert code == 0
    assert err == "measuring mlp\n", "once"
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["precision"] == "fp32"
    assert written["versions"]["jax"] == jax.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written["date"])
    assert written["cores"] >= 1
    assert list(written["models"]) == ["mlp"]
    mlp = written["models"]["mlp"]
    check_agreement(mlp, 2)
    assert mlp["parameters"] == 4_810
    columns = {}
    for name, program in mlp["programs"].items():
        seconds = program["seconds_per_round"]
        assert 0 < seconds["min"] < 1
        assert 0 < program["compile_seconds"] < 60
        assert program["program_bytes"] > 4 * mlp["parameters"]
        assert program["rounds_per_repetition"] == 1
        assert program["share_of_peak"] > 0
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [name])
        assert f" {1e3 * seconds['median']:.4g} " in line
        _, _, _, to_floor, *rest = line.split()
        assert to_floor == f"{program['ratio_to_floor']:.2f}"
        columns[name] = rest
    assert columns["fedda-sgdm"][0] == f"{mlp['fedda_to_fedavg']:.2f}"
    # Only FedDA has that one. The two ratios of FedAvg and FedDA may be equal by chance.
    assert len(columns["fedda-sgdm"]) == len(columns["fedavg"]) + 1
    assert f"at most {written['machine']['flops_per_second'] / 1e12:.3g} TFLOP/s" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_help_names_all_models(fedda):
    _, out, _ = fedda("bench", "--help")
    for name in cases.CASES:
        assert re.search(rf"\b{name}\b", out)
    assert {*cases.ON_CPU} < {*cases.CASES}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mpl"], "unknown model 'mpl'. Did you mean mlp?"),
        (["mlp", "--repetitions", "0"], "0 is not in the range x>=1."),
        (["mlp", "--precision", "fp8"], "unknown precision 'fp8'. Did you mean"),
        (["mlp", "--out", "no/b.json"], "(No such file or directory). Give another --out."),
        (["mlp", "--out", "/proc/b.json"], "cannot write to /proc/"),
        (["mlp", "--out", "."], "--out must be a file to write, got the folder ."),
    ],
)
def test_wrong_input_is_a_message(fedda, tmp_path: Path, options: list[str], message: str):
    code, out, err = fedda("bench", *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert "measuring" not in err or "precision" in message, "it is checked first"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


# --------------------------------------------------------------------------------- unequal clients


@pytest.mark.parametrize(
    ("sizes", "mean", "largest"),
    [("lognormal:0", 50, 50), ("lognormal:1", 50, 430), ("femnist", 137, 165)],
)
def test_unequal_clients_have_the_sizes_asked_for(sizes, mean, largest):
    case = cases.with_sizes(cases.CASES["mlp"]("fp32"), sizes)
    start, count = np.asarray(case.clients.start), np.asarray(case.clients.count)
    assert count.mean() == pytest.approx(mean, rel=0.02)
    assert count.max() == case.clients.max_count == pytest.approx(largest, rel=0.1)
    assert (start >= 0).all()
    assert (start + count <= len(case.clients.y)).all()
    assert case.steps == round(mean / case.batch)


def test_users_of_stack_exchange_have_few_posts():
    case = cases.with_sizes(cases.CASES["mlp"]("fp32"), "stackexchange")
    count = np.asarray(case.clients.count)
    assert (np.median(count), count.max(), case.steps) == (1, 86, 1)
    assert bench.examples_of(case, 1000) == pytest.approx(10 * count.mean(), rel=0.1)


@pytest.mark.parametrize("sizes", ["lognormal", "lognormal:-1", "normal:1", "emnist"])
def test_sizes_that_do_not_exist(sizes):
    with pytest.raises(InputError, match=rf"value of --sizes .*{sizes}"):
        cases.with_sizes(cases.CASES["mlp"]("fp32"), sizes)


def test_unequal_clients_are_measured_by_the_example():
    case = cases.with_sizes(cases.CASES["mlp"]("fp32"), "lognormal:1")._replace(rounds=2)
    measured = bench.measure(case, repetitions=1, peak=1e12)
    programs, examples = measured["programs"], bench.examples_of(case, 2)
    seconds = {name: each["seconds_per_round"]["median"] for name, each in programs.items()}
    assert measured["sizes"] == "lognormal:1"
    assert programs["fedavg"]["examples_per_second"] * seconds["fedavg"] == pytest.approx(examples)
    expected = seconds["fedavg"] / examples / (seconds["floor"] / measured["examples_per_round"])
    assert programs["fedavg"]["ratio_to_floor"] == pytest.approx(expected)
