"""Models from Flax NNX and from Equinox, with dropout, on the bundled digits."""

import equinox as eqx
import fedda
import jax
import jax.numpy as jnp
from fedda.data import digits, partition
from flax import nnx
from jax import Array


class FlaxNet(nnx.Module):
    """A module that takes a batch, as is usual in Flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


class EquinoxNet(eqx.Module):
    """A module that takes one example, as is usual in Equinox; `key` is None in evaluation."""

    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key: Array) -> None:
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 32, key=first)
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(32, 10, key=second)

    def __call__(self, x: Array, key: Array | None = None) -> Array:
        return self.out(self.dropout(jax.nn.relu(self.hidden(x)), key=key))


def main(rounds: int = 60) -> dict[str, float]:
    data = digits.load()
    x, test_x = (images.reshape(-1, 64) / 16.0 for images in (data.train_x, data.test_x))
    parts = partition.dirichlet(data.train_y, clients=50, alpha=0.3, seed=0)
    clients = [(x[rows], data.train_y[rows]) for rows in parts]
    accuracies = {}
    for name, model in (
        ("flax", fedda.models.from_nnx(FlaxNet)),
        ("equinox", fedda.models.from_equinox(EquinoxNet)),
    ):
        result = fedda.run(
            "fedda-adam",
            model,
            clients,
            fedda.losses.cross_entropy,
            test=(jnp.asarray(test_x), jnp.asarray(data.test_y)),
            metrics=[fedda.losses.accuracy],
            rounds=rounds,
            server_lr=1.0,
        )
        accuracies[name] = result.history[-1]["accuracy"]
        print(f"{name}: accuracy {accuracies[name]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
