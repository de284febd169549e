"""Conversion of PyTorch modules to models of the library, and back.

For the server, the parameters of a module are a dictionary from their names to arrays.
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
        InputError: The module cannot be federated.
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
                f"{parameter.dtype} in {name}. Convert the module, for instance by module.float()."
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise private_buffer(f"{type(part).__name__} {name!r} keeps running statistics")
    return params


def private_buffer(what: str) -> InputError:
    """Return the error for a buffer that changes in training, and so differs between clients."""
    return InputError(
        f"{what}, but a federated model is its parameters alone: such a buffer would stay with the "
        "client. Use layers that keep none, such as GroupNorm or LayerNorm in place of BatchNorm."
    )


def load(module: Module, params: Mapping[str, Any]) -> None:
    """Copy the parameters of a server's state into a module.

    Args:
        module: The module.
        params: Arrays by the names of the module's parameters, such as `served.state.params`.

    Raises:
        InputError: The arrays have other names or shapes.
    """
    targets = parameters(module)
    if odd := sorted(targets.keys() ^ params.keys()):
        raise InputError(
            f"the module has {len(targets)} parameters, got {len(params)} arrays with other names, "
            f"{odd[0]} among them. Build the module as on the server."
        )
    for name, parameter in targets.items():
        if parameter.shape != params[name].shape:
            raise InputError(
                f"{name} has shape {tuple(parameter.shape)} in the module, got an array of shape "
                f"{tuple(params[name].shape)}. Build the module as on the server."
            )
    with torch.no_grad():
        for name, parameter in targets.items():
            parameter.copy_(to_tensor(params[name]))


def model(module: Module) -> Model:
    """Return a module as a model for the server, with its present parameters for the first round.

    The server does not compute with the module. It only needs the shapes of uploads; an evaluation,
    which would need numbers, is refused.
    """
    initial = {name: to_array(parameter) for name, parameter in parameters(module).items()}

    def refuse() -> np.ndarray:
        raise InputError(
            "a server does not compute with a PyTorch module, so it cannot evaluate one: leave "
            "test out, and give evaluate, which may load the parameters with fedda.torch.load."
        )

    def apply(params: PyTree, x: Any) -> Any:
        like = jax.ShapeDtypeStruct((num_rows(x),), jnp.result_type(float))
        return jax.pure_callback(refuse, like)

    return Model(lambda key: jax.tree.map(jnp.asarray, initial), apply)


def task(module: Module, epochs: int = 1) -> Task:
    """Return the task for the `Settings` of a server; the clients know loss and local work.

    Args:
        module: The module.
        epochs: How often clients visit their examples at most, for the range of a secure sum.
    """
    return Task(model(module), lambda outputs, y: outputs, Plan(1, epochs, "epochs"))


def to_array(tensor: Tensor) -> np.ndarray:
    """Return a copy as an array, with bfloat16 of JAX, and float64 only if JAX has it enabled."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy().view(jnp.bfloat16))
    return np.array(tensor.numpy(), jax.dtypes.canonicalize_dtype(tensor.numpy().dtype))


def to_tensor(array: Any) -> Tensor:
    """Return a copy of an array as a tensor; PyTorch cannot read the bfloat16 of JAX."""
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)
