"""The small convolutional network of the federated EMNIST experiments, for images of any size.

Two 3x3 convolutions, 2x2 maxima, dropout, a hidden layer, dropout, logits. With 28x28 images and
62 classes it has 1,206,590 parameters.
"""

from flax import nnx
from jax import Array

from fedda.models import Model, from_nnx
from fedda.models.conv import max_pool, patches_conv


class CNN(nnx.Module):
    def __init__(self, size: int, channels: int, classes: int, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.glorot_uniform()

        def conv(inputs: int, outputs: int) -> nnx.Conv:
            return nnx.Conv(
                inputs,
                outputs,
                (3, 3),
                padding="VALID",
                kernel_init=init,
                conv_general_dilated=patches_conv,
                rngs=rngs,
            )

        pooled = (size - 4) // 2
        self.conv1, self.conv2 = conv(channels, 32), conv(32, 64)
        self.dropout1, self.dropout2 = nnx.Dropout(0.25, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(pooled * pooled * 64, 128, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(128, classes, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = self.dropout1(max_pool(x)).reshape(x.shape[0], -1)
        return self.out(self.dropout2(nnx.relu(self.hidden(x))))


def cnn(size: int, channels: int, classes: int) -> Model:
    return from_nnx(lambda rngs: CNN(size, channels, classes, rngs))
