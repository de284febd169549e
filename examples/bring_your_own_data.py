"""Your own federation: a list of arrays, two functions, one call.

Clients may have any number of examples, even one. Short batches are weighted exactly.
"""

import fedda
import jax
import numpy as np


def make_clients(num_clients: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients that measure the same line, each with its own offset and number of points."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(num_clients):
        x = rng.normal(size=(rng.integers(1, 50), 3))
        noise = 0.1 * rng.normal(size=(len(x), 1)) + 0.2 * rng.normal()
        clients.append((x, x @ np.array([[1.0], [-2.0], [0.5]]) + noise))
    return clients


def main() -> fedda.Result:
    clients = make_clients(30, seed=0)
    model = fedda.Model(
        init=lambda key: {"w": jax.random.normal(key, (3, 1)), "b": jax.numpy.zeros((1, 1))},
        apply=lambda params, x: x @ params["w"] + params["b"],
    )
    result = fedda.run(
        "fedda-sgdm",
        model,
        clients,
        fedda.losses.squared_error,
        rounds=100,
        cohort=5,
        client_lr=0.05,
        test=clients[0],
    )
    print("slopes", result.params["w"].ravel(), "loss", result.history[-1]["loss"])
    return result


if __name__ == "__main__":
    main()
