"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
clients = [(images[number:1500:30] / 16, labels[number:1500:30]) for number in range(30)]
x, y = images[1500:] / 16, labels[1500:]


def init(key):
    first, second = jax.random.split(key)
    hidden, out = jax.random.normal(first, (64, 32)) / 8, jax.random.normal(second, (32, 10)) / 6
    return {"hidden": hidden, "out": out}


def apply(params, x):
    return jax.nn.relu(x @ params["hidden"]) @ params["out"]


def loss(outputs, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], 1)[:, 0]


grad = fedjax.grad(lambda params, batch, rng: loss(apply(params, batch["x"]), batch["y"]).mean())
algorithm = fed_avg.federated_averaging(
    grad,
    client_optimizer=fedjax.optimizers.sgd(0.3),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=20, num_epochs=1),
)
data = fedjax.InMemoryFederatedData(
    {str(number): {"x": x, "y": y} for number, (x, y) in enumerate(clients)}
)
sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=10, seed=0)
state = algorithm.init(init(jax.random.key(0)))
for _ in range(30):
    state, _ = algorithm.apply(state, sampler.sample())
params = state.params

print(f"accuracy {np.mean(apply(params, x).argmax(1) == y):.2f}")
