"""Benchmark problems by name: data, model, loss and metrics, ready to train.

A task is two files in this folder: `<task>.toml`, which `config` describes, and a module with a
function `build(config)`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedda.tasks.config import Config, about

if TYPE_CHECKING:  # settings are checked without JAX
    from fedda.core.task import ExampleWise
    from fedda.data.federation import Shards
    from fedda.data.preparation import Preparation
    from fedda.data.streaming import Block, Feed
    from fedda.models import Model


class Problem(NamedTuple):
    """A federation, a model to train on it, and the metrics of its evaluation."""

    model: Model
    shards: Shards | Feed
    test: tuple[Any, Any]
    loss: ExampleWise
    metrics: tuple[ExampleWise, ...]  # results are compared by the first
    labels: Sequence[str]  # the names of the classes
    reduction: Literal["mean", "sum"] = "mean"
    final: Callable[[], Iterable[Block]] | None = None  # a larger test set, for the end of a run
    data: Mapping[str, Any] = {}  # the origin of the examples, for the results
    names: Sequence[str] = ()  # of the clients; empty if they have only numbers
    preparation: Preparation | None = None  # how the columns of a table became features
    test_clients: Callable[[], Shards] | None = None  # the test examples of each client

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values of the first metric are better."""
        from fedda.simulate.evaluation import is_higher_better

        return is_higher_better(self.metrics[0])

    def __repr__(self) -> str:
        from fedda.data.federation import num_rows

        return f"Problem({self.shards}, {num_rows(self.test[1]):,} test examples)"


# The settings that a problem depends on.
DEPENDS_ON = ("task", "model", "precision", "partition", "partition_seed", "clients", "data_gb")


def load(config: Config) -> Problem:
    """Load the problem of a configuration."""
    from fedda.data.datasets import root

    about(config.task)  # refuses an unknown task
    values = {name: getattr(config, name) for name in (*DEPENDS_ON, "options")}
    return _load(json.dumps(values), root())


# Cached, so that all runs of a comparison share one federation and one compiled program.
@lru_cache(maxsize=2)
def _load(values: str, data_folder: Path) -> Problem:
    config = Config(**json.loads(values))
    module = importlib.import_module(f"fedda.tasks.{config.task.replace('-', '_')}")
    problem: Problem = module.build(config)
    return problem
