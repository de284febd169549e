"""Client memory: one table on the device; on the host, room only for what was visited and touched.

Both come to the same results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda import algorithms, api
from fedda.core import tree
from fedda.core.losses import squared_error
from fedda.data.federation import Shards
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate.client_state import HostMemory
from fedda.simulate.train import host_work, segment, start, train
from fedda.tasks import config

BLANK = {"c": jnp.zeros((5, 2)), "started": jnp.asarray(False), "rate": jnp.ones(())}


def memories(seed: int, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "c": rng.normal(size=(count, 5, 2)).astype(np.float32),
        "started": np.ones(count, bool),
        "rate": rng.normal(size=count).astype(np.float32),
    }


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_what_is_put_is_taken_and_strangers_are_blank():
    host = HostMemory(BLANK)
    kept = memories(0, 3)
    host.put(np.array([7, 2, 900_000]), kept)
    assert_equal(host.take(np.array([2, 900_000, 7])), tree.take(kept, np.array([1, 2, 0])))
    assert_equal(host.take(np.array([3])), jax.tree.map(lambda leaf: leaf[None], BLANK))
    assert len(host) == 3


def test_a_later_visit_replaces_all_of_an_earlier_one():
    host = HostMemory(BLANK)
    host.put(np.array([4]), memories(0, 1))
    host.put(np.array([4]), jax.tree.map(lambda leaf: np.asarray(leaf)[None], BLANK))
    assert_equal(host.take(np.array([4])), jax.tree.map(lambda leaf: leaf[None], BLANK))


def test_only_touched_rows_are_stored():
    host = HostMemory({"words": jnp.zeros((10_000, 50))})
    table = np.zeros((1, 10_000, 50), np.float32)
    table[0, [3, 77, 9_000]] = 1.0
    host.put(np.array([0]), {"words": table})
    assert host.nbytes == 3 * (50 * 4 + 4), "three rows of 50 numbers, and which rows they are"
    assert_equal(host.take(np.array([0])), {"words": table})


def test_it_is_a_pytree_of_arrays_and_comes_back_from_them():
    host = HostMemory(BLANK)
    host.put(np.array([7, 2]), memories(1, 2))
    host.put(np.array([5]), jax.tree.map(lambda leaf: np.asarray(leaf)[None], BLANK))
    leaves, structure = jax.tree.flatten(host)
    again = jax.tree.unflatten(structure, [leaf.copy() for leaf in leaves])
    everyone = np.array([2, 5, 7, 8])
    assert_equal(again.take(everyone), host.take(everyone))
    assert len(again) == 3
    assert len(jax.tree.leaves(HostMemory(BLANK))) == len(leaves)


MODEL = fedda.Model(
    lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["w"]
)


def remembering() -> list[str]:
    """The algorithms whose clients keep something, under some option."""
    params = {"w": jnp.zeros((3, 2))}
    found = []
    for name in algorithms.names():
        for option, values in {"": [""], **algorithms.options(name)}.items():
            for value in values:
                chosen = {option: value} if option else {}
                record = algorithms.get(name, **chosen)
                if jax.tree.leaves(record.memory(record.Hyper(), params)):
                    found.append((name, tuple(chosen.items())))
    return found


def clients():
    rng = np.random.default_rng(3)
    sizes = (4, 1, 9, 0, 6, 3, 2, 5)
    return [(rng.normal(size=(size, 3)), rng.normal(size=(size, 2))) for size in sizes]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        pytest.param(name, chosen, marks=[pytest.mark.slow] if "weighting" in str(chosen) else [])
        for name, chosen in remembering()
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_host_and_device_agree(name, chosen):
    """To rounding: they are two programs, as their tables differ in size."""

    def run(memory_gb):
        settings = {"rounds": 11, "cohort": 3, "eval_every": 4, "batch": 3, "stabilise": 2}
        return fedda.run(
            name, MODEL, clients(), squared_error, memory_gb=memory_gb, **settings, **dict(chosen)
        )

    device, host = run(4.0), run(1e-9)

    def agree(ours, theirs):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)

    jax.tree.map(agree, host.state, device.state)
    jax.tree.map(agree, host.history, device.history)


def program(name, chosen, count, chunk):
    """What trains so many runs of 200 clients; and the shapes of the leaves of its table."""
    model = fedda.Model(lambda key: {"w": jnp.zeros((30, 20))}, lambda params, x: x @ params["w"])
    settings = {"cohort": 5, "batch": 1, "local_work": 2, "chunk": chunk}
    setup, hyper = api.prepare(
        name, model, [(np.ones((1, 30)), np.ones((1, 20)))] * 200, squared_error,
        **settings, **chosen,
    )  # fmt: skip
    seeds, together = list(range(count)), count > 1
    hp = api.traced(hyper, model)
    if together:
        hp = jax.tree.map(lambda value: jnp.stack([value] * count), hp)
    run = start(setup, hp, seeds)
    span = next(host_work(setup, seeds))
    keys = jax.vmap(random.key)(np.arange(count)) if together else random.key(0)
    traced = segment(setup.algorithm, setup.task, setup.layout, together).trace(hp, run, keys, span)
    return traced, jax.tree.map(jnp.shape, jax.tree.leaves(run.memory))


def uses_of_gathered(jaxpr, shapes):
    """For each read of a table, which operations take what was read; also in inner programs."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params):
            if hasattr(inner, "eqns"):
                yield from uses_of_gathered(getattr(inner, "jaxpr", inner), shapes)
        if equation.primitive.name == "gather" and equation.invars[0].aval.shape in shapes:
            read = equation.outvars[0]
            yield {
                other.primitive.name
                for other in jaxpr.eqns
                if any(operand is read for operand in other.invars)
            }


IN_PLACE = pytest.mark.parametrize(
    ("name", "chosen"), [("scaffold", {}), ("scaffold", {"control": "I"})], ids=str
)
BATCHED = pytest.mark.parametrize(
    ("count", "chunk"), [(1, 5), (1, 2), (1, 1), (2, 5), (2, 2), (2, 1)]
)


@IN_PLACE
@BATCHED
def test_a_table_is_read_before_it_is_written(name, chosen, count, chunk):
    """A GPU's compiler may repeat a read where it is used, so it must not see what that is.

    Repeated after the same rows are written, it would be of a copy of the whole table.
    """
    traced, shapes = program(name, chosen, count, chunk)
    uses = list(uses_of_gathered(traced.jaxpr.jaxpr, shapes))
    assert len(uses) == len(algorithms.get(name, **chosen).phases), "a read for each phase"
    assert all(use == {"optimization_barrier"} for use in uses)


@IN_PLACE
@BATCHED
def test_a_program_has_no_room_for_a_second_table(name, chosen, count, chunk):
    traced, shapes = program(name, chosen, count, chunk)
    table = sum(4 * np.prod(shape) for shape in shapes)
    sizes = traced.lower().compile().memory_analysis()
    assert sizes.temp_size_in_bytes < table / 2
    assert sizes.output_size_in_bytes - sizes.alias_size_in_bytes < table / 2, "it is reused"


def test_a_table_is_handed_on():
    setup, hyper = api.prepare(
        "scaffold", MODEL, clients(), squared_error, rounds=3, cohort=2, eval_every=1
    )
    runs = []
    for evaluation in train(setup, api.traced(hyper, MODEL), [0]):
        assert all(leaf.is_deleted() for run in runs for leaf in jax.tree.leaves(run.memory))
        runs.append(evaluation.run)
    assert len(runs) == 4


def test_a_population_of_stackoverflows_size_needs_room_for_the_visited_only():
    """342,477 clients, 15,000 visits: dense, the device's table would take 342,477 times c_i."""
    population, rounds, cohort = 342_477, 1_500, 10
    words, tags, length = 2_000, 4, 3
    rng = np.random.default_rng(0)

    def apply(params, x):  # a bag of a few words: only their rows have a gradient
        return params["w"][x].mean(1)

    model = fedda.Model(lambda key: {"w": jnp.zeros((words, tags))}, apply)
    ids = jnp.arange(population, dtype=jnp.int32)
    shards = Shards(
        x=jnp.asarray(rng.integers(0, words, (population, length)), jnp.int32),
        y=jnp.asarray(rng.normal(size=(population, tags)), jnp.float32),
        start=ids,
        count=jnp.ones_like(ids),
        max_count=1,
        num_clients=population,
    )
    setup, hyper = api.prepare(
        "scaffold", model, shards, squared_error,
        rounds=rounds, cohort=cohort, batch=1, local_work=1, eval_every=50, memory_gb=0.05,
    )  # fmt: skip
    assert setup.host_rounds is not None
    for evaluation in train(setup, api.traced(hyper, model), [0]):
        memory = evaluation.run.memory
    visited = len(memory)
    assert 0.97 * rounds * cohort < visited <= rounds * cohort, "few clients come twice"
    at_most = visited * length * (tags * 4 + 4)
    assert 0.9 * at_most < memory.nbytes <= at_most, "three words each, hardly ever the same twice"


def test_checkpoints_hold_it(tmp_path):
    settings = {
        "algorithm": "scaffold", "model": "linear", "clients": 12, "cohort": 3, "rounds": 12,
        "eval_every": 2, "checkpoint_every": 1, "memory_gb": 1e-6,
    }  # fmt: skip
    whole = experiment.run(config.resolve(settings), tmp_path / "whole")
    experiment.run(config.resolve(settings), tmp_path / "cut")
    for number in (10, 12):  # as if it had been killed in round 9
        (tmp_path / "cut" / "checkpoints" / f"round-{number}").unlink()
    resumed = experiment.resume(tmp_path / "cut")
    assert resumed.notes[-1] == "continued from round 8"
    assert_equal(resumed.result.state, whole.result.state)


def test_grids_and_algorithms_that_ask_everyone_need_the_device():
    with pytest.raises(InputError, match=r"keep client memory on the device, .* Raise memory_gb"):
        fedda.run_grid(
            "scaffold", MODEL, clients(), squared_error,
            grid={"client_lr": [0.1, 0.2]}, cohort=2, memory_gb=1e-9,
        )  # fmt: skip
    with pytest.raises(InputError, match="memory_gb must be a positive finite number, got 0"):
        fedda.run("scaffold", MODEL, clients(), squared_error, cohort=2, memory_gb=0)
