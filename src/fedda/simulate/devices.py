"""Devices of a run, placement of arrays, and the cache of compiled programs.

The command line calls `start_up` before JAX initialises its devices. The Python API does not: it
only uses the cache of compiled programs, and leaves the configuration of JAX as it was.
"""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedda.core.tree import PyTree
from fedda.errors import InputError

# A device whose clients have little work waits for the other devices before each sum. On a CPU, XLA
# treats a wait of more than a minute as a deadlock and ends the process.
PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1_000_000,
}
PATIENCE_BEFORE = (0, 13)  # older releases of JAX have these flags; an unknown flag is fatal in XLA

# The number of parameters, over all clients of a device, from which another device saves time. With
# fewer, the devices mainly wait for one another to add up their sums.
WORTHWHILE = 10_000

CACHE = "FEDDA_COMPILE_CACHE"  # in the environment: a folder for compiled programs, or "off"
PROGRAMS = "*-cache"  # JAX's names of the files there
MOST_CACHED = 1_000_000_000  # bytes; beyond, a new process deletes what was not used for longest


def start_up() -> None:
    """Use every CPU core as a device, and keep compiled programs on disk.

    Settings of the user have precedence. Nothing changes if JAX has already initialised its
    devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = jax.config.jax_num_cpu_devices >= 0  # type: ignore[attr-defined]
    if not given and "xla_force_host_platform_device_count" not in flags:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:  # JAX has already initialised its devices
            return
    if jax.__version_info__ < PATIENCE_BEFORE:
        more = [f"--{name}={value}" for name, value in PATIENCE.items() if name not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *more]).strip()
    for name, value in _cache_settings().items():
        jax.config.update(name, value)


@contextmanager
def compile_cache() -> Iterator[None]:
    """Keep the programs that the block compiles on disk, and reuse those of earlier processes.

    Settings of the user have precedence. After the block, JAX is configured as before.
    """
    settings = _cache_settings()
    before = {name: getattr(jax.config, name) for name in settings}

    def configure(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        if values:
            compilation_cache.reset_cache()  # JAX reads the folder only once

    configure(settings)
    try:
        yield
    finally:
        configure(before)


def _cache_settings() -> dict[str, Any]:
    """Return JAX's settings for the cache; empty if the user chose a cache or switched it off."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    folder = compiled_folder() if enabled and not chosen else None
    if folder is None or not _is_ready(folder):
        return {}
    return {
        "jax_compilation_cache_dir": str(folder),
        # Also keep the many small programs of a start: together they take seconds to compile.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }


@cache
def _is_ready(folder: Path) -> bool:
    """Make the folder of compiled programs, or make room in it, once in a process.

    JAX can limit its size, too, but then reads the whole folder whenever it writes a program.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        if CACHE in os.environ:
            raise
        return False  # the user has no writable home directory
    programs = []
    with suppress(OSError):  # another process deletes them, too
        for path in folder.glob(PROGRAMS):
            found = path.stat()
            programs.append((max(found.st_atime, found.st_mtime), found.st_size, path))
        size = sum(size for _, size, _ in programs)
        for _, freed, path in sorted(programs):
            if size <= MOST_CACHED:
                break
            path.unlink()
            size -= freed
    return True


def cached(clear: bool) -> tuple[Path | None, int, int]:
    """Return the folder of compiled programs, their number and their bytes; delete them if asked.

    They are those of all types of CPU that use the folder.
    """
    own = compiled_folder()
    if own is None:
        return None, 0, 0
    programs = [(path, path.stat().st_size) for path in own.parent.glob(f"*/{PROGRAMS}")]
    for path, _ in programs if clear else ():
        path.unlink(missing_ok=True)
    return own.parent, len(programs), sum(size for _, size in programs)


def cores() -> int:
    """Return the number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def compiled_folder() -> Path | None:
    """Return the folder of compiled programs, or None if the environment switches it off.

    By default it is in the user's cache folder.
    """
    wanted = os.environ.get(CACHE, "")
    if wanted == "off":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(wanted) if wanted else base / "fedda" / "compiled") / _processor()


@cache
def _processor() -> str:
    """Return a name for this type of CPU. A program may use instructions that other CPUs lack."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]


def mesh_for(asked: int | None, cohort: int, parameters: int) -> Mesh | None:
    """Return the devices that share a cohort, or `None` for a single device.

    If several processes train the run, they use all devices.

    Args:
        asked: The number of devices. `None` uses as many devices as save time, but at most one
            for each client of the cohort.
        cohort: The number of clients in a cohort.
        parameters: The number of parameters of the model.

    Raises:
        InputError: There are fewer devices, or several processes should use only some devices.
    """
    known = jax.devices()
    if asked is not None and asked > len(known):
        raise InputError(f"devices must be at most {len(known)}, as many as JAX sees, got {asked}.")
    if jax.process_count() > 1:
        if asked not in (None, len(known)):
            raise InputError(
                f"several processes use all their devices, which are {len(known)}, got "
                f"{asked} devices. Leave devices out."
            )
        asked = len(known)
    worthwhile = max(1, cohort * parameters // WORTHWHILE)
    count = min(cohort, worthwhile, len(known)) if asked is None else asked
    return Mesh(np.array(known[:count]), ("clients",)) if count > 1 else None


def everywhere(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Replicate the arrays of a tree on all devices of the mesh.

    All processes of a run must pass the same arrays. On a CPU, no copies are made.
    """
    if mesh is None:
        return jax.device_put(tree)
    place = NamedSharding(mesh, PartitionSpec())
    if mesh.devices.flat[0].platform != "cpu" and jax.process_count() == 1:
        return jax.device_put(tree, place)  # from device to device

    def put(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return random.wrap_key_data(put(random.key_data(leaf)), impl=random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    return jax.tree.map(put, tree)


def here(tree: PyTree) -> PyTree:
    """Return this process's copy of replicated arrays, for work without the other processes."""
    return jax.tree.map(
        lambda leaf: leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf, tree
    )
