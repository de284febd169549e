"""The example for PyTorch on Flower: ten lines lead from FedAvg to FedDA, and both apps run."""

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from helpers.federation import example
from helpers.pages import ROOT, blocks

APPS = ROOT / "examples" / "flower-pytorch"
FILES = [
    "pyproject.toml",
    *(f"digits_app/{name}.py" for name in ("task", "client_app", "server_app")),
]


def changed_lines() -> list[str]:
    """Return the lines that differ between the two apps, with a sign in front."""
    found = []
    for name in FILES:
        before, after = (
            (APPS / app / name).read_text().splitlines() for app in ("fedavg", "fedda")
        )
        lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
        found += [line for line in lines if not line.startswith("@@")]
    return found


def test_ten_lines_change():
    lines = changed_lines()
    for sign in "+-":
        assert 0 < sum(line.startswith(sign) for line in lines) <= 10
    for app in ("fedavg", "fedda"):
        files = {str(path.relative_to(APPS / app)) for path in (APPS / app).rglob("*.[pt][yo]*")}
        files = {name for name in files if not name.endswith(".pyc")}
        assert files == {*FILES, "digits_app/__init__.py"}, "all other files are the same"
    (init,) = {(APPS / app / "digits_app/__init__.py").read_text() for app in ("fedavg", "fedda")}
    assert init


def test_the_page_shows_these_lines():
    (shown,) = blocks(ROOT / "docs" / "pytorch.md", "diff")
    assert [line for line in shown.text.splitlines() if line.startswith(("+", "-"))] == (
        changed_lines()
    )


IN_ONE_PROCESS = """
import sys, tomllib
from digits_app import client_app
assert "jax" not in sys.modules, "clients start without JAX"
from digits_app import server_app
from flwr.app import Context, RecordDict
from helpers.flower_grid import LocalGrid

config = tomllib.load(open("pyproject.toml", "rb"))["tool"]["flwr"]["app"]["config"]
config |= {"num-server-rounds": 3, "local-epochs": 3, "out": sys.argv[1]}
grid = LocalGrid([client_app.app] * 3)
for context in grid.contexts.values():
    context.node_config["num-partitions"] = 3
    context.run_config.update(config)
server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
"""


def accuracy(path: Path) -> float:
    """Return the accuracy of a saved model on the server's test set."""
    code = (
        "import sys, torch\n"
        "from digits_app.task import Net, load_test, test\n"
        "model = Net()\n"
        "model.load_state_dict(torch.load(sys.argv[1], weights_only=True))\n"
        "print(test(model, load_test(), 'cpu')[1])\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=APPS / "fedavg", capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.parametrize("app", ["fedavg", "fedda"])
def test_the_apps_run(app: str, tmp_path: Path):
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(tmp_path / "model.pt")],
        cwd=APPS / app,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Left out" not in done.stderr
    assert len(re.findall("Received 3 results and 0 failures", done.stderr)) == 3
    assert accuracy(tmp_path / "model.pt") > 0.5, "it would be 0.1 without training"


@pytest.mark.slow
def test_fedda_in_a_deployed_federation(tmp_path: Path):
    """A SuperLink with three SuperNodes, under TLS and with node keys."""
    config = {"num-server-rounds": 2, "local-epochs": 4, "out": str(tmp_path / "model.pt")}
    with example.Federation(tmp_path / "federation", app=APPS / "fedda") as federation:
        printed = federation.run(config)
    assert len(re.findall("aggregate_train: Received 3 results and 0 failures", printed)) == 2
    assert "FedDA: Adam(client_lr=0.3, server_lr=0.3, " in printed
    assert "Left out" not in printed
    assert accuracy(tmp_path / "model.pt") > 0.3, "it would be 0.1 without training"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="flwr[simulation] is missing")
def test_fedda_in_flowers_simulation(tmp_path: Path):
    home, port = tmp_path / "home", str(example.free_port())
    home.mkdir()
    try:
        done = subprocess.run(
            [
                example.COMMANDS / "flwr", "run", str(APPS / "fedda"), "--stream", "--run-config",
                f'num-server-rounds=2 local-epochs=6 out="{tmp_path / "model.pt"}"',
            ],
            env=os.environ | {
                "PATH": f"{example.COMMANDS}{os.pathsep}{os.environ['PATH']}",
                "FLWR_HOME": str(home),
                "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
                "FLWR_LOCAL_CONTROL_API_PORT": str(example.free_port()),
                "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_TELEMETRY_ENABLED": "0",
            },
            capture_output=True,
            text=True,
            timeout=500,
        )  # fmt: skip
    finally:  # the SuperLink that `flwr run` started would go on
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if port in words and any("flower-superlink" in word for word in words):
                process.terminate()
                process.wait(30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model.pt").exists(), done.stdout + done.stderr
    assert accuracy(tmp_path / "model.pt") > 0.3, "it would be 0.1 without training"
