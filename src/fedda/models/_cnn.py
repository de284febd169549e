"""The small convolutional network of the federated EMNIST experiments, for images of any size.

Two 3x3 convolutions, 2x2 maxima, dropout, a hidden layer, dropout, logits. With 28x28 images and
62 classes it has 1,206,590 parameters.
"""

from flax import nnx
from jax import Array, lax

from fedda.models import Model, from_nnx
from fedda.models.conv import Convolution, max_pool, patches_conv


class CNN(nnx.Module):
    def __init__(
        self, size: int, channels: int, classes: int, convolution: Convolution, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.glorot_uniform()

        def conv(inputs: int, outputs: int) -> nnx.Conv:
            return nnx.Conv(
                inputs,
                outputs,
                (3, 3),
                padding="VALID",
                kernel_init=init,
                conv_general_dilated=convolution,
                rngs=rngs,
            )

        pooled = (size - 4) // 2
        self.conv1, self.conv2 = conv(channels, 32), conv(32, 64)
        self.dropout1, self.dropout2 = nnx.Dropout(0.25, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(pooled * pooled * 64, 128, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(128, classes, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        # Kept apart, or XLA puts two sums of the gradient into one kernel, which is slow on a GPU.
        x = lax.optimization_barrier(nnx.relu(self.conv1(x)))
        # Bias and ReLU do not change which number is the largest: after the maxima they are fewer.
        bias = self.conv2.bias
        assert bias is not None
        x = self.conv2.conv_general_dilated(
            x, self.conv2.kernel[...], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = nnx.relu(max_pool(x) + bias[None, None, None])
        x = self.dropout1(x).reshape(x.shape[0], -1)
        return self.out(self.dropout2(nnx.relu(self.hidden(x))))


def cnn(size: int, channels: int, classes: int, convolution: Convolution = patches_conv) -> Model:
    """Return the convolutional network of the federated EMNIST experiments.

    Args:
        size: Height and width of an image, in pixels.
        channels: Channels of an image.
        classes: Outputs.
        convolution: Computes a convolution; the default is fast when many clients are batched.
    """
    return from_nnx(lambda rngs: CNN(size, channels, classes, convolution, rngs))
