"""JAX is stricter here than for users: no silent change of rank or dtype, two CPU devices."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 everywhere, for tests of exactness."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """For tests of what a program computes, not how fast: compiling takes half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
