"""The residual network of the federated CIFAR-100 experiments.

It normalises before it convolves, in groups instead of over a batch, and no stage reduces the
image: after the stem, 24x24 pixels are 6x6 in every block. With 100 classes it has 11,227,812
parameters, or 11,218,212 if the norms have no scale and offset.
"""

from typing import NamedTuple

from flax import nnx
from jax import Array
from jax import numpy as jnp
from jax.tree_util import DictKey, tree_leaves_with_path

from fedda.models import Model, Params, from_nnx
from fedda.models.conv import Convolution, max_pool_same, patches_conv

CHANNELS = (64, 64, 128, 128, 256, 256, 512, 512)  # of the blocks


class Layers(NamedTuple):
    """Makes the layers of one network."""

    affine: bool
    convolution: Convolution
    rngs: nnx.Rngs

    def conv(self, inputs: int, outputs: int, size: int, stride: int = 1) -> nnx.Conv:
        return nnx.Conv(
            inputs,
            outputs,
            (size, size),
            stride,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            conv_general_dilated=self.convolution,
            rngs=self.rngs,
        )

    def norm(self, channels: int) -> nnx.GroupNorm:
        return nnx.GroupNorm(
            channels,
            num_groups=2,
            epsilon=1e-3,
            use_bias=self.affine,
            use_scale=self.affine,
            use_fast_variance=False,  # E[x²] - E[x]² cancels where the mean is large
            rngs=self.rngs,
        )


class Block(nnx.Module):
    """Two convolutions, each after norm and ReLU, are added to the block's own input.

    Where the number of channels changes, a 1x1 convolution and a norm adapt the input. One that is
    `normed` already is not normed again before the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, layers: Layers, normed: bool = False) -> None:
        self.norm1 = None if normed else layers.norm(inputs)
        self.conv1 = layers.conv(inputs, outputs, 3)
        self.norm2 = layers.norm(outputs)
        self.conv2 = layers.conv(outputs, outputs, 3)
        self.shortcut = (
            None
            if inputs == outputs
            else nnx.Sequential(layers.conv(inputs, outputs, 1), layers.norm(outputs))
        )

    def __call__(self, x: Array) -> Array:
        y = x if self.norm1 is None else nnx.relu(self.norm1(x))
        y = self.conv2(nnx.relu(self.norm2(self.conv1(y))))
        return y + (x if self.shortcut is None else self.shortcut(x))


class ResNet18(nnx.Module):
    def __init__(self, classes: int, layers: Layers) -> None:
        self.stem = layers.conv(3, 64, 7, stride=2)
        self.stem_norm = layers.norm(64)
        inputs = (64, *CHANNELS[:-1])
        self.blocks = nnx.List(
            Block(before, after, layers, normed=number == 0)
            for number, (before, after) in enumerate(zip(inputs, CHANNELS, strict=True))
        )
        self.norm = layers.norm(512)
        init = nnx.initializers.normal(0.01)
        self.out = nnx.Linear(512, classes, kernel_init=init, rngs=layers.rngs)

    def __call__(self, x: Array) -> Array:
        x = max_pool_same(nnx.relu(self.stem_norm(self.stem(x))), size=3, stride=2)
        for block in self.blocks:
            x = block(x)
        return self.out(nnx.relu(self.norm(x)).mean((1, 2)))


def resnet18(
    classes: int = 100,
    affine: bool = True,
    l2: float = 1e-4,
    convolution: Convolution = patches_conv,
) -> Model:
    """The network and its weight decay: `l2` times the sum of squares, so 2 `l2` w in a gradient.

    Kernels decay and so does the bias of the last layer, but no scale or offset of a norm.
    """

    def penalty(params: Params) -> Array:
        decaying = [params["out"]["bias"]] + [
            leaf for path, leaf in tree_leaves_with_path(params) if path[-1] == DictKey("kernel")
        ]
        return l2 * jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in decaying]).sum()

    model = from_nnx(lambda rngs: ResNet18(classes, Layers(affine, convolution, rngs)))
    return model._replace(penalty=penalty) if l2 else model
