"""The arguments that `fedda.run` and `fedda.run_grid` share, and their checks."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeGuard

from fedda.core.algorithm import Algorithm
from fedda.core.task import ExampleWise, Plan
from fedda.data.federation import Shards, from_clients, is_dataset
from fedda.data.streaming import Feed
from fedda.data.tabular import Federation
from fedda.errors import LARGEST, InputError, check_whole_number, is_finite, shown, unknown
from fedda.models import Model
from fedda.simulate.cohort import SAMPLERS

# A pair of arrays or tensors (x, y), or a Dataset or DataLoader of PyTorch.
Examples = Any
Clients = Sequence[Examples] | Mapping[str, Examples] | Federation | Shards | Feed
Test = Examples | Sequence[Examples]  # the second: one pair for each client


class Training(NamedTuple):
    """The settings of a run, without hyper-parameters. `fedda.run` documents them."""

    algorithm: str | Algorithm
    model: Model
    clients: Clients
    loss: ExampleWise
    test: Test | None = None
    metrics: Sequence[ExampleWise] = ()
    rounds: int = 100
    cohort: int = 10
    batch: int = 20
    local_work: int = 5
    local_unit: Literal["steps", "epochs"] = "steps"
    reduction: Literal["mean", "sum"] = "mean"
    stabilise: float = 0
    eval_every: int = 10
    late_every: int = 0
    chunk: int | None = None
    devices: int | None = 1
    memory_gb: float = 4.0
    sampling: str = "uniform"


KEYWORDS = tuple(Training._field_defaults)  # without algorithm, model, clients and loss
CHANGEABLE = ("devices", "checkpoint_every")  # settings that a resumed run may change


def is_one_pair_a_client(data: Any) -> TypeGuard[Sequence[Examples]]:
    """Return whether data are a list of tuples `(x, y)` or datasets, not one pair of arrays."""
    return isinstance(data, list) and all(
        (isinstance(pair, tuple) and len(pair) == 2) or is_dataset(pair) for pair in data
    )


def test_of_clients(test: Any, num_clients: int) -> Shards | None:
    """Return the test examples of each client; None if `test` is one pair of arrays, or None.

    Raises:
        InputError: There is not one pair for each client.
    """
    if not is_one_pair_a_client(test):
        return None
    if len(test) != num_clients:
        raise InputError(
            f"test must be a pair (x, y), or a list of one pair for each of the {num_clients} "
            f"clients, got a list of {len(test)}. Give empty arrays for a client without "
            "test examples."
        )
    return from_clients(test, owner="the test set of client")


def checked_plan(given: Training, shards: Shards | Feed) -> Plan:
    """Check the settings of a run, and return the local work of a client.

    Args:
        given: The settings.
        shards: The clients' examples.

    Returns:
        The local work of a client in a round.

    Raises:
        InputError: A setting is wrong, or does not fit the federation.
    """
    for name in ("rounds", "cohort", "batch", "local_work", "eval_every", "devices", "chunk"):
        value = getattr(given, name)
        if value is not None or name not in ("devices", "chunk"):
            check_whole_number(name, value, least=1)
    check_whole_number("late_every", given.late_every, least=0)
    if given.cohort > shards.num_clients:
        raise InputError(
            f"cohort must be at most the number of clients, which is {shards.num_clients}, got "
            f"{given.cohort}. Lower cohort or add clients."
        )
    for name, allowed in (
        ("local_unit", ("steps", "epochs")),
        ("reduction", ("mean", "sum")),
        ("sampling", tuple(SAMPLERS)),
    ):
        if getattr(given, name) not in allowed:
            raise unknown(f"value of {name}", getattr(given, name), allowed)
    plan = Plan(given.batch, given.local_work, given.local_unit)
    visited = plan.amount * (plan.batch if plan.unit == "steps" else shards.max_count)
    if visited + plan.batch > LARGEST:  # the last batch may be padded
        raise InputError(
            f"a client would process {visited:,} examples in a round, expected fewer than 2**31. "
            "Lower local_work or batch."
        )
    return plan


def host_rounds(given: Training, bytes_of_one: int, num_clients: int) -> int | None:
    """Return the number of rounds whose client memories fit into `memory_gb`.

    Args:
        given: The settings.
        bytes_of_one: The size of one client's memory.
        num_clients: The number of clients in the federation.

    Returns:
        The number of rounds, or None if the memories of all clients fit.

    Raises:
        InputError: `memory_gb` is not a positive number.
    """
    budget = given.memory_gb
    number = isinstance(budget, Real) and not isinstance(budget, bool)
    if not number or not is_finite(budget) or not budget > 0:
        raise InputError(f"memory_gb must be a positive finite number, got {shown(budget)}.")
    if bytes_of_one * num_clients <= budget * 1e9:
        return None
    return max(1, int(budget * 1e9 / (bytes_of_one * given.cohort)))
