"""JAX is stricter here than for users: no silent change of rank or dtype, two CPU devices."""

import gc
import itertools
import os
import signal
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler

from fedda.simulate import train

pytest_plugins = ["helpers.browser", "helpers.downloads"]  # fixtures

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The tests go through every algorithm again and again: more programs than stay in memory for users.
for kind in ("begin", "segment", "evaluate"):
    setattr(train, kind, lru_cache(maxsize=None)(getattr(train, kind).__wrapped__))

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


# Plain loops, and a program in one piece: the better ones take most of the time to compile.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@pytest.fixture(scope="session")
def quick_options() -> dict[str, Any]:
    """Those of `QUICK` that this version of XLA has."""

    def known(option: str) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options={option: QUICK[option]})()
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {option: value for option, value in QUICK.items() if known(option)}


@contextmanager
def compiling_quickly(options: dict[str, Any]) -> Iterator[None]:
    """Takes a third of the time to compile, where it matters what a program computes, not how fast.

    JAX has no setting for all of it, and XLA_FLAGS are those of a whole process.
    """
    usual = compiler.get_compile_options

    def quick(*given: Any, **settings: Any) -> Any:
        found = usual(*given, **settings)
        found.env_option_overrides = [*found.env_option_overrides, *options.items()]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)
            jax.clear_caches()  # nobody else is to run these programs


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(
    request: pytest.FixtureRequest, quick_options: dict[str, Any]
) -> Iterator[None]:
    """All but the proofs of this library's own method: these are of programs as users run them.

    So is whatever runs in a process of its own, if it is not asked for `in_quick_processes`.
    """
    as_for_users = request.module.__name__ in ("test_exactness", "test_oracles")
    with nullcontext() if as_for_users else compiling_quickly(quick_options):
        yield


@pytest.fixture
def quickly(quick_options: dict[str, Any]) -> Iterator[None]:
    """For single tests of a module whose others are of programs as users run them."""
    with compiling_quickly(quick_options):
        yield


@pytest.fixture
def in_quick_processes(monkeypatch: pytest.MonkeyPatch, quick_options: dict[str, Any]) -> None:
    """The same for processes that a test starts. They have one device, as users have."""
    flags = [f"--{option}={value}".lower() for option, value in quick_options.items()]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
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
