"""Fully connected networks: a linear model, a multilayer perceptron and an autoencoder."""

from itertools import pairwise

from flax import nnx
from jax import Array

from fedda.models import Model, built_in, from_nnx

INIT = nnx.initializers.glorot_uniform()


class Linear(nnx.Module):
    def __init__(self, features: int, classes: int, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(features, classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.out(x.reshape(x.shape[0], -1))


@built_in
def linear(features: int, classes: int) -> Model:
    """Return a linear model with a bias.

    With the loss `cross_entropy` it is a softmax regression. With `tag_cross_entropy` it is
    a logistic regression for each tag.

    Args:
        features: The number of entries of an input. Inputs are flattened.
        classes: The number of outputs.

    Returns:
        A model whose outputs have the shape [examples, classes].

    Example:
        >>> import jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.linear(features=64, classes=10)
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 8, 8))).shape
        (3, 10)
    """
    return from_nnx(lambda rngs: Linear(features, classes, rngs))


class MLP(nnx.Module):
    def __init__(self, features: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(features, hidden, kernel_init=INIT, rngs=rngs)
        self.out = nnx.Linear(hidden, classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


@built_in
def mlp(features: int, hidden: int, classes: int) -> Model:
    """Return a multilayer perceptron with one hidden layer and ReLU.

    Args:
        features: The number of entries of an input. Inputs are flattened.
        hidden: The number of hidden units.
        classes: The number of outputs.

    Returns:
        A model whose outputs have the shape [examples, classes].

    Example:
        >>> import jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.mlp(features=64, hidden=32, classes=10)
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 8, 8))).shape
        (3, 10)
    """
    return from_nnx(lambda rngs: MLP(features, hidden, classes, rngs))


class Autoencoder(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        sizes = (features, 1000, 500, 250, 30, 250, 500, 1000, features)
        self.layers = nnx.List(
            nnx.Linear(inputs, outputs, kernel_init=INIT, rngs=rngs)
            for inputs, outputs in pairwise(sizes)
        )

    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            if number != 4:  # the layer of 30 outputs is linear
                x = nnx.sigmoid(x)
        return x


@built_in
def autoencoder(features: int = 784) -> Model:
    """Return the deep autoencoder of the federated EMNIST experiments.

    Its layers have 1000, 500, 250, 30, 250, 500, 1000 and `features` outputs. Every layer has
    a sigmoid, except the bottleneck of 30 outputs. For images of 28x28 pixels it has 2,837,314
    parameters.

    Args:
        features: The number of entries of an input. Inputs are flattened.

    Returns:
        A model whose outputs have the shape [examples, features].

    Example:
        >>> import jax
        >>> import fedda
        >>> model = fedda.models.autoencoder(features=784)
        >>> sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))
        2837314
    """
    return from_nnx(lambda rngs: Autoencoder(features, rngs))
