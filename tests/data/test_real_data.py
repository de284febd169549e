"""The paper's data sets, from the official files to training, each by the command in a process.

The files are found in the folder FEDDA_TEST_DATA, in the layouts of the official downloads:
cifar-100-python/, fed_emnist_{train,test}.h5 (of any writers), stackexchange/SITE/Posts.xml.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import jax.numpy as jnp
import numpy as np
import pytest

from fedda import tasks
from fedda.data import datasets, preprocessing
from fedda.data.readers import cifar_python
from fedda.tasks import config

FILES = os.environ.get("FEDDA_TEST_DATA")

pytestmark = pytest.mark.skipif(
    FILES is None, reason="FEDDA_TEST_DATA names no folder with the files"
)

WHERE = {"emnist": ".", "cifar100": "cifar-100-python", "stackexchange": "stackexchange"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The data sets, imported on first use."""
    root = tmp_path_factory.mktemp("data")
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDDA_DATA", str(root))

    def get(name):
        if not (root / name).exists():
            datasets.import_files(name, Path(FILES) / WHERE[name])
        return datasets.open_dataset(name)

    yield get
    patch.undo()


# A process starts with the ru_maxrss of the one that has started it, but with its own VmHWM.
COMMAND = """
import json, pathlib, re, sys
from fedda.cli.main import main
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1e6
    print(json.dumps({"gigabytes": peak}), file=sys.stderr)
"""


def trained(tmp_path, *words):
    """The summary of a run in a process of its own, its rows, and the most memory it had."""
    command = [sys.executable, "-c", COMMAND, "run", *words]
    command += ["--out", str(tmp_path / "run"), "--json", "--quiet"]
    # Neither the tests' second device nor their weaker compiler is wanted here.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    peak = json.loads(done.stderr.splitlines()[-1])["gigabytes"]
    return json.loads(done.stdout), [json.loads(row) for row in rows], peak


def test_shards_are_the_images_of_the_file(imported):
    """CIFAR-100, dealt out: every client has 100 images, and all images are those of the file."""
    imported("cifar100")
    problem = tasks.load(config.resolve({"task": "cifar100"}))
    shards = problem.shards
    assert np.asarray(shards.count).tolist() == [100] * 500
    (_, source), *_ = cifar_python.read(Path(FILES) / WHERE["cifar100"], "cifar100").splits["train"]
    ours, theirs = (
        sorted(zip(map(bytes, np.asarray(x)), np.asarray(y).tolist(), strict=True))
        for x, y in ((shards.x, shards.y), (source["x"], source["y"]))
    )
    assert ours == theirs
    assert problem.data["partition"] == "pachinko:0.1"


def test_pixels_are_those_of_the_file_to_the_last_bit(imported):
    """EMNIST: what the network is given on the device, and what h5py finds in the file."""
    imported("emnist")
    problem = tasks.load(config.resolve({"task": "emnist"}))
    with h5py.File(Path(FILES) / "fed_emnist_train.h5") as file:
        writers = sorted(file["examples"])
        assert len(writers) == problem.shards.num_clients
        for client in range(0, len(writers), 13):
            own = file["examples"][writers[client]]
            shard = problem.shards.shard(client)
            x, y = shard.rows(jnp.arange(shard.count))
            np.testing.assert_array_equal(preprocessing.scaled(x), own["pixels"][()])
            np.testing.assert_array_equal(y, own["label"][()])


@pytest.mark.slow
def test_emnist_learns_in_little_memory(imported, tmp_path):
    imported("emnist")
    summary, rows, gigabytes = trained(tmp_path, "task=emnist", "rounds=12", "eval_every=4")
    assert summary["parameters"] == 1_206_590
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert gigabytes < 3


@pytest.mark.slow
def test_two_rounds_of_the_resnet(imported, tmp_path):
    imported("cifar100")
    summary, rows, _ = trained(tmp_path, "task=cifar100", "rounds=2", "eval_every=2", "chunk=1")
    assert summary["parameters"] == 11_227_812
    assert summary["nonfinite_clients"] == summary["skipped_rounds"] == 0
    # Clients learn what they have, of some 20 labels: ln 100 is 4.6. After two rounds at a server
    # rate of 3.3 nothing is to be expected yet of the test set.
    assert rows[-1]["train_loss"] < 4.3
    assert rows[-1]["loss"] < 5


@pytest.mark.slow
def test_stack_exchange_finds_a_third_of_the_tags_of_new_users(imported, tmp_path):
    """On posts of users that were held out; most of them are about questions that were not."""
    imported("stackexchange")
    settings = ("task=stackexchange", "algorithm=fedda-adagrad", "rounds=100", "chunk=1")
    summary, _, _ = trained(tmp_path, *settings)
    assert summary["parameters"] == 5_000_500
    assert summary["final"]["recall_at_5"] >= 0.35
