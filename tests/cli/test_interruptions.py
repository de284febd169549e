"""Ctrl-C in real processes, of the command and of a script that calls `fedda.run`."""

import subprocess
import sys

import pytest

from helpers import interruptions
from helpers.interruptions import COMMAND, LIBRARY

# Ctrl-C as JAX is imported, in a callback, where Python drops what a handler of signals raises.
IMPORTING = """
import signal, sys, weakref
from fedda.cli.main import main

class Hook:
    def find_spec(self, name, *_):
        if name == "jax":
            dropped = type("Dropped", (), {})()
            finalizer = weakref.ref(dropped, lambda _: signal.raise_signal(signal.SIGINT))
            del dropped
            print("goes on", file=sys.stderr)

sys.meta_path.insert(0, Hook())
sys.argv = ["fedda", "run", "rounds=4"]
main()
"""


def test_an_interrupt_while_jax_is_imported_is_not_lost(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [LIBRARY, COMMAND])
@pytest.mark.usefixtures("in_quick_processes")
def test_an_interrupt_while_programs_are_compiled(tmp_path, kind):
    """JAX crashes at the end of a process if an exception is raised while it compiles."""
    ended = interruptions.run(kind, tmp_path / "run", 0.2)
    assert interruptions.check_interrupted(kind, tmp_path / "run", ended) == "compiling"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LIBRARY, COMMAND])
def test_no_interrupt_is_lost_and_no_round_either(tmp_path, kind):
    """Fifty times, at random moments of compiling and training."""
    stages, codes, longest = interruptions.interrupt_often(kind, tmp_path, 50, 15, seed=0)
    print(f"\n{kind}: {dict(stages)}, exit codes {dict(codes)}, longest {longest}")
    assert codes == {1 if kind == LIBRARY else 130: 50}
    assert min(stages["compiling"], stages["training"]) >= 5
    if kind == COMMAND:
        # A second of patience, and time for a checkpoint on a slow machine.
        assert max(longest.values()) < 10
