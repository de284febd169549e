"""The soak itself: it sees what it looks for, and the seeds that once failed do not any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Kind, first seed and number of tries of what has failed, kept for ever.
FAILED = [
    ("replies", 2, 1),  # all replies of the first round were refused: the server crashed
    ("fuzz", 29, 6),  # checkpoints and settings with right checksums and wrong content, reports
]


def python(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a process that has not started JAX, as forks need it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed", "tries"), FAILED)
def test_what_has_failed_once(kind: str, seed: int, tries: int):
    done = python("-m", "soak", kind, "--seed", str(seed), "--most", str(tries))
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = """
import os, signal, sys, time
from pathlib import Path
from soak import fuzz
from soak.samples import Sample

fuzz.INPUTS, fuzz.LONGEST = 5, 1
folder = Path(sys.argv[1])

def said(read, **more):
    try:
        return dict(fuzz.read_all("it", Sample({"a": b"12"}, read, **more), 0, folder))
    except AssertionError as error:
        return str(error).splitlines()[0]

def crash(place):
    os.abort()

print(said(lambda place: None))
print(said(crash))
print(said(crash, sandboxed=False))
print(said(lambda place: time.sleep(9)))
print(said(lambda place: time.sleep(9), sandboxed=False))
print(said(lambda place: os.system("true")))
print(said(lambda place: 1 / 0))
print(said(lambda place: bytearray(10**10), sandboxed=False))
"""
FOUND = """{'inputs': 5}
{'inputs': 5, 'crashes contained': 5}
it, input 0: exit code -6
{'inputs': 5, 'hangs contained': 5}
it, input 0: it hangs
it, input 0: code of the file was run
it, input 0: Traceback (most recent call last):
it, input 0: MemoryError
"""


def test_planted_faults_of_a_reader_are_found(tmp_path: Path):
    done = python("-c", PLANTED, str(tmp_path))
    assert done.stdout == FOUND, done.stderr


KILLED = """
import sys
from pathlib import Path
from soak.jobs import Job, rows_of
from soak.kills import finish
from soak.processes import Process

class Numbers(Job):
    '''Write the numbers below 5, but the first of a process twice if it does not look.'''

    def start(self, place, **environment):
        def write():
            place.mkdir(exist_ok=True)
            log = place / "metrics.jsonl"
            done = rows_of(place).count(b"\\n") if "looks" in self.words else 0
            with log.open("ab") as file:
                for number in range(done, 5):
                    file.write(b"%d\\n" % number)
        return Process(write, self.log(place))

    def left(self, place):
        return rows_of(place)

for words in (["looks"], []):
    folder = Path(sys.argv[1]) / str(len(words))
    folder.mkdir()
    job = Numbers(folder, words)
    (folder / "killed").mkdir()
    (folder / "killed" / "metrics.jsonl").write_text("0\\n1\\n")
    try:
        print(finish(job, folder / "killed"))
    except AssertionError as error:
        print(error)
"""


def test_a_doubled_round_is_found(tmp_path: Path):
    done = python("-c", KILLED, str(tmp_path))
    assert done.stdout.splitlines()[0] == "None", done.stderr
    assert done.stdout.splitlines()[1] == "it differs from the undisturbed"


def test_the_table_adds_up_runs_and_names_failures():
    from soak import table

    line = {"kind": "run", "counts": {"kills": 2}, "seconds": 3.0, "memory": 10**9, "failure": ""}
    bad = line | {"seed": 8, "failure": "Traceback\n  a\nAssertionError: a round is lost"}
    date = table.datetime.datetime(2026, 1, 2, tzinfo=table.datetime.UTC)
    run = table.run_of([line | {"seed": 7}, bad], date, 60)
    text = table.markdown([run, run])
    assert "| 4 | 8 kills | 2 | 3 s | 1.0 GB |" in text
    assert "- run, seed 8: `AssertionError: a round is lost`" in text
    assert "In all: 4 tries (8 kills), 2 failures." in text
