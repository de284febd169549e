"""Models and losses against PyTorch, which is told the same parameters and nothing else of ours.

What PyTorch computes is written from the descriptions of the networks, with channels first and
with TensorFlow's padding spelt out. Needs `pip install torch`; in CI it must be there.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from fedda.core import losses
from fedda.models import autoencoder, cnn, linear, resnet18
from fedda.models.conv import max_pool_same

if os.environ.get("CI"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

F = torch.nn.functional


def normal(number, shape, dtype=jnp.float32):
    return random.normal(random.key(number), shape, dtype)


def pad_same(x, size, stride, value=0.0):
    """TensorFlow's SAME: ⌈length / stride⌉ windows; of an odd padding, the larger part is last."""
    pads = []
    for length in (x.shape[3], x.shape[2]):  # the last axis first
        missing = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads, value=value)


def conv_same(x, layer, stride=1):
    kernel = layer["kernel"].permute(3, 2, 0, 1)
    return F.conv2d(pad_same(x, kernel.shape[-1], stride), kernel, stride=stride)


def norm(x, layer):
    return F.group_norm(x, 2, layer.get("scale"), layer.get("bias"), eps=1e-3)


def torch_resnet(params, x):
    def get(block, name):
        return params["blocks"][block].get(name, {})  # norms without parameters have no entry

    x = x.permute(0, 3, 1, 2)
    x = F.relu(norm(conv_same(x, params["stem"], stride=2), params.get("stem_norm", {})))
    x = F.max_pool2d(pad_same(x, 3, 2, value=-torch.inf), 3, 2)
    sides = [x.shape[2]]
    for block in range(8):
        y = x if block == 0 else F.relu(norm(x, get(block, "norm1")))
        y = conv_same(y, get(block, "conv1"))
        y = conv_same(F.relu(norm(y, get(block, "norm2"))), get(block, "conv2"))
        if block in (2, 4, 6):
            adapt = get(block, "shortcut")["layers"]
            x = norm(conv_same(x, adapt[0]), adapt.get(1, {}))
        x = x + y
        sides.append(x.shape[2])
    assert len(set(sides)) == 1  # no stage reduces the image
    x = F.relu(norm(x, params.get("norm", {}))).mean((2, 3))
    assert x.shape[1] == 512
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def torch_cnn(params, x):
    x = x.permute(0, 3, 1, 2)
    for name in ("conv1", "conv2"):
        x = F.relu(F.conv2d(x, params[name]["kernel"].permute(3, 2, 0, 1), params[name]["bias"]))
    x = F.max_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1)
    x = F.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def torch_autoencoder(params, x):
    for number, activation in enumerate(3 * "s" + "l" + 4 * "s"):
        layer = params["layers"][number]
        x = x @ layer["kernel"] + layer["bias"]
        x = torch.sigmoid(x) if activation == "s" else x
    return x


def torch_linear(params, x):
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def to_torch(array, learnt=False):
    return torch.tensor(np.asarray(array)).requires_grad_(learnt)


def compare(model, torch_model, loss, torch_loss, x, y, tolerance, dtype=jnp.float64):
    """Outputs and gradients; a leaf of a gradient may err by `tolerance` of its largest number."""
    rng = np.random.default_rng(0)
    shapes, structure = jax.tree.flatten(jax.eval_shape(model.init, random.key(0)))
    leaves = [
        rng.uniform(0.5, 1.5, leaf.shape).astype(dtype)  # scales, offsets, biases
        if leaf.ndim == 1
        else (rng.normal(size=leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))).astype(dtype)
        for leaf in shapes
    ]
    params, x = jax.tree.unflatten(structure, leaves), jnp.asarray(x, dtype)

    def ours(params):
        outputs = model.apply(params, x)
        return loss(outputs, y).mean(), outputs

    with jax.numpy_dtype_promotion("standard"):  # in float64, Flax's GroupNorm needs it
        (value, outputs), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    theirs = [to_torch(leaf, learnt=True) for leaf in leaves]
    their_outputs = torch_model(jax.tree.unflatten(structure, theirs), to_torch(x))
    their_value = torch_loss(their_outputs)
    their_value.backward()

    def close(found, expected):
        assert found.dtype == dtype
        expected = expected.detach().numpy()
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)

    close(outputs, their_outputs)
    close(value, their_value)
    for found, leaf in zip(jax.tree.leaves(gradient), theirs, strict=True):
        close(found, leaf.grad)


def against_labels(y):
    return lambda logits: F.cross_entropy(logits, to_torch(y).long())


# Some ten thousand operations, each of which errs by 1.1e-16 or by 6e-8 of its result.
DOUBLE, SINGLE = 1e-12, 1e-5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("affine", "size"), [(True, 24), (False, 32)], ids=str)
def test_resnet(affine, size):
    x, y = normal(1, (2, size, size, 3)), jnp.asarray([3, 99])
    compare(
        resnet18(affine=affine), torch_resnet, losses.cross_entropy, against_labels(y), x, y, DOUBLE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("affine", "size"), [(True, 32), (False, 24)], ids=str)
def test_resnet_in_single_precision(affine, size):
    x, y = normal(1, (2, size, size, 3)), jnp.asarray([3, 99])
    compare(
        resnet18(affine=affine), torch_resnet, losses.cross_entropy, against_labels(y), x, y,
        SINGLE, jnp.float32,
    )  # fmt: skip


@pytest.mark.usefixtures("x64")
def test_cnn():
    x, y = normal(1, (3, 28, 28, 1)), jnp.asarray([3, 61, 0])
    compare(cnn(28, 1, 62), torch_cnn, losses.cross_entropy, against_labels(y), x, y, DOUBLE)


@pytest.mark.usefixtures("x64")
def test_autoencoder():
    x = jax.nn.sigmoid(normal(1, (3, 784), jnp.float64))
    compare(
        autoencoder(), torch_autoencoder, losses.squared_error,
        lambda outputs: F.mse_loss(outputs, to_torch(x)), x, x, DOUBLE,
    )  # fmt: skip


@pytest.mark.usefixtures("x64")
def test_logistic_regression():
    tags = jnp.asarray([[1, 0], [2, 65535], [65535, 65535]], jnp.uint16)
    has = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).double()
    compare(
        linear(20, 5), torch_linear, losses.tag_cross_entropy,
        lambda logits: F.binary_cross_entropy_with_logits(logits, has),
        20 * normal(1, (3, 20)), tags, DOUBLE,
    )  # fmt: skip


@pytest.mark.parametrize("length", [12, 16, 7])
def test_overlapping_maxima(length):
    x = jnp.round(2 * normal(0, (2, length, length, 3))) - 3  # negative, and with equal numbers
    outputs, pull = jax.vjp(lambda x: max_pool_same(x, 3, 2), x)
    theirs = to_torch(x, learnt=True)
    maxima = F.max_pool2d(pad_same(theirs.permute(0, 3, 1, 2), 3, 2, -torch.inf), 3, 2)
    maxima = maxima.permute(0, 2, 3, 1)
    np.testing.assert_array_equal(outputs, maxima.detach())
    maxima.square().sum().backward()
    np.testing.assert_array_equal(pull(2 * outputs)[0], theirs.grad)  # sums of whole numbers
