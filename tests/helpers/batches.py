"""Read the batches of a client."""

import jax
import jax.numpy as jnp


def read(batches, most):
    """The number of batches, and the rows and masks of the first `most` of them."""
    rows, mask = jax.vmap(lambda step: batches.at(step)[1:3])(jnp.arange(most))
    return batches.steps, rows, mask


def most_of(plan, shard):
    """The largest number of batches that any client of the federation has."""
    epochs = -(-plan.amount * shard.max_count // plan.batch)
    return {"steps": plan.amount, "epochs": epochs, "full": 1}[plan.unit]
