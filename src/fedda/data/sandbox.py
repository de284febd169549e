"""Call a function in a child process with limits on memory and time.

A damaged or malicious file can make a parser hang, crash or use more memory than the machine has.
In a child process, each of these becomes an `InputError`, and Ctrl-C always works.
"""

import errno
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import InputError

# The child imports single modules of this package, but not the package, which would import JAX.
_START = """
import importlib, json, sys, types
job = json.load(sys.stdin)
sys.path[:] = job["path"]
sys.modules["fedda"] = types.ModuleType("fedda")
sys.modules["fedda"].__path__ = [job["package"]]
importlib.import_module("fedda.data.sandbox").run_child(job)
"""


class Limits(NamedTuple):
    """The limits of the child."""

    memory: int  # bytes
    seconds: float


def call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    what: str,
    limits: Limits,
    tell: Callable[[str], None],
) -> Any:
    """Call `function(*arguments, tell=tell)` in a child process and return its result.

    Args:
        function: A function at the top level of a module.
        arguments: Its arguments. They and the result must be JSON values.
        what: The input, for messages.
        limits: The limits of the child. The system stops it at the end of the time.
        tell: Called with messages of the function, at most once a second.

    Raises:
        InputError: The function raised an error, crashed, or exceeded a limit.
        OSError: The function met an error of the operating system.
    """
    job = {
        "path": sys.path,
        "package": str(Path(__file__).parents[1]),
        "function": [function.__module__, function.__name__],
        "arguments": arguments,
        "what": what,
        "limits": limits,
    }
    kind: str = ""  # of the last line that the child printed
    content: Any = None
    with tempfile.TemporaryFile() as order:
        order.write(json.dumps(job).encode())
        order.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread would take memory
        )

    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                if not line.endswith(b"\n"):  # the child was killed while it wrote
                    break
                kind, content = json.loads(line)
                if kind == "tell":
                    tell(content)
        except BaseException:  # such as Ctrl-C
            process.kill()
            raise
    if kind == "result":
        return content
    if kind == "system":
        raise OSError(*content)
    if kind == "refused":
        raise InputError(content)
    more = "If the file is right, allow more with"
    memory = f"{limits.memory / 1e9:,.1f} GB of memory allowed for it"
    if process.returncode == -signal.SIGALRM:
        seconds = f"{limits.seconds:,.0f} seconds"
        raise InputError(f"{what} takes more than the {seconds} allowed for it. {more} --minutes.")
    if kind == "memory":
        raise InputError(f"{what} takes more than the {memory}. {more} --memory.")
    code = process.returncode
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    raise InputError(
        f"{what} made its reader crash ({how}). It is damaged, or takes more than the {memory}. "
        f"Get it again. {more} --memory."
    )


def run_child(job: dict[str, Any]) -> None:
    """Run a job in the child. The last line that it prints is the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to the standard output
    memory, seconds = job["limits"]
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    allowed = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)  # even if the parent has ended
    last = 0.0

    def say(kind: str, content: Any) -> None:
        print(json.dumps([kind, content]), file=lines, flush=True)

    def tell(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 1:
            last = time.monotonic()
            say("tell", message)

    module, name = job["function"]
    try:
        function = getattr(importlib.import_module(module), name)
        say("result", function(*job["arguments"], tell=tell))
    except InputError as error:
        say("refused", str(error))
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, MemoryError) or number == errno.ENOMEM:
            say("memory", None)
        elif isinstance(error, OSError) and number is not None:
            file = error.filename if isinstance(error.filename, str) else None
            say("system", [number, error.strerror, file])
        else:  # any other error of a parser is caused by the file
            problem = f"{job['what']} cannot be read ({type(error).__name__}: {error})"
            say("refused", f"{problem}. It is damaged or of another format: get it again.")
