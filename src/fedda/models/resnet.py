"""The residual network of the federated CIFAR-100 experiments.

It normalises before it convolves, in groups instead of over a batch, and no stage reduces the
image: after the stem, 24x24 pixels are 6x6 in every block. With 100 classes it has 11,227,812
parameters, or 11,218,212 if the norms have no scale and offset.
"""

from flax import nnx
from jax import Array
from jax import numpy as jnp
from jax.tree_util import DictKey, tree_leaves_with_path

from fedda.models import Model, Params, from_nnx
from fedda.models.conv import max_pool_same, patches_conv

CHANNELS = (64, 64, 128, 128, 256, 256, 512, 512)  # of the blocks


def convolution(inputs: int, outputs: int, size: int, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        stride,
        use_bias=False,
        kernel_init=nnx.initializers.he_normal(),
        conv_general_dilated=patches_conv,
        rngs=rngs,
    )


def norm(channels: int, affine: bool, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        num_groups=2,
        epsilon=1e-3,
        use_bias=affine,
        use_scale=affine,
        use_fast_variance=False,  # E[x²] - E[x]² cancels where the mean is large
        rngs=rngs,
    )


class Block(nnx.Module):
    """Two convolutions, each after norm and ReLU, are added to the block's own input.

    Where the number of channels changes, a 1x1 convolution and a norm adapt the input. One that is
    `normed` already is not normed again before the first convolution.
    """

    def __init__(
        self, inputs: int, outputs: int, affine: bool, rngs: nnx.Rngs, normed: bool = False
    ) -> None:
        self.norm1 = None if normed else norm(inputs, affine, rngs)
        self.conv1 = convolution(inputs, outputs, 3, rngs)
        self.norm2 = norm(outputs, affine, rngs)
        self.conv2 = convolution(outputs, outputs, 3, rngs)
        self.shortcut = (
            None
            if inputs == outputs
            else nnx.Sequential(convolution(inputs, outputs, 1, rngs), norm(outputs, affine, rngs))
        )

    def __call__(self, x: Array) -> Array:
        y = x if self.norm1 is None else nnx.relu(self.norm1(x))
        y = self.conv2(nnx.relu(self.norm2(self.conv1(y))))
        return y + (x if self.shortcut is None else self.shortcut(x))


class ResNet18(nnx.Module):
    def __init__(self, classes: int, affine: bool, rngs: nnx.Rngs) -> None:
        self.stem = convolution(3, 64, 7, rngs, stride=2)
        self.stem_norm = norm(64, affine, rngs)
        inputs = (64, *CHANNELS[:-1])
        self.blocks = nnx.List(
            Block(before, after, affine, rngs, normed=number == 0)
            for number, (before, after) in enumerate(zip(inputs, CHANNELS, strict=True))
        )
        self.norm = norm(512, affine, rngs)
        self.out = nnx.Linear(512, classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = max_pool_same(nnx.relu(self.stem_norm(self.stem(x))), size=3, stride=2)
        for block in self.blocks:
            x = block(x)
        return self.out(nnx.relu(self.norm(x)).mean((1, 2)))


def resnet18(classes: int = 100, affine: bool = True, l2: float = 1e-4) -> Model:
    """The network and its weight decay: `l2` times the sum of squares, so 2 `l2` w in a gradient.

    Kernels decay and so does the bias of the last layer, but no scale or offset of a norm.
    """

    def penalty(params: Params) -> Array:
        decaying = [params["out"]["bias"]] + [
            leaf for path, leaf in tree_leaves_with_path(params) if path[-1] == DictKey("kernel")
        ]
        return l2 * jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in decaying]).sum()

    model = from_nnx(lambda rngs: ResNet18(classes, affine, rngs))
    return model._replace(penalty=penalty) if l2 else model
