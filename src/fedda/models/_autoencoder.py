"""The deep autoencoder of the federated EMNIST experiments.

Its layers have 1000, 500, 250, 30, 250, 500, 1000 and again as many outputs as there are features,
with a sigmoid after each but the code of 30 numbers. It has 2,837,314 parameters for 28x28 images.
"""

from itertools import pairwise

from flax import nnx
from jax import Array

from fedda.models import Model, from_nnx


class Autoencoder(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        sizes = (features, 1000, 500, 250, 30, 250, 500, 1000, features)
        init = nnx.initializers.glorot_uniform()
        self.layers = nnx.List(
            nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)
            for inputs, outputs in pairwise(sizes)
        )

    def __call__(self, x: Array) -> Array:
        """Each example as its code gives it back, in [examples, features]."""
        x = x.reshape(x.shape[0], -1)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            if number != 4:  # the code
                x = nnx.sigmoid(x)
        return x


def autoencoder(features: int = 784) -> Model:
    """Return the autoencoder of the federated EMNIST experiments, for so many `features`."""
    return from_nnx(lambda rngs: Autoencoder(features, rngs))
