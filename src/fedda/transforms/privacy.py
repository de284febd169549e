"""Differential privacy, and a bound on every client's influence, for any algorithm.

`private` hides whether a client took part, and with what data. In each round

    client i:  u = its upload, what is weighted divided by its weight; 0 if it is not finite;
                   without counters, which are uploaded as they are
               u <- u min(1, clip / |u|)                        the norm is over the whole upload
               upload  u + s N(0, 1),  in place of a weight 1
      central  s = noise clip / sqrt(clients): their sum has noise of noise clip
      local    s = noise clip

Weights are a part of this. A weighted upload would tell how many examples a client has, and let a
large client move the sum by more than clip; so all clients weigh the same, and nothing else of
them is revealed: neither their training loss nor their number of examples.

Central noise hides a client from all who see the sum alone, as under secure aggregation, or from
all but a server that is trusted to look at nothing else. `clients` is then the number of uploads
that are sure to arrive: if fewer come, the sum has less noise than was accounted for. Local noise
hides it from the server too.

Counters (`core.local.Counter`) are the numbers of an upload that count work and hold no gradient:
the local steps T of FedDA with bias=steps, of STEM and of MFL+Adam, the beta1^T of FedDA with
bias=steps or sends=model, and the 1 / A_i of FedLocal+SGDM. They are neither clipped nor noisy, or
the server would divide by noise. So they are not covered by `epsilon`. Under local_unit="steps" T
is the same for all clients and reveals nothing. Under "epochs" it is the number of a client's
batches: the server then learns, to a batch, how many examples each client has (under secure
aggregation, only the mean over a cohort). Use "steps" where that is private.

What is refused, and why:
    several exchanges in a round  each would need noise of its own, and its own place in `epsilon`
    client memory                 it is to match what the client uploaded, and would not match what
                                  arrives, clipped and noisy: SCAFFOLD's c would walk at random
    central noise, and then a codec or a bound on each upload
                                  only of the plain sum is it known how private it is

What is not covered: the noise of a simulation follows from its seed, and whoever knows that can
take it away again; a real federation draws it from the client's own entropy (`Phase.secret`).
Floating-point noise has gaps between its values, which known attacks on single numbers exploit; and
secure aggregation rounds and clips after the noise. An algorithm that divides by something else its
clients upload (FedLocal with Adam or AdaGrad by 1 / A_i) divides by a noisy number.
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
    """Return the algorithm with clipped and noisy uploads of equal weight.

    The module's docstring says what that hides. Equal requests return the same record.

    Args:
        algorithm: An algorithm of one phase whose clients keep nothing.
        clip: The largest norm of an upload.
        noise: The standard deviation of the noise, in units of `clip`.
        clients: For central noise, the number of uploads that are sure to arrive.
        where: Whether the noise of the sum, or that of each single upload, has that size.

    Raises:
        InputError: A number is out of range, or the algorithm cannot be made private.
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
    """Return the algorithm whose server clips every upload to a norm.

    A guard against poisoned uploads: it clips what arrives, and so does not rely on the client.
    Norms are of what is averaged. Weights and counters are for the client to say, and are not
    clipped (a Flower server has bounds for them). Secure aggregation leaves no upload to clip.

    Args:
        algorithm: The algorithm.
        most_norm: The largest norm of an upload.

    Raises:
        InputError: The norm is not positive, or only the sum of the uploads is private.
    """
    _check_number("most_norm", most_norm, positive=True)
    if any(phase.sum_only for phase in algorithm.phases):
        raise InputError(
            "bounded clips each upload, got an algorithm of which only the sum is private. Its "
            "uploads are clipped already: leave bounded out, or use private(..., where='local')."
        )

    def guarded(phase: Phase) -> Phase:
        def decode(sent: PyTree) -> PyTree:
            return sums(_on_values(partial(clipped, most_norm), means(phase.decoded(sent))))

        return phase._replace(decode=decode)

    return algorithm._replace(phases=tuple(guarded(phase) for phase in algorithm.phases))


def clipped(most: float, upload: PyTree) -> PyTree:
    """Return the upload, shortened to the norm `most` if it is longer."""
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
    """Apply `change` to the list of an upload's arrays, without weights and counters."""
    marked = on_weighted(lambda part: part._replace(weight=Counter(part.weight)), upload)
    leaves, structure = jax.tree.flatten(marked, is_leaf=is_counter)
    changed = iter(change([leaf for leaf in leaves if not is_counter(leaf)]))
    leaves = [leaf if is_counter(leaf) else next(changed) for leaf in leaves]
    marked = jax.tree.unflatten(structure, leaves)
    return on_weighted(lambda part: part._replace(weight=part.weight.value), marked)


def _check_hideable(algorithm: Algorithm) -> None:
    if len(algorithm.phases) != 1:
        raise InputError(
            f"private takes algorithms of one exchange a round, got one of {len(algorithm.phases)}:"
            " each would need noise of its own. Use FedDA, FedAvg or another single-phase one."
        )
    if algorithm.phases[0].decode or algorithm.phases[0].sum_only:
        raise InputError(
            "private takes uploads that travel as they are, got compressed, bounded or private "
            "ones. Make the algorithm private first, with where='local' if more is to follow."
        )
    kept = jax.eval_shape(algorithm.memory, algorithm.Hyper(), jnp.zeros(()))
    if jax.tree.leaves(kept):
        raise InputError(
            "private takes algorithms whose clients keep nothing, got one whose clients do: what "
            "they keep would not match their clipped, noisy uploads. Use FedDA or FedAvg instead."
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
    """Return the epsilon of (epsilon, delta)-differential privacy after some rounds of `private`.

    For central noise, and a client whose uploads all become 0. For local noise, take
    `epsilon(noise / 2, visits, 1.0, delta)`, which hides a client with that number of visits: any
    of its uploads may become any other.

    Args:
        noise: As given to `private`.
        rounds: The number of rounds.
        sampling_rate: The share of the clients in a cohort.
        delta: The probability that the guarantee does not hold.
        cohorts: How cohorts are drawn. Under "poisson" each client is in a cohort or not
            independently of the others, which is what nearly all publications account for; the
            number is tight (privacy loss distributions). Cohorts of a fixed size, as this library
            draws them, are something else, and for them it is an approximation that can be too low.
            "fixed" bounds what such cohorts leak, even if a client's data is replaced by other
            data, so that the sum changes by up to 2 clip (Renyi divergences; Wang et al., 2019);
            often it is far too high.

    Raises:
        InputError: A number is out of range, or dp-accounting is not installed.
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
