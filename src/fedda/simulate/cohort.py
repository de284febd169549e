"""A cohort: who is in it, and how its work is laid out over chunks and devices."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from fedda.core import tree
from fedda.core.task import Plan
from fedda.core.tree import PyTree

# What a core has of fast memory, in bytes: clients that take more together are slower than the same
# clients one after another, whose products are larger ones.
CPU_CACHE = 1.6e6

# What a step costs besides its clients, in clients: to launch it, and to reach the width that the
# hardware wants.
OVERHEAD = {"cpu": 0.25, "gpu": 4.0}


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


class Layout(NamedTuple):
    """How a cohort is laid out; results depend on it only by rounding."""

    chunk: int | None = None  # clients worked on together; None: all that are on one device
    mesh: Mesh | None = None  # devices with one axis "clients"; None: one device

    def places(self, clients: int) -> tuple[int, int, int]:
        """The devices, the chunks of each, and the places in a chunk, for so many clients."""
        devices = 1 if self.mesh is None else self.mesh.size
        share = -(-clients // devices)
        chunk = min(self.chunk or share, share)
        return devices, -(-share // chunk), chunk


def arrange(cohort: np.ndarray, count: np.ndarray, layout: Layout) -> np.ndarray:
    """The cohort with clients of like size in a chunk, and as many large ones on each device.

    Clients that are worked on together take as long as the largest of them.
    """
    _, chunks, chunk = layout.places(len(cohort))
    device, turn = np.divmod(np.arange(len(cohort)), chunks * chunk)
    arranged = np.empty_like(cohort)
    by_size = cohort[np.argsort(-count[cohort], kind="stable")]
    arranged[np.lexsort((device, turn))] = by_size  # dealt out, the largest first
    return arranged


class Work(NamedTuple):
    """What clients do in one round, each by itself."""

    examples: np.ndarray  # that count
    batches: np.ndarray  # that hold them
    computed: np.ndarray  # batches, at least one


def work_of(plan: Plan, count: np.ndarray) -> Work:
    """The work of clients with so many examples."""
    count = np.asarray(count, np.int64)
    if plan.unit == "steps":
        examples = plan.amount * plan.batch * (count > 0)
        computed = np.full_like(count, plan.amount)
    else:
        examples = plan.amount * count if plan.unit == "epochs" else count
        computed = np.maximum(-(-examples // plan.batch), 1)
    return Work(examples, -(-examples // plan.batch), computed)


def padding(
    layout: Layout, rounds: Iterable[tuple[np.ndarray, Plan]], count: np.ndarray
) -> dict[str, float]:
    """The share of the computed examples that do not count, over rounds of (cohort, plan).

    Some fill up a client's last batch. The rest, which is told apart as `unequal_clients`, are
    batches of clients that wait for the largest of their chunk, and of places that no client has.
    """
    examples = own = slots = computed = 0
    for cohort, plan in rounds:
        devices, chunks, chunk = layout.places(len(cohort))
        work = work_of(plan, count[arrange(cohort, count, layout)])
        nobody = work_of(plan, np.zeros(devices * chunks * chunk - len(cohort)))
        taken = np.concatenate([work.computed, nobody.computed]).reshape(-1, chunk).max(1)
        batches = chunk * int(taken.sum())
        computed += batches
        slots += batches * plan.batch
        examples += int(work.examples.sum())
        own += int(work.batches.sum())
    return {"total": 1 - examples / slots, "unequal_clients": 1 - own / computed}


def automatic_chunk(
    model_bytes: int, plan: Plan, count: np.ndarray, cohort: int, mesh: Mesh | None
) -> int:
    """How many clients to work on together: a client's work holds its model some eight times.

    On a CPU they should stay in a core's cache; an accelerator is to be filled, but not more than
    half of it. Below that, a chunk is as large as pays off: a step of few clients costs more than
    their share of a step of many, but small clients that are together with large ones wait.
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
    """The sums of all devices added up, in one message of each type: each has its delay."""
    leaves, structure = jax.tree.flatten(parts)
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, apart = ravel_pytree([leaves[place] for place in places])
        for place, total in zip(places, apart(lax.psum(flat, "clients")), strict=True):
            leaves[place] = total
    return jax.tree.unflatten(structure, leaves)


def sum_over_clients(
    layout: Layout,
    work: Callable[..., tuple[PyTree, PyTree]],
    add_up: Callable[..., tuple[PyTree, PyTree]],
    shared: PyTree,
    own: PyTree,
) -> tuple[PyTree, PyTree]:
    """Maps `work(shared, own[i])` over clients: the sum of the first results, all of the second.

    Clients of a chunk are one vmap, and `add_up(first, second, own)` makes one sum of their first
    results; chunks follow one another with a running sum; every device has its share of the cohort.
    Slots that fill the last chunk ask an absent client.
    """
    asked = jax.tree.leaves(own)[0].shape[0]
    devices, chunks_each, chunk = layout.places(asked)
    share = chunks_each * chunk
    filler = devices * share - asked
    clients, memory = own
    padded = (
        jnp.pad(clients, (0, filler), constant_values=np.iinfo(clients.dtype).max),
        jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, filler)] + [(0, 0)] * (leaf.ndim - 1)), memory
        ),
    )

    @jax.jit  # so that it is traced once, though its shape is asked for before it is called
    def together(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        if chunk == 1:  # XLA does better without an axis of one client
            one = work(shared, jax.tree.map(lambda leaf: leaf[0], own))
            parts, kept = jax.tree.map(lambda leaf: leaf[None], one)
        else:
            parts, kept = jax.vmap(work, (None, 0))(shared, own)
        return add_up(parts, kept, own)

    def here(shared: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), own)
        if chunks_each == 1:
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
        first = lax.axis_index("clients") * share
        own = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, share), own)
        total, kept = here(shared, own)
        return _sum_over_devices(total), lax.all_gather(kept, "clients", tiled=True)

    if layout.mesh is None:
        total, kept = here(shared, padded)
    else:
        whole = PartitionSpec()
        total, kept = jax.shard_map(
            everywhere, mesh=layout.mesh, in_specs=whole, out_specs=whole, check_vma=False
        )(shared, padded)
    return total, jax.tree.map(lambda leaf: leaf[:asked], kept)
