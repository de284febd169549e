"""Devices: how many are found and used, what lies on them, and what is compiled only once."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda import api
from fedda.cli import main
from fedda.core import losses
from fedda.core.task import Plan, Task
from fedda.data.federation import Ragged
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate import devices
from fedda.simulate.train import evaluate, host_work, segment, start
from fedda.tasks import config

RNG = np.random.default_rng(0)
QUICK = [
    "algorithm=fedavg",
    "model=linear",
    "clients=12",
    "cohort=3",
    "rounds=2",
    "eval_every=2",
    "--quiet",
]


def python(code: str, **environment: str) -> list[str]:
    """Runs a program in a process of its own, with no JAX settings but these; gives its lines."""
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", devices.CACHE)
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=plain | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


# ------------------------------------------------------------------------------ at the start


COUNT = "--xla_force_host_platform_device_count"
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds"


@pytest.mark.parametrize(
    ("before", "environment", "count"),
    [
        ("", {}, 3),
        ("", {"XLA_FLAGS": f"{COUNT}=2 {PATIENT}=7"}, 2),
        ("", {"JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": "/a"}, 1),
        ("jax.devices()", {}, 1),
    ],
    ids=["one a core", "user's flags", "user's settings", "already found"],
)
def test_the_devices_of_the_command(before: str, environment: dict[str, str], count: int):
    code = f"""
import os, jax
from fedda.simulate import devices
os.sched_getaffinity = lambda process: {{1, 2, 5}}
{before}
devices.start_up()
print(len(jax.devices()))
print(os.environ.get("XLA_FLAGS"))
print(jax.config.jax_compilation_cache_dir)
"""
    found, flags, folder = python(code, FEDDA_COMPILE_CACHE="/b", **environment)
    assert int(found) == count
    kept = "None" if before else f"/b/{devices._processor()}"
    assert folder == environment.get("JAX_COMPILATION_CACHE_DIR", kept)
    if "XLA_FLAGS" in environment:
        assert flags.startswith(environment["XLA_FLAGS"])
        assert flags.count(PATIENT) == 1, "the user's stays"
    elif not before:
        assert f"{PATIENT}=1000000" in flags.split()


def test_importing_the_library_or_the_command_looks_for_no_devices():
    code = """
import fedda.cli.main, fedda.public, jax
jax.config.update("jax_num_cpu_devices", 5)  # refused once devices were looked for
print(len(jax.devices()), jax.config.jax_compilation_cache_dir)
"""
    assert python(code) == ["5 None"]


HEARD = """
import sys, jax
heard = []
jax.monitoring.register_event_listener(lambda event, **kwargs: heard.append(event))
{program}
for what in ("hits", "misses"):
    print(heard.count(f"/jax/compilation_cache/cache_{{what}}"))
"""
SMALL = """
from fedda.simulate import devices
devices.start_up()
print(jax.jit(lambda x: x @ x)(jax.numpy.ones((3, 3))).sum())
"""
WHOLE = f"""
from fedda.cli import main
sys.argv = ["fedda", "run", *{QUICK}, "--json", "--out", {{out!r}}]
try:
    main.main()
except SystemExit as stop:
    assert not stop.code
"""
LIBRARY = """
import fedda, jax, numpy as np
before = jax.config.values.copy()
jax.numpy.ones(3) + 1  # a program of the user
draw = np.random.default_rng(0)
clients = [(draw.normal(size=(n, 4)), draw.integers(0, 2, n)) for n in (5, 30, 9)]
model, metrics = fedda.models.linear(4, 2), [fedda.losses.accuracy]
given = (model, clients, fedda.losses.cross_entropy)
settings = dict(test=clients[1], metrics=metrics, rounds=4, cohort=2, progress=False)
result = fedda.run("fedavg", *given, **settings)
fedda.run_grid("fedavg", *given, grid=dict(client_lr=[0.1, 0.2]), **settings)
fedda.evaluate(model, result.params, clients, metrics, per_client=True)
jax.numpy.ones(4) - 1  # another
name = "jax_persistent_cache_min_entry_size_bytes"  # JAX itself changes it at the first use
assert {{**before, name: 0}} == {{**jax.config.values, name: 0}}
"""


@pytest.mark.parametrize(
    "program",
    [SMALL, LIBRARY, pytest.param(WHOLE, marks=pytest.mark.slow)],
    ids=["small", "library", "whole"],
)
def test_a_second_process_compiles_nothing(program: str, tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    kept = tmp_path / "fedda" / "compiled"
    for number in range(2):
        code = HEARD.format(program=program.format(out=str(tmp_path / f"run{number}")))
        *_, hits, misses = map(int, python(code, **environment)[-2:])
        (folder,) = kept.iterdir()
        names = [path.name for path in folder.iterdir()]
        if number == 0:
            assert misses == len(names) > 0
        else:
            assert misses == 0
            assert hits >= len(names)  # one program may be asked for twice
    assert any(name.startswith("jit_segment-") for name in names) == (program is not SMALL)
    assert not any("subtract" in name for name in names), "programs of the user stay out"


@pytest.mark.parametrize(
    "setting",
    [
        {"FEDDA_COMPILE_CACHE": "off"},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"JAX_COMPILATION_CACHE_DIR": "theirs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    ],
    ids=["off", "JAX's is off", "another folder"],
)
def test_the_user_decides_about_the_cache(setting: dict[str, str], tmp_path: Path):
    code = """
import os
import fedda, numpy as np
os.chdir(os.environ["XDG_CACHE_HOME"])
model = fedda.Model(lambda key: np.ones(()), lambda params, x: params * x)
fedda.evaluate(model, 1.0, ([[1.0]], [[1.0]]), [fedda.losses.squared_error])
print(*os.listdir())
"""
    expected = "theirs" if "theirs" in setting.values() else ""
    assert python(code, XDG_CACHE_HOME=str(tmp_path), **setting) == [expected]


def test_programs_that_were_not_used_for_longest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for number in range(4):
        path = tmp_path / f"jit_{number}-cache"
        path.write_bytes(b"0123456789")
        os.utime(path, (number == 0 and 10, number))  # the first was used last
    (tmp_path / "another.txt").write_bytes(50 * b"x")
    devices._is_ready.cache_clear()
    monkeypatch.setattr(devices, "MOST_CACHED", 25)
    assert devices._is_ready(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["another.txt", "jit_0-cache", "jit_3-cache"]


def test_the_cache_is_shown_and_cleared(fedda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert fedda("cache")[1] == "FEDDA_COMPILE_CACHE=off: no programs are kept.\n"
    monkeypatch.setenv("FEDDA_COMPILE_CACHE", str(tmp_path / "compiled"))
    for processor in "ab":
        folder = tmp_path / "compiled" / processor
        folder.mkdir(parents=True)
        (folder / "jit_segment-1-cache").write_bytes(bytes(1_000_000))
        (folder / "mine.txt").touch()
    where = f"2 compiled programs (2.0 MB) in {tmp_path / 'compiled'}\n"
    assert fedda("cache")[1] == f"There are {where}"
    assert fedda("cache", "--clear")[1] == f"Deleted {where}"
    assert {path.name for path in tmp_path.glob("compiled/*/*")} == {"mine.txt"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FEDDA_COMPILE_CACHE": "off"}, None),
        ({"FEDDA_COMPILE_CACHE": "/a/b"}, "/a/b"),
        ({"FEDDA_COMPILE_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/fedda/compiled"),
        ({"FEDDA_COMPILE_CACHE": "", "HOME": "/d"}, "/d/.cache/fedda/compiled"),
    ],
    ids=["off", "a path", "XDG", "home"],
)
def test_where_compiled_programs_are_kept(
    environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = devices.compiled_folder()
    assert (found and str(found.parent)) == expected


def test_each_kind_of_processor_has_its_own_programs(monkeypatch: pytest.MonkeyPatch):
    name = devices._processor.__wrapped__  # not the cached one
    ours = name()
    assert ours == name()
    monkeypatch.setattr(Path, "read_text", lambda path: "processor: 0\nflags : fpu sse avx512f\n")
    assert ours != name()


# --------------------------------------------------------------------------- what a run uses


@pytest.mark.parametrize(
    ("asked", "cohort", "parameters", "count"),
    [
        (None, 10, 10**6, 2),
        (None, 2, 10**6, 2),
        (None, 1, 10**6, 1),
        (1, 9, 10**6, 1),
        (None, 10, 4_810, 2),
        (None, 10, 650, 1),
        (2, 1, 10, 2),
    ],
)
def test_the_mesh_of_a_run(asked: int | None, cohort: int, parameters: int, count: int):
    mesh = devices.mesh_for(asked, cohort, parameters)
    if count == 1:
        assert mesh is None
    else:
        assert mesh is not None
        assert list(mesh.devices) == jax.devices()[:count]


def test_more_devices_than_there_are():
    with pytest.raises(InputError, match=r"devices must be at most 2, .* got 3\."):
        devices.mesh_for(3, 10, 10**6)


@pytest.mark.parametrize(
    ("words", "used"),
    [([], 1), (["devices=2"], 2), (["devices=1", "--devices", "all"], 2)],
)  # fmt: skip
def test_the_command_says_how_many_devices_it_used(
    words: list[str], used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(devices.CACHE, "off")
    monkeypatch.setattr(sys, "argv", ["fedda", "run", *QUICK, *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert not stop.value.code
    assert json.loads((tmp_path / "summary.json").read_text())["devices"] == used


def test_a_run_goes_on_with_another_number_of_devices(tmp_path: Path):
    settings = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}
    settings |= {"checkpoint_every": 1}
    whole = experiment.run(config.resolve(settings | {"devices": 2}), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "checkpoints" / "round-4").unlink()
    rest = experiment.resume(tmp_path / "run", {"devices": 1, "rounds": 4})
    assert rest.notes == ["continued from round 2"]
    assert (whole.summary["devices"], rest.summary["devices"]) == (2, 1)
    assert rest.summary["final"] == pytest.approx(whole.summary["final"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "some"], "devices must be a whole number, got 'some'"),
        (["devices=-1"], "devices must be at least 0, got -1"),
        (["--devices", "9"], "devices must be at most 2"),
        (["--process", "1"], "--processes and --process need --coordinator HOST:PORT"),
    ],
)
def test_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(devices.CACHE, "off")
    monkeypatch.setattr(sys, "argv", ["fedda", "run", *words, "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------- placement


def test_cores_share_what_lies_everywhere():
    mesh = devices.mesh_for(2, 2, 1)
    large = jnp.arange(100_000.0)
    tree = {"x": large, "key": random.key(3), "host": np.arange(3)}
    placed = devices.everywhere(tree, mesh)
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.device_set == set(jax.devices())
    for shard in placed["x"].addressable_shards:
        assert shard.data.unsafe_buffer_pointer() == large.unsafe_buffer_pointer(), "no copy"
    np.testing.assert_array_equal(placed["host"], tree["host"])
    assert random.bits(placed["key"]) == random.bits(tree["key"])


def test_what_is_shared_survives_a_donation():
    mesh = devices.mesh_for(2, 2, 1)
    start = jnp.zeros(1000)
    placed = devices.everywhere(start, mesh)
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    assert float(moved.max()) == 1
    assert float(start.max()) == 0


# ------------------------------------------------------------------------------- evaluation


def ratio(outputs, targets):
    """A metric that is a ratio of two sums."""
    return targets[:, 0] * outputs[:, 0], targets[:, 1] ** 2


def ragged(rows: int) -> Ragged:
    length = RNG.integers(1, 4, rows).astype(np.int32)
    values = RNG.integers(0, 5, length.sum()).astype(np.uint8)
    start = (np.cumsum(length) - length).astype(np.int32)
    return Ragged(jnp.asarray(values), jnp.asarray(start), jnp.asarray(length), 3)


MODEL = fedda.Model(
    lambda key: {"w": random.normal(key, (3, 2))},
    lambda params, x: x.astype(params["w"].dtype) @ params["w"],
)
TASK = Task(MODEL, losses.squared_error, Plan(2), (ratio,))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("rows", "kind", "together"),
    [(1, "dense", False), (1031, "dense", False), (5, "ragged", False), (5, "dense", True)],
)
def test_devices_share_an_evaluation(rows: int, kind: str, together: bool):
    x = ragged(rows) if kind == "ragged" else jnp.asarray(RNG.normal(size=(rows, 3)))
    y = jnp.asarray(RNG.normal(size=(rows, 2)))
    keys = random.split(random.key(0), 2)
    params = jax.vmap(MODEL.init)(keys) if together else MODEL.init(keys[0])
    mesh = devices.mesh_for(2, 2, 1)
    alone = evaluate(TASK, together, None)(params, x, y)
    everywhere = devices.everywhere((params, x, y), mesh)
    shared = evaluate(TASK, together, mesh)(*everywhere)
    assert alone.keys() == shared.keys() == {"loss", "ratio"}
    for name, value in alone.items():
        assert value.shape == ((2,) if together else ())
        np.testing.assert_allclose(shared[name], value, rtol=1e-12)
    errors = np.asarray(x[jnp.arange(rows)]) @ np.asarray(params["w"]) - np.asarray(y)
    np.testing.assert_allclose(alone["loss"], (errors**2).mean((-2, -1)), rtol=1e-12)


def test_each_device_evaluates_only_its_share():
    x, y, params = jnp.zeros((2048, 3)), jnp.zeros((2048, 2)), MODEL.init(random.key(0))
    for mesh, batches in ((None, 64), (devices.mesh_for(2, 2, 1), 32)):
        program = str(jax.make_jaxpr(evaluate(TASK, False, mesh))(params, x, y))
        assert re.findall(r"\blength=(\d+)", program) == [str(batches)]


# --------------------------------------------------------------------------- communication


def communicated(algorithm: str) -> dict[str, int]:
    """The bytes that each kind of collective gives, in one round of a cohort of three."""
    clients = [(RNG.normal(size=(4, 3)), RNG.normal(size=(4, 2))) for _ in range(5)]
    setup, hyper = api.prepare(
        algorithm, MODEL, clients, losses.squared_error, cohort=3, devices=2, rounds=1
    )
    hp, mesh = api.traced(hyper, MODEL), setup.layout.mesh
    run = start(setup, hp, [0])
    hp, run, key = devices.everywhere((hp, run, random.key(0)), mesh)
    span = next(host_work(setup, [0]))
    lowered = segment(setup.algorithm, setup.task, setup.layout, False).lower(hp, run, key, span)
    program = lowered.compile().as_text()
    found: dict[str, int] = {}
    for result, name in re.findall(
        r"= (.*?) (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", program
    ):
        numbers = re.findall(r"[fs]32\[([\d,]*)\]", result)
        sizes = [int(np.prod([int(n) for n in each.split(",") if n])) for each in numbers]
        found[name] = found.get(name, 0) + 4 * sum(sizes)
    return found


@pytest.mark.parametrize(("algorithm", "models"), [("fedavg", 1), ("fedda-sgdm", 2)])
def test_one_upload_is_communicated_whatever_the_cohort(algorithm: str, models: int):
    model, counters = 4 * 6, 4 * 5  # weight, loss, examples, counted, not finite
    assert communicated(algorithm) == {"all-reduce": models * model + counters}


def test_what_the_cohort_keeps_is_gathered_once():
    model, filled = 4 * 6, 4  # clients, of whom one is absent, on two devices
    assert communicated("scaffold")["all-gather"] == filled * model
