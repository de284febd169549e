"""Measure large federations: Stack Overflow's shape on disk, and a million small clients.

    python benchmarks/scale.py DIR [--share 1.0] [--rounds 20] [--out scale.json]

Draws a federation of the shape of Stack Overflow's training set (342,477 users, 135,818,730
sentences of about 20 words with Zipf's frequencies, users' sizes log-normal) and writes it to DIR
as a store (about 7 GB; `--share` makes a smaller one, and the results say so). Then, in a new
process: opens it; draws cohorts of 10 and gathers their examples as the simulator does; trains the
logistic regression of the paper. Does the same with 1,000,000 clients of ten examples. Reports
seconds to open, milliseconds of host work per round, seconds per round, and the largest resident
memory. What is learnt does not matter: the words are random.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedda import api, models
from fedda.core import losses
from fedda.data import preprocessing, store
from fedda.data.store import Client, Rows, Source
from fedda.data.streaming import Feed
from fedda.models import linear
from fedda.simulate.train import host_work, train

USERS, SENTENCES = 342_477, 135_818_730
WORDS, TAGS = 10_000, 500
SMALL_CLIENTS, SMALL_EXAMPLES = 1_000_000, 10


def sizes(rng: np.random.Generator, users: int, sentences: int) -> np.ndarray:
    """Draw the users' numbers of sentences: log-normal, at least 100, with the given sum."""
    draws = rng.lognormal(4.5, 1.2, users)
    count = (draws * (sentences - 100 * users) / draws.sum()).astype(np.int64) + 100
    count[: sentences - int(count.sum())] += 1  # what rounding down left over
    return count


def texts(count: np.ndarray, mean_words: float) -> Iterator[Client]:
    """Draw users with random sentences, which have about `mean_words` words and two tags."""
    rng = np.random.default_rng(1)
    # A million ranks by Zipf's law. To sample from them is much faster than to draw new ones.
    zipf = np.minimum(np.exp(rng.random(2**20) * np.log(60_000)), 60_000).astype(np.uint16)
    for first in range(0, len(count), 1000):
        block = count[first : first + 1000]
        length = rng.poisson(mean_words, int(block.sum())).astype(np.int32)
        words = zipf[rng.integers(0, len(zipf), int(length.sum()), dtype=np.int32)]
        tags = (zipf[rng.integers(0, len(zipf), 2 * len(length), dtype=np.int32)] % 2000).astype(
            np.uint16
        )
        rows = np.append(0, np.cumsum(block))
        parts = np.append(0, np.cumsum(length, dtype=np.int64))
        for i in range(len(block)):
            a, b = rows[i], rows[i + 1]
            x = Rows(words[parts[a] : parts[b]], length[a:b])
            y = Rows(tags[2 * a : 2 * b], np.full(b - a, 2, np.int32))
            yield f"{first + i:08d}", {"x": x, "y": y}


def write(path: Path, count: np.ndarray, mean_words: float) -> dict[str, float]:
    """Write a federation of random texts to disk, and time it."""
    begin = time.perf_counter()
    made = store.write(path, Source({"train": texts(count, mean_words)}), {"drawn": True})
    size = sum(facts["bytes"] for facts in made.meta["files"].values())
    return {"seconds_to_write": time.perf_counter() - begin, "gigabytes": size / 1e9}


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Open a federation and train on it, in a process that has opened nothing before."""
    begin = time.perf_counter()
    opened = Feed(store.open_store(path).splits["train"], most=1000)
    seconds_to_open = time.perf_counter() - begin

    model = models.with_input(
        linear(WORDS, TAGS), lambda x: preprocessing.bag_of_words(x, WORDS, "known")
    )
    setup, hyper = api.prepare(
        "fedda-sgdm",
        model,
        opened,
        losses.tag_cross_entropy,
        rounds=rounds,
        cohort=10,
        batch=100,
        local_work=1,
        local_unit="epochs",
        reduction="sum",
        eval_every=rounds,
        client_lr=100.0,
    )
    host_rounds = 200
    spans = host_work(setup._replace(rounds=host_rounds, eval_every=100), seeds=[1])
    begin = time.perf_counter()
    for _ in spans:
        pass
    host = (time.perf_counter() - begin) / host_rounds

    times = []
    for evaluation in train(setup, api.traced(hyper, model), [0]):
        times.append(time.perf_counter())
        assert evaluation.row["nonfinite_clients"] == 0
    return {
        "clients": opened.num_clients,
        "examples_after_the_cap": int(opened.count.sum(dtype=np.int64)),
        "seconds_to_open": seconds_to_open,
        "host_milliseconds_a_round": 1e3 * host,
        "seconds_a_round": (times[-1] - times[0]) / rounds,  # with compilation
        "largest_resident_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "device": str(jax.devices()[0]),
        "rounds_a_program": min(opened.rounds(10), rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of Stack Overflow's users")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.rounds)))
        return
    users = round(arguments.share * USERS)
    rng = np.random.default_rng(0)
    plans = {
        "stackoverflow": (sizes(rng, users, round(arguments.share * SENTENCES)), 20.0),
        "million": (np.full(round(arguments.share * SMALL_CLIENTS), SMALL_EXAMPLES), 8.0),
    }
    results: dict[str, Any] = {
        "share": arguments.share,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.platform(),
        "jax": jax.__version__,
    }
    for name, (count, mean_words) in plans.items():
        path = arguments.directory / name
        written = write(path, count, mean_words)
        command = [sys.executable, __file__, str(arguments.directory), "--measure", str(path)]
        command += ["--rounds", str(arguments.rounds)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[name] = {"examples": int(count.sum()), **written, **json.loads(printed)}
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
