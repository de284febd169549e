"""Runs in this process that die within an operation on a file, and runs whose files are damaged.

They continue exactly. Of damaged files, they may be refused instead; then nothing is changed.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import test_run_directory as run_directory
from fedda.errors import InputError
from helpers.kills import killed_after

TRIES = 10  # in an attempt


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    whole = folder / "whole", run_directory.run(folder / "whole")
    for number, place in enumerate((folder / "stopped", folder / "other")):
        with suppress(KeyboardInterrupt):
            run_directory.run(place, seed=number, on_evaluation=run_directory.stop_at(8))
    stopped, other = folder / "stopped", folder / "other"
    intact = run_directory.content(stopped)

    with killed_after(None) as operations:
        run_directory.run(folder / "counted")

    def die(draw: random.Random) -> Counter[str]:
        return Counter(
            {
                "deaths within an operation": sum(
                    run_directory.kill_and_finish(folder / "killed", operations.count, draw, whole)
                    for _ in range(TRIES)
                )
            }
        )

    def damage(draw: random.Random) -> Counter[str]:
        for _ in range(TRIES):
            place = Path(shutil.copytree(stopped, folder / "damaged"))
            names = draw.sample(list(intact), draw.choice([1, 1, 2]))
            for file in names:
                run_directory.damage(place / file, other / file, draw)
            before = run_directory.content(place)
            result = run_directory.run_or_refusal(place)
            if isinstance(result, InputError):
                assert run_directory.content(place) == before, f"{result} changed a file"
                for file in names:
                    (place / file).write_bytes(intact[file])
                result = run_directory.run(place)
            run_directory.assert_same(result, whole[1])
            run_directory.assert_same_files(place, whole[0])
            shutil.rmtree(place)
        return Counter(directories=TRIES)

    attempt = die if name == "operations" else damage
    return lambda seed: attempt(random.Random(seed))
