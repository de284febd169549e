"""Cohorts: how they are drawn, and how their work is laid out over chunks and devices."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from fedda.core import tree
from fedda.core.task import Plan
from fedda.core.tree import PyTree

# The fast memory of a core, in bytes: clients that take more together are slower than the same
# clients one after another, whose products are larger ones.
CPU_CACHE = 1.6e6

# The cost of a step besides its clients, in clients: to launch it, and to reach the width that the
# hardware wants.
OVERHEAD = {"cpu": 0.25, "gpu": 4.0}


def draw_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the clients of a round, uniformly without replacement, independently of other rounds.

    Args:
        seed: The seed of the run.
        round_number: The round; the first is 0.
        population: The number of clients to draw from.
        size: The number of clients to draw.

    Returns:
        The ids of the clients.
    """
    rng = np.random.default_rng((seed, round_number))
    return rng.choice(population, size, replace=False).astype(np.int32)


def fedopt_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the clients that the experiments of FedOpt (Reddi et al., 2021) draw in this round.

    A Lehmer generator makes one seed for each round out of the experiment's. FedOpt draws client
    ids out of a list sorted as text: the positions here are positions in that list. The draw
    permutes the whole population, which takes 5 ms for the 342,477 clients of Stack Overflow.
    """
    start = int(np.random.RandomState(seed).randint(1, 2**31 - 2))
    round_seed = pow(16807, round_number, 2**31 - 1) * start % (2**31 - 1)
    rng = np.random.RandomState(round_seed)
    return rng.choice(population, size, replace=False).astype(np.int32)


def _tff21_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the same sequence, one round later: this simulation loop calls its first round 1."""
    return fedopt_cohort(seed, round_number + 1, population, size)


Sampler = Callable[[int, int, int, int], np.ndarray]

# The ways to draw cohorts. "fedopt" is that of the paper's own loop of 2020, "tff21" that of the
# simulation loop of TensorFlow Federated in 2021.
SAMPLERS: dict[str, Sampler] = {
    "uniform": draw_cohort,
    "fedopt": fedopt_cohort,
    "tff21": _tff21_cohort,
}


class Layout(NamedTuple):
    """How a cohort is laid out; results depend on it only by rounding.

    Attributes:
        chunk: How many clients a device works on together; `None` for all of its clients.
        mesh: The devices, with one axis "clients"; `None` for one device.
    """

    chunk: int | None = None
    mesh: Mesh | None = None

    def places(self, clients: int) -> tuple[int, int, int]:
        """Return the number of devices, of chunks on each, and of clients in a chunk."""
        devices = 1 if self.mesh is None else self.mesh.size
        share = -(-clients // devices)
        chunk = min(self.chunk or share, share)
        return devices, -(-share // chunk), chunk


def arrange(cohort: np.ndarray, count: np.ndarray, layout: Layout) -> np.ndarray:
    """Order a cohort so that a chunk has clients of similar size, and devices have equal work.

    Clients that are worked on together take as long as the largest of them.
    """
    _, chunks, chunk = layout.places(len(cohort))
    device, turn = np.divmod(np.arange(len(cohort)), chunks * chunk)
    arranged = np.empty_like(cohort)
    by_size = cohort[np.argsort(-count[cohort], kind="stable")]
    arranged[np.lexsort((device, turn))] = by_size  # dealt out, the largest first
    return arranged


class Work(NamedTuple):
    """The local work of clients in one round, an entry for each client."""

    examples: np.ndarray  # that count
    batches: np.ndarray  # that hold them
    computed: np.ndarray  # batches, at least one


def work_of(plan: Plan, count: np.ndarray) -> Work:
    """Return the work of clients with these numbers of examples."""
    count = np.asarray(count, np.int64)
    if plan.unit == "steps":
        examples = plan.amount * plan.batch * (count > 0)
        computed = np.full_like(count, plan.amount)
    else:
        examples = plan.amount * count if plan.unit == "epochs" else count
        computed = np.maximum(-(-examples // plan.batch), 1)
    return Work(examples, batches=-(-examples // plan.batch), computed=computed)


def automatic_chunk(
    model_bytes: int, plan: Plan, count: np.ndarray, cohort: int, mesh: Mesh | None
) -> int:
    """Choose how many clients to work on together.

    A client's work holds its model some eight times. On a CPU the chunk should stay in a core's
    cache; an accelerator should be filled, but not more than half of it. Below that, a chunk is as
    large as pays off: a step of few clients costs more than their share of a step of many, but
    small clients that are together with large ones wait.
    """
    device = jax.devices()[0]
    room = CPU_CACHE
    if device.platform != "cpu":
        room = 0.5 * (device.memory_stats() or {}).get("bytes_limit", 16e9)
    share = Layout(None, mesh).places(cohort)[2]
    most = min(share, max(1, int(room / (8 * model_bytes))))
    drawn = [draw_cohort(0, number, len(count), cohort) for number in range(20)]
    by_size = np.sort(count[np.stack(drawn)])[:, ::-1][:, :: -(-cohort // share)]
    steps = work_of(plan, by_size).computed
    alone = OVERHEAD.get(device.platform, OVERHEAD["gpu"])
    chunks = {-(-share // number) for number in range(-(-share // most), share + 1)}
    return min(chunks, key=lambda chunk: (steps[:, ::chunk].sum() * (alone + chunk), -chunk))


def _sum_over_devices(parts: PyTree) -> PyTree:
    """Add up the sums of all devices, in one message for each dtype: each has its delay."""
    leaves, structure = jax.tree.flatten(parts)
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, restore = ravel_pytree([leaves[place] for place in places])
        for place, total in zip(places, restore(lax.psum(flat, "clients")), strict=True):
            leaves[place] = total
    return jax.tree.unflatten(structure, leaves)


def sum_over_clients(
    layout: Layout,
    work: Callable[..., tuple[PyTree, PyTree]],
    add_up: Callable[..., tuple[PyTree, PyTree]],
    shared: PyTree,
    clients: PyTree,
) -> tuple[PyTree, PyTree]:
    """Map `work(shared, client)` over clients; return the sum of the first results, and the second.

    The clients of a chunk are one vmap, and `add_up(first, second, clients)` makes one sum of their
    first results; chunks follow one another with a running sum; every device has its share of the
    cohort. Places that fill the last chunk have an absent client.
    """
    ids, memory = clients
    count = ids.shape[0]
    devices, chunks_each, chunk = layout.places(count)
    share = chunks_each * chunk
    filler = devices * share - count

    def pad(leaf: Array, value: int = 0) -> Array:
        return jnp.pad(leaf, [(0, filler)] + [(0, 0)] * (leaf.ndim - 1), constant_values=value)

    padded = (pad(ids, np.iinfo(ids.dtype).max), jax.tree.map(pad, memory))

    @jax.jit  # so that it is traced once, though its shape is asked for before it is called
    def one_chunk(shared: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
        if chunk == 1:  # XLA does better without an axis of one client
            one = work(shared, jax.tree.map(lambda leaf: leaf[0], clients))
            parts, kept = jax.tree.map(lambda leaf: leaf[None], one)
        else:
            parts, kept = jax.vmap(work, (None, 0))(shared, clients)
        return add_up(parts, kept, clients)

    def one_device(shared: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
        if chunks_each == 1:
            return one_chunk(shared, clients)
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), clients)
        shape, _ = jax.eval_shape(one_chunk, shared, tree.take(chunks, jnp.asarray(0)))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

        def body(total: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
            part, kept = one_chunk(shared, clients)
            return tree.add(total, part), kept

        total, kept = lax.scan(body, zero, chunks)
        return total, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)

    def its_share(shared: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
        # Outside of this function all devices hold everything: what it gathers is gathered once.
        first = lax.axis_index("clients") * share
        clients = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, share), clients)
        total, kept = one_device(shared, clients)
        return _sum_over_devices(total), lax.all_gather(kept, "clients", tiled=True)

    whole, run = PartitionSpec(), one_device
    if layout.mesh is not None:
        run = jax.shard_map(
            its_share, mesh=layout.mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
    total, kept = run(shared, padded)
    return total, jax.tree.map(lambda leaf: leaf[:count], kept)
