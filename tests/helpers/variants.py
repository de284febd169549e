"""Every algorithm of the folder with each of its options, and how results of two are compared."""

import typing

import jax
import numpy as np
import pytest

from fedda import algorithms
from fedda.algorithms import registry

# One algorithm of each module, FedDA with Adam, and Mime, which does more than MimeLite. The others
# of a module differ from these in the server's optimiser only.
FAST = {next(iter(module.variants)) for module in registry.modules()} | {"fedda-adam", "mime-sgdm"}


class Variant(typing.NamedTuple):
    """An algorithm with at most one option that is not the default."""

    name: str
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def is_slow(self):
        """Whether the tests of this variant are slow ones: it has much in common with another."""
        return bool(self.chosen) or self.name not in FAST

    @property
    def algorithm(self):
        return algorithms.get(self.name, **dict(self.chosen))

    def __str__(self):
        return "-".join([self.name, *(f"{option}={value}" for option, value in self.chosen)])


VARIANTS = [
    variant
    for name in algorithms.names()
    for variant in (
        Variant(name),
        *(
            Variant(name, ((option, value),))
            for option, (_, *others) in algorithms.options(name).items()
            for value in others
        ),
    )
]
# In the fast tests, the test vectors compare every variant with its reference.
every_variant = pytest.mark.parametrize(
    "variant",
    [pytest.param(each, marks=[pytest.mark.slow] if each.is_slow else []) for each in VARIANTS],
    ids=str,
)


def assert_same(one, other):
    """Bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_near(one, other, tolerance=1e-12):
    """Equal but for the rounding of a few hundred operations on numbers near 1."""

    def leaf(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(a).max()))

    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(leaf, one, other)
