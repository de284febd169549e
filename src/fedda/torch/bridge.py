"""PyTorch modules as the rest of the library sees models, and back.

The parameters of a module are to the server a flat dictionary from their names to arrays.
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
    """The parameters of a module by their names, if it is one that can be federated."""
    if not isinstance(module, Module):
        raise InputError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    found = dict(module.named_parameters())
    if not found:
        raise InputError("the module must have parameters, got none.")
    for name, parameter in found.items():
        if parameter.dtype not in DTYPES:
            raise InputError(
                "the parameters must be of float32, float64, float16 or bfloat16, got "
                f"{parameter.dtype} in {name}. Convert the module, for instance by module.float()."
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise private_buffer(f"{type(part).__name__} {name!r} keeps running statistics")
    return found


def private_buffer(what: str) -> InputError:
    return InputError(
        f"{what}, but a federated model is its parameters alone: such a buffer would stay with the "
        "client. Use layers that keep none, such as GroupNorm or LayerNorm in place of BatchNorm."
    )


def load(module: Module, params: Mapping[str, Any]) -> None:
    """Gives a module the parameters of a server's state."""
    own = parameters(module)
    if own.keys() != params.keys():
        odd = sorted(own.keys() ^ params.keys())[0]
        raise InputError(
            f"the module has {len(own)} parameters, got {len(params)} arrays with other names, "
            f"{odd} among them. Build the module as on the server."
        )
    for name, parameter in own.items():
        if parameter.shape != params[name].shape:
            raise InputError(
                f"{name} has shape {tuple(parameter.shape)} in the module, got an array of shape "
                f"{tuple(params[name].shape)}. Build the module as on the server."
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(to_tensor(params[name]))


def model(module: Module) -> Model:
    """The module for the server: its parameters now are those of the first round.

    The server does not compute with it. What asks `apply` for the shapes of uploads is answered;
    what asks for numbers, as an evaluation does, is refused.
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
    """What the `Settings` of a server need of a module; the clients know all else.

    `epochs` is how often clients see their examples at most: a secure sum has room for as many.
    """
    return Task(model(module), _outputs, Plan(1, epochs, "epochs"))


def _outputs(outputs: Any, y: Any) -> Any:
    return outputs


def to_array(tensor: Tensor) -> np.ndarray:
    """A copy as NumPy has it, or as JAX's NumPy has bfloat16; float64 only where JAX has that."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy().view(jnp.bfloat16))
    return np.array(tensor.numpy(), jax.dtypes.canonicalize_dtype(tensor.numpy().dtype))


def to_tensor(array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)
