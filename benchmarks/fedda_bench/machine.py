"""What this machine can do at most, and how much memory it has given so far."""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from fedda.models import Model, with_precision

TIMES = 4


def most(precision: str, repetitions: int, quick: bool = False) -> dict[str, float]:
    """The most that a device does: operations of a large matrix product, bytes of a large copy.

    Measured after the models, whose largest memory would else be these matrices'.
    """
    cpu = jax.default_backend() == "cpu"
    side, length = (2048, 2**25) if cpu else (8192, 2**28)
    if quick:
        side, length = side // 4, length // 16
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    product = with_precision(Model(random.key, lambda matrix, x: x @ matrix), precision)
    matrix, array = np.full((side, side), 1 / side, dtype), np.zeros(length, np.float32)

    def multiply(x: Array, matrix: Array) -> Array:
        return product.apply(matrix, x).astype(dtype)

    def copy(x: Array) -> Array:
        return x + 1

    return {
        "flops_per_second": 2 * side**3 / _fastest(repetitions, multiply, matrix, matrix),
        "bytes_per_second": 2 * array.nbytes / _fastest(repetitions, copy, array),
    }


def _fastest(repetitions: int, function: Callable[..., Array], x: Any, *others: Any) -> float:
    """The fewest seconds of a function that is given what it gave before."""

    # Several times in one program and in place: else starting it, and finding new memory, counts.
    @partial(jax.jit, donate_argnums=0)
    def program(x: Array, times: Array, *others: Array) -> Array:
        return lax.fori_loop(0, times, lambda _, x: function(x, *others), x)

    x, others = jax.device_put((x, others))
    seconds = []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        x = jax.block_until_ready(program(x, TIMES, *others))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]) / TIMES  # the first was compiled


def host_bytes() -> int:
    """The most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
