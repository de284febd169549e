"""Run the tries, and write the table: `make soak`, or `python -m soak` in the folder `tests`."""

import argparse
import datetime
import importlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from soak import kinds, table

HERE = Path(__file__).parent
ENOUGH = 20  # failures of a kind, after which it ends
LATE = 600.0  # seconds after its time in which a kind must have finished its last try


def one_kind(name: str, seconds: float, seed: int, most: int | None) -> None:
    """Try one kind in this process; print a line of JSON for each try."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind = kinds.KINDS[name]
    # Not a TemporaryDirectory, which each forked process would delete at its end.
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{name}-"))
    try:
        attempt = importlib.import_module(f"soak.{kind.module}").prepare(folder, name)
        end, number, failures, parent = time.monotonic() + seconds, 0, 0, os.getppid()
        while number < (most or 10**9) and (number == 0 or time.monotonic() < end):
            if os.getppid() != parent:  # which was stopped
                break
            begin, failure, counts = time.monotonic(), "", Counter[str]()
            try:
                counts = attempt(seed + number)
            except Exception:
                failure = traceback.format_exc()[-4000:]
            used = [resource.getrusage(who).ru_maxrss for who in (0, resource.RUSAGE_CHILDREN)]
            line = {"kind": name, "seed": seed + number, "counts": counts, "failure": failure}
            line |= {"seconds": time.monotonic() - begin, "memory": max(used) * 1024}
            print(json.dumps(line), file=out, flush=True)
            number += 1
            failures += bool(failure)
            if failures == ENOUGH:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def collected(name: str, seconds: float, seed: int, most: int | None) -> list[dict[str, Any]]:
    """Try one kind in a process of its own; return the lines that it printed."""
    command = [sys.executable, "-m", "soak", "--one", name, "--seed", str(seed)]
    command += ["--seconds", str(seconds), *(["--most", str(most)] if most else [])]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=HERE.parent, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds + LATE)
        failure = f"the process of the tries ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        printed, _ = process.communicate()
        failure = f"a try has not ended after {time.monotonic() - begin:.0f} s"
    lines = [json.loads(line) for line in printed.splitlines()]
    if process.returncode:
        seed += len(lines)
        empty = {"counts": {}, "seconds": 0.0, "memory": 0}
        lines.append({"kind": name, "seed": seed, "failure": failure, **empty})
    for line in lines:
        if line["failure"]:
            print(f"{name}, seed {line['seed']}:\n{line['failure']}", file=sys.stderr)
    done = sum(Counter(line["counts"]).total() for line in lines)
    print(f"{name}: {len(lines)} tries, {done} things, {time.monotonic() - begin:.0f} s")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("kinds", nargs="*", choices=[[], *kinds.KINDS], help="default: all")
    parser.add_argument("--minutes", type=float, default=30, help="for all kinds together")
    parser.add_argument("--jobs", type=int, default=2, help="kinds at a time")
    parser.add_argument("--seed", type=int, help="of the first try; default: another each time")
    parser.add_argument("--most", type=int, help="tries of each kind")
    parser.add_argument("--out", type=Path, help="a folder for results.json and RESULTS.md")
    parser.add_argument("--one", choices=kinds.KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    if given.one:
        return one_kind(given.one, given.seconds, seed, given.most)
    chosen = given.kinds or list(kinds.KINDS)
    share = given.minutes * 60 * given.jobs / sum(kinds.KINDS[name].share for name in chosen)
    begun, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        lines = [
            line
            for found in pool.map(
                lambda name: collected(name, share * kinds.KINDS[name].share, seed, given.most),
                sorted(chosen, key=lambda name: -kinds.KINDS[name].share),
            )
            for line in found
        ]
    run = table.run_of(lines, begun, time.monotonic() - start)
    if given.out:
        table.write(given.out, run)
    print(table.markdown([run]))
    sys.exit(any(line["failure"] for line in lines))


if __name__ == "__main__":
    main()
