"""Many calls in one process, and many rounds in one run: memory must not grow."""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import fedda

CALLS = 500  # for each seed
ROUNDS = 20_000
GROWTH = 200 * 10**6  # bytes, after the first fifth
CLIENTS = [(np.ones((n, 3), np.float32), np.arange(n) % 2) for n in (4, 7, 2, 5)]


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    def attempt(seed: int) -> Counter[str]:
        return {"calls": calls, "rounds": rounds}[name](seed, folder)

    return attempt


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def calls(seed: int, folder: Path) -> Counter[str]:
    """Calls with other settings each, every third with a directory."""
    draw, before = random.Random(seed), 0
    model = fedda.models.linear(features=3, classes=2)
    for number in range(CALLS):
        if number == CALLS // 5:
            before = memory()
        algorithm = draw.choice(["fedavg", "fedda-adam", "scaffold", "mime-sgdm"])
        result = fedda.run(
            *(algorithm, model, CLIENTS, fedda.losses.cross_entropy),
            rounds=draw.choice([2, 5]),
            cohort=2,
            seed=draw.randrange(10**6),
            client_lr=draw.uniform(0.01, 0.1),
            directory=folder / f"{seed}-{number}" if number % 3 == 0 else None,
        )
        assert np.isfinite(result.history[-1]["train_loss"])
    grown = memory() - before
    assert grown < GROWTH, f"the process grew by {grown / 1e6:.0f} MB"
    return Counter(calls=CALLS)


def rounds(seed: int, folder: Path) -> Counter[str]:
    """One long run with a directory."""
    used: list[int] = []

    def watch(row: dict[str, float]) -> None:
        if row["round"] % 1000 == 0:
            used.append(memory())

    model = fedda.models.linear(features=3, classes=2)
    result = fedda.run(
        *("scaffold", model, CLIENTS, fedda.losses.cross_entropy),
        rounds=ROUNDS,
        cohort=2,
        seed=seed,
        eval_every=10,
        checkpoint_every=10,
        directory=folder / str(seed),
        on_evaluation=watch,
    )
    expected = [*range(0, ROUNDS + 1, 10)]
    assert [row["round"] for row in result.history] == expected, "a round is lost or doubled"
    lines = (folder / str(seed) / "metrics.jsonl").read_bytes().count(b"\n")
    assert lines == len(expected)
    grown = used[-1] - used[len(used) // 5]
    assert grown < GROWTH, f"the process grew by {grown / 1e6:.0f} MB"
    print(f"memory after {len(used)} thousand rounds: {used[-1] / 1e6:.0f} MB", file=sys.stderr)
    return Counter(rounds=ROUNDS)
