"""Arithmetic on trees, where it is more than a line."""

import jax
import jax.numpy as jnp
import pytest

from fedda.core import tree

LEAVES = {
    "a": jnp.zeros(3),
    "b": jnp.zeros((2, 2), jnp.bfloat16),
    "c": jnp.zeros(()),
    "n": jnp.int32(7),
}


@pytest.mark.parametrize("large", [0, 20_000])
def test_all_finite_looks_at_every_number(large):
    x = LEAVES | {"large": jnp.zeros(large)}
    assert tree.all_finite(x)
    for name, leaf in x.items():
        if name == "n":
            continue
        for place in {0, leaf.size - 1} if leaf.size else ():
            for value in (jnp.nan, jnp.inf, -jnp.inf):
                spoilt = leaf.ravel().at[place].set(value).reshape(leaf.shape)
                assert not tree.all_finite(x | {name: spoilt})


def test_all_finite_of_clients_and_of_nothing():
    x = {"w": jnp.zeros((3, 4)).at[1, 2].set(jnp.nan), "b": jnp.zeros((3, 20_000))}
    assert jax.vmap(tree.all_finite)(x).tolist() == [True, False, True]
    assert tree.all_finite(())


def test_complex_numbers_that_are_not_finite():
    assert tree.all_finite(jnp.full(2, 1 + 2j))
    for value in (complex(1, jnp.inf), complex(jnp.nan, 1)):
        assert not tree.all_finite(jnp.full(2, value))


def test_random_keys_are_finite():
    x = {"key": jax.random.key(3, impl="rbg"), "w": jnp.zeros(2)}
    assert tree.all_finite(x)
    assert not tree.all_finite(x | {"w": jnp.full(2, jnp.nan)})
