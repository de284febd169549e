"""Logits that are linear in the features: softmax regression, or one logistic one a tag."""

from flax import nnx
from jax import Array

from fedda.models import Model, from_nnx


class Linear(nnx.Module):
    def __init__(self, features: int, classes: int, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(
            features, classes, kernel_init=nnx.initializers.glorot_uniform(), rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        return self.out(x.reshape(x.shape[0], -1))


def linear(features: int, classes: int) -> Model:
    """Return a linear model with a bias, which flattens its inputs.

    Args:
        features: Numbers of an input.
        classes: Outputs.
    """
    return from_nnx(lambda rngs: Linear(features, classes, rngs))
