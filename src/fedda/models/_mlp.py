"""A perceptron with one hidden layer."""

from flax import nnx
from jax import Array

from fedda.models import Model, from_nnx


class MLP(nnx.Module):
    def __init__(self, features: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.glorot_uniform()
        self.hidden = nnx.Linear(features, hidden, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(hidden, classes, kernel_init=init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def mlp(features: int, hidden: int, classes: int) -> Model:
    """Return a perceptron with one hidden layer, which flattens its inputs.

    Args:
        features: Numbers of an input.
        hidden: Units of the hidden layer.
        classes: Outputs.
    """
    return from_nnx(lambda rngs: MLP(features, hidden, classes, rngs))
