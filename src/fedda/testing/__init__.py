"""Check an algorithm of your own with the tests that this library has for its algorithms."""

from collections.abc import Collection

import jax

from fedda import api
from fedda.core.algorithm import Algorithm
from fedda.core.check_structure import check_parts, check_work
from fedda.errors import InputError, unknown_setting
from fedda.testing.checks import CHECKS, case_of
from fedda.testing.federation import MODEL, TASK, federation

__all__ = ["check_algorithm"]


def check_algorithm(algorithm: Algorithm, unused: Collection[str] = ()) -> None:
    """Check that an algorithm keeps the contract of the library's own algorithms.

    It is trained for three rounds, in float64, on eight small clients of unequal sizes, one of them
    without examples. The checks are that

    - a round keeps the structure, the shapes and the types of the server's state and of the
      clients' memory, in float64, in float32 and with parameters in bfloat16;
    - one compiled program serves all values of the hyper-parameters and any number of rounds;
    - equal seeds give equal results;
    - every hyper-parameter changes the model;
    - padding and clients outside of the cohort have no effect at all;
    - the order of a cohort, the size of chunks, gaps between clients, clients without examples,
      several devices, and other runs that are trained together change only rounding;
    - a client whose upload is not finite counts as absent, and a round without any finite upload
      changes nothing.

    `fedda.run` checks the structure of a record before every run. This takes ten seconds or more,
    and belongs in a test.

    Args:
        algorithm: The algorithm.
        unused: Hyper-parameters that need not change the model.

    Raises:
        InputError: A check failed. The message says what was got, what was expected and what to
            look for.

    Example:
        >>> import fedda
        >>> from fedda.testing import check_algorithm
        >>> check_algorithm(fedda.algorithms.get("fedavg"))
    """
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"algorithm must be a fedda.Algorithm, got {type(algorithm).__name__}. For an "
            "algorithm of the library, use fedda.algorithms.get(name)."
        )
    check_parts(algorithm)
    for name in unused:
        if name not in algorithm.Hyper._fields:
            raise unknown_setting("hyper-parameter in unused", name, algorithm.Hyper._fields)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        _check_structure(algorithm)
        case = case_of(algorithm, unused=unused)
        for check in CHECKS:
            check(case)


def _check_structure(algorithm: Algorithm) -> None:
    try:
        check_work(algorithm, api.traced(algorithm.Hyper(), MODEL), TASK, federation())
    except jax.errors.ConcretizationTypeError as error:
        (reason, *_) = str(error).splitlines()
        raise InputError(
            "init, send, work and merge are compiled once for all values, but one of them uses a "
            f"value in Python code, such as `if`, `while` or `float`: {reason} Use jnp.where, "
            "jax.lax.cond or jnp.asarray instead."
        ) from error
