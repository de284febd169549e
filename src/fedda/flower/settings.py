"""What a federation is to do: its settings, their checks, and the algorithm that they name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import random

from fedda import algorithms, api
from fedda.core.algorithm import Algorithm, as_sent
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard, from_clients
from fedda.errors import InputError, check_whole_number
from fedda.flower import messages
from fedda.flower.secure import Secure
from fedda.transforms.privacy import only_summed


class Settings(NamedTuple):
    """How a federation is trained."""

    algorithm: str | Algorithm
    task: Task
    example: tuple[Any, Any]  # arrays (x, y) of one example or more, like the clients' own
    rounds: int
    cohort: int  # clients that are asked in a round
    chosen: Mapping[str, Any] = {}  # hyper-parameters and options of the algorithm
    seed: int = 0
    stabilise: float = 0  # full-batch rounds at the end: a share below 1, or a number
    test: tuple[Any, Any] | None = None
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None  # the model, in your own way
    eval_every: int = 1
    nodes: int = 0  # that must be there before the first round; 0: as many as a cohort has clients
    least: int = 1  # sound replies that a phase needs
    deadline: float = 600.0  # seconds, for the replies of a phase and for nodes to come
    attempts: int = 3  # at a round, before it is skipped
    most_norm: float | None = None  # of an upload, after a weighted one was divided by its weight
    most_weight: float | None = None  # of a weighted upload: the examples that a client may have
    # Limits relative to the median of this round's replies and the 20 before; None: no limit.
    # A reply whose norm is above the first, and above the model's, is refused. A weight above the
    # second is lowered to it, unless there is a most_weight; a counter above it is refused.
    most_norm_ratio: float | None = 1000.0
    most_weight_ratio: float | None = 30.0
    secure: Secure | None = None  # sums alone are revealed; the clients have `secure_mods`
    directory: Path | None = None  # for metrics, checkpoints and the summary


class Method(NamedTuple):
    """The algorithm of a federation, as the server computes with it and as orders name it."""

    algorithm: Algorithm
    hp: Any
    example: Shard  # like the clients' own
    name: str
    options: str  # as JSON
    hyper: Mapping[str, float]

    def first_state(self, settings: Settings) -> Any:
        """The server's state before the first round, as in a simulation."""
        key = random.fold_in(random.key(settings.seed), 0)
        params = jax.jit(settings.task.model.init)(key)
        return jax.jit(self.algorithm.init)(self.hp, params)

    def identity(self, settings: Settings) -> dict[str, str]:
        """What must be the same for a folder's federation to be continued, in words."""
        found = {"algorithm": self.name, "options": self.options, "seed": str(settings.seed)}
        found |= {name: str(value) for name, value in self.hyper.items()}
        named = jax.tree_util.tree_leaves_with_path(settings.task.model.shapes())
        return found | {
            f"parameter {messages.name_of(path)}": f"{leaf.dtype}{leaf.shape}"
            for path, leaf in named
        }


def method(settings: Settings) -> Method:
    """What the settings name, after a check that a federation can be trained with them."""
    record, hyper = algorithms.configure(settings.algorithm, settings.chosen)
    _check_numbers(settings)
    _check_secure(settings, record)
    name = settings.algorithm if isinstance(settings.algorithm, str) else "own"
    known = algorithms.options(name) if name != "own" else {}
    options = {option: settings.chosen.get(option, choices[0]) for option, choices in known.items()}
    return Method(
        record,
        api.traced(hyper, settings.task.model),
        from_clients([settings.example]).shard(0),
        name,
        json.dumps(options, sort_keys=True),
        {name: float(value) for name, value in hyper._asdict().items()},
    )


def _check_numbers(settings: Settings) -> None:
    for name in ("rounds", "cohort", "eval_every", "least", "attempts"):
        check_whole_number(name, getattr(settings, name), least=1)
    check_whole_number("nodes", settings.nodes, least=0)
    api.last_rounds(settings.stabilise, settings.rounds)
    if settings.least > settings.cohort:
        raise InputError(
            f"least must be at most cohort, which is {settings.cohort}, got {settings.least}: no "
            "round would have enough replies. Lower least or raise cohort."
        )
    for name in ("most_norm", "most_weight", "most_norm_ratio", "most_weight_ratio"):
        value, least = getattr(settings, name), 1 if name.endswith("ratio") else 0
        if value is not None and not (value >= least and value > 0):
            kind = "a number of at least 1" if least else "a positive number"
            raise InputError(f"{name} must be {kind}, or None for no limit, got {value}.")
    if not settings.deadline > 0:
        raise InputError(f"deadline must be a positive number of seconds, got {settings.deadline}.")
    api.check_seed(settings.seed)


def _check_secure(settings: Settings, record: Algorithm) -> None:
    """Refuses what needs single uploads, where the server sees only their sum."""
    if settings.secure is None:
        return
    if settings.most_norm or settings.most_weight:
        raise InputError(
            "most_norm and most_weight are of single uploads, which a server with secure "
            "aggregation does not see. Give most and most_weight of Secure instead."
        )
    if any(phase.opened not in (as_sent, only_summed) for phase in record.phases):
        raise InputError(
            "compressed and bounded uploads are opened one by one, and a server with secure "
            "aggregation sees only their sum. Leave one of the two out."
        )
