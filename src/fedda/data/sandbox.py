"""Call a function in a child process with limits on memory and time.

Files from elsewhere can make a parser hang, crash or ask for more memory than the machine has. In a
child process, each of these becomes an `InputError`, and Ctrl-C works whatever the parser does.
"""

import errno
import importlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import InputError

_log = logging.getLogger(__name__)

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
    """What the child may use."""

    memory: int  # bytes
    seconds: float


def call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    what: str,
    limits: Limits,
    tell: Callable[[str], None],
    lock: int | None = None,
) -> Any:
    """Call `function(*arguments, tell=tell)` in a child process and return its result.

    Args:
        function: A function that its module has under its own name.
        arguments: Its arguments, which JSON can express, as it must its result.
        what: The input, for messages.
        limits: What the child may use. It is killed when the time is over.
        tell: Called with each message of the function.
        lock: A file descriptor that the child keeps open.

    Raises:
        InputError: The function raised it or any unexpected error, crashed, or met a limit.
        OSError: The system refused something to the function.
    """
    job = {
        "path": sys.path,
        "package": str(Path(__file__).parents[1]),
        "function": [function.__module__, function.__name__],
        "arguments": arguments,
        "limits": limits,
    }
    late = threading.Event()
    kind = ""  # of the last line that the child has printed
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
            pass_fds=[] if lock is None else [lock],
        )

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limits.seconds, stop)
    timer.daemon = True
    assert process.stdout is not None
    with process:
        try:
            timer.start()
            for line in process.stdout:
                if not line.endswith(b"\n"):  # the child was killed while it wrote
                    break
                kind, content = json.loads(line)
                if kind == "tell":
                    tell(content)
        except BaseException:  # such as Ctrl-C
            process.kill()
            raise
        finally:
            timer.cancel()
    if kind == "result":
        return content
    if kind == "system":
        raise OSError(*content)
    if kind == "refused":
        raise InputError(content)
    raise InputError(_reason(what, limits, kind, content, process.returncode, late.is_set()))


def _reason(what: str, limits: Limits, kind: str, content: Any, code: int, late: bool) -> str:
    """Why there is no result, for a person."""
    time = f"{limits.seconds:,.0f} seconds"
    memory = f"{limits.memory / 1e9:,.1f} GB of memory"
    right = "If the file is right, allow more with"
    if late or code == -signal.SIGXCPU:
        return f"{what} takes more than the {time} allowed for it. {right} --minutes."
    if kind == "memory":
        return f"{what} takes more than the {memory} allowed for it. {right} --memory."
    if kind == "failed":
        _log.debug("%s", content)
        error = content.strip().splitlines()[-1]
        return f"{what} cannot be read ({error}). It is damaged or of another format: get it again."
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return (
        f"{what} made its reader crash ({how}). It is damaged, or takes more than the {memory} "
        f"allowed for it. Get it again. {right} --memory."
    )


def run_child(job: dict[str, Any]) -> None:
    """Run a job in the child. The last line that it prints is the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and decides
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to the standard output
    memory, seconds = job["limits"]
    _limit(resource.RLIMIT_DATA, memory)
    _limit(resource.RLIMIT_CPU, int(seconds) + 1)  # where the parent was killed and cannot stop it

    def say(kind: str, content: Any) -> None:
        print(json.dumps([kind, content]), file=lines, flush=True)

    def tell(message: str) -> None:
        say("tell", message)

    module, name = job["function"]
    try:
        function = getattr(importlib.import_module(module), name)
        say("result", function(*job["arguments"], tell=tell))
    except InputError as error:
        say("refused", str(error))
    except MemoryError:
        say("memory", None)
    except OSError as error:
        named = isinstance(error.filename, str)
        if error.errno is None:
            say("failed", traceback.format_exc())
        elif error.errno == errno.ENOMEM:  # by the limit
            say("memory", None)
        else:
            say("system", [error.errno, error.strerror, error.filename if named else None])
    except Exception:  # whatever a parser trips over, it is the file
        say("failed", traceback.format_exc())


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, hard))
