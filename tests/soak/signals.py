"""Every signal, once or twice, at random moments of importing, compiling and training."""

import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.jobs import Jobs
from soak.kills import finish
from soak.processes import LONGEST, preload

ENDING = [signal.SIGINT, signal.SIGTERM]  # that the library handles
OTHERS = [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
OTHERS += [signal.SIGPIPE, signal.SIGSTOP, signal.SIGWINCH, signal.SIGCHLD, signal.SIGXCPU]


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    jobs = Jobs(folder, "run")

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        job, place = jobs.draw(draw), folder / "stopped"
        shutil.rmtree(place, ignore_errors=True)
        sent = 0
        for _ in range(draw.randint(1, 4)):
            # Without compiled programs of earlier processes it takes three times as long.
            cache = draw.random() < 0.5
            process = job.start(place, **({} if cache else {"FEDDA_COMPILE_CACHE": "off"}))
            longest = job.work if cache else 3 * job.work
            if process.ended(600, work=draw.uniform(0, longest)):
                break
            number = draw.choice([*ENDING * 3, *OTHERS])
            process.send(number)
            sent += 1
            if draw.random() < 0.5:
                process.ended(draw.uniform(0, 0.5))
                process.send(draw.choice(ENDING) if number in ENDING else signal.SIGKILL)
                sent += 1
            elif number == signal.SIGSTOP:
                process.send(signal.SIGCONT)
            ended = process.result(LONGEST if number in ENDING else 600)
            codes = {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}
            if number in OTHERS:
                codes |= {-number, -signal.SIGKILL}
            # Before and after the library handles signals, a second one ends Python at once.
            assert ended.code in codes | {-one for one in ENDING}, ended
            job.check(place)
        finish(job, place)
        return Counter(signals=sent)

    return attempt
