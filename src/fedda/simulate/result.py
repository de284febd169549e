"""The outcome of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda.core.tree import PyTree
from fedda.data.preparation import Preparation
from fedda.errors import InputError, import_extra
from fedda.models import Model
from fedda.simulate import saved
from fedda.simulate.client_metrics import ClientMetrics
from fedda.simulate.train import Row


@dataclass(frozen=True, repr=False, eq=False)  # eq would compare arrays, which is ambiguous
class Result:
    """The outcome of a run: the trained parameters, and how they were trained.

    Attributes:
        state: The state of the server's optimiser, with the parameters.
        history: One row for each evaluation.
        memory: What clients keep between rounds. Results of `run_grid` lack it.
        settings: The settings of the run, as plain values: the algorithm, its hyper-parameters,
            `rounds`, `cohort`, `seed`, the names of the `metrics` and more. If the clients are a
            federation with classes, `classes` are their values, in the order of the outputs.
        model: The model, if it is known.
        preparation: How a table becomes inputs of the model, if the clients came from a table.
        per_client: The metrics of each client after the last round, if `per_client` was set.
        warnings: What is probably wrong with the run, in sentences. `fedda.run` also logs them.
    """

    state: Any
    history: list[Row]
    memory: Any = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Model | None = None
    preparation: Preparation | None = None
    per_client: ClientMetrics | None = None
    warnings: Sequence[str] = ()

    @property
    def params(self) -> PyTree:
        """The parameters of the model."""
        return self.state.params

    def predict(self, x: Any) -> Any:
        """Return the outputs of the trained model.

        Args:
            x: Examples as the clients have them; the first axis counts examples. If the result has
                a `preparation`, an array is taken as prepared, and anything else as a table.

        Raises:
            InputError: The result has no model, or a table or prepared array does not fit.
        """
        if self.model is None:
            raise InputError(
                "predict needs the model, and this result has none. Load the result with its "
                "model: fedda.load(path, model=model)."
            )
        if self.preparation is not None and not isinstance(x, np.ndarray | jax.Array):
            x = self.preparation.apply(x)
        elif self.preparation is not None and x.shape[1:] != (len(self.preparation.features),):
            raise InputError(
                f"got an array of shape {x.shape}, expected prepared examples of the shape "
                f"(examples, {len(self.preparation.features)}). Give the rows of a table, as a "
                "DataFrame or a dictionary of columns."
            )
        return self.model.apply(self.params, jnp.asarray(x))

    def to(self, module: Any) -> Any:
        """Copy the trained parameters into a PyTorch module, and return the module.

        Parameters that were not trained are copied, too, if the result has its model.

        Args:
            module: A module like the one that was trained, on any device.

        Raises:
            InputError: The module has other parameters.
        """
        import_extra("torch", "torch", "load parameters into a PyTorch module")
        from fedda.models.torch import load

        frozen = {} if self.model is None else getattr(self.model.apply, "frozen", {})
        load(module, {**frozen, **self.params})
        return module

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one file, which `fedda.load` reads.

        The file is written completely or not at all. It holds everything but the functions of a
        model of your own. What clients keep (`memory`) is included if it takes at most a gigabyte.

        Args:
            path: The file, such as `model.fedda`. A file of this name is replaced.

        Raises:
            InputError: The path is a folder, or in a folder that does not exist.
        """
        saved.write(self, Path(path))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model when a result is pickled: most functions cannot be."""
        return self.__dict__ | {"model": None}

    def __repr__(self) -> str:
        row = self.history[-1]
        name = next((name for name in self.settings.get("metrics", ()) if name in row), None)
        shown = name or "train_loss"
        algorithm = self.settings.get("algorithm", "unknown algorithm")
        rounds = f"{row['round']} rounds"
        if not self.settings.get("finished", True):
            rounds += ", unfinished"
        return f"Result({algorithm}, {rounds}, {shown} {row[shown]:.3g})"


class GridPoint(NamedTuple):
    """One run of a grid: its hyper-parameters, its seed and its result."""

    hyper: dict[str, float]
    seed: int
    result: Result
