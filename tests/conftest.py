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
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

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
    from fedda import cli, terminal

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for console in (terminal.out, terminal.err):  # which may have been made under another width
        monkeypatch.setattr(console, "_width", None)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedda", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Halves the time to compile, where it matters what a program computes and not how fast.

    The proofs of this library's own method are of programs as users run them.
    """
    as_for_users = request.module.__name__ in ("test_exactness", "test_oracles")
    jax.config.update("jax_disable_most_optimizations", not as_for_users)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


_torn_down = itertools.count()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drops compiled programs in time: each takes some hundred memory maps, Linux allows 65,530."""
    maps = Path("/proc/self/maps")
    if next(_torn_down) % 16 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that share programs on one worker: a file, or an algorithm's contract."""
    for item in items:
        variant = getattr(item, "callspec", None) and item.callspec.params.get("variant")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {variant}"))
