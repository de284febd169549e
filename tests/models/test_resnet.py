"""The residual network's size, start and weight decay; `test_torch.py` has what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from fedda.core import tree
from fedda.models import resnet18

STAGES = (64, 128, 256, 512)
L2 = 1e-4


def kernels():
    """The shapes of all convolutions, from the description: 3x3, and 1x1 where channels change."""
    shapes, before = [(7, 7, 3, 64)], 64
    for channels in STAGES:
        shapes += [(3, 3, before, channels)] + 3 * [(3, 3, channels, channels)]
        shapes += [(1, 1, before, channels)] if before != channels else []
        before = channels
    return shapes


def normed_channels():
    """Before each convolution of a block but the very first, after each shortcut, and two more."""
    before_convolutions = [shape[2] for shape in kernels() if shape[0] == 3][1:]
    return 64 + sum(before_convolutions) + sum(STAGES[1:]) + 512


@pytest.mark.parametrize("affine", [True, False])
def test_number_of_parameters(affine):
    params = jax.eval_shape(resnet18(affine=affine).init, random.key(0))
    dense = (512 + 1) * 100
    expected = sum(map(np.prod, kernels())) + dense + 2 * normed_channels() * affine
    assert tree.size(params) == expected == (11_227_812 if affine else 11_218_212)


@pytest.fixture(scope="module")
def params():
    return jax.jit(resnet18().init)(random.key(0))


def split(params):
    """Convolutions, the last layer, and scales and offsets of the norms."""
    leaves = [
        (jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)
    ]
    convolutions = [np.asarray(leaf, np.float64) for _, leaf in leaves if leaf.ndim == 4]
    last = params["out"]
    norms = [(name, leaf) for name, leaf in leaves if leaf.ndim == 1 and "'out'" not in name]
    assert len(convolutions) + 2 + len(norms) == len(leaves)
    return convolutions, last, norms


def test_convolutions_start_from_truncated_he_normal(params):
    convolutions, _, _ = split(params)
    assert sorted(kernel.shape for kernel in convolutions) == sorted(kernels())
    # A normal distribution that is cut at two of its deviations keeps .8796 of its deviation.
    cut = 2 / 0.87962566103423978
    for kernel in convolutions:
        deviation = np.sqrt(2 / np.prod(kernel.shape[:3]))
        z = kernel / deviation
        # The variance of a square is below 2, its value for the whole normal distribution. Five
        # deviations are exceeded once in two million.
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(np.mean(z**2) - 1) < 5 * np.sqrt(2 / z.size)
        # Within 2 % of the cut is 1 of 212 numbers, and every kernel has 8,192 at least.
        assert 0.98 * cut < np.abs(z).max() <= cut * (1 + 1e-6)


def test_last_layer_starts_from_a_narrow_normal(params):
    _, last, _ = split(params)
    z = np.asarray(last["kernel"], np.float64) / 0.01
    assert z.shape == (512, 100)
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(np.mean(z**2) - 1) < 5 * np.sqrt(2 / z.size)
    assert np.abs(z).max() > 3  # not truncated: 1 of 370 numbers is beyond 3 deviations
    np.testing.assert_array_equal(last["bias"], 0)


def test_norms_start_as_the_identity(params):
    _, _, norms = split(params)
    assert sum(leaf.size for _, leaf in norms) == 2 * normed_channels()
    for name, leaf in norms:
        np.testing.assert_array_equal(leaf, 1 if name.endswith("['scale']") else 0)


def test_kernels_and_the_last_bias_decay(params):
    model = resnet18(l2=L2)
    params = jax.tree.map(lambda leaf: leaf + 0.01, params)  # the bias starts at 0
    value, gradient = jax.jit(jax.value_and_grad(model.penalty))(params)
    kernels, last, norms = split(params)
    decaying = [*kernels, *(np.asarray(leaf, np.float64) for leaf in last.values())]
    expected = L2 * sum(np.sum(leaf**2) for leaf in decaying)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert sum(leaf.size for leaf in decaying) == 11_218_212
    of_kernels, of_last, of_norms = split(gradient)
    for weight, found in zip(decaying, [*of_kernels, *of_last.values()], strict=True):
        np.testing.assert_allclose(found, 2 * L2 * weight, rtol=1e-6)
    assert len(of_norms) == len(norms)
    for _, leaf in of_norms:
        np.testing.assert_array_equal(leaf, 0)


def test_without_weight_decay_there_is_no_penalty():
    assert resnet18(l2=0).penalty is None


def test_images_and_clients_do_not_meet(params):
    """A norm over a batch would let them; and parameters may differ from client to client."""
    apply = resnet18().apply
    x = random.normal(random.key(1), (2, 24, 24, 3))
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.1 * leaf]), params)
    together = jax.jit(jax.vmap(apply, in_axes=(0, None)))(both, x)
    assert together.shape == (2, 2, 100)
    alone = jax.jit(apply)
    for client in range(2):
        theirs = jax.tree.map(lambda leaf, client=client: leaf[client], both)
        for image in range(2):
            np.testing.assert_allclose(
                together[client, image], alone(theirs, x[image : image + 1])[0], rtol=0, atol=1e-5
            )
    assert np.abs(together[0] - together[1]).max() > 1e-2
