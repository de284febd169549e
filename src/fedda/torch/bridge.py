"""Describe a PyTorch module to a server that does not run it.

The server stores the parameters of a module as a dictionary of arrays by name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.nn import Module

from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import num_rows
from fedda.errors import InputError
from fedda.models import Model
from fedda.models.torch import parameters, to_array


def model(module: Module) -> Model:
    """Return a model for the server, with the module's current parameters as initial parameters.

    The server does not run the module: it only needs the shapes of the parameters. An evaluation of
    the model raises an `InputError`.
    """
    initial = {name: to_array(parameter) for name, parameter in parameters(module).items()}

    def refuse() -> np.ndarray:
        raise InputError(
            "the server cannot evaluate a PyTorch module. Leave out test, and give evaluate, "
            "a function that may load the parameters into the module with fedda.torch.load."
        )

    def apply(params: PyTree, x: Any) -> Any:
        like = jax.ShapeDtypeStruct((num_rows(x),), jnp.result_type(float))
        return jax.pure_callback(refuse, like)

    return Model(lambda key: jax.tree.map(jnp.asarray, initial), apply)


def task(module: Module, epochs: int = 1) -> Task:
    """Return the task for the `Settings` of a server whose clients train a PyTorch module.

    The loss and the local work are chosen by the clients.

    Args:
        module: The module.
        epochs: The largest number of epochs of a client in a round. Secure aggregation computes
            the range of its sums from it.

    Example:
        >>> import torch
        >>> {name: leaf.shape for name, leaf in task(torch.nn.Linear(4, 2)).model.shapes().items()}
        {'bias': (2,), 'weight': (2, 4)}
    """
    return Task(model(module), lambda outputs, y: outputs, Plan(1, epochs, "epochs"))
