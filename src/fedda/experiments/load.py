"""Results from files and run directories."""

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedda import models, tasks
from fedda.data.preparation import Preparation
from fedda.errors import InputError
from fedda.models import Model
from fedda.simulate import saved
from fedda.simulate.client_metrics import ClientMetrics
from fedda.simulate.evaluation import metric_settings
from fedda.simulate.result import Result
from fedda.storage.checkpoint import restored
from fedda.storage.files import read_json
from fedda.storage.named_arrays import Node, nested
from fedda.storage.snapshot import SUMMARY, read_newest
from fedda.tasks import config

# Settings of a result that are no settings of a task.
ADDED = ("metrics", "lower_is_better", "classes", "finished")


def load(path: str | PathLike[str], model: Model | object | None = None) -> Result:
    """Load a result.

    Args:
        path: A file of `result.save`; or a run directory of `fedda run` or `fedda.run`. Of an
            unfinished run, the newest checkpoint is loaded, and `settings["finished"]` is False.
        model: The model that was trained, or the module of PyTorch, Flax or Equinox. Models of
            `fedda.models`, such as `mlp`, and those of the tasks of `fedda run` are restored
            without it. The functions of your own models are not stored: without `model`, the result
            cannot predict, and its parameters are nested dictionaries, also where the model has
            lists, tuples or modules.

    Returns:
        The result. It predicts, and a run continues from it with `fedda.run(..., start=result)`.
        Parts of its `state` besides `params` have the names of the original, and the containers
        that are described above.

    Raises:
        InputError: The file or directory is missing, damaged, of another kind or of a newer
            version; or the model is not the one that was trained.

    Example:
        >>> import fedda, numpy as np, tempfile
        >>> clients = [(np.ones((n, 2)), np.arange(n) % 2) for n in (3, 5, 20)]
        >>> model = fedda.models.linear(features=2, classes=2)
        >>> result = fedda.run("fedavg", model, clients, fedda.losses.cross_entropy, cohort=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.save(f"{folder}/model.fedda")
        ...     again = fedda.load(f"{folder}/model.fedda")
        >>> again.predict(np.ones((4, 2))).shape
        (4, 2)
    """
    source, known = Path(path), None if model is None else models.as_model(model)
    return _from_directory(source, known) if source.is_dir() else _from_file(source, known)


def _from_file(path: Path, model: Model | None) -> Result:
    arrays, notes = saved.read(path)
    return _result(
        path,
        arrays,
        model or _model(notes["settings"]),
        settings=notes["settings"],
        history=notes["history"],
        per_client=notes["per_client"],
        warnings=notes["warnings"],
        preparation=notes["preparation"],
    )


def _from_directory(path: Path, model: Model | None) -> Result:
    found = read_newest(path)
    if not saved.parameters(found.arrays):
        raise InputError(
            f"got {path}, whose checkpoints hold no result of one simulated run; expected a run "
            "directory of `fedda run` or fedda.run. Give one of these."
        )
    settings = found.settings | {"finished": found.finished}
    prepared = settings.pop("preparation", None)
    if "task" in settings and model is None:
        problem = _problem(settings)
        model, prepared = problem.model, problem.preparation and problem.preparation.to_json()
        settings |= metric_settings(problem.metrics) | {"classes": list(problem.labels)}
    history = [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in found.history
    ]
    summary = _summary(path) if found.finished else {}
    return _result(
        path,
        found.arrays,
        model or _model(settings),
        settings=settings,
        history=history,
        per_client=summary.get("per_client"),
        warnings=summary.get("warnings", []),
        preparation=prepared,
    )


def _result(
    source: Path, arrays: Mapping[str, np.ndarray], model: Model | None, **about: Any
) -> Result:
    """Return the result that a file or a checkpoint holds.

    Args:
        source: Where the arrays are from, for errors.
        arrays: The arrays by name.
        model: The model, if it is known. Then the parameters have its structure.
        **about: The other fields of `Result`; `preparation` and `per_client` as JSON.
    """
    for name, array in arrays.items():
        if (here := jax.dtypes.canonicalize_dtype(array.dtype)) != array.dtype:
            raise InputError(
                f"got {source} with {array.dtype} in {name}; expected {here}, as JAX is set here. "
                "Set JAX_ENABLE_X64=1."
            )
    found = nested(arrays)
    if not isinstance(found, Node) or "params" not in getattr(
        found.parts.get("state"), "parts", ()
    ):
        raise InputError(
            f"got {source}, whose arrays are not those of a result; expected a file of "
            "result.save, or a run directory. Give one of these."
        )
    state = jax.tree.map(jnp.asarray, found.state)
    if model is not None:
        what, advice = f"the model in {source}", "Give the model that was trained."
        params = restored(saved.parameters(arrays), model.shapes(), what, advice)
        state = Node({**state.parts, "params": jax.tree.map(jnp.asarray, params)})
    text, clients = about.pop("preparation"), about.pop("per_client")
    return Result(
        state=state,
        memory=found.parts.get("memory", ()),
        model=model,
        preparation=None if text is None else Preparation.from_json(text),
        per_client=None if clients is None else ClientMetrics.from_json(clients),
        **about,
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path / SUMMARY, {...: Any}))
    except (OSError, ValueError):  # it does not exist, or another command reports the damage
        return {}


def _model(settings: dict[str, Any]) -> Model | None:
    """Return the model of a run, if its settings say how to make it."""
    if settings.get("built_in_model"):
        return models.from_recipe(settings["built_in_model"])
    return _problem(settings).model if "task" in settings else None


def _problem(settings: dict[str, Any]) -> tasks.Problem:
    return tasks.load(config.resolve({k: v for k, v in settings.items() if k not in ADDED}))
