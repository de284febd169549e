"""What `test_sandbox` calls in a child process, which starts soon as this imports little."""

import os
import resource
import signal
import sys

import numpy as np

from fedda.errors import InputError


def add(one, other, tell):
    tell(f"adding {one} and {other}")
    print("libraries print too")
    return {
        "sum": one + other,
        "jax": "jax" in sys.modules,
        "limits": [
            resource.getrlimit(each)[0] for each in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)
        ],
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
