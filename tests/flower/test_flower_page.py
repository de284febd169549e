"""The commands of `"flower.md"`, run: its script, and the federation by hand.

Each of the slow tests has a federation of its own, so they may run beside those that share one.
"""

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedda[flower] is not installed")
from flwr.app import Context, RecordDict

from helpers.federation import COMMANDS, EXAMPLE, PAGE, alive, descendants, example, soon, summary
from helpers.flower_grid import LocalGrid
from helpers.pages import blocks

pytestmark = pytest.mark.usefixtures("in_quick_processes")


@pytest.mark.slow
def test_a_federation_without_certificates(tmp_path: Path):
    """One node on a network that is trusted; the smallest federation there is."""
    out = tmp_path / "out"
    with example.Federation(tmp_path, nodes=1, tls=False) as plain:
        config = {"algorithm": "fedavg", "rounds": 1, "nodes": 1, "cohort": 1, "out": str(out)}
        printed = plain.run(config)
        assert "http://" in plain.log("superlink")
    assert "Events: none" in printed
    assert summary(out)["clients"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_script_stops_all_that_it_started(number: signal.Signals, tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, EXAMPLE / "federation.py", "--nodes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as script:
        try:
            assert script.stdout is not None
            assert "2 SuperNodes" in script.stdout.readline()
            soon(lambda: len(descendants(script.pid)) >= 6)  # with their executors
            started = descendants(script.pid)
            script.send_signal(number)
            assert script.wait(60) != 0
        finally:
            script.kill()
    soon(lambda: not any(map(alive, started)), within=5)
    assert list(tmp_path.iterdir()) == [], "keys and certificates are thrown away"


def test_the_log_on_the_page_is_that_of_the_example(caplog: pytest.LogCaptureFixture):
    """Its seconds may differ, and the third digit of its metrics."""
    server = importlib.import_module("flower_digits.server_app")
    client = importlib.import_module("flower_digits.client_app")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    given = project["tool"]["flwr"]["app"]["config"]
    network = LocalGrid([client.app] * 3)
    for context in network.contexts.values():
        context.node_config["num-partitions"] = 3
    with caplog.at_level("INFO", "flwr.fedda"):
        server.app(network, Context(1, 1, {}, RecordDict(), given))
    number = re.compile(r"\d+(?:\.\d+)?")
    logged = [one.getMessage() for one in caplog.records if one.name == "flwr.fedda"]
    (shown,) = (
        block.text.splitlines()
        for block in blocks(PAGE, "text")
        if block.caption.startswith("The log")
    )
    assert len(shown) == len(logged) == 4 + 3 + 1
    for line, expected in zip(logged, shown, strict=True):
        (words, numbers), (same, about) = (
            (number.sub("", text).split(), list(map(float, number.findall(text))))
            for text in (re.sub(r"[\d.]+ s$", "s", text) for text in (line, expected))
        )
        assert words == same
        assert numbers == pytest.approx(about, rel=0.01)


@pytest.mark.slow
def test_the_superlink_that_flwr_leaves_is_stopped_as_the_page_says(tmp_path: Path):
    """On other ports, so that the one of the person who runs the tests is left alone."""
    (command,) = (block.text for block in blocks(PAGE, "sh") if "kill $(lsof" in block.text)
    if not shutil.which("lsof"):
        pytest.skip("the page uses lsof")
    port = str(example.free_port())
    environment = os.environ | {
        "PATH": f"{example.COMMANDS}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
        "FLWR_LOCAL_CONTROL_API_PORT": str(example.free_port()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
    }

    def listening() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", int(port))) == 0

    subprocess.run(["flwr", "list", "local"], env=environment, check=True, timeout=120)
    assert listening(), "it stays when the command that started it has ended"
    assert "39091" in command
    subprocess.run(command.replace("39091", port), shell=True, env=environment, check=True)
    soon(lambda: not listening(), within=30)


@pytest.mark.slow
def test_the_script_runs_as_the_page_says(tmp_path: Path):
    (words,) = (words for words in COMMANDS if words[:2] == ["python", "federation.py"])
    done = subprocess.run(
        [sys.executable, *words[1:], "rounds=1", f"out={tmp_path / 'out'}"],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ROUND 1/1] train_loss" in done.stdout
    assert summary(tmp_path / "out")["rounds"] == 1


@pytest.mark.slow
def test_the_page_by_hand(tmp_path: Path):
    """The commands of the page, in a copy of the app; only its ports and its folder differ."""
    missing = [name for name in ("bash", "openssl", "ssh-keygen") if not shutil.which(name)]
    if missing:
        pytest.skip(f"the page uses {', '.join(missing)}")
    page = PAGE.read_text().split("## On several machines")[1]
    page = page.replace("/path/to/the/app", f"{tmp_path}/app")
    for port in ("9443", "9100", "9101"):
        page = page.replace(port, str(example.free_port()))
    changed = tmp_path / "flower.md"
    changed.write_text(page)
    (configuration,) = (block.text for block in blocks(changed, "toml"))
    address = re.search(r'address = "(.*):(.*)"', configuration)
    assert address is not None
    listening = (
        f"until (echo > /dev/tcp/{address[1]}/{address[2]}) 2> /dev/null; do sleep 0.2; done\n"
    )
    commands = [block.text for block in blocks(changed, "sh")]
    commands.insert(2, listening)
    shutil.copytree(EXAMPLE, tmp_path / "app")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(configuration)
    done = subprocess.run(
        ["bash", "-e", "-c", "trap 'kill $(jobs -p); wait' EXIT\n" + "".join(commands)],
        cwd=tmp_path / "app",
        env=os.environ
        | {
            "PATH": f"{example.COMMANDS}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(tmp_path / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "[ROUND 3/3] train_loss" in done.stdout, done.stdout + done.stderr
    assert "finished:completed" in done.stdout
