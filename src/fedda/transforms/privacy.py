"""Differential privacy for any algorithm, and a bound on the influence of each client.

`private` hides whether a client took part, and its data. In each round

    client i:  u = its upload without counters; weighted parts are divided by their weights;
                   0 if a number is not finite
               u <- u min(1, clip / |u|)                        |u| is the norm of the whole upload
               upload  u + s N(0, 1),  with weight 1, and the counters
      central  s = noise clip / sqrt(clients): the sum over clients has noise of size noise clip
      local    s = noise clip

All clients have weight 1. A weight would reveal a client's number of examples, and a client with
many examples could change the sum by more than clip. The client's training loss and its number of
examples are not reported either.

Central noise protects a client from everyone who sees only the sum: from everyone under secure
aggregation, or from everyone but the server, if the server is trusted to use only the sum.
`clients` is the number of uploads that are certain to arrive. If fewer arrive, the sum has less
noise than `epsilon` assumes. Local noise protects a client from the server too.

Counters (`core.local.Counter`) are the numbers of an upload that count work and hold no gradient:
the local steps T of FedDA with bias=steps, of STEM and of MFL+Adam, the beta1^T of FedDA with
bias=steps or sends=model, and the 1 / A_i of FedLocal+SGDM. The server divides by them, so they are
neither clipped nor noised, and `epsilon` does not cover them. Under local_unit="steps", T is the
same for all clients and reveals nothing. Under "epochs", T is a client's number of batches. The
server then learns each client's number of examples, up to the batch size (under secure aggregation,
only the mean over a cohort). Use "steps" if this number is private.

`private` refuses
    algorithms with several phases      each phase would need separate noise, and `epsilon` would
                                        have to count it
    algorithms with client memory       the memory must match the client's upload, but the server
                                        receives a clipped and noisy upload: the control variate of
                                        SCAFFOLD would do a random walk
Central noise excludes a codec or a bound after it, because the guarantee is known only for the
plain sum.

Limits: in a simulation, the noise follows from the seed, so whoever knows the seed can remove it.
A deployed client draws its noise from the entropy of its machine (`Phase.secret`). Floating-point
noise has gaps between its values, and known attacks on single numbers exploit them. Secure
aggregation rounds and clips after the noise is added. Some algorithms divide by another part of the
uploads (FedLocal with Adam or AdaGrad by 1 / A_i), and then divide by a noisy number.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, random

from fedda.core import tree
from fedda.core.algorithm import Algorithm, Phase, Seen, nothing_seen
from fedda.core.local import Counter, is_counter
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard
from fedda.errors import InputError, check_whole_number, import_extra, unknown
from fedda.transforms.compression import means, on_weighted, sums

NOISE = 0xD1FF  # folded into a client's key; tasks fold in small numbers


@lru_cache
def private(
    algorithm: Algorithm,
    clip: float,
    noise: float,
    clients: int = 1,
    where: Literal["central", "local"] = "central",
) -> Algorithm:
    """Return the algorithm with differentially private uploads.

    Every upload is clipped, gets Gaussian noise, and has weight 1. The module's docstring states
    the guarantee and its limits. Equal arguments return the same record, so JAX compiles it once.

    Args:
        algorithm: An algorithm with one phase and without client memory.
        clip: The largest norm of an upload.
        noise: The standard deviation of the noise, in units of `clip`.
        clients: For central noise, the number of uploads that are certain to arrive.
        where: `"central"` adds noise of this size to the sum of the uploads, `"local"` to every
            single upload.

    Returns:
        An algorithm for `fedda.run` or Flower, with the same hyper-parameters.

    Raises:
        InputError: A number is out of range, or the algorithm cannot be made private.

    Example:
        >>> from fedda import algorithms
        >>> from fedda.transforms.privacy import private
        >>> algorithm = private(algorithms.get("fedavg"), clip=1.0, noise=1.0, clients=10)
        >>> algorithm.phases[0].sum_only
        True
    """
    _check_number("clip", clip, positive=True)
    _check_number("noise", noise)
    check_whole_number("clients", clients, least=1)
    if where not in ("central", "local"):
        raise unknown("value of where", where, ("central", "local"))
    _check_hideable(algorithm)
    (phase,) = algorithm.phases
    deviation = noise * clip / (math.sqrt(clients) if where == "central" else 1)

    def work(
        hp: Any, task: Task, message: PyTree, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[PyTree, PyTree, Seen]:
        def hidden(values: PyTree) -> PyTree:
            finite = tree.where(tree.all_finite(values), values, tree.zeros_like(values))
            return _noisy(random.fold_in(key, NOISE), deviation, clipped(clip, finite))

        upload, memory, _ = phase.work(hp, task, message, memory, shard, key)
        upload = on_weighted(
            lambda part: part._replace(weight=jnp.ones_like(part.weight)), means(upload)
        )
        return _on_values(hidden, upload), memory, nothing_seen()

    noisy = phase._replace(work=work, sum_only=where == "central", secret=noise > 0)
    return algorithm._replace(phases=(noisy,))


@lru_cache
def bounded(algorithm: Algorithm, most_norm: float) -> Algorithm:
    """Return the algorithm with uploads that the server clips to a norm.

    This limits the effect of a poisoned upload. The server clips, so a malicious client cannot
    avoid it. The norm is that of the upload divided by its weight. Weights and counters are not
    clipped; a Flower server has limits for them. Secure aggregation cannot be combined with it,
    because it hides the single uploads from the server.

    Args:
        algorithm: The algorithm.
        most_norm: The largest norm of an upload.

    Returns:
        An algorithm for `fedda.run` or Flower, with the same hyper-parameters.

    Raises:
        InputError: The norm is not positive, or the algorithm is centrally private.

    Example:
        >>> import jax.numpy as jnp
        >>> from fedda import algorithms
        >>> from fedda.core.local import Weighted
        >>> from fedda.transforms.privacy import bounded
        >>> algorithm = bounded(algorithms.get("fedavg"), most_norm=1.0)
        >>> upload = Weighted(sum=jnp.array([60.0, 80.0]), weight=jnp.array(10.0))
        >>> [round(float(x), 3) for x in algorithm.phases[0].decoded(upload).sum]
        [6.0, 8.0]
    """
    _check_number("most_norm", most_norm, positive=True)
    if any(phase.sum_only for phase in algorithm.phases):
        raise InputError(
            "bounded needs to clip single uploads, got an algorithm with central privacy, of which "
            "only the sum may be used. Its uploads are already clipped: leave bounded out, or use "
            "private(..., where='local')."
        )

    def guarded(phase: Phase) -> Phase:
        def decode(sent: PyTree) -> PyTree:
            return sums(_on_values(partial(clipped, most_norm), means(phase.decoded(sent))))

        return phase._replace(decode=decode)

    return algorithm._replace(phases=tuple(guarded(phase) for phase in algorithm.phases))


def clipped(most: float, upload: PyTree) -> PyTree:
    """Return the upload, scaled down to the norm `most` if its norm is larger."""
    leaves = [leaf.astype(jnp.result_type(float)) for leaf in jax.tree.leaves(upload)]
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves))
    return tree.scale(most / jnp.maximum(norm, most), upload)


def _noisy(key: Array, deviation: float, upload: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(upload)

    def noisy(number: int, leaf: Array) -> Array:
        drawn = random.normal(random.fold_in(key, number), leaf.shape, jnp.result_type(float))
        return leaf + (deviation * drawn).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [noisy(*pair) for pair in enumerate(leaves)])


def _on_values(change: Callable[[PyTree], PyTree], upload: PyTree) -> PyTree:
    """Apply `change` to the list of an upload's arrays, except weights and counters."""
    marked = on_weighted(lambda part: part._replace(weight=Counter(part.weight)), upload)
    leaves, structure = jax.tree.flatten(marked, is_leaf=is_counter)
    changed = iter(change([leaf for leaf in leaves if not is_counter(leaf)]))
    leaves = [leaf if is_counter(leaf) else next(changed) for leaf in leaves]
    marked = jax.tree.unflatten(structure, leaves)
    return on_weighted(lambda part: part._replace(weight=part.weight.value), marked)


def _check_hideable(algorithm: Algorithm) -> None:
    if len(algorithm.phases) != 1:
        raise InputError(
            f"private takes algorithms with one phase, got one with {len(algorithm.phases)}, each "
            "of which would need separate noise. Use FedDA, FedAvg or another one with one phase."
        )
    if algorithm.phases[0].decode or algorithm.phases[0].sum_only:
        raise InputError(
            "private takes an algorithm with plain uploads, got one whose uploads are compressed, "
            "bounded or private. Use private first, with where='local' if another one follows."
        )
    kept = jax.eval_shape(algorithm.memory, algorithm.Hyper(), jnp.zeros(()))
    if jax.tree.leaves(kept):
        raise InputError(
            "private takes algorithms without client memory, got one with client memory, which "
            "would not match the clipped and noisy uploads. Use FedDA or FedAvg instead."
        )


def _check_number(name: str, value: float, positive: bool = False) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        kind = "a positive number" if positive else "zero or a positive number"
        raise InputError(f"{name} must be {kind}, got {value!r}.")


def epsilon(
    noise: float,
    rounds: int,
    sampling_rate: float,
    delta: float,
    cohorts: Literal["poisson", "fixed"] = "poisson",
) -> float:
    """Return the epsilon of (epsilon, delta)-differential privacy after training with `private`.

    The result is for central noise, and compares a client with one whose uploads are all 0. For
    local noise, call `epsilon(noise / 2, visits, 1.0, delta)`, where `visits` is the number of
    rounds in which the client takes part. It compares any two series of uploads of a client.

    Args:
        noise: The `noise` of `private`.
        rounds: The number of rounds.
        sampling_rate: The share of all clients that is in a cohort.
        delta: The probability that the guarantee does not hold.
        cohorts: How cohorts are drawn. `"poisson"`: every client is in a cohort independently of
            the others. Nearly all publications assume this. The result is tight for such cohorts
            (privacy loss distributions). This library draws cohorts of a fixed size, for which
            the result is only an approximation, and can be too low. `"fixed"`: an upper bound for
            cohorts of a fixed size, often far too high. It compares a client with one that has
            other data, which changes the sum by up to 2 clip (Renyi divergences; Wang et al.,
            2019).

    Returns:
        The epsilon; infinity without noise.

    Raises:
        InputError: A number is out of range, or dp-accounting is not installed.

    Example:
        >>> from fedda.transforms.privacy import epsilon
        >>> spent = epsilon(noise=1.0, rounds=100, sampling_rate=0.01, delta=1e-5)
        >>> print(f"{spent:.1f}")
        0.7
    """
    _check_number("noise", noise)
    check_whole_number("rounds", rounds, least=1)
    for name, value in (("sampling_rate", sampling_rate), ("delta", delta)):
        _check_number(name, value, positive=True)
        if value > 1:
            raise InputError(f"{name} must be at most 1, got {value!r}.")
    if cohorts not in ("poisson", "fixed"):
        raise unknown("value of cohorts", cohorts, ("poisson", "fixed"))
    if noise == 0:
        return math.inf
    dp = import_extra("dp_accounting", extra="privacy", action="compute epsilon")
    from dp_accounting import pld, rdp

    if cohorts == "poisson":
        one_round = dp.PoissonSampledDpEvent(sampling_rate, dp.GaussianDpEvent(noise))
        accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    else:
        size, population = float(sampling_rate).as_integer_ratio()
        gaussian = dp.GaussianDpEvent(noise / 2)
        one_round = dp.SampledWithoutReplacementDpEvent(population, size, gaussian)
        accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp.SelfComposedDpEvent(one_round, int(rounds)))
    return float(accountant.get_epsilon(delta))
