"""The contract of an algorithm: one function for each promise, which raises an `InputError`."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.sharding import Mesh

from fedda import api
from fedda.algorithms.registry import domains
from fedda.core import tree
from fedda.core.algorithm import Algorithm, Domain, Phase
from fedda.core.round import one_round
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.models import Model
from fedda.simulate.cohort import Layout, sum_over_clients
from fedda.simulate.train import Span, begin, initial, segment
from fedda.testing.federation import (
    CLIENTS,
    COHORT,
    COHORTS,
    COUNTS,
    MODEL,
    ROUNDS,
    TASK,
    apply,
    examples,
    federation,
    init,
    played,
    with_huge,
)

ROUNDING = 1e-12  # of a few hundred operations on numbers near 1, in float64
MATTERS = 1e-9  # a change of a hyper-parameter must change the model by more


class Case(NamedTuple):
    """What is checked; see `case_of`.

    Attributes:
        algorithm: The algorithm, which counts how often it is compiled.
        traced: The phase of each compilation of a client's work.
        task: The task that it is trained on.
        unused: Hyper-parameters that need not change the model.
    """

    algorithm: Algorithm
    traced: list[int]
    task: Task
    unused: Collection[str]

    def play(self, hp: Any = None, **settings: Any) -> tuple[PyTree, PyTree]:
        """Return the server's state and the clients' memory after the rounds."""
        run, _ = played(self.algorithm, hp, task=self.task, **settings)
        return run.state, run.memory


def case_of(algorithm: Algorithm, task: Task = TASK, unused: Collection[str] = ()) -> Case:
    """Return the case of an algorithm. The checks of one case share their compiled programs."""
    traced: list[int] = []

    def counted(number: int, work: Callable[..., Any], *arguments: Any) -> Any:
        traced.append(number)
        return work(*arguments)

    phases: tuple[Phase, ...] = tuple(
        phase._replace(work=partial(counted, number, phase.work))
        for number, phase in enumerate(algorithm.phases)
    )
    return Case(algorithm._replace(phases=phases), traced, task, unused)


# ---------------------------------------------------------------------------------- comparisons


def differ(one: PyTree, other: PyTree, tolerance: float) -> bool:
    """Return whether two trees differ by more than this, or one of them is not finite."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not all(np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance for a, b in pairs)


def difference(expected: PyTree, got: PyTree, tolerance: float) -> str:
    """Return where two results differ, for an error message, or an empty text.

    Args:
        expected: The one result, a pair of state and memory.
        got: The other.
        tolerance: The largest difference, relative to an entry above 1. If it is 0, results must
            be equal bit for bit, and NaN equals NaN.
    """
    names = ("state", "memory")
    for name, one, other in zip(names, expected, got, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(one)
        for (path, a), b in zip(leaves, jax.tree.leaves(other), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if tolerance == 0:
                equal = (a == b) | ((a != a) & (b != b))
            else:
                largest = max(1.0, float(np.abs(a).max(initial=0)))
                equal = np.abs(a - b) <= tolerance * largest
            if not equal.all():
                place = np.unravel_index(np.argmin(equal), a.shape)
                entry = "".join(f"[{index}]" for index in place)
                where = f"{name}{jax.tree_util.keystr(path)}{entry}"
                return f"{where} is {b[place]:.10g} instead of {a[place]:.10g}"
    return ""


def check_equal(what: str, expected: PyTree, got: PyTree, advice: str) -> None:
    """Raise an `InputError` if two results are not equal bit for bit."""
    if found := difference(expected, got, 0):
        raise InputError(f"{what} changed the result: {found}. Expected the same bits. {advice}")


def check_near(what: str, expected: PyTree, got: PyTree, advice: str) -> None:
    """Raise an `InputError` if two results differ by more than rounding."""
    if found := difference(expected, got, ROUNDING):
        raise InputError(
            f"{what} changed the result: {found}. Expected a difference of at most {ROUNDING:g}, "
            f"which is rounding. {advice}"
        )


# ----------------------------------------------------------------------------------- the checks


def mixed_init(key: jax.Array) -> PyTree:
    params = init(key)
    return params | {"bias": params["bias"].astype("bfloat16")}


def check_types(case: Case) -> None:
    """A round keeps the structure, shapes and types of the state and the memory."""
    _check_types(case, MODEL, "float64")
    with jax.enable_x64(False):
        _check_types(case, MODEL, "float32")
        with jax.numpy_dtype_promotion("standard"):
            _check_types(case, Model(mixed_init, apply), "float32 and bfloat16")


def _check_types(case: Case, model: Model, precision: str) -> None:
    algorithm, task, shards = case.algorithm, case.task._replace(model=model), federation()
    hp = api.traced(algorithm.Hyper(), model)

    def at_the_start(hp: Any) -> tuple[PyTree, PyTree]:
        params = initial(model, False)(random.key(0))
        run = begin(algorithm, False, shards.num_clients)(hp, params)
        return run.state, run.memory

    def after_a_round(hp: Any, state: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        new_state, new_memory, _ = one_round(
            algorithm,
            task,
            partial(sum_over_clients, Layout(chunk=3)),
            hp=hp,
            state=state,
            memory=memory,
            shards=shards,
            cohort=jnp.asarray(COHORTS[0]),
            key=random.key(0),
        )
        return new_state, new_memory

    before = jax.eval_shape(at_the_start, hp)
    after = jax.eval_shape(after_a_round, hp, *before)
    pairs = [
        ("init must keep the model: its params", jax.eval_shape(model.init, random.key(0)),
         before[0].params),
        ("a round must keep the types of the state: it", before[0], after[0]),
        ("a round must keep the types of the memory: it", before[1], after[1]),
    ]  # fmt: skip
    for promise, expected, got in pairs:
        old, new = _types(expected), _types(got)
        for path in {**old, **new}:
            if old.get(path) != new.get(path):
                raise InputError(
                    f"with parameters in {precision}, {promise}{path} was "
                    f"{old.get(path, 'absent')}, now it is {new.get(path, 'absent')}. Create it "
                    "with jnp.zeros(()) or tree.zeros_like(params), so that it has a type, and "
                    "compute with fedda.core.tree, whose functions keep types."
                )


def _types(values: PyTree) -> dict[str, str]:
    """Return the type and shape of every leaf, by path. A weak type gives way to any other."""
    found = tree.types("", values)
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        if leaf.weak_type:
            found[jax.tree_util.keystr(path)] += " of weak type"
    return found | {" structure": str(jax.tree.structure(values))}


def other_value(value: float, domain: Domain) -> float | None:
    """Return another number of a domain, near the value if possible."""
    candidates = (0.5 * value + 0.23, 1.1 * value, 0.9 * value, 2 * value, value + 1, value - 1)
    return next((x for x in candidates if x != value and domain.allows(x)), None)


def other_values(algorithm: Algorithm) -> dict[str, float]:
    """Return another value of each hyper-parameter, if its domain has one."""
    defaults = algorithm.Hyper._field_defaults
    found = {
        name: other_value(defaults[name], domain)
        for name, domain in domains(algorithm.Hyper).items()
    }
    return {name: value for name, value in found.items() if value is not None}


def check_one_program(case: Case) -> None:
    """One program serves all values of the hyper-parameters and any number of rounds."""
    case.play()
    once = len(case.traced)
    for rounds, hyper in ((ROUNDS, other_values(case.algorithm)), (1, {})):
        case.play(case.algorithm.Hyper(**hyper), rounds=rounds)
    if len(case.traced) > once:
        raise InputError(
            f"work of phase {case.traced[once]} was compiled again for other hyper-parameters or "
            "another number of rounds, expected one program for all. init must give every entry "
            "of the state the type and shape that merge gives it."
        )


def check_seeds(case: Case) -> None:
    """Equal seeds give equal results."""
    advice = "Take random numbers only from the key that work is called with."
    check_equal("training twice with one seed", case.play(seed=1), case.play(seed=1), advice)


def check_hyper_parameters(case: Case) -> None:
    """Every hyper-parameter changes the model."""
    Hyper, (state, _) = case.algorithm.Hyper, case.play()
    for name, value in other_values(case.algorithm).items():
        if name in case.unused:
            continue
        changed, _ = case.play(Hyper(**{name: value}))
        if not differ(state.params, changed.params, MATTERS):
            default = Hyper._field_defaults[name]
            raise InputError(
                f"{name} of Hyper has no effect: the model after {ROUNDS} rounds is the same for "
                f"{default:g} and {value:g}. Use hp.{name} in send, work or merge, or name it in "
                "unused if it matters only elsewhere."
            )


def check_padding(case: Case) -> None:
    """Rows that belong to no client have no effect."""
    expected = case.play()
    for junk in (np.nan, 1e30):
        got = case.play(shards=federation(junk))
        check_equal(
            f"padding that holds {junk:g}", expected, got,
            "Use examples only through task.batches, task.gradient, task.full_gradient and "
            "task.mean_loss, which leave padding out.",
        )  # fmt: skip


def check_absent_clients(case: Case) -> None:
    """Clients that are in no cohort have no effect."""
    absent = set(CLIENTS) - set(COHORTS.ravel().tolist())

    def data(client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = examples(client)
        return (np.nan * x, np.nan * y) if client in absent else (x, y)

    check_equal(
        "the data of clients outside of the cohorts", case.play(),
        case.play(shards=federation(data=data)),
        "work may use only the data of its own shard.",
    )  # fmt: skip


def check_order(case: Case) -> None:
    """The order of a cohort changes only rounding."""
    check_near(
        "another order of the clients in a cohort", case.play(),
        case.play(cohorts=COHORTS[:, ::-1].copy()),
        "Uploads are added up, so each entry must be a term of a sum. Take random numbers from the "
        "key of work.",
    )  # fmt: skip


def check_layout(case: Case) -> None:
    """Chunks, devices, gaps, empty clients and other runs change only rounding.

    One program is compared with another that differs in all of these. Two runs with other
    hyper-parameters and seeds are trained together. Their cohorts are in another order and lack the
    client without examples, and there are no gaps between clients. Each of two devices, if there
    are two, takes its clients one by one, with another program for clients of up to 4 examples.
    """
    algorithm, seeds = case.algorithm, (0, 3)
    hypers = [algorithm.Hyper(), algorithm.Hyper(**other_values(algorithm))]
    alone = [case.play(hp, seed=seed) for hp, seed in zip(hypers, seeds, strict=True)]
    compact = from_clients([examples(client) for client in CLIENTS])
    cohorts = np.array([[c for c in reversed(cohort) if COUNTS[c]] for cohort in COHORTS], np.int32)
    assert cohorts.shape == (ROUNDS, COHORT - 1)
    hps, keys = [api.traced(hp, MODEL) for hp in hypers], [random.key(seed) for seed in seeds]
    params = map(initial(MODEL, False), keys)
    starts = map(begin(algorithm, False, compact.num_clients), hps, params)
    hp, run = (jax.tree.map(lambda *leaves: np.stack(leaves), *trees) for trees in (hps, starts))
    devices = jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("clients",)) if len(devices) > 1 else None
    span = Span(first=0, last=ROUNDS, cohorts=np.stack([cohorts] * 2), shards=compact)
    program = segment(algorithm, case.task, Layout(chunk=1, mesh=mesh, widths=(4,)), True)
    together, _ = program(hp, run, jnp.stack(keys), span)
    for number, expected in enumerate(alone):
        got = jax.tree.map(lambda leaf, i=number: np.asarray(leaf)[i], together)
        check_near(
            "another layout (chunks, gaps, no client without examples, two runs together)",
            expected, (got.state, got.memory),
            "A mean must divide by a weight that was summed with it, as local.weighted and "
            "local.mean do. A client's memory must depend on its own visits alone.",
        )  # fmt: skip


def check_nonfinite_client(case: Case) -> None:
    """A client whose upload is not finite counts as absent: as if it had no examples."""
    bad = 1
    counts = tuple(0 if client == bad else count for client, count in enumerate(COUNTS))
    run, _ = played(case.algorithm, task=case.task, shards=with_huge(bad))
    visits = sum(bad in cohort for cohort in COHORTS)
    expected = visits * len(case.algorithm.phases)
    if run.nonfinite != expected:
        raise InputError(
            f"gradients of a client were not finite, and {int(run.nonfinite)} of its {expected} "
            "uploads were dropped, expected all. Every upload must pass a number on that is not "
            "finite: do not use jnp.nan_to_num or jnp.where to hide it. A phase whose upload does "
            "not depend on the client's data must upload something from its memory that does."
        )
    check_equal(
        "a client whose upload is not finite", case.play(shards=federation(counts=counts)),
        (run.state, run.memory),
        "Expected the result without this client. A mean must divide by a weight that was summed "
        "with it, as local.weighted and local.mean do.",
    )  # fmt: skip


def check_lost_round(case: Case) -> None:
    """A round in which no upload is finite changes nothing."""
    bad = set(COHORTS[-1].tolist()) - {2}  # number 2 has no examples
    cohorts = np.array([[0, 4, 5, 7], [5, 0, 7, 2], COHORTS[-1]], np.int32)
    before, after = (
        case.play(shards=with_huge(*bad), cohorts=cohorts, rounds=rounds) for rounds in (2, 3)
    )
    check_equal(
        "a round without any finite upload", before, after,
        "Every upload must pass on a number that is not finite.",
    )  # fmt: skip


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_types,
    check_one_program,
    check_seeds,
    check_hyper_parameters,
    check_padding,
    check_absent_clients,
    check_order,
    check_layout,
    check_nonfinite_client,
    check_lost_round,
)
