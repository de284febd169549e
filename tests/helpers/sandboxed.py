"""Functions that tests call in a child process, which starts soon as this imports little."""

import importlib
import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np

from fedda.data import sandbox
from fedda.errors import InputError


def add(one, other, tell):
    tell(f"adding {one} and {other}")
    print("libraries print too")
    return {
        "sum": one + other,
        "jax": "jax" in sys.modules,
        "memory": resource.getrlimit(resource.RLIMIT_DATA)[0],
    }


def refuse(tell):
    raise InputError("the file \udcff is wrong.")


def fail(tell):
    raise KeyError("offset")


def recurse(tell):
    recurse(tell)


def open_nothing(tell):
    os.stat("/nowhere/at/all")


def allocate(size, tell):
    return len(np.ones(size, np.uint8))


def crash(tell):
    os.kill(os.getpid(), signal.SIGSEGV)


def spin(tell):
    """Never looks at signals, as the loop is not in Python."""
    tell(str(os.getpid()))
    sum(range(10**12))


def outcomes(reader, name, paths):
    """Read hostile files in child processes, and return how each of these ended.

    An outcome is "read", "refused" (with an `InputError`), "memory", "error" (any other exception)
    or the signal that ended the process: SIGALRM if it took longer than 5 seconds.
    """
    limits = sandbox.Limits(memory=5 * 10**8, seconds=500)
    arguments = (reader, name, [str(path) for path in paths])
    return sandbox.call(outcomes_in_child, arguments, "the files", limits, lambda message: None)


def outcomes_in_child(reader, name, paths, tell):
    module = importlib.import_module(f"fedda.data.readers.{reader}")
    codes = {0: "read", 1: "refused", 2: "memory", 3: "error"}
    found = []
    for path in paths:
        process = os.fork()
        if not process:
            signal.alarm(5)
            os._exit(_outcome(module, Path(path), name))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        found.append(codes[code] if code >= 0 else signal.Signals(-code).name)
    return found


def _outcome(module, path, name):
    try:
        for clients in module.read(path, name).splits.values():
            for _, columns in clients:
                assert len(columns["y"]) == len(columns["x"])
    except InputError:
        return 1
    except MemoryError:
        return 2
    except Exception:
        return 3
    return 0
