"""Operations of PyTorch in JAX that torchax lacks, or that are faster here."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax, random

from fedda.errors import InputError
from fedda.models.conv import first_maximum, patches_conv, shifts

aten, functional = torch.ops.aten, torch.nn.functional


def replacements(env: Any) -> Mapping[Any, tuple[Callable[..., Any], bool]]:
    """Return functions of arrays in place of operations, and whether they need random keys.

    Args:
        env: The torchax environment, whose own operations serve in unusual cases.
    """
    conv = partial(_convolution, env._ops[aten.convolution].func)
    pool = partial(_max_pool, 2, env._ops[functional.max_pool2d].func)
    return {
        aten.convolution: (conv, False),
        functional.max_pool2d: (pool, False),
        aten.avg_pool1d: (partial(_avg_pool, 1), False),
        aten.avg_pool2d: (partial(_avg_pool, 2), False),
        aten.avg_pool3d: (partial(_avg_pool, 3), False),
        aten.native_group_norm: (_group_norm, False),
        functional.batch_norm: (_batch_norm, False),
        functional.embedding_bag: (_embedding_bag, False),
        functional.dropout: (_dropout, True),
        torch.dropout: (_dropout, True),
        functional.gumbel_softmax: (_gumbel_softmax, True),
        aten.exponential_: (partial(_fixed_noise, "exponential_"), False),
        aten.cauchy_: (partial(_fixed_noise, "cauchy_"), False),
        torch.lstm: (partial(_recurrent, _lstm), True),
        torch.gru: (partial(_recurrent, _gru), True),
        torch.rnn_tanh: (partial(_recurrent, partial(_rnn, jnp.tanh)), True),
        torch.rnn_relu: (partial(_recurrent, partial(_rnn, jax.nn.relu)), True),
    }


# ------------------------------------------------------------------- convolution and pooling


def _convolution(
    general: Callable[..., Array],
    x: Array,
    kernel: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """Return a convolution as image patches times a matrix, which is fast under `vmap`."""
    if kernel.ndim > 4 or groups != 1 or set(dilation) != {1} or x.ndim != kernel.ndim:
        if transposed and groups != 1:
            # torchax 0.0.13 takes the kernel of each group from the wrong places.
            parts = kernel.reshape(groups, -1, *kernel.shape[1:])
            kernel = parts.swapaxes(0, 1).reshape(kernel.shape)
        return general(
            x, kernel, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    if kernel.ndim == 3:  # one axis of places: images of height 1
        x, kernel = x[:, :, None], kernel[:, :, None]
        stride, padding, output_padding = (1, *stride), (0, *padding), (0, *output_padding)
        one = (1,)
        out = _convolution(
            general, x, kernel, bias, stride, padding, one, transposed, output_padding, 1
        )
        return out[:, :, 0]
    x, kernel = x.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)
    pads = [(pad, pad) for pad in padding]
    if transposed:
        # The transpose of the convolution that makes `x` of larger images.
        height, width = (
            (n - 1) * s - 2 * p + k + more
            for n, s, p, k, more in zip(
                x.shape[1:3], stride, padding, kernel.shape[:2], output_padding, strict=True
            )
        )
        larger = jnp.zeros((len(x), height, width, kernel.shape[2]), x.dtype)
        _, pull = jax.vjp(lambda images: patches_conv(images, kernel, stride, pads), larger)
        (out,) = pull(x)
    else:
        out = patches_conv(x, kernel, stride, pads)
    out = out if bias is None else out + bias
    return out.transpose(0, 3, 1, 2)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Return one number for each axis of places. PyTorch takes one number for all of them, too."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _outside(length: int, size: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Return how far the last window reaches beyond the padding, with `ceil_mode`."""
    if not ceil_mode:
        return 0
    last = -(-(length + 2 * padding - size) // stride) * stride  # where the last window starts
    if last >= length + padding:  # PyTorch has no window that starts in the padding at the end
        last -= stride
    return max(0, last + size - length - 2 * padding)


def _windows(
    combine: Callable[[Array, Array], Array],
    x: Array,
    windows: Sequence[tuple[int, int, int, int]],
    fill: float,
) -> Array:
    """Combine the numbers of each window, along one axis of places after the other.

    On a CPU this is several times faster than a window reduction, and so is its gradient. The
    channels are the last axis meanwhile, as in a convolution.

    Args:
        combine: A function such as the maximum.
        x: Images of shape [..., channels, *places].
        windows: Size, stride, padding and what `_outside` returns, for each axis of places.
        fill: The number outside of the images.
    """
    axes = len(windows)
    x = jnp.moveaxis(x, -axes - 1, -1)
    for axis, (size, stride, padding, outside) in reversed(list(enumerate(windows))):
        pads = [(0, 0)] * x.ndim
        place = axis - axes - 1
        pads[place] = (padding, padding + outside)
        padded = jnp.pad(x, pads, constant_values=fill)
        x = reduce(combine, shifts(padded, x.ndim + place, size, stride))
    return jnp.moveaxis(x, -1, -axes - 1)


def _described(
    x: Array, axes: int, size: Any, stride: Any, padding: Any, ceil_mode: bool
) -> list[tuple[int, int, int, int]]:
    sizes, paddings = _each(size, axes), _each(padding, axes)
    strides = _each(stride, axes) if stride else sizes
    return [
        (k, s, p, _outside(n, k, s, p, ceil_mode))
        for n, k, s, p in zip(x.shape[-axes:], sizes, strides, paddings, strict=True)
    ]


def _max_pool(
    axes: int,
    general: Callable[..., Any],
    x: Array,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices or set(_each(dilation, axes)) != {1}:
        return general(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

    # Of equal numbers the first gets the gradient, as in PyTorch.
    windows = _described(x, axes, kernel_size, stride, padding, ceil_mode)
    return _windows(first_maximum, x, windows, -jnp.inf)


def _avg_pool(
    axes: int,
    x: Array,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    windows = _described(x, axes, kernel_size, stride, padding, ceil_mode)
    total = _windows(jnp.add, x, windows, 0.0)
    if divisor_override:
        return total / divisor_override
    counts = np.ones(())
    for length, (size, stride, pad, outside) in zip(x.shape[-axes:], windows, strict=True):
        starts = np.arange(-pad, length + pad + outside - size + 1, stride)
        first, last = (-pad, length + pad) if count_include_pad else (0, length)
        inside = np.minimum(starts + size, last) - np.maximum(starts, first)
        counts = counts[..., None] * inside
    return total / jnp.asarray(counts, total.dtype)


# ------------------------------------------------- normalisation, embedding bags and dropout


def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[Array, None, None]:
    grouped = x.reshape(batch, groups, -1)
    mean = grouped.mean(-1, keepdims=True)
    variance = jnp.square(grouped - mean).mean(-1, keepdims=True)
    out = ((grouped - mean) * lax.rsqrt(variance + eps)).reshape(x.shape)
    shape = (-1, *(1,) * (x.ndim - 2))
    out = out if weight is None else out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape), None, None


def refused_batch_norm(what: str) -> InputError:
    """Return the error for a layer whose outputs for an example depend on other examples."""
    return InputError(
        f"{what} normalises over the examples of a batch, but a federated model is its parameters "
        "alone, without statistics of one client's batches. Replace it by "
        "torch.nn.GroupNorm(groups, channels) or torch.nn.LayerNorm."
    )


def _batch_norm(*_: Any, **__: Any) -> None:
    raise refused_batch_norm("batch_norm")


BAGS = ("sum", "mean", "max")


def _embedding_bag(
    words: Array,
    weight: Array,
    offsets: Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Array:
    if words.ndim != 2 or offsets is not None:
        raise InputError(
            "an EmbeddingBag takes words of shape (examples, words) here, without offsets, got the "
            f"shape {words.shape}. Pad the texts to one length, and set padding_idx."
        )
    unlike = (per_sample_weights is not None and mode != "sum") or mode not in BAGS
    if max_norm is not None or scale_grad_by_freq or unlike:
        raise InputError(
            f"an EmbeddingBag has one of the modes {', '.join(BAGS)} here, no max_norm, no "
            "scale_grad_by_freq, and per_sample_weights only with the mode sum, as in PyTorch; got "
            f"mode={mode!r}, {max_norm=}, {scale_grad_by_freq=}. Change it."
        )
    counted = jnp.ones(words.shape, bool)
    if padding_idx is not None:
        counted = words != padding_idx % len(weight)
    rows, present = weight[words], counted[..., None]
    if mode == "max":
        largest = jnp.where(present, rows, -jnp.inf).max(1)
        return jnp.where(counted.any(1, keepdims=True), largest, 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    total = jnp.where(present, rows, 0).sum(1)
    return total if mode == "sum" else total / jnp.maximum(counted.sum(1, keepdims=True), 1)


def _dropout(
    x: Array, p: float = 0.5, training: bool = True, inplace: bool = False, env: Any = None
) -> Array:
    if not training or p == 0:
        return x
    kept = random.bernoulli(env.get_and_rotate_prng_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0) if p < 1 else jnp.zeros_like(x)


def _gumbel_softmax(
    logits: Array,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
    env: Any = None,
) -> Array:
    noise = random.gumbel(env.get_and_rotate_prng_key(), logits.shape, logits.dtype)
    soft = jax.nn.softmax((logits + noise) / tau, dim)
    if not hard:
        return soft
    chosen = jax.nn.one_hot(soft.argmax(dim), soft.shape[dim], axis=dim, dtype=soft.dtype)
    return lax.stop_gradient(chosen - soft) + soft


def _fixed_noise(name: str, *_: Any, **__: Any) -> None:
    """Refuse an operation whose random numbers do not follow the key in torchax 0.0.13."""
    raise InputError(
        f"the module uses {name}, whose random numbers would not follow the seed of the run. "
        "Compute them from torch.rand or torch.randn."
    )


# -------------------------------------------------------------------------- recurrent layers


def _lstm(state: tuple[Array, Array], inputs: Array, recur: Callable[[Array], Array]) -> Any:
    hidden, cell = state
    let_in, forget, new, out = jnp.split(inputs + recur(hidden), 4, -1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(let_in) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def _gru(state: tuple[Array], inputs: Array, recur: Callable[[Array], Array]) -> Any:
    (hidden,) = state
    (reset, update, new), old = jnp.split(inputs, 3, -1), jnp.split(recur(hidden), 3, -1)
    keep = jax.nn.sigmoid(update + old[1])
    new = jnp.tanh(new + jax.nn.sigmoid(reset + old[0]) * old[2])
    return ((1 - keep) * new + keep * hidden,)


def _rnn(
    activation: Callable[[Array], Array],
    state: tuple[Array],
    inputs: Array,
    recur: Callable[[Array], Array],
) -> Any:
    return (activation(inputs + recur(state[0])),)


def _recurrent(
    cell: Callable[..., Any],
    x: Array,
    states: Any,
    weights: Sequence[Array],
    has_bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
    env: Any,
) -> tuple[Array, ...]:
    """Return outputs and final states of a recurrent layer, whose steps are a compiled loop."""
    states = states if isinstance(states, tuple | list) else (states,)
    ways = 2 if bidirectional else 1
    if len(weights) != layers * ways * (4 if has_bias else 2):
        raise InputError("an LSTM with proj_size is not supported. Use one without.")
    x = x.swapaxes(0, 1) if batch_first else x
    finals = []
    for layer in range(layers):
        if layer:
            x = _dropout(x, dropout, training, env=env)
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            size = len(weights) // (layers * ways)
            w_in, w_hidden, *biases = weights[place * size : (place + 1) * size]
            b_in, b_hidden = biases or (jnp.zeros((), x.dtype),) * 2

            def step(state: Any, inputs: Array, w: Array = w_hidden, b: Array = b_hidden) -> Any:
                state = cell(state, inputs, lambda hidden: hidden @ w.T + b)
                return state, state[0]

            start = tuple(part[place] for part in states)
            final, out = lax.scan(step, start, x @ w_in.T + b_in, reverse=bool(way))
            finals.append(final)
            outputs.append(out)
        x = jnp.concatenate(outputs, -1)
    x = x.swapaxes(0, 1) if batch_first else x
    return x, *(jnp.stack(parts) for parts in zip(*finals, strict=True))
