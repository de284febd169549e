"""The torchax environment: it runs operations of PyTorch on arrays of JAX."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import jax
import torch
from jax import Array, lax, random

from fedda.errors import InputError, import_extra
from fedda.models.torch_operations import replacements


@cache
def environment() -> Any:
    """Return the torchax environment that runs operations of PyTorch on JAX arrays."""
    with _without_side_effects(), _with_removed_operations():
        tensor = import_extra("torchax.tensor", "torch", "train a PyTorch module")
        registry = import_extra("torchax.ops.ops_registry", "torch", "train a PyTorch module")
        mappings = import_extra("torchax.ops.mappings", "torch", "train a PyTorch module")
        # Otherwise torch.accelerator would offer JAX as a device for modules.
        torch.get_device_module("jax").is_available = lambda: False
        # The original `type_as` also changes its argument, and `data` has a gradient.
        tensor.Tensor.type_as = lambda self, other: self.to(other.dtype)
        tensor.Tensor.data = property(lambda self: self.detach())

        class Environment(tensor.Environment):  # type: ignore[misc, name-defined]
            def t2j_iso(self, values: Any) -> Any:
                """Convert also tensors of PyTorch, such as those that a module closes over."""

                def convert(value: Any) -> Any:
                    plain = not isinstance(value, tensor.Tensor | tensor.View)
                    return mappings.t2j(value.detach(), False) if plain else value.jax()

                return tensor.torch_pytree.tree_map_only(torch.Tensor, convert, values)

            def get_and_rotate_prng_key(self, generator: Any = None) -> Array:
                return next(self.param.prng)

        class FunctionMode(tensor.XLAFunctionMode):  # type: ignore[misc, name-defined]
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                """Let no gradient through under `torch.no_grad`."""
                result = super().__torch_function__(func, types, args, kwargs)
                if torch.is_grad_enabled() or (args and result is args[0]):
                    return result

                def stopped(value: Any) -> Any:
                    return self.env.j2t_iso(lax.stop_gradient(self.env.t2j_iso(value)))

                # The result may also be a device or a shape.
                return tensor.torch_pytree.tree_map_only(torch.Tensor, stopped, result)

        env = Environment()
        env._function_mode = FunctionMode(env)
    for operation, (function, needs_key) in replacements(env).items():
        env._ops[operation] = registry.Operator(
            operation, function, is_jax_function=True, is_user_defined=True,
            needs_env=needs_key, is_view_op=False,
        )  # fmt: skip
    return env


@contextmanager
def computing(key: Array) -> Iterator[Any]:
    """Run operations of PyTorch in JAX, with random numbers from a key. Yields the environment."""
    env, fast_attention = environment(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it uses operations that torchax lacks
    function: Any = torch.autograd.Function
    usual, function.apply = vars(function)["apply"], classmethod(_refuse_function)
    try:
        with (
            warnings.catch_warnings(),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            env.override_property(prng=(random.fold_in(key, n) for n in count())),
            torch.enable_grad(),
            env,
            torch.device("jax"),
        ):
            # PyTorch counts in 64 bits, which JAX has only if they are enabled.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            yield env
    finally:
        function.apply = usual
        torch.backends.mha.set_fastpath_enabled(fast_attention)


def _refuse_function(function: type, *_: Any) -> None:
    raise InputError(
        f"the module uses the torch.autograd.Function {function.__name__}, but JAX would ignore "
        "its backward. Write it with operations of PyTorch; x + (y - x).detach() has the value of "
        "y and the gradient of x."
    )


class _Removed:
    """Stands for an operation that PyTorch no longer has."""

    def __getattr__(self, name: str) -> "_Removed":
        return _Removed()


@contextmanager
def _with_removed_operations() -> Iterator[None]:
    """Let torchax 0.0.13 be imported with newer versions of PyTorch.

    torchax has tables with operations as keys. Some of these are removed from PyTorch: those on
    named tensors in 2.13, `cholesky` in 2.15. Their rows in the tables are never used.
    """
    classes: tuple[Any, ...] = (torch._ops._OpNamespace, torch._ops.OpOverloadPacket)
    originals = {kind: kind.__getattr__ for kind in classes}

    def lookup(self: Any, name: str) -> Any:
        try:
            return originals[type(self)](self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _Removed()

    for kind in classes:
        kind.__getattr__ = lookup
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__getattr__ = original


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Undo the global settings that torchax changes when it is imported."""
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    variables = dict(os.environ)
    client = getattr(jax.config, "jax_pjrt_client_create_options", None)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        if client is not None:
            jax.config.update("jax_pjrt_client_create_options", client)
