"""A cohort: who is in it, and how its work is laid out over chunks and devices."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fedda import tree
from fedda.tree import PyTree

CPU_CACHE = 32e6  # bytes, about


def draw_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """The clients of a round, uniformly without replacement, independent of all other rounds."""
    rng = np.random.default_rng((seed, round_number))
    return rng.choice(population, size, replace=False).astype(np.int32)


def fedopt_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """The clients that FedOpt's experiments (Reddi et al., 2021) draw in the round of this number.

    A Lehmer generator makes one seed for each round out of the experiment's. FedOpt draws client
    ids out of a list sorted as text: the positions here are positions in that list. The draw
    permutes the whole population, which takes 5 ms for the 342,477 clients of Stack Overflow.
    """
    start = int(np.random.RandomState(seed).randint(1, 2**31 - 2))
    round_seed = pow(16807, round_number, 2**31 - 1) * start % (2**31 - 1)
    rng = np.random.RandomState(round_seed)
    return rng.choice(population, size, replace=False).astype(np.int32)


def _tff21_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """The same sequence, one round on: this simulation loop numbers its first round 1."""
    return fedopt_cohort(seed, round_number + 1, population, size)


Sampler = Callable[[int, int, int, int], np.ndarray]

# How a run draws its cohorts, from its seed, the round (the first is 0), how many clients there are
# and how many are asked. "fedopt" is what the paper's own loop of 2020 draws, "tff21" what the
# simulation loop of TensorFlow Federated in 2021 draws.
SAMPLERS: dict[str, Sampler] = {
    "uniform": draw_cohort,
    "fedopt": fedopt_cohort,
    "tff21": _tff21_cohort,
}


def arrange(cohort: np.ndarray, count: np.ndarray, devices: int) -> np.ndarray:
    """The cohort with clients of like size beside one another, as many large ones on each device.

    Clients that are worked on together take as long as the largest of them.
    """
    by_size = cohort[np.argsort(-count[cohort], kind="stable")]
    return np.concatenate([by_size[first::devices] for first in range(devices)])


def automatic_chunk(model_bytes: int) -> int:
    """How many clients to work on together: a client's work holds its model some eight times.

    On a CPU they should stay in its cache, which also lets clients of unequal sizes take only their
    own steps; an accelerator is to be filled, but not more than half of it.
    """
    device = jax.devices()[0]
    room = CPU_CACHE
    if device.platform != "cpu":
        room = 0.5 * (device.memory_stats() or {}).get("bytes_limit", 16e9)
    return max(1, int(room / (8 * model_bytes)))


class Layout(NamedTuple):
    """How a cohort is laid out; results depend on it only by rounding."""

    chunk: int | None = None  # clients worked on together; None: all that are on one device
    mesh: Mesh | None = None  # devices with one axis "clients"; None: one device


def sum_over_clients(
    layout: Layout, work: Callable[..., tuple[PyTree, PyTree]], shared: PyTree, own: PyTree
) -> tuple[PyTree, PyTree]:
    """Maps `work(shared, own[i])` over clients: the sum of the first results, all of the second.

    Clients of a chunk are one vmap; chunks follow one another with a running sum; every device has
    its share of the cohort. Slots that fill the last chunk ask an absent client.
    """
    asked = jax.tree.leaves(own)[0].shape[0]
    devices = 1 if layout.mesh is None else layout.mesh.size
    chunk = min(layout.chunk or asked, -(-asked // devices))
    filler = -asked % (devices * chunk)
    clients, memory = own
    padded = (
        jnp.pad(clients, (0, filler), constant_values=np.iinfo(clients.dtype).max),
        jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, filler)] + [(0, 0)] * (leaf.ndim - 1)), memory
        ),
    )

    def together(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        parts, kept = jax.vmap(work, (None, 0))(shared, own)
        return tree.sum_leading(parts), kept

    def here(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), own)
        count = jax.tree.leaves(chunks)[0].shape[0]
        if count == 1:
            return together(shared, own)
        shape, _ = jax.eval_shape(together, shared, tree.take(chunks, jnp.asarray(0)))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

        def body(total: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
            part, kept = together(shared, own)
            return tree.add(total, part), kept

        total, kept = lax.scan(body, zero, chunks)
        return total, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)

    def everywhere(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        # Outside of this function all devices hold everything: what it gathers is gathered once.
        share = (asked + filler) // devices
        first = lax.axis_index("clients") * share
        own = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, share), own)
        total, kept = here(shared, own)
        return lax.psum(total, "clients"), lax.all_gather(kept, "clients", tiled=True)

    if layout.mesh is None:
        total, kept = here(shared, padded)
    else:
        whole = PartitionSpec()
        total, kept = jax.shard_map(
            everywhere, mesh=layout.mesh, in_specs=whole, out_specs=whole, check_vma=False
        )(shared, padded)
    return total, jax.tree.map(lambda leaf: leaf[:asked], kept)
