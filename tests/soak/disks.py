"""Disks that are full, of two dozen sizes: a message, and the run goes on when there is room.

Where the system allows it, the disk is a small file system in memory that only this process sees.
Elsewhere the largest size of a file is limited, which looks the same to a program.
"""

import ctypes
import os
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.jobs import Jobs
from soak.kills import finish
from soak.processes import preload

NEW_NAMESPACE, NEW_USER, PRIVATE, REMOUNT = 0x20000, 0x10000000, 1 << 18 | 1 << 14, 32
SIZES = [4096 * 2**power for power in range(1, 10)]  # 8 kB to 2 MB
PLENTY = 1 << 28


def mounted(place: Path) -> bool:
    """Mount a file system in memory that only this process sees; return whether that worked."""
    c = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if c.unshare(NEW_NAMESPACE) and c.unshare(NEW_NAMESPACE | NEW_USER) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if c.mount(None, b"/", None, PRIVATE, None):
        return False
    return c.mount(b"tmpfs", bytes(place), b"tmpfs", 0, f"size={PLENTY}".encode()) == 0


def resize(place: Path, size: int) -> None:
    c = ctypes.CDLL(None, use_errno=True)
    if c.mount(b"tmpfs", bytes(place), b"tmpfs", REMOUNT, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "the disk cannot be made smaller")


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    preload()
    disk = folder / "disk"
    disk.mkdir()
    real = mounted(disk)
    kinds = {kind: Jobs(folder / kind, kind) for kind in ("run", "import", "compare")}

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        jobs = kinds[draw.choice(["run", "run", "import", "compare"])]
        jobs.folder.mkdir(exist_ok=True)
        os.environ["FEDDA_COMPILE_CACHE"] = str(jobs.folder / "programs")
        job, place = jobs.draw(draw), disk / "work"
        shutil.rmtree(place, ignore_errors=True)
        size = int(draw.choice(SIZES) * draw.uniform(1, 2))
        if real:
            resize(disk, size)
        else:
            limit_files(size)
        try:
            ended = job.start(place).result()
        finally:
            resize(disk, PLENTY) if real else limit_files(resource.RLIM_INFINITY)
        assert ended.code in (0, 2), ended
        assert ended.code == 0 or "No space left" in ended.printed or not real, ended
        job.check(place)
        finish(job, place)
        return Counter(disks=1)

    return attempt
