"""Convert PyTorch modules to models of this library, and back.

The server stores the parameters of a module as a dictionary of arrays by name.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.nn import Module, Parameter

import torch
from fedda.core.task import Plan, Task
from fedda.core.tree import PyTree
from fedda.data.federation import num_rows
from fedda.errors import InputError
from fedda.models import Model
from torch import Tensor

DTYPES = {
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
}


def parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters of a module by name.

    Raises:
        InputError: The module has no parameters, parameters of an unsupported type, or layers with
            running statistics.

    Example:
        >>> import torch
        >>> sorted(parameters(torch.nn.Linear(4, 2)))
        ['bias', 'weight']
    """
    if not isinstance(module, Module):
        raise InputError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    module = getattr(module, "_orig_mod", module)  # torch.compile wraps the module
    params = dict(module.named_parameters())
    if not params:
        raise InputError("the module must have parameters, got none.")
    for name, parameter in params.items():
        if parameter.dtype not in DTYPES:
            raise InputError(
                "the parameters must be of float32, float64, float16 or bfloat16, got "
                f"{parameter.dtype} in {name}. Convert the module, for example by module.float()."
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise private_buffer(f"{type(part).__name__} {name!r} keeps running statistics")
    return params


def private_buffer(what: str) -> InputError:
    """Return the error for a buffer that changes in training, and so differs between clients."""
    return InputError(
        f"{what}, but a federation exchanges parameters only, so the buffer would stay on the "
        "client. Use layers without such buffers: GroupNorm or LayerNorm in place of BatchNorm."
    )


def load(module: Module, params: Mapping[str, Any]) -> None:
    """Copy parameters from the server into a module.

    Args:
        module: The module.
        params: The arrays by parameter name, such as `served.state.params`.

    Raises:
        InputError: The arrays have other names or shapes than the module's parameters.

    Example:
        >>> import numpy as np, torch
        >>> module = torch.nn.Linear(2, 1)
        >>> load(module, {"weight": np.ones((1, 2)), "bias": np.zeros(1)})
        >>> module(torch.ones(2)).item()
        2.0
    """
    targets = parameters(module)
    if odd := sorted(targets.keys() ^ params.keys()):
        raise InputError(
            f"the module has {len(targets)} parameters, got {len(params)} arrays with other names, "
            f"for example {odd[0]}. Build the same module as on the server."
        )
    for name, parameter in targets.items():
        if parameter.shape != params[name].shape:
            raise InputError(
                f"{name} has shape {tuple(parameter.shape)} in the module, got an array of shape "
                f"{tuple(params[name].shape)}. Build the same module as on the server."
            )
    with torch.no_grad():
        for name, parameter in targets.items():
            parameter.copy_(to_tensor(params[name]))


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


def to_array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array. It is float64 only if JAX has enabled float64."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy().view(jnp.bfloat16))
    return np.array(tensor.numpy(), jax.dtypes.canonicalize_dtype(tensor.numpy().dtype))


def to_tensor(array: Any) -> Tensor:
    """Return a copy of an array as a tensor, also for bfloat16, which NumPy lacks."""
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)
