"""Settings that no one should give: a message, or a run that Ctrl-C ends."""

import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.processes import LONGEST, fedda, preload

MEMORY = 4 * 10**9
VALUES = [
    *("0", "-1", "1e308", "nan", "inf", "-inf", "1e-320", "", "''", "None", "true", "[]", "{}"),
    *("9" * 40, "10000000", "1" * 5000, "0x10", "1_0", "1e3", "'a'", "é\u202e", "\x00"[:0], "\t"),
    *("../..", "/dev/null", "/dev/full", "fedda-adam", "digits", "dirichlet:0", "dirichlet:nan"),
    *("dirichlet:1e-9", "shards:0", "shards:1000000", "steps", "epochs", "1979-05-27", "$(id)"),
    *("a=b", "=", "--", "%s", "\ud800"),
]
NAMES = [
    *("algorithm", "task", "model", "precision", "partition", "partition_seed", "clients"),
    *("cohort", "sampling", "rounds", "batch", "local_work", "local_unit", "stabilise", "seed"),
    *("eval_every", "chunk", "devices", "memory_gb", "data_gb", "checkpoint_every", "client_lr"),
    *("server_lr", "beta1", "beta2", "eps", "mu", "late_every", "per_client", "", "é", "__class__"),
]
PATIENCE = 8.0  # seconds of work, after which Ctrl-C comes


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    place = folder / "absurd"

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        shutil.rmtree(place, ignore_errors=True)
        words = ["rounds=3", "clients=12", "cohort=3", "model=linear"]
        for _ in range(draw.choice([1, 1, 2, 4])):
            words.append(f"{draw.choice(NAMES)}={draw.choice(VALUES)}")
        words = [word for word in words if "\x00" not in word]
        command = draw.choice(["run", "run", "run", "sweep", "compare"])
        if command == "compare":
            words = ["fedavg", *words]
        if command == "sweep":
            words += ["--grid", f"client_lr=0.1,{draw.choice(VALUES)}"]
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, limits[1]))
        try:
            process = fedda(command, *words, "--quiet", "--out", place, log=folder / "log")
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        if not process.ended(600, work=PATIENCE):
            process.send(signal.SIGINT)
        ended = process.result(LONGEST)
        assert ended.code in (0, 1, 2, 130), (words, ended)
        return Counter(settings=1)

    return attempt
