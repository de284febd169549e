"""What a result was made with: versions, the commit, the devices, and the time of compilation."""

import importlib.metadata
import math
import os
import platform
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("fedda", "jax", "jaxlib", "flax", "numpy")


def provenance() -> dict[str, Any]:
    """Return what every summary says about how its numbers were made."""
    return {"device": device(), "versions": versions(), "commit": commit()}


@lru_cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


@lru_cache
def commit() -> str:
    """Return the commit of the source tree this package runs from, if it runs from one.

    It ends in `-dirty` if what decides numbers differs from the commit.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return "unknown"
    status = ["status", "--porcelain=v2", "--branch", "--", "src", "pyproject.toml"]
    command = ["git", "-C", str(root), *status]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    head, *others = lines.splitlines()
    dirty = any(not line.startswith("#") for line in others)
    return head.removeprefix("# branch.oid ") + ("-dirty" if dirty else "")


def device() -> str:
    found = jax.devices()
    kind = f"{len(found)} x {found[0].device_kind}"
    if found[0].platform != "cpu":
        return kind
    return f"{kind} ({os.cpu_count()} cores, {platform.machine()})"


_compiling: list[tuple[float, float]] = []  # from when to when, in the order in which they ended


@lru_cache
def _listen_to_compiler() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):  # tracing, lowering, and what XLA does
            return
        end = time.perf_counter()
        start = end - duration_secs
        while _compiling and _compiling[-1][0] >= start:  # it was a part of this
            _compiling.pop()
        _compiling.append((start, end))

    jax.monitoring.register_event_duration_secs_listener(listener)


def compile_seconds() -> float:
    """Return for how long JAX has traced and XLA has compiled since the first call of this."""
    _listen_to_compiler()
    return math.fsum(end - start for start, end in _compiling)
