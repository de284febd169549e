"""Damaged and crafted files for every reader: each is read, or refused with a message.

Many inputs share a forked process, with limits on memory and time. If a file makes the process
crash, the next process goes on behind it.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak import samples
from soak.processes import LONGEST, Process, fedda, preload
from soak.samples import Content, Sample

INPUTS = 200  # in an attempt
MEMORY = 2 * 10**9
EXECUTED = 99  # the exit code of a process in which a file made code run
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "os.symlink", "os.link", "code.__new__"),
}
TOKENS = [
    *(b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"9" * 40, b"null", b"true", b'""', b"[]"),
    *(b"{}", b"[" * 3000, b'"\\ud800"', b"1979-05-27", b"0.5", b"../../etc/passwd", b"\x00"),
    *(b"\xff\xfe", b"'", b'"', b",", b"\n", b"\r\n", b"__import__('os')", b"<", b"&#0;", b"%s"),
]
NUMBERS = [0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
WORD = re.compile(rb'-?\d+(?:\.\d+)?|"[^"\n]*"|true|false|null|\w+')


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Return bytes that were changed in one to four places."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        size = len(data)
        if not size:
            return draw.randbytes(draw.randrange(9))
        # Headers are at the start, and directories of archives at the end.
        place = draw.choice(
            [
                draw.randrange(size),
                draw.randrange(min(size, 200)),
                size - 1 - draw.randrange(min(size, 200)),
            ]
        )
        length = min(draw.choice([1, 2, 4, 8, 16, 512]), size - place)
        before, after = data[:place], data[place + length :]
        way = draw.randrange(11)
        if way == 0:
            data = before + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        elif way == 1:
            data = before
        elif way == 2:
            data = before + after
        elif way == 3:
            data = before + draw.randbytes(length) + after
        elif way == 4:
            data = before + bytes(length) + after
        elif way == 5:
            data = before + data[place : place + length] * draw.choice([2, 3, 50]) + after
        elif way == 6:
            width = draw.choice([1, 2, 4, 8])
            number = draw.choice(NUMBERS) % 256**width
            data = before + number.to_bytes(width, draw.choice(["little", "big"]))
            data += (before + data[place : place + length] + after)[len(data) :]
        elif way == 7:
            start = draw.randrange(len(other) or 1)
            data = before + other[start : start + length] + after
        elif way == 8:
            data = before + draw.choice(TOKENS) + data[place:]
        elif words := [
            match.span() for match in WORD.finditer(data, max(0, place - 500), place + 500)
        ]:
            begin, end = draw.choice(words)
            new = draw.choice([*TOKENS, data[begin:end] * 2, *(data[b:e] for b, e in words[:9])])
            data = data[:begin] + new + data[end:]
    return data


def one_input(sample: Sample, draw: random.Random) -> Content:
    """Return the files of a sample, with damage in one of them."""
    files = dict(sample.files)
    name = draw.choice(list(files))
    other = files[draw.choice(list(files))]
    files[name] = mutated(files[name], other, draw)
    if name in sample.seals and draw.random() < 0.7:
        files[name] = sample.seals[name](files[name])
    if draw.random() < 0.01:
        del files[name]
    return files


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    known = all_samples(folder)

    def attempt(seed: int) -> Counter[str]:
        which = list(known)[seed % len(known)]
        outcomes = read_all(which, known[which], seed, folder)
        assert not (folder / "executed").exists(), "code of a file was run"
        return outcomes

    return attempt


def all_samples(folder: Path) -> dict[str, Sample]:
    """Return all samples, after a check that each is read while it is whole."""
    os.environ["FEDDA_COMPILE_CACHE"] = str(folder / "programs")
    run, log = folder / "run", folder / "log"
    words = ["algorithm=scaffold", "model=linear", "clients=6", "cohort=2", "rounds=4"]
    words += ["eval_every=2", "checkpoint_every=1"]
    assert fedda("run", *words, "--out", run, log=log).result().code == 0

    (folder / "samples").mkdir()
    written = Process(lambda: samples.write_own(folder / "samples", run), log)
    assert written.result().code == 0
    known = samples.data_sets(folder / "samples", folder / "executed")
    known |= samples.own_files(folder / "samples", run)
    known["message"] = samples.message()
    whole = {name: one for name, one in known.items() if not re.search("attack|inside", name)}

    def read_whole() -> None:
        for name, sample in whole.items():
            write(folder / "whole", sample.files)
            print(name)
            sample.read(folder / "whole")

    ended = Process(read_whole, log).result()
    assert ended.code == 0, ended
    return known


def write(place: Path, files: Content) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def read_all(name: str, sample: Sample, seed: int, folder: Path) -> Counter[str]:
    """Read all inputs of a seed; return how often each outcome was."""
    outcomes, number = Counter[str](), 0
    while number < INPUTS:
        log = folder / "outcomes"
        child = os.fork()
        if not child:
            in_child(sample, range(number, INPUTS), seed, folder / "input", log)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for outcome, error in lines:
            assert not error, f"{name}, input {number}: {error}"
            outcomes[outcome] += 1
            number += 1
        assert code != EXECUTED, f"{name}, input {number}: code of the file was run"
        if code:
            problem = "it hangs" if code == -signal.SIGALRM else f"exit code {code}"
            contained = sample.sandboxed and code < 0
            assert contained, f"{name}, input {number}: {problem}"
            outcomes["hangs" if code == -signal.SIGALRM else "crashes"] += 1
            number += 1
    kept = {f"{key} contained": outcomes[key] for key in ("hangs", "crashes")}
    return Counter(inputs=outcomes.total()) + Counter(kept)


def in_child(sample: Sample, numbers: range, seed: int, place: Path, log: Path) -> None:
    """Read inputs, and write the outcome of each to a file. Never returns."""
    from fedda.errors import InputError

    out = log.open("w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reading = False

    def audit(event: str, arguments: object) -> None:
        if reading and event in FORBIDDEN:
            os._exit(EXECUTED)

    sys.addaudithook(audit)
    for number in numbers:
        write(place, one_input(sample, random.Random(f"{seed}-{number}")))
        signal.alarm(int(LONGEST))
        outcome, error = "read", ""
        reading = True
        try:
            sample.read(place)
        except InputError:
            outcome = "refused"
        except MemoryError:
            outcome = "memory"
            error = "" if sample.sandboxed else "MemoryError"
        except BaseException:
            outcome, error = "error", traceback.format_exc()[-1500:]
        reading = False
        print(json.dumps([outcome, error]), file=out, flush=True)
    os._exit(0)
