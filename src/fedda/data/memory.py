"""How much memory devices and the host could still give."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def of_devices(devices: Sequence[Any]) -> float:
    """The bytes that each of these devices could still give; not every kind says."""
    found = [device.memory_stats() for device in devices]
    return min(
        (each["bytes_limit"] - each["bytes_in_use"] for each in found if each), default=math.inf
    )


# Where a container's limit, its use and the statistics of its use are, and what it can do without.
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def of_host(root: Path = Path("/")) -> int:
    """The bytes the host, or the container this is in, could still give."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        found.append(_table(meminfo)["MemAvailable:"] * 1024)
    for *names, spare in CGROUPS:
        limit, used, stat = (root / "sys/fs/cgroup" / name for name in names)
        if limit.exists() and limit.read_text().strip().isdigit():
            found.append(int(limit.read_text()) - int(used.read_text()) + _table(stat)[spare])
    return max(0, min(found))


def _table(path: Path) -> dict[str, int]:
    """The first number of every line, by the word before it."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
