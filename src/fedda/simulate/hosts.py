"""Several processes that train one run, each on a machine with devices of its own.

`jax.distributed` connects them, and carries the numbers of the training: Gloo between processors,
NCCL between GPUs. Neither asks who is there, so the network must be trusted. Process 0 alone reads
and writes the run's directory, and passes on what it has read.
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
    """Make this process one of several. Return once all are there and have the same plan.

    Args:
        coordinator: `HOST:PORT` at which process 0 listens.
        processes: How many processes there are.
        process: Which of them this is.
        plan: What must be equal in all of them, such as the settings of the run.
        wait: For how many seconds to wait for the others.

    Raises:
        InputError: An argument is wrong, or a process was given another plan.
    """
    if not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"--coordinator must be HOST:PORT, of process 0, got {coordinator!r}.")
    if processes < 2 or not 0 <= process < processes:
        raise InputError(
            f"--processes must be at least 2 and --process below it, got {processes} and {process}."
        )

    def give_up() -> None:
        sys.stderr.write(
            f"fedda: not all of {processes} processes came to {coordinator} within {wait:g} "
            "seconds. Start each with the same command and its own --process, and let HOST be an "
            "address of process 0 that all of them can reach.\n"
        )
        os._exit(2)

    # JAX ends a process that waits in vain with a stack trace of its own: this comes before it.
    deadline = threading.Timer(wait, give_up)
    deadline.daemon = True
    deadline.start()
    # Gloo prints to the standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=int(wait) + 60,
        coordinator_bind_address=coordinator,
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX would take note of it, and go on
    plan = plan | {"processes": processes}
    first, *others = map(json.loads, _from_all(json.dumps(plan).encode()))
    deadline.cancel()
    for number, other in enumerate(others, 1):
        for name in first | other:
            if (here := first.get(name, "nothing")) != (there := other.get(name, "nothing")):
                raise InputError(
                    f"process 0 was given {name} = {here}, but process {number} {there}. Start "
                    "each with the same command and its own --process."
                )


def is_first() -> bool:
    """Tell whether this process reads and writes files, and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def agreed(function: Callable[[], T]) -> T:
    """Call a function in every process. If one of them refuses its input, all raise an error."""
    if not jax.distributed.is_initialized():
        return function()
    refusal = None
    try:
        result = function()
    except (InputError, OSError) as error:
        refusal = error
    messages = _from_all(str(refusal or "").encode())
    if refusal is not None:
        raise refusal
    for process, message in enumerate(messages):
        if message:
            raise InputError(f"process {process}: {message.decode()}")
    return result


def from_first(function: Callable[[], bytes]) -> bytes:
    """Call a function in process 0, and return its result in all processes."""
    data = agreed(lambda: function() if is_first() else b"")
    return _from_all(data)[0] if jax.distributed.is_initialized() else data


def _from_all(data: bytes) -> list[bytes]:
    """Return the data of every process, once all have called this.

    One device of each process takes part, as machines may have unequal numbers of devices.
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
    """End a process that fails at once: JAX would let it wait for the others, and them for it."""
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
