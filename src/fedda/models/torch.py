"""Convert PyTorch modules and losses to JAX, and copy trained parameters back."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, random
from torch import Tensor
from torch.nn import Module, Parameter

from fedda.errors import InputError
from fedda.models import Model, Params
from fedda.models.torch_environment import computing, environment
from fedda.models.torch_operations import refused_batch_norm

DTYPES = {
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
}

# What JAX raises where a program would have to know the values of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def from_torch(module: Module, trainable: Callable[[str], bool] | None = None) -> Model:
    """Return a model from a PyTorch module.

    Every run starts from the weights that the module has now, whatever its seed. The module itself
    is not changed; `Result.to` copies the trained parameters into it. Dropout and other random
    layers follow the run's seed, and are off in evaluation.

    Args:
        module: The module, on the CPU. Its `forward` takes a batch of inputs.
        trainable: `(name) -> bool`, chooses the parameters that are trained. None chooses all of
            them. Parameters with `requires_grad=False` are never trained. What is not trained is a
            constant: it is never sent and counts for no bytes.

    Returns:
        The model. Its parameters are a dictionary of arrays by name.

    Raises:
        InputError: The module has no parameters to train, parameters of an unsupported type or
            device, or a layer that mixes the examples of a batch, such as BatchNorm.
        MissingExtraError: torchax is not installed.

    Example:
        >>> import jax, numpy as np, torch
        >>> import fedda
        >>> network = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Dropout(0.5))
        >>> model = fedda.models.from_torch(network)
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 64), np.float32)).shape
        (3, 10)
    """
    environment()  # fail at once if torchax is missing
    named = parameters(module)
    module = unwrapped(module)
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            raise refused_batch_norm(f"layer {name!r} ({type(part).__name__})")
        if getattr(part, "max_norm", None) is not None:
            raise InputError(
                f"layer {name!r} ({type(part).__name__}) has max_norm, which changes the weights "
                "outside of the training steps, but a federated model changes by its steps alone. "
                "Leave out max_norm, or normalise the outputs by torch.nn.functional.normalize."
            )
    chosen = {
        name
        for name, parameter in named.items()
        if parameter.requires_grad and (trainable is None or trainable(name))
    }
    if not chosen:
        raise InputError(
            f"the module must have parameters to train, but all {len(named)} are frozen. Set "
            "requires_grad for some of them, or give another trainable."
        )
    arrays = {name: _constant(tensor, name) for name, tensor in _tensors(module).items()}
    initial = {name: array for name, array in arrays.items() if name in chosen}
    constants = {name: array for name, array in arrays.items() if name not in chosen}
    # The structure is copied, the tensors are not: a call replaces all of them.
    shared = {id(tensor): tensor for tensor in _tensors(module).values()}
    called = _Located(copy.deepcopy(module, shared))

    def run(params: Params, x: Any, key: Array, training: bool) -> Any:
        called.train(training)

        def forward(tensors: Mapping[str, Tensor], x: Tensor) -> Any:
            named = {f"module.{name}": tensor for name, tensor in tensors.items()}
            return torch.func.functional_call(called, named, (x,))

        outputs = _on_arrays(forward, ({**constants, **params}, x), key, called)
        if not all(isinstance(leaf, Array) for leaf in jax.tree.leaves(outputs)):
            raise InputError(
                f"the module must return a tensor, got {type(outputs).__name__}. Put it into a "
                "module that returns one, such as output.logits."
            )
        return outputs

    def apply(params: Params, x: Any) -> Any:
        return run(params, x, random.key(0), training=False)

    def train(params: Params, x: Any, key: Array) -> Any:
        return run(params, x, key, training=True)

    apply.__dict__["frozen"] = {name: constants[name] for name in named.keys() - chosen}
    return Model(lambda key: jax.tree.map(jnp.asarray, initial), apply, train)


def _tensors(module: Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name. Shared ones have one name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def _constant(tensor: Tensor, name: str) -> np.ndarray:
    if tensor.device.type != "cpu":
        raise InputError(
            f"the module must be on the CPU, got {name} on {tensor.device.type}. Move it by "
            "module.cpu(): JAX chooses the device of a run itself."
        )
    if tensor.dtype == torch.float64 and jnp.result_type(float) == jnp.float32:
        raise InputError(
            f"JAX computes in 32 bits by default, got {name} of torch.float64. Convert the module "
            'by module.float(), or first call jax.config.update("jax_enable_x64", True).'
        )
    return to_array(tensor)


class _Located(Module):
    """A module that knows which of its layers is running, and that no call may change."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.running: list[str] = []
        for name, part in module.named_modules():
            text = f"layer {name!r} ({type(part).__name__})" if name else f"{type(part).__name__}"
            part.register_forward_pre_hook(lambda *_, text=text: self.running.append(text))
            part.register_forward_hook(lambda *_: self.running.pop() and None)

    def forward(self, *args: Tensor) -> Any:
        self.running, before = [], self.kept()
        outputs = self.module(*args)
        if changed := dict(self.kept().items() - before.items()):
            raise InputError(
                f"the module changes its buffer or attribute {min(changed)!r} when it is called, "
                "but a federated model is its parameters alone. Remove the update, or compute the "
                "value from the inputs."
            )
        return outputs

    def kept(self) -> dict[str, tuple[int, ...]]:
        """Return what changes when a buffer or another tensor of the module is changed."""
        return {
            f"{path}.{name}".lstrip("."): (
                id(value),
                value._version,
                id(getattr(value, "_elem", 0)),
            )
            for path, part in self.module.named_modules()
            for name, value in {**part._buffers, **vars(part)}.items()
            if isinstance(value, Tensor)
        }


def _on_arrays(
    function: Callable[..., Any], arrays: tuple[Any, ...], key: Array, located: _Located
) -> Any:
    """Call a function of tensors with arrays, and return arrays."""
    arrays = jax.tree.map(jnp.asarray, arrays)
    try:
        with computing(key) as env:
            return env.t2j_iso(function(*env.j2t_iso(arrays)))
    except InputError:
        raise
    except Exception as error:
        where = located.running[-1] if located.running else type(located.module).__name__
        if isinstance(error, _NEEDS_VALUES):
            raise InputError(
                f"{where} decides in Python by the values of a tensor, but a compiled program "
                "must work for all values. Use torch.where in place of if, and shapes that do "
                "not depend on values."
            ) from error
        if type(error).__name__ == "OperatorNotFound":
            raise InputError(
                f"{where} uses an operation that cannot be converted to JAX: {error}. Replace "
                "the layer, or write it with other operations."
            ) from error
        raise RuntimeError(f"{where}: {error}") from error


# ------------------------------------------------------------------------------------- losses

_measures: WeakKeyDictionary[Module, Callable[[Any, Any], Any]] = WeakKeyDictionary()


def from_torch_loss(loss: Module) -> Callable[[Any, Any], Any]:
    """Return a loss that computes one number for each example from a loss module of PyTorch.

    Args:
        loss: A loss such as `torch.nn.CrossEntropyLoss()`. The number of an example is the mean
            over its outputs; positions with the label `ignore_index` do not count. Or a module of
            your own that returns one number for each example.

    Raises:
        InputError: The mean that the loss computes is not a mean over examples.

    Example:
        >>> import jax.numpy as jnp, torch
        >>> from fedda.models.torch import from_torch_loss
        >>> loss = from_torch_loss(torch.nn.MSELoss())
        >>> loss(jnp.array([[1.0, 3.0], [0.0, 0.0]]), jnp.zeros((2, 2))).tolist()
        [5.0, 0.0]
    """
    if loss in _measures:
        return _measures[loss]
    name = type(loss).__name__
    called: Any = copy.deepcopy(loss)
    if hasattr(called, "reduction"):
        if called.reduction not in ("mean", "none"):
            raise InputError(
                f"{name} must have reduction='mean' or 'none', got {called.reduction!r}: fedda "
                "takes the mean over the examples of a batch, or fedda.run(reduction='sum') the "
                "sum."
            )
        of_classes = isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
        if of_classes and called.weight is not None and called.reduction == "mean":
            raise InputError(
                f"the mean of {name} with weight=... divides by the weights of a batch, which is "
                "no mean over examples. Give reduction='none': fedda takes the mean of the "
                "weighted losses."
            )
        called.reduction = "none"
    located = _Located(called)

    def measure(outputs: Any, y: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using a target size")  # refused below
            values = _on_arrays(located, (outputs, y), random.key(0), located)
        if not hasattr(loss, "reduction"):
            return values
        if values.ndim >= outputs.ndim and outputs.shape != y.shape:
            # PyTorch compares all outputs with all labels, and only warns.
            raise InputError(
                f"{name} needs outputs and labels of the same shape, got {outputs.shape[1:]} and "
                f"{y.shape[1:]} for each example. Reshape the labels, for example by "
                "y.reshape(-1, 1), or the outputs."
            )
        counted = jnp.ones(values.shape, values.dtype)
        if hasattr(called, "ignore_index") and jnp.issubdtype(y.dtype, jnp.integer):
            counted = (y != called.ignore_index).astype(values.dtype)
        axes = tuple(range(1, values.ndim))
        return values.sum(axes) / jnp.maximum(counted.sum(axes), 1)

    measure.__name__ = name
    measure.__dict__.update(higher_is_better=False, of_classes=hasattr(called, "ignore_index"))
    _measures[loss] = measure
    return measure


# ---------------------------------------------------------------------------- parameters


def unwrapped(module: Module) -> Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    return getattr(module, "_orig_mod", module)


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
    params = dict(unwrapped(module).named_parameters())
    if not params:
        raise InputError("the module must have parameters, got none.")
    for name, parameter in params.items():
        if parameter.dtype not in DTYPES:
            raise InputError(
                "the parameters must be of float32, float64, float16 or bfloat16, got "
                f"{parameter.dtype} in {name}. Convert the module, for example by module.float()."
            )
    for name, part in unwrapped(module).named_modules():
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
    """Copy parameters into a module.

    Args:
        module: The module.
        params: The arrays by parameter name, such as `served.state.params`. Those of parameters
            with `requires_grad=False` may be missing, and are then left alone.

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
    needed = {name for name, parameter in targets.items() if parameter.requires_grad}
    if odd := sorted((params.keys() - targets.keys()) | (needed - params.keys())):
        raise InputError(
            f"the module has {len(targets)} parameters, got {len(params)} arrays with other names, "
            f"for example {odd[0]}. Build the same module as in training."
        )
    for name, array in params.items():
        if targets[name].shape != array.shape:
            raise InputError(
                f"{name} has shape {tuple(targets[name].shape)} in the module, got an array of "
                f"shape {tuple(array.shape)}. Build the same module as in training."
            )
    with torch.no_grad():
        for name, array in params.items():
            targets[name].copy_(to_tensor(array))


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
