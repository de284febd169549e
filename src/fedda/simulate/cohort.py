"""Draw cohorts, and divide their work into chunks and over devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from fedda.core import tree
from fedda.core.task import Plan
from fedda.core.tree import PyTree

# The cache of a CPU core, in bytes. If the clients of a chunk need more than this together, it is
# faster to compute them one after the other.
CPU_CACHE = 1.6e6

# The fixed cost of a step, in units of the cost of one client. It covers the launch of the step and
# the unused width of the hardware. On a CPU it is that of small models: only they are computed
# together there. 1.5 chooses chunks within 8 % of the fastest, for equal and for log-normal sizes
# (benchmarks/README.md).
OVERHEAD = {"cpu": 1.5, "gpu": 4.0}

GROUP = 16  # clients that are computed one after the other, and whose sum is checked once


def draw_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the cohort of a round uniformly without replacement, independently of other rounds.

    Args:
        seed: The seed of the run.
        round_number: The number of the round. The first round is 0.
        population: The number of clients in the federation.
        size: The number of clients in the cohort.

    Returns:
        The ids of the clients.

    Example:
        >>> cohort = draw_cohort(seed=0, round_number=3, population=100, size=10)
        >>> len(set(cohort.tolist()))
        10
    """
    rng = np.random.default_rng((seed, round_number))
    return rng.choice(population, size, replace=False).astype(np.int32)


def fedopt_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the same cohort as the experiments of FedOpt (Reddi et al., 2021) in this round.

    A Lehmer generator makes a seed for each round from the seed of the run. FedOpt draws client
    names from a list in alphabetical order; the ids here are positions in that list. The draw
    permutes the whole population, which takes 5 ms for the 342,477 clients of Stack Overflow.
    """
    start = int(np.random.RandomState(seed).randint(1, 2**31 - 2))
    round_seed = pow(16807, round_number, 2**31 - 1) * start % (2**31 - 1)
    rng = np.random.RandomState(round_seed)
    return rng.choice(population, size, replace=False).astype(np.int32)


def _tff21_cohort(seed: int, round_number: int, population: int, size: int) -> np.ndarray:
    """Draw the cohort of `fedopt_cohort` for the next round, as this loop counts from 1."""
    return fedopt_cohort(seed, round_number + 1, population, size)


Sampler = Callable[[int, int, int, int], np.ndarray]

# The ways to draw cohorts. "fedopt" follows the training loop of the FedOpt paper of 2020, "tff21"
# the simulation loop of TensorFlow Federated of 2021.
SAMPLERS: dict[str, Sampler] = {
    "uniform": draw_cohort,
    "fedopt": fedopt_cohort,
    "tff21": _tff21_cohort,
}


class Layout(NamedTuple):
    """How a cohort is divided. The layout changes results only by rounding.

    Attributes:
        chunk: The number of clients that a device computes together. `None` for all its clients.
        mesh: The devices, with one axis "clients". `None` for a single device.
        widths: Numbers of examples, ascending. A chunk whose clients have no more is computed by
            a narrower program.
    """

    chunk: int | None = None
    mesh: Mesh | None = None
    widths: tuple[int, ...] = ()

    def places(self, clients: int) -> tuple[int, int, int]:
        """Return the numbers of devices, of chunks on a device, and of clients in a chunk."""
        devices = 1 if self.mesh is None else self.mesh.size
        share = -(-clients // devices)
        chunk = min(self.chunk or share, share)
        return devices, -(-share // chunk), chunk


def arrange(cohort: np.ndarray, count: np.ndarray, layout: Layout) -> np.ndarray:
    """Order a cohort so that the clients of a chunk have similar sizes.

    A chunk takes as long as its largest client. The work is balanced between the devices.
    """
    _, chunks, chunk = layout.places(len(cohort))
    device, turn = np.divmod(np.arange(len(cohort)), chunks * chunk)
    arranged = np.empty_like(cohort)
    by_size = cohort[np.argsort(-count[cohort], kind="stable")]
    arranged[np.lexsort((device, turn))] = by_size  # the largest first, to the devices in turn
    return arranged


class Work(NamedTuple):
    """The local work of clients in one round. The arrays have one entry for each client."""

    examples: np.ndarray  # the number of examples, without padding
    batches: np.ndarray  # the number of batches with these examples
    computed: np.ndarray  # the number of computed batches, at least one


def work_of(plan: Plan, count: np.ndarray) -> Work:
    """Return the local work of clients with the given numbers of examples."""
    count = np.asarray(count, np.int64)
    if plan.unit == "steps":
        examples = plan.amount * plan.batch * (count > 0)
        computed = np.full_like(count, plan.amount)
    else:
        examples = plan.amount * count if plan.unit == "epochs" else count
        computed = np.maximum(-(-examples // plan.batch), 1)
    return Work(examples, batches=-(-examples // plan.batch), computed=computed)


def slots_of(plan: Plan, largest: np.ndarray, limits: tuple[int, ...]) -> np.ndarray:
    """Return how many examples, with padding, a client of a chunk computes.

    Args:
        plan: The local work of a client.
        largest: The number of examples of the chunk's largest client, for each chunk.
        limits: The numbers of examples that programs are compiled for, ascending. The last is that
            of the largest client of the federation.
    """
    most = np.array(limits)[np.searchsorted(np.array(limits), largest)]
    repeats = plan.amount if plan.unit == "epochs" else 1
    width = plan.batch if plan.unit == "steps" else np.minimum(plan.batch, repeats * most)
    return work_of(plan, largest).computed * width


def with_widths(layout: Layout, plan: Plan, count: np.ndarray, cohort: int) -> Layout:
    """Return the layout with narrower programs for clients that are smaller than a batch.

    Each program takes time to compile. So they are for powers of two of examples, and only those
    are chosen that save a tenth of the computed examples.
    """
    if plan.unit == "steps":
        return layout  # its batches are full
    devices, _, chunk = layout.places(cohort)
    largest = _by_size(count, cohort, devices)[:, ::chunk]

    def slots(limits: tuple[int, ...]) -> int:
        return int(slots_of(plan, largest, limits).sum())

    limits: tuple[int, ...] = (int(count.max()),)
    most = min(limits[0] - 1, plan.batch // (plan.amount if plan.unit == "epochs" else 1))
    powers = {2**power for power in range(most.bit_length())}
    while more := [tuple(sorted({*limits, power})) for power in powers.difference(limits)]:
        best = min(more, key=slots)
        if slots(best) > 0.9 * slots(limits):
            break
        limits = best
    return layout._replace(widths=limits[:-1])


def _by_size(count: np.ndarray, cohort: int, devices: int) -> np.ndarray:
    """Return the sizes of a device's clients in some rounds, in descending order."""
    drawn = [draw_cohort(0, number, len(count), cohort) for number in range(20)]
    return np.sort(count[np.stack(drawn)])[:, ::-1][:, ::devices]


def automatic_chunk(
    model_bytes: int, plan: Plan, count: np.ndarray, cohort: int, mesh: Mesh | None
) -> int:
    """Choose the number of clients that are computed together.

    The memory limits the number: a client needs about eight times its model, a chunk should fit
    into the cache of a CPU core, and should fill at most half the memory of an accelerator. Within
    this limit the number minimises the estimated time. A large chunk shares the fixed cost of
    a step between more clients, but small clients wait for large ones.
    """
    device = jax.devices()[0]
    room = CPU_CACHE
    if device.platform != "cpu":
        room = 0.5 * (device.memory_stats() or {}).get("bytes_limit", 16e9)
    share = Layout(None, mesh).places(cohort)[2]
    most = min(share, max(1, int(room / (8 * model_bytes))))
    steps = work_of(plan, _by_size(count, cohort, -(-cohort // share))).computed
    alone = OVERHEAD.get(device.platform, OVERHEAD["gpu"])
    chunks = {-(-share // number) for number in range(-(-share // most), share + 1)}
    return min(chunks, key=lambda chunk: (steps[:, ::chunk].sum() * (alone + chunk), -chunk))


def _sum_over_devices(parts: PyTree) -> PyTree:
    """Add the sums of all devices. One message for each dtype saves the delays of many messages."""
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
    finite: Callable[[PyTree], Array],
    dropped: Callable[[PyTree], PyTree],
    shared: PyTree,
    clients: PyTree,
    sizes: Array,
    axis: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Map `work(shared, client, most)` over the clients and add up the finite results.

    Every device computes a part of the cohort, chunk by chunk. A `vmap` computes the clients of
    a chunk. The last chunk is padded with clients without examples.

    A sum is finite only if all its terms are finite, because nothing cancels an infinity or a NaN.
    So the clients are checked one by one only if a sum is not finite.

    Args:
        layout: The chunk size and the devices.
        work: `(shared, client, most) -> (contribution, memory)`, for one client with at most `most`
            examples, or any number if `most` is `None`.
        finite: `contribution -> bool`, for one client or for a sum.
        dropped: `contribution -> contribution`, what counts of a client that is not finite. Such
            a client keeps its old memory.
        shared: A tree that is the same for all clients.
        clients: The clients' ids and memories, stacked.
        sizes: The clients' numbers of examples.
        axis: The name of the axis of the runs, if several are trained together.

    Returns:
        The sum of the contributions, and the new memories of the clients, stacked.
    """
    ids, memory = clients
    count = ids.shape[0]
    devices, chunks_on_device, chunk = layout.places(count)
    share = chunks_on_device * chunk
    filler = devices * share - count

    def pad(leaf: Array, value: int = 0) -> Array:
        return jnp.pad(leaf, [(0, filler)] + [(0, 0)] * (leaf.ndim - 1), constant_values=value)

    padded = (pad(ids, np.iinfo(ids.dtype).max), jax.tree.map(pad, memory))

    largest = pad(sizes).reshape(-1, chunk).max(1)
    if axis is not None:  # runs that are trained together take the same programs
        largest = lax.pmax(largest, axis)
    places = jnp.searchsorted(jnp.asarray(layout.widths, largest.dtype), largest)

    @partial(jax.jit, static_argnums=0)  # traced once, both for its shape and for the computation
    def one_chunk(most: int | None, shared: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
        if chunk == 1:  # faster without an axis of length 1; `add_one_by_one` checks it
            part, kept = work(shared, jax.tree.map(lambda leaf: leaf[0], clients), most)
            one = jax.tree.map(lambda leaf: leaf[None], (part, kept))
            return tree.sum_leading(one[0]), one[1]
        parts, kept = jax.vmap(work, (None, 0, None))(shared, clients, most)
        total = tree.sum_leading(parts)

        def without_nonfinite() -> tuple[PyTree, PyTree]:
            good, only_if = jax.vmap(finite)(parts), jax.vmap(tree.where)
            sound = only_if(good, parts, jax.vmap(dropped)(parts))
            return tree.sum_leading(sound), only_if(good, kept, clients[1])

        return lax.cond(finite(total), lambda: (total, kept), without_nonfinite)

    programs = [partial(one_chunk, most) for most in (*layout.widths, None)]

    def one_device(shared: PyTree, clients: PyTree, places: Array) -> tuple[PyTree, PyTree]:
        if chunk > 1 and chunks_on_device == len(programs) == 1:
            return programs[0](shared, clients)
        old = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), clients)
        shape, _ = jax.eval_shape(programs[-1], shared, tree.take(old, jnp.asarray(0)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
        loop = (zeros, old[1])
        # The chunks are in the order of their sizes: one loop for each program, the widest first.
        # If they were not, a chunk would get the program of the largest that follows.
        places = lax.cummax(places, reverse=True)
        for place, program in reversed([*enumerate(programs)]):

            def add(
                number: Array, loop: tuple[PyTree, PyTree], program: Any = program
            ) -> tuple[PyTree, PyTree]:
                total, memory = loop
                part, kept = program(shared, tree.take(old, number))
                memory = jax.tree.map(lambda rows, new: rows.at[number].set(new), memory, kept)
                return tree.add(total, part), memory

            first, last = (places > place).sum(), (places >= place).sum()
            if len(programs) == 1:
                first, last = jnp.int32(0), jnp.int32(chunks_on_device)
            if chunk > 1:
                loop = lax.fori_loop(first, last, add, loop)
            else:
                loop = add_one_by_one(add, first, last, loop, zeros, old[1])
        total, memory = loop
        return total, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), memory)

    def add_one_by_one(
        add: Callable[..., Any], first: Array, last: Array, loop: Any, zeros: Any, old: Any
    ) -> tuple[PyTree, PyTree]:
        """Add up single clients in groups, and check the sum of each group.

        A check of each client would read its upload once more, and the upload would have to be
        written for that. If a group is not finite, its clients are computed again, and from there
        on each client is its own group: a run that diverges is not computed twice.
        """

        def one_group(loop: Any) -> Any:
            number, alone, total, memory = loop
            end = jnp.where(alone, number + 1, jnp.minimum(number + GROUP, last))
            part, memory = lax.fori_loop(number, end, add, (zeros, memory))
            good = every = finite(part)
            if axis is not None:  # runs that are trained together take the same groups
                every = lax.pmin(good.astype("int32"), axis) > 0
            done = every | (end == number + 1)
            part = tree.where(good, part, dropped(part))
            total = tree.add(total, tree.where(done, part, zeros))
            memory = jax.tree.map(
                lambda new, old: new.at[number].set(jnp.where(good, new[number], old[number])),
                memory,
                old,
            )
            return jnp.where(done, end, number), alone | ~done, total, memory

        start = (first, jnp.asarray(False), *loop)
        return lax.while_loop(lambda loop: loop[0] < last, one_group, start)[2:]

    def on_each_device(shared: PyTree, clients: PyTree, places: Array) -> tuple[PyTree, PyTree]:
        # Outside of this function, every device holds all clients, so one gather is enough.
        def share_of(leaf: Array, length: int) -> Array:
            return lax.dynamic_slice_in_dim(leaf, lax.axis_index("clients") * length, length)

        clients = jax.tree.map(lambda leaf: share_of(leaf, share), clients)
        total, kept = one_device(shared, clients, share_of(places, chunks_on_device))
        return _sum_over_devices(total), lax.all_gather(kept, "clients", tiled=True)

    spec, run = PartitionSpec(), one_device  # replicated
    if layout.mesh is not None:
        run = jax.shard_map(
            on_each_device, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    total, kept = run(shared, padded, places)
    return total, jax.tree.map(lambda leaf: leaf[:count], kept)
