"""Processes that are killed at random moments, continued, and compared with undisturbed ones."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.jobs import Job, Jobs
from soak.processes import preload

MOST = 20  # kills before the work may finish


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    jobs = Jobs(folder, name)

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        job, place = jobs.draw(draw), folder / "killed"
        shutil.rmtree(place, ignore_errors=True)
        kills = 0
        for _ in range(draw.randint(1, MOST)):
            process = job.start(place)
            if process.ended(600, work=draw.uniform(0, job.work)):
                break
            process.ended(draw.uniform(0, 0.01))  # the time of a processor is counted in such steps
            kills += process.kill()
            job.check(place)
        finish(job, place)
        return Counter(kills=kills)

    return attempt


def finish(job: Job, place: Path) -> None:
    """Let the work end, and compare what it leaves."""
    ended = job.start(place).result()
    assert ended.code == 0, ended
    assert job.left(place) == job.expected, "it differs from the undisturbed"
