"""The task of a federation, in the words of `fedda.run`."""

from collections.abc import Sequence
from typing import Any, Literal

from fedda.core.losses import as_measure, as_measures
from fedda.core.task import ExampleWise, Plan, Task
from fedda.errors import check_whole_number, unknown
from fedda.models import as_model


def task(
    model: Any,
    loss: ExampleWise | str,
    *,
    metrics: Sequence[ExampleWise | str] = (),
    batch: int = 20,
    local_work: int = 5,
    local_unit: Literal["steps", "epochs"] = "steps",
    reduction: Literal["mean", "sum"] = "mean",
) -> Task:
    """Return the task for a client and its server, with the arguments of `fedda.run`.

    Args:
        model: A `fedda.Model`, or a module of PyTorch, Flax NNX or Equinox. Client and server need
            the same names and shapes of parameters. Training starts from the server's weights.
        loss: A function, a name such as `"cross_entropy"`, or a loss module of PyTorch.
        metrics: Functions or names, for the server's evaluation.
        batch: The number of examples in a mini-batch.
        local_work: The number of steps, or epochs, that a client takes in a round.
        local_unit: What `local_work` counts: `"steps"` or `"epochs"`.
        reduction: Whether the loss of a mini-batch is the `"mean"` or the `"sum"` over its
            examples.

    Raises:
        InputError: An argument is wrong.

    Example:
        >>> from fedda import models
        >>> from fedda.flower import task
        >>> task(models.linear(8, 3), "cross_entropy", local_work=2).plan
        Plan(batch=20, amount=2, unit='steps')
    """
    check_whole_number("batch", batch, least=1)
    check_whole_number("local_work", local_work, least=1)
    for name, value, allowed in (
        ("local_unit", local_unit, ("steps", "epochs")),
        ("reduction", reduction, ("mean", "sum")),
    ):
        if value not in allowed:
            raise unknown(f"value of {name}", value, allowed)
    return Task(
        as_model(model),
        as_measure(loss),
        Plan(batch, local_work, local_unit),
        metrics=tuple(as_measures(list(metrics))),
        reduction=reduction,
    )
