"""Shuffle the examples of a client without sorting them: a keyed permutation, row by row.

The permutation is the swap-or-not shuffle (Hoang, Morris & Rogaway, CRYPTO 2012). Each of its
rounds has a random number K and pairs the position x with the position (K - x) mod count. A random
bit of the pair decides whether the two change places. So every round is a permutation for any
`count`, which may be traced, and a row costs the same in a client of 5 and of 5 million examples.

How close the orders are to uniform, given ideal random bits and 24 rounds: one position is uniform
up to a total variation of 2^-24, and so is a pair of positions. The orders of 2 to 7 examples, as
a whole, are uniform up to 1e-5. The bits come from 64 bits of a JAX key through 32-bit hashes. So
a client has at most 2^64 orders, and the shuffle must not be used for cryptography.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax, random

ROUNDS = 24


def shuffled_rows(key: Array, count: Array, epoch: Array | int, position: Array) -> Array:
    """Return the rows at some positions of a shuffled epoch.

    Args:
        key: The random key of all epochs.
        count: The number of the client's examples, below 2^31.
        epoch: The number of the epoch, for all positions or for each of them.
        position: The positions, from 0 to `count - 1`. Elsewhere the result is arbitrary.

    Returns:
        The row numbers, in the shape of the positions. In each epoch they are a permutation.
    """
    first, second = random.bits(key, (2,), "uint32")
    own = mixed(second + jnp.asarray(epoch).astype("uint32"))
    size, row = count.astype("int32"), position.astype("int32")

    def swap(number: Array, row: Array) -> Array:
        bits = mixed(first ^ (own + number * jnp.uint32(0x9E3779B9)))
        # Floating-point numbers, as the product would need 64 bits and a remainder is slow.
        share = (bits >> 8).astype("float32") * jnp.float32(2.0**-24)
        K = jnp.minimum((share * size.astype("float32")).astype("int32"), size - 1)
        other = K - row
        other = jnp.where(other < 0, other + size, other)
        pair = jnp.maximum(row, other).astype("uint32") * jnp.uint32(0x9E3779B1)
        pair = pair ^ (bits * jnp.uint32(0x7FEB352D))
        pair = (pair ^ (pair >> 15)) * jnp.uint32(0x846CA68B)
        return jnp.where(pair >> 31 == 1, other, row)

    if jax.default_backend() == "cpu":  # a loop is three times as fast as its iterations
        row = lax.fori_loop(jnp.uint32(0), jnp.uint32(ROUNDS), swap, row)
    else:
        for number in range(ROUNDS):
            row = swap(jnp.uint32(number), row)
    return row.astype(position.dtype)


def mixed(bits: Array) -> Array:
    """Mix all bits of unsigned numbers of 32 bits (the finaliser of MurmurHash3).

    The function is bijective. A change of one bit changes about half of the bits.
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
