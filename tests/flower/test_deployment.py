"""A real federation on loopback: the processes, certificates and keys of a deployment.

The slow tests share one SuperLink with three SuperNodes, under TLS and with node keys. A message
takes some seconds, as a SuperNode starts a process for each. So every run serves two proofs: that
an algorithm comes to the numbers of the simulation, each test has another one, and that nothing of
what happens meanwhile matters.
"""

import os
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import random

import fedda
from fedda import algorithms, api
from fedda.core.round import one_round
from fedda.data.federation import from_clients
from fedda.simulate.cohort import Layout, sum_over_clients
from fedda.storage.directory import RunDirectory
from fedda.storage.files import read_rows
from fedda.storage.snapshot import read_settings

pytest.importorskip("flwr", reason="the extra fedda[flower] is not installed")

from helpers.federation import (
    COMMANDS,
    EXAMPLE,
    example,
    kill,
    kill_serverapp,
    problem,
    soon,
    summary,
)

TASK = problem.TASK
CLIENTS = 3
COHORT = 2


def share(number: int) -> Any:
    return problem.share(number, CLIENTS)


def simulated(algorithm: str, rounds: int) -> fedda.Result:
    """The same federation in one process."""
    return fedda.run(
        algorithm,
        TASK.model,
        [share(number) for number in range(CLIENTS)],
        TASK.loss,
        test=problem.test_set(),
        metrics=TASK.metrics,
        rounds=rounds,
        cohort=COHORT,
        batch=TASK.plan.batch,
        local_work=TASK.plan.amount,
        eval_every=1,
    )


def left_by(directory: Path, like: Any) -> Any:
    """The server's state in the newest checkpoint of a deployed run."""
    with RunDirectory(directory, read_settings(directory)) as kept:
        found = kept.read_back(lambda: like)
    assert found is not None
    return found.run


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return read_rows(directory / "metrics.jsonl", {"round": int}).rows


def assert_same(found: Any, expected: Any) -> None:
    """To 1e-6 of the largest number of an array, or of 1: AdaGrad's V is a sum of squares."""

    def compare(one: Any, other: Any) -> None:
        largest = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * largest)

    jax.tree.map(compare, found, expected)


# Quick ones.


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        failed = []

        def serve() -> None:
            try:
                server.wrap_socket(there, server_side=True).close()
            except (ssl.SSLError, OSError) as error:
                failed.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client.wrap_socket(here, server_hostname=name).close()
        finally:
            here.close()
            thread.join()
        assert not failed


def test_certificates_are_for_this_machine_and_trusted_alone(tmp_path: Path):
    made, other = (example.make_certificate(tmp_path / name) for name in ("a", "b"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made, made.with_suffix(".key"))
    trusting = ssl.create_default_context(cafile=made)
    for name in ("localhost", "127.0.0.1"):
        handshake(server, trusting, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, trusting, "example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
        handshake(server, ssl.create_default_context(cafile=other), "localhost")
    assert made.with_suffix(".key").stat().st_mode & 0o077 == 0, "a secret is its owner's"


def test_the_app_is_built(tmp_path: Path):
    """Flower accepts the app's description, and packs the app without the script beside it."""
    environment = os.environ | {"FLWR_HOME": str(tmp_path), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [example.COMMANDS / "flwr", "build", "--app", str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = tmp_path.glob("*.fab")
    shutil.unpack_archive(bundle, tmp_path / "app", "zip")
    packed = {path.name for path in (tmp_path / "app").rglob("*.py")}
    assert packed == {path.name for path in (EXAMPLE / "flower_digits").glob("*.py")}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rounds", "settings are KEY=VALUE"),
        (
            "round=5",
            "with a key of algorithm, settings, rounds, cohort, nodes, seed, deadline, out",
        ),
    ],
)
def test_a_word_that_is_no_setting_is_a_message(word: str, message: str):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "federation.py"), word], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_nothing_on_the_wire_is_pickled(monkeypatch: pytest.MonkeyPatch):
    """Records are taken apart and put together as Flower does it, and no pickle is touched."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
    from flwr.supercore.inflatable import inflatable_object as flower
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from fedda.flower import messages

    tree = {"a": np.arange(6.0).reshape(2, 3), "b": (np.float32(1), np.int32(2))}
    content = RecordDict(
        {
            "fedda": ConfigRecord({"algorithm": "fedavg", "serial": 1}),
            "seen": MetricRecord({"loss": 0.5}),
            "upload": messages.pack(tree),
        }
    )
    hostile = pickle.dumps(RuntimeError())

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    sent = {name: each.deflate() for name, each in flower.get_all_nested_objects(content).items()}
    received = inflate_object_from_contents(content.object_id, sent)
    back = messages.unpack(received["upload"], tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert dict(received["fedda"]) == dict(content["fedda"])
    # What says that it is a pickled array is refused before anybody looks at the pickle.
    lines = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n"
    header = b"\x93NUMPY\x01\x00" + len(lines).to_bytes(2, "little") + lines
    array = Array(dtype="float64", shape=(), stype="numpy.ndarray", data=header + hostile)
    with pytest.raises(messages.MessageError, match="pickle"):
        messages.unpack(ArrayRecord({"a": array}), {"a": np.float64(0)})


@pytest.mark.slow
def test_the_page_names_options_that_exist():
    """Every command of the page is one of Flower's, or of this example, with known options."""
    known: dict[tuple[str, ...], str] = {}
    checked = 0
    for words in COMMANDS:
        if words[:1] not in (["flwr"], ["flower-superlink"], ["flower-supernode"]):
            continue
        verbs = tuple(words[: {"flwr": 3 if "supernode" in words else 2}.get(words[0], 1)])
        if verbs not in known:
            done = subprocess.run(
                [example.COMMANDS / verbs[0], *verbs[1:], "--help"],
                env=os.environ | {"FLWR_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, verbs
            known[verbs] = done.stdout
        for word in words:
            assert not word.startswith("--") or word in known[verbs], f"{verbs} has no {word}"
        checked += 1
    assert checked >= 5


# Slow ones, on one federation.


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("federation")
    with example.Federation(directory, environment={"XLA_FLAGS": ""}) as started:
        yield started


def assert_as_simulated(out: Path, algorithm: str, rounds: int) -> None:
    """Two of three clients a round: one at least is visited twice, and what it keeps matters."""
    expected = simulated(algorithm, rounds)
    assert_same(left_by(out, expected.state), expected.state)
    rows = rows_of(out)
    for row, wanted in zip(rows, expected.history[1:], strict=True):
        for name in ("round", "train_loss", "loss", "accuracy"):
            assert row[name] == pytest.approx(wanted[name], abs=1e-5), name
    assert summary(out)["clients"] == CLIENTS


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedda-adagrad", "scaffold", "mime-sgdm"])
def test_deployment_equals_the_simulation(algorithm: str, deployed: Any):
    """One of FedDA's, one whose clients remember something, and one with two phases a round."""
    out = deployed.directory / algorithm
    config = {"algorithm": algorithm, "rounds": 2, "cohort": COHORT, "deadline": 300.0}
    deployed.run({**config, "out": str(out)})
    assert_as_simulated(out, algorithm, rounds=2)
    assert summary(out)["events"] == {}


@pytest.mark.slow
def test_strangers_are_refused(deployed: Any):
    """Nodes without a key, with one that nobody registered, and one that trusts another."""
    other = example.make_certificate(deployed.directory / "other")
    new_key = example.make_key(deployed.directory / "stranger" / "key")
    registered = deployed.directory / "keys" / "node-0"
    deployed.start_supernode("no key", 3, None, deployed.certificate)
    deployed.start_supernode("new key", 3, new_key, deployed.certificate)
    deployed.start_supernode("other authority", 3, registered, other)
    out = deployed.directory / "strangers"
    config = {"algorithm": "fedavg", "rounds": 2, "cohort": COHORT, "deadline": 300.0}
    deployed.run({**config, "out": str(out)})
    for name, why in (
        ("no key", "must be registered"),
        ("new key", "Failed to activate"),
        ("other authority", "CERTIFICATE_VERIFY_FAILED"),
    ):
        assert deployed.processes[name].wait(60) != 0
        assert why in deployed.log(name)
    assert_as_simulated(out, "fedavg", rounds=2)
    assert summary(out)["events"] == {}


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(deployed: Any):
    """A run that is submitted again with the same folder ends as if nothing had happened."""
    out = deployed.directory / "killed-server"
    config = {"algorithm": "fedda-adam", "rounds": 4, "cohort": COHORT, "deadline": 300.0}
    config |= {"out": str(out)}
    done = 0
    for killed in ("serverapp", "superlink"):
        deployed.submit(config)
        soon((out / "checkpoints" / f"round-{done + 1}").exists)
        if killed == "serverapp":
            kill_serverapp(deployed)
        else:
            kill(deployed, "superlink")
            deployed.start_superlink()
        before, done = done, len(rows_of(out))
        assert before < done < 4, f"the {killed} was killed in the middle"
    printed = deployed.run(config)
    assert "continued from round" in printed
    assert summary(out)["events"]["restarts"] == 2
    assert_as_simulated(out, "fedda-adam", rounds=4)


def without(lost: int, rounds: int) -> Any:
    """FedDA+SGDM's state if one client takes part in the first round only."""
    record = algorithms.get("fedda-sgdm")
    hp = api.traced(record.Hyper(), TASK.model)
    shards = from_clients([share(number) for number in range(CLIENTS)])
    state = record.init(hp, TASK.model.init(random.fold_in(random.key(0), 0)))
    for number in range(rounds):
        there = [client for client in range(CLIENTS) if client != lost or number == 0]
        key = random.fold_in(random.fold_in(random.key(0), 1), number)
        state, _, _ = one_round(
            record,
            TASK,
            partial(sum_over_clients, Layout()),
            hp=hp,
            state=state,
            memory=(),
            shards=shards,
            cohort=np.array(there, np.int32),
            key=key,
        )
    return state


@pytest.mark.slow
def test_a_node_killed_in_a_round(deployed: Any):
    """The round is done with the others, each counted once, and the summary tells of it.

    The last of the tests on this federation, as it leaves one node short.
    """
    out = deployed.directory / "killed-node"
    config = {"algorithm": "fedda-sgdm", "rounds": 2, "deadline": 90.0, "out": str(out)}
    run = deployed.submit(config)
    begun = f"[RUN {run}, ROUND 2]"
    soon(lambda: begun in deployed.log("node-2"))
    kill(deployed, "node-2")
    deployed.wait(run)
    assert [row["round"] for row in rows_of(out)] == [1, 2]
    told = summary(out)
    assert sum(told["events"].values()) == 1
    assert set(told["events"]) <= {"missing_replies", "refused_replies"}
    expected = without(2, rounds=2)
    assert_same(left_by(out, expected), expected)
