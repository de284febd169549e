"""JAX is stricter here than for users: no silent change of rank or dtype, two CPU devices."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import pytest

from fedda.simulate import train

pytest_plugins = ["helpers.browser", "helpers.downloads"]  # fixtures

# Plain loops, and a program in one piece: the better ones take most of the time to compile. XLA
# dies of a flag that it does not know, and a newer one may not know these.
QUICK = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
AS_FOR_USERS = {"xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32}
if jax.__version_info__ >= (0, 11):
    QUICK, AS_FOR_USERS = [], {}
FLAGS = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"])

# XLA reads its flags once. Processes that tests start compile as for users.
os.environ["XLA_FLAGS"] = " ".join([FLAGS, *QUICK])
jax.devices()
os.environ["XLA_FLAGS"] = FLAGS

# JAX keeps millions of objects, and Python goes through all of them at each full collection.
gc.set_threshold(200_000, 20, 50)
os.environ["FEDDA_COMPILE_CACHE"] = "off"  # or a test would depend on programs of earlier ones
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


# The tests go through every algorithm again and again: more programs than stay in memory for users.
@cache
def _compiled(quick: bool, function: Callable[..., Any], donated: str | None, *fixed: Any) -> Any:
    options = None if quick else AS_FOR_USERS
    return jax.jit(partial(function, *fixed), donate_argnames=donated, compiler_options=options)


_is_quick = False  # how programs are compiled now
train._program = lambda *program: _compiled(_is_quick, *program)

# What a shell starts in the background ignores interrupts, and so would the commands tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 everywhere, for tests of exactness."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def fedda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Calls the command in an empty directory; gives its exit code and both outputs."""
    from fedda.cli import main, terminal

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)  # so that a command that is stopped ends alone
    monkeypatch.setenv("COLUMNS", "80")
    for console in (terminal.out, terminal.err):  # which may have been made under another width
        monkeypatch.setattr(console, "_width", None)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedda", *words])
        usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            main.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        # A command that was stopped leaves signals to the system.
        for number, handler in usual.items():
            signal.signal(number, handler)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _compile_quickly(wanted: bool) -> None:
    """Take a third of the time to compile, where it matters what a program computes, not how fast.

    Compiled programs are dropped where this changes, but serve the modules of tests between.
    """
    global _is_quick
    if _is_quick != wanted:
        _is_quick = wanted
        jax.config.update("jax_disable_most_optimizations", wanted)
        jax.clear_caches()


def _is_for_users(request: pytest.FixtureRequest) -> bool:
    return request.module.__name__ in ("test_exactness", "test_oracles")


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> None:
    """All but the proofs of this library's own method: these are of programs as users run them.

    So is whatever runs in a process of its own, if it is not asked for `in_quick_processes`.
    """
    _compile_quickly(not _is_for_users(request))


@pytest.fixture(autouse=True)
def compiled_as_this_test_wants(request: pytest.FixtureRequest) -> None:
    _compile_quickly("quickly" in request.fixturenames or not _is_for_users(request))


@pytest.fixture
def quickly() -> None:
    """For single tests of a module whose others are of programs as users run them."""


@pytest.fixture
def in_quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for processes that a test starts. They have one device, as users have."""
    monkeypatch.setenv("XLA_FLAGS", " ".join(QUICK))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")


_compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, fun_name="", **_: (
        _compilations.append(fun_name) if event.endswith("backend_compile_duration") else None
    )
)


@pytest.fixture
def compilations() -> list[str]:
    """Gives the names of the programs that were compiled, in order, as `jit(segment)`."""
    _compilations.clear()
    return _compilations


_torn_down = itertools.count()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drops compiled programs in time: each takes some hundred memory maps, Linux allows 65,530."""
    maps = Path("/proc/self/maps")
    if next(_torn_down) % 16 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
