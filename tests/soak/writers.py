"""Two processes that want one directory, of which one may be killed."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.jobs import Jobs
from soak.kills import finish
from soak.processes import preload


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    all_jobs = {kind: Jobs(folder, kind) for kind in ("run",)}

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        job, place = all_jobs["run"].draw(draw), folder / "shared"
        shutil.rmtree(place, ignore_errors=True)
        both = [job.start(place)]
        both[0].ended(600, work=draw.uniform(0, job.work))
        both.append(job.start(place))
        if draw.random() < 0.5:
            victim = draw.choice(both)
            victim.ended(600, work=draw.uniform(0, job.work))
            victim.kill()
        for process in both:
            ended = process.result()
            # Both print to one file, so what is said is not compared.
            assert ended.code in (0, 2, -9), ended
        job.check(place)
        finish(job, place)
        return Counter(pairs=1)

    return attempt
