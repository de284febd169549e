"""The convolutional networks of the federated EMNIST and CIFAR-100 experiments."""

from collections.abc import Callable
from functools import partial

from flax import nnx
from jax import Array, lax
from jax import numpy as jnp
from jax.tree_util import DictKey, tree_leaves_with_path

from fedda.models import Model, Params, built_in, from_nnx
from fedda.models.conv import Convolution, max_pool, max_pool_same, patches_conv

CHANNELS = (64, 64, 128, 128, 256, 256, 512, 512)  # the output channels of the ResNet's blocks

Conv = Callable[[int, int, tuple[int, int]], nnx.Conv]  # (inputs, outputs, kernel size)
Norm = Callable[[int], nnx.GroupNorm]  # (channels)


class CNN(nnx.Module):
    """Two 3x3 convolutions, 2x2 max-pooling, dropout, a hidden layer, dropout, logits."""

    def __init__(
        self, size: int, channels: int, classes: int, convolution: Convolution, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.glorot_uniform()
        conv = partial(nnx.Conv, kernel_size=(3, 3), padding="VALID", kernel_init=init, rngs=rngs)
        pooled = (size - 4) // 2
        self.conv1 = conv(channels, 32, conv_general_dilated=convolution)
        self.conv2 = conv(32, 64, conv_general_dilated=convolution)
        self.dropout1, self.dropout2 = nnx.Dropout(0.25, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(pooled * pooled * 64, 128, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(128, classes, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        # Without the barrier, XLA fuses two sums of the gradient into one kernel: slow on a GPU.
        x = lax.optimization_barrier(nnx.relu(self.conv1(x)))
        # Bias and ReLU keep the position of the maximum. After the pooling they are cheaper.
        bias = self.conv2.bias
        assert bias is not None
        x = self.conv2.conv_general_dilated(
            x, self.conv2.kernel[...], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = nnx.relu(max_pool(x) + bias[None, None, None])
        x = self.dropout1(x).reshape(x.shape[0], -1)
        return self.out(self.dropout2(nnx.relu(self.hidden(x))))


@built_in
def cnn(size: int, channels: int, classes: int, convolution: Convolution = patches_conv) -> Model:
    """Return the small convolutional network of the federated EMNIST experiments.

    Two 3x3 convolutions with 32 and 64 channels, 2x2 max-pooling, a hidden layer of 128 units, and
    dropout. With 28x28 images of one channel and 62 classes it has 1,206,590 parameters.

    Args:
        size: Height and width of an image in pixels.
        channels: The number of channels of an image.
        classes: The number of outputs.
        convolution: A function with the arguments of `lax.conv_general_dilated`. The default is
            fast when many clients are trained together.

    Returns:
        A model for inputs of shape [examples, size, size, channels].

    Example:
        >>> import jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.cnn(size=28, channels=1, classes=62)
        >>> sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))
        1206590
    """
    return from_nnx(lambda rngs: CNN(size, channels, classes, convolution, rngs))


class Block(nnx.Module):
    """A residual block: two convolutions, both after a norm and a ReLU, plus the block's input.

    If the number of channels changes, the shortcut is a 1x1 convolution and a norm. A block whose
    input is `normed` already has no norm before its first convolution.
    """

    def __init__(
        self, inputs: int, outputs: int, conv: Conv, norm: Norm, normed: bool = False
    ) -> None:
        self.norm1 = None if normed else norm(inputs)
        self.conv1 = conv(inputs, outputs, (3, 3))
        self.norm2 = norm(outputs)
        self.conv2 = conv(outputs, outputs, (3, 3))
        same = inputs == outputs
        self.shortcut = (
            None if same else nnx.Sequential(conv(inputs, outputs, (1, 1)), norm(outputs))
        )

    def __call__(self, x: Array) -> Array:
        y = x if self.norm1 is None else nnx.relu(self.norm1(x))
        y = self.conv2(nnx.relu(self.norm2(self.conv1(y))))
        return y + (x if self.shortcut is None else self.shortcut(x))


class ResNet18(nnx.Module):
    def __init__(
        self, classes: int, affine: bool, convolution: Convolution, rngs: nnx.Rngs
    ) -> None:
        conv = partial(
            nnx.Conv,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            conv_general_dilated=convolution,
            rngs=rngs,
        )
        # The fast variance E[x²] - E[x]² suffers from cancellation if the mean is large.
        exact = partial(nnx.GroupNorm, num_groups=2, epsilon=1e-3, use_fast_variance=False)
        norm = partial(exact, use_bias=affine, use_scale=affine, rngs=rngs)
        self.stem = conv(3, 64, (7, 7), 2)
        self.stem_norm = norm(64)
        inputs = (64, *CHANNELS[:-1])
        self.blocks = nnx.List(
            Block(before, after, conv, norm, normed=number == 0)
            for number, (before, after) in enumerate(zip(inputs, CHANNELS, strict=True))
        )
        self.norm = norm(512)
        init = nnx.initializers.normal(0.01)
        self.out = nnx.Linear(512, classes, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = max_pool_same(nnx.relu(self.stem_norm(self.stem(x))), size=3, stride=2)
        for block in self.blocks:
            x = block(x)
        return self.out(nnx.relu(self.norm(x)).mean((1, 2)))


@built_in
def resnet18(
    classes: int = 100,
    affine: bool = True,
    l2: float = 1e-4,
    convolution: Convolution = patches_conv,
) -> Model:
    """Return the ResNet-18 of the federated CIFAR-100 experiments.

    It is a pre-activation ResNet with group normalisation. Its blocks have stride 1: images of
    24x24 pixels have 6x6 positions after the stem and in every block. With 100 classes it has
    11,227,812 parameters, or 11,218,212 without scales and offsets of the norms.

    Args:
        classes: The number of outputs.
        affine: Whether the norms have a scale and an offset.
        l2: The weight decay. The training loss includes `l2` times the sum of squares of all
            kernels and of the last layer's bias, so the gradient includes 2 `l2` w. Scales and
            offsets do not decay.
        convolution: A function with the arguments of `lax.conv_general_dilated`. The default is
            fast when many clients are trained together.

    Returns:
        A model for inputs of shape [examples, height, width, 3].

    Example:
        >>> import jax
        >>> import fedda
        >>> model = fedda.models.resnet18(classes=100)
        >>> sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))
        11227812
    """

    def penalty(params: Params) -> Array:
        decaying = [params["out"]["bias"]] + [
            leaf for path, leaf in tree_leaves_with_path(params) if path[-1] == DictKey("kernel")
        ]
        return l2 * jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in decaying]).sum()

    model = from_nnx(lambda rngs: ResNet18(classes, affine, convolution, rngs))
    return model._replace(penalty=penalty) if l2 else model
