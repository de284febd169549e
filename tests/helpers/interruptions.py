"""Runs in real processes, which get a Ctrl-C at a random moment, again and again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# A network that takes some seconds to compile.
SCRIPT = """
import json, os, signal, sys
import jax, jax.numpy as jnp, numpy as np
import fedda

draw = np.random.default_rng(0)
clients = [(draw.normal(size=(n, 8)), draw.integers(0, 3, n)) for n in (3, 20, 7, 11)]

def init(key):
    return [jax.random.normal(key, shape) / 3 for shape in [(8, 16), *[(16, 16)] * 8, (16, 3)]]

def apply(params, x):
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights)
    return x @ params[-1]

model = fedda.Model(init, apply)
print("begun", flush=True)
try:
    result = fedda.run(
        "fedda-adam", model, clients, fedda.losses.cross_entropy, test=clients[1],
        metrics=[fedda.losses.accuracy], rounds=6000, cohort=3, eval_every=20,
        checkpoint_every=10, directory=sys.argv[1],
    )
except fedda.Interrupted as stop:
    reached = finite = None
    if stop.result is not None:
        reached = stop.result.history[-1]["round"]
        finite = all(bool(jnp.isfinite(leaf).all()) for leaf in stop.result.params)
    print(json.dumps({"round": reached, "finite": finite}), flush=True)
    raise
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(json.dumps({"final": result.history[-1]}), flush=True)
"""


LIBRARY, COMMAND = "fedda.run", "fedda run"


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str
    seconds: float | None  # from Ctrl-C to the end; None: it ended before


class Counts(NamedTuple):
    """How often runs were interrupted in each stage, and how soon they ended.

    Attributes:
        stages: How often they were interrupted in which stage, and how many runs finished.
        codes: How often they had which exit code after an interrupt.
        longest: The most seconds from Ctrl-C to the end of the process, by stage.
    """

    stages: Counter[str]
    codes: Counter[int]
    longest: dict[str, float]


def words(kind: str, directory: Path) -> list[str]:
    """Return the command that begins or continues a run in a directory."""
    if kind == LIBRARY:
        return [sys.executable, "-c", SCRIPT, str(directory)]
    given = ["algorithm=fedda-adam", "clients=12", "cohort=3", "rounds=8000", "eval_every=20"]
    given += ["checkpoint_every=10", "--out", str(directory)]
    if (directory / "config.toml").exists():
        given = ["--resume", str(directory)]
    return [sys.executable, "-m", "fedda", "run", *given, "--json"]


def run(kind: str, directory: Path, seconds: float | None) -> Ended:
    """Run a process; send Ctrl-C this long after its run has begun, or never."""
    process = subprocess.Popen(
        words(kind, directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"FEDDA_COMPILE_CACHE": "off"},
    )
    sent = None
    try:
        stream = process.stdout if kind == LIBRARY else process.stderr
        assert stream is not None
        first = stream.readline()  # the run begins
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        took = None if sent is None else time.monotonic() - sent
    finally:
        process.kill()
    return Ended(process.returncode, out, (first if kind == COMMAND else "") + err, took)


def check_interrupted(kind: str, directory: Path, ended: Ended) -> str:
    """Check what a process left behind that was interrupted; return where it stopped."""
    code, out, err, _ = ended
    assert "/jax/" not in err, err
    last = err.splitlines()[-1]
    if kind == COMMAND:
        assert code == 130, (code, err)
        assert last.startswith("Interrupted."), err
        assert "Traceback" not in err, err
        return "training" if (directory / "checkpoints").exists() else "compiling"
    assert code == 1, (code, err)
    assert last.startswith("fedda.Interrupted: The run was stopped."), err
    found = json.loads(out)
    assert found["finite"] is not False
    if not found["round"]:
        return "compiling"
    assert (directory / "checkpoints" / f"round-{found['round']}").exists()
    return "training"


def interrupt_often(kind: str, folder: Path, times: int, longest: float, seed: int) -> Counts:
    """Interrupt runs at random moments until they were interrupted this often.

    Every run is continued until it has finished, and then compared with one that was not
    interrupted.
    """
    draw, number = random.Random(seed), 0
    stages, codes, slowest = Counter[str](), Counter[int](), dict[str, float]()
    whole = folder / "whole"
    assert run(kind, whole, None).code == 0
    expected = (whole / "metrics.jsonl").read_bytes()
    while codes.total() < times or (folder / f"run-{number}").exists():
        directory = folder / f"run-{number}"
        moment = draw.uniform(0.05, longest) if codes.total() < times else None
        ended = run(kind, directory, moment)
        # Ctrl-C may come after the command has printed its results, while Python shuts down.
        if ended.code == 0 or (kind == COMMAND and ended.out and ended.code in (130, -2)):
            assert "final" in json.loads(ended.out.splitlines()[-1])
            assert (directory / "metrics.jsonl").read_bytes() == expected
            stages["finished"] += 1
            number += 1
        else:
            stage = check_interrupted(kind, directory, ended)
            stages[stage] += 1
            codes[ended.code] += 1
            assert ended.seconds is not None, ended.err
            slowest[stage] = max(slowest.get(stage, 0), ended.seconds)
    return Counts(stages, codes, slowest)
