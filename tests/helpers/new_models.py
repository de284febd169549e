"""Runs of many models in one process."""

import weakref
from collections.abc import Iterator

import jax
import numpy as np

import fedda

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(count, 3)), RNG.normal(size=(count, 2))) for count in (4, 7, 2)]


def train_new_models(calls: int) -> Iterator[tuple[int, weakref.ref]]:
    """Yield after each call of `fedda.run`, every time with a new model."""
    for number in range(calls):
        model = fedda.Model(
            lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["w"]
        )
        fedda.run(
            "fedavg", model, CLIENTS, fedda.losses.squared_error,
            rounds=4, eval_every=2, cohort=2, batch=2, test=CLIENTS[0],
        )  # fmt: skip
        yield number, weakref.ref(model.apply)
