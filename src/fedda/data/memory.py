"""The free memory of devices and of the host."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# For both versions of control groups: the files with a container's limit, use and statistics, and
# the statistic of memory that can be freed. psutil does not read these.
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
    """Return the least free memory of these devices in bytes; infinite if it is unknown."""
    statistics = [device.memory_stats() for device in devices]
    return min(
        (each["bytes_limit"] - each["bytes_in_use"] for each in statistics if each),
        default=math.inf,
    )


def of_host(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory of the host, or of the container of this process, in bytes."""
    left = [psutil.virtual_memory().available]
    for *names, freeable in CGROUPS:
        limit, used, statistics = (cgroup / name for name in names)
        if limit.exists() and limit.read_text().strip().isdigit():
            lines = dict(line.split() for line in statistics.read_text().splitlines())
            left.append(int(limit.read_text()) - int(used.read_text()) + int(lines[freeable]))
    return max(0, min(left))
