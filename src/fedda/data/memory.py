"""The memory that devices and the host have left."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# The files of a container's limit, of its use and of statistics, and the name there of memory that
# can be freed, for both versions of control groups. psutil knows nothing of these.
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def of_devices(devices: Sequence[Any]) -> float:
    """Return the bytes that each of these devices has left; infinite if none says."""
    statistics = [device.memory_stats() for device in devices]
    return min(
        (each["bytes_limit"] - each["bytes_in_use"] for each in statistics if each),
        default=math.inf,
    )


def of_host(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the host, or the container of this process, has left."""
    left = [psutil.virtual_memory().available]
    for *names, freeable in CGROUPS:
        limit, used, statistics = (cgroup / name for name in names)
        if limit.exists() and limit.read_text().strip().isdigit():
            lines = dict(line.split() for line in statistics.read_text().splitlines())
            left.append(int(limit.read_text()) - int(used.read_text()) + int(lines[freeable]))
    return max(0, min(left))
