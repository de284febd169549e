"""Provenance of a result: package versions, commit, device and compilation time."""

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
    """Return the device, the package versions and the commit, for the summary of a run."""
    return {"device": device(), "versions": versions(), "commit": commit()}


@lru_cache
def versions() -> dict[str, str]:
    python = {"python": platform.python_version()}
    return python | {name: importlib.metadata.version(name) for name in PACKAGES}


@lru_cache
def commit() -> str:
    """Return the git commit of the source tree, or "unknown" for an installed package.

    The name ends in `-dirty` if `src` or `pyproject.toml` differ from the commit.
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
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform != "cpu":
        return kind
    return f"{kind} ({os.cpu_count()} cores, {platform.machine()})"


_compiling: list[tuple[float, float]] = []  # (start, end) of compilations, ordered by their end


@lru_cache
def _listen_to_compiler() -> None:
    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):  # tracing, lowering, compilation by XLA
            return
        end = time.perf_counter()
        start = end - duration_secs
        while _compiling and _compiling[-1][0] >= start:  # a nested event: part of this one
            _compiling.pop()
        _compiling.append((start, end))

    jax.monitoring.register_event_duration_secs_listener(listener)


def compile_seconds() -> float:
    """Return the seconds of tracing and compilation since the first call of this function."""
    _listen_to_compiler()
    return math.fsum(end - start for start, end in _compiling)
