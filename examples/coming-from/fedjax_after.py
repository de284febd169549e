"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import fedda
import jax
import jax.numpy as jnp
import numpy as np
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


settings = {"rounds": 30, "batch": 20, "local_work": 1, "local_unit": "epochs", "client_lr": 0.3}
params = fedda.run("fedavg", fedda.Model(init, apply), clients, loss, cohort=10, **settings).params

print(f"accuracy {np.mean(apply(params, x).argmax(1) == y):.2f}")
