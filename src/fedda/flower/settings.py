"""Settings of a federation, and their checks."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedda import api
from fedda.core.algorithm import Algorithm
from fedda.core.check_structure import check_work
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import checked_pair, from_clients
from fedda.errors import InputError, check_whole_number
from fedda.simulate.check_problem import check_problem

MODULUS = 2**32  # of secure sums: the largest that Flower allows


class Secure(NamedTuple):
    """Settings of secure aggregation: how uploads become integers, and how many may be lost.

    An entry of an upload is clipped to the range from -r to r and rounded at random, without bias,
    to one of 2^bits steps. The error of an entry in a sum of n uploads, none of them clipped, is
    below n * 2 r / 2^bits. Here r is `most` for a plain entry, and `most` times `most_weight` for
    an entry that is multiplied by a weight. The range of a counter, such as the number of local
    steps, is the largest number of steps that a client takes, if that is more than `most`. Weights
    that are whole numbers are summed without error if `most_weight` is at most 2^(bits - 1).

    Attributes:
        most: The largest entry of an upload, after division by the weight if it is weighted.
        most_weight: The largest number of examples of a client.
        most_loss: The largest mean loss of a client, which is only shown.
        bits: Precision of an entry.
        neighbours: Number of clients, itself included, with which a client shares its secrets;
            None: all.
        threshold: The share of these neighbours that must remain at the end.
    """

    most: float
    most_weight: float
    most_loss: float = 100.0
    bits: int = 22
    neighbours: int | None = None
    threshold: float = 2 / 3

    def check(self, clients: int) -> None:
        """Refuse settings that cannot work for the sum over this number of clients."""
        for name in ("most", "most_weight", "most_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} of secure must be a positive number, got {value}.")
        if not 0.5 < self.threshold < 1:
            # If half of a client's shares were enough, the server could ask for both secrets.
            allowed = "above 0.5 and below 1"
            raise InputError(f"threshold of secure must be {allowed}, got {self.threshold}.")
        count = self.neighbours
        if count is not None and (count < 3 or count % 2 == 0):
            raise InputError(f"neighbours of secure must be an odd number from 3 on, got {count}.")
        if clients < 2:
            raise InputError("the sum over one client is its upload. Ask two clients or more.")
        if not 1 <= self.bits <= 30 or clients * 2**self.bits >= MODULUS:
            allowed = f"1 to {min(30, 31 - math.floor(math.log2(clients)))} for {clients} clients"
            raise InputError(f"bits of secure must be {allowed}, got {self.bits}.")

    def shares(self, clients: int) -> int:
        """Return the number of clients, itself included, with which each shares its secrets."""
        return min(self.neighbours or clients, clients)

    def needed(self, clients: int) -> int:
        """Return the number of shares that reveal a secret: that many neighbours must remain."""
        shares = self.shares(clients)
        return max(2, shares // 2 + 1, int(self.threshold * shares))


class Settings(NamedTuple):
    """Settings of a federation.

    The ratios compare each part of an upload, such as FedDA's sum of gradients, with the median of
    the replies of this round and the 20 accepted replies before. A reply is refused if the norm of
    a part, after division by the weight, exceeds `most_norm_ratio` times the median, or if a
    counter exceeds `most_weight_ratio` times the median. The weight of a client is lowered until
    no part, multiplied by it, has a norm above `most_sum_ratio` times the median, and the weight
    itself is at most `most_weight_ratio` times the median (unless `most_weight` is given).

    Attributes:
        algorithm: A name (`fedda algorithms` lists them) or an algorithm of your own.
        task: Model, loss and local work, the same as the clients'.
        example: Arrays `(x, y)` of one example or more, like those of the clients.
        rounds: Number of rounds.
        cohort: Number of clients that are asked in a round.
        chosen: Hyper-parameters and options of the algorithm.
        seed: Seed of all random numbers.
        stabilise: Full-batch rounds at the end: their number, or below 1 their share.
        test: Arrays `(x, y)` on which the server evaluates the model.
        evaluate: Your own evaluation: parameters in, numbers by name out.
        eval_every: Rounds between two evaluations.
        nodes: Clients that must have joined before the first round, at least `cohort`; 0: `cohort`.
        least: Valid replies that a phase needs.
        deadline: Seconds that the server waits for the replies of a phase, and for clients to join.
        attempts: Attempts at a round before it is skipped.
        most_norm: Limit on the norm of an upload, after division by its weight.
        most_weight: Limit on the weight of an upload: the examples of the largest client.
        most_norm_ratio: Limit on the norm, relative to the median; None: no limit.
        most_sum_ratio: Limit on what a client adds to a sum, relative to the median; None: no
            limit.
        most_weight_ratio: Limit on weights and counters, relative to the median; None: no limit.
        most_loss_ratio: Limit on the loss on `test` after a round, relative to the loss before. A
            round above it does not count. None: no limit.
        secure: Settings of secure aggregation; the clients then need `secure_mods`.
        directory: Directory for metrics, checkpoints and the summary.
    """

    algorithm: str | Algorithm
    task: Task
    example: tuple[Any, Any]
    rounds: int
    cohort: int
    chosen: Mapping[str, Any] = {}
    seed: int = 0
    stabilise: float = 0
    test: tuple[Any, Any] | None = None
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None
    eval_every: int = 1
    nodes: int = 0
    least: int = 1
    deadline: float = 600.0
    attempts: int = 3
    most_norm: float | None = None
    most_weight: float | None = None
    most_norm_ratio: float | None = 30.0
    most_sum_ratio: float | None = 3.0
    most_weight_ratio: float | None = 30.0
    most_loss_ratio: float | None = None
    secure: Secure | None = None
    directory: Path | None = None


def check(settings: Settings, algorithm: Algorithm, hyper: Any) -> None:
    """Refuse settings with which a federation cannot be trained."""
    for name in ("rounds", "cohort", "eval_every", "least", "attempts"):
        check_whole_number(name, getattr(settings, name), least=1)
    check_whole_number("nodes", settings.nodes, least=0)
    api.check_seed(settings.seed)
    if settings.least > settings.cohort:
        raise InputError(
            f"least must be at most cohort, which is {settings.cohort}, got {settings.least}. "
            "Lower least or raise cohort."
        )
    if 0 < settings.nodes < settings.cohort:
        raise InputError(
            f"cohort must be at most nodes, which is {settings.nodes}, got {settings.cohort}. "
            "Lower cohort or raise nodes."
        )
    for name in (name for name in settings._fields if name.startswith("most_")):
        value, least = getattr(settings, name), 1 if name.endswith("ratio") else 0
        if value is not None and not (value >= least and value > 0):
            kind = "a number of at least 1" if least else "a positive number"
            raise InputError(f"{name} must be {kind}, or None for no limit, got {value}.")
    if not settings.deadline > 0:
        raise InputError(f"deadline must be a positive number of seconds, got {settings.deadline}.")
    if settings.most_loss_ratio is not None and settings.test is None:
        raise InputError("most_loss_ratio needs a test set. Give test, or leave out this limit.")
    if settings.secure is not None:
        settings.secure.check(settings.cohort)
    if settings.secure is not None and (settings.most_norm or settings.most_weight):
        raise InputError(
            "most_norm and most_weight limit single uploads, which a server with secure "
            "aggregation does not see. Give most and most_weight of Secure instead."
        )
    if settings.secure is not None and any(phase.decode for phase in algorithm.phases):
        raise InputError(
            "compressed and bounded uploads are opened one by one, but a server with secure "
            "aggregation sees only their sum. Leave one of the two out."
        )
    task, test = settings.task, settings.test
    if not isinstance(task, Task):
        raise InputError(f"task must be a fedda.core.task.Task, got {type(task).__name__}.")
    test = None if test is None else checked_pair(test, "the test set")
    shards = from_clients([checked_pair(settings.example, "example")])
    check_problem(task.model, task.loss, task.metrics if test else (), shards, test)
    if isinstance(settings.algorithm, Algorithm):
        check_work(algorithm, api.traced(hyper, task.model), task, shards)
