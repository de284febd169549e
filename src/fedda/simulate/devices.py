"""Devices: their number, the placement of arrays, and the cache of compiled programs.

The command calls `start_up` before JAX looks for devices. The library leaves JAX as its user has
set it up; it takes from here the mesh of a run and the placement of its arrays.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedda.core.tree import PyTree
from fedda.errors import InputError

# A device whose clients have little to do waits for the others before each sum. If the devices are
# cores, XLA takes a wait of more than a minute for a deadlock, and ends the process.
PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1_000_000,
}
PATIENCE_BEFORE = (0, 13)  # releases of JAX that know these flags; XLA dies of one it does not know

# The number of parameters, of all its clients together, that makes a device worthwhile. With fewer,
# there is little to gain: the devices wait for one another to add up their sums.
WORTHWHILE = 10_000

CACHE = "FEDDA_COMPILE_CACHE"  # in the environment: a folder for compiled programs, or "off"


def start_up() -> None:
    """Make a device of every core, and keep compiled programs on disk.

    What the user has set stays as it is, and so do the devices that JAX has already found.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = jax.config.jax_num_cpu_devices >= 0  # type: ignore[attr-defined]
    if not given and "xla_force_host_platform_device_count" not in flags:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:  # JAX has found its devices
            return
    if jax.__version_info__ < PATIENCE_BEFORE:
        more = [f"--{name}={value}" for name, value in PATIENCE.items() if name not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *more]).strip()
    folder = compiled_folder()
    if folder is None or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        if CACHE in os.environ:
            raise
        return  # there is no home to keep anything in
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The many small programs of a start, too: together they take seconds to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cores() -> int:
    """Return the number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def compiled_folder() -> Path | None:
    """Return the folder of compiled programs: in the user's cache, unless the environment says."""
    wanted = os.environ.get(CACHE, "")
    if wanted == "off":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(wanted) if wanted else base / "fedda" / "compiled") / _processor()


def _processor() -> str:
    """Return a name for this kind of processor: a program for another may use what it lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]


def mesh_for(asked: int | None, cohort: int, parameters: int) -> Mesh | None:
    """Return the devices that share a cohort; `None` stands for a single device.

    Several processes use all their devices, for each of them has to take part.

    Args:
        asked: The number of devices. `None` for at most as many as the cohort has clients, each
            with enough to do.
        cohort: The number of clients of a cohort.
        parameters: The number of parameters of the model.

    Raises:
        InputError: There are fewer devices, or several processes are to use only some.
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
    """Place the arrays of a tree on every device of the mesh, whole on each.

    Every process of a run gives the same arrays. Cores share them with the host: no copy is made.
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
    """Return the arrays of a tree as this process has them, for work that it does alone."""
    return jax.tree.map(
        lambda leaf: leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf, tree
    )
