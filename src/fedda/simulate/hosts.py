"""Train one run with several processes, for example on several machines.

`jax.distributed` connects the processes. They exchange arrays with Gloo (CPUs) or NCCL (GPUs),
which have no authentication, so the network must be trusted. Only process 0 reads and writes the
run directory. It sends the content to the other processes.
"""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedda.errors import InputError

T = TypeVar("T")


def join(coordinator: str, processes: int, process: int, plan: dict[str, Any], wait: float) -> None:
    """Connect this process with the others, and check that all have the same settings.

    Args:
        coordinator: The address `HOST:PORT` of process 0.
        processes: The number of processes.
        process: The number of this process, from 0.
        plan: Values that must be equal in all processes, such as the settings of the run.
        wait: The number of seconds to wait for the other processes.

    Raises:
        InputError: An argument is wrong, or a process has another plan.
    """
    if not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"--coordinator must be HOST:PORT, of process 0, got {coordinator!r}.")
    if processes < 2 or not 0 <= process < processes:
        raise InputError(
            f"--processes must be at least 2 and --process below it, got {processes} and {process}."
        )

    def give_up() -> None:
        sys.stderr.write(
            f"fedda: not all of {processes} processes connected to {coordinator} within {wait:g} "
            "seconds. Start each with the same command and a different --process, and set HOST to "
            "an address of process 0 that all processes can reach.\n"
        )
        os._exit(2)

    # After its timeout, JAX would end the process with a stack trace. This timer comes earlier.
    deadline = threading.Timer(wait, give_up)
    deadline.daemon = True
    deadline.start()
    # Gloo prints to the standard output, which is reserved for results.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=int(wait) + 60,
        coordinator_bind_address=coordinator,
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler of JAX would continue the run
    plan = plan | {"processes": processes}
    first, *others = map(json.loads, _from_all(json.dumps(plan).encode()))
    deadline.cancel()
    for number, other in enumerate(others, 1):
        for name in first | other:
            if (here := first.get(name, "nothing")) != (there := other.get(name, "nothing")):
                raise InputError(
                    f"process 0 has {name} = {here}, but process {number} has {there}. Start each "
                    "with the same command and a different --process."
                )


def is_first() -> bool:
    """Return whether this is the process that reads and writes files, and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def agreed(function: Callable[[], T]) -> T:
    """Call a function in every process. If it raises in one of them, all raise an error."""
    if not jax.distributed.is_initialized():
        return function()
    failure = None
    try:
        result = function()
    except (InputError, OSError) as error:
        failure = error
    messages = _from_all(str(failure or "").encode())
    if failure is not None:
        raise failure
    for process, message in enumerate(messages):
        if message:
            raise InputError(f"process {process}: {message.decode()}")
    return result


def from_first(function: Callable[[], bytes]) -> bytes:
    """Call a function in process 0, and return its result in all processes."""
    data = agreed(lambda: function() if is_first() else b"")
    return _from_all(data)[0] if jax.distributed.is_initialized() else data


def _from_all(data: bytes) -> list[bytes]:
    """Return the data of every process. All processes must call this function.

    It uses one device of each process, because processes may have different numbers of devices.
    """
    devices = {device.process_index: device for device in jax.devices()}
    mesh = Mesh([devices[number] for number in sorted(devices)], "processes")
    split = NamedSharding(mesh, PartitionSpec("processes"))

    def gathered(row: np.ndarray) -> np.ndarray:
        rows = jax.make_array_from_process_local_data(split, row[None])
        return process_allgather(rows, tiled=True)

    sizes = gathered(np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [row[:size].tobytes() for row, size in zip(gathered(padded), sizes, strict=True)]


@contextmanager
def parting() -> Iterator[None]:
    """End the process immediately if the block fails.

    JAX would wait for the other processes at exit, and they would wait for this one.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not code or not jax.distributed.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)
