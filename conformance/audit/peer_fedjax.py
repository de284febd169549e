"""FedJAX: its algorithms, with the optimisers that it has for clients and servers."""

import jax
import jax.numpy as jnp
import numpy as np
from fedjax import ClientDataset, PaddedBatchHParams, ShuffleRepeatBatchHParams, optimizers
from fedjax.algorithms import fed_avg, mime, mime_lite

from conformance.audit.adapter import PROBLEM, ROUNDS, main

BATCHES, WHOLE = ShuffleRepeatBatchHParams(PROBLEM.batch), PaddedBatchHParams(PROBLEM.batch)


class Client(ClientDataset):
    """A client with the batches of the vectors. FedJAX would fill up the last one."""

    def __init__(self, rows):
        super().__init__({"x": rows.x, "y": rows.y})
        self.given = [{"x": x, "y": y} for x, y in rows.batches()]

    def shuffle_repeat_batch(self, hparams=None, **kwargs):
        return self.given


def losses(params, batch, key):
    scores = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def gradient(params, batch, key):
    return jax.grad(lambda params: losses(params, batch, key).mean())(params)


def run(algorithm):
    W = PROBLEM.weights
    state, models = algorithm.init({"w": jnp.asarray(W[:-1]), "b": jnp.asarray(W[-1])}), []
    for cohort in ROUNDS:
        clients = [(rows.client, Client(rows), jax.random.PRNGKey(0)) for rows in cohort.values()]
        state, _ = algorithm.apply(state, clients)
        models.append(np.vstack([state.params["w"], state.params["b"]]))
    return models


def fedavg(server):
    return lambda hp: run(
        fed_avg.federated_averaging(gradient, optimizers.sgd(hp["client_lr"]), server(hp), BATCHES)
    )


def of_mime(build, base):
    return lambda hp: run(
        build(losses, base(hp), BATCHES, WHOLE, server_learning_rate=hp["server_lr"])
    )


def momentum(hp):
    return optimizers.sgd(hp["client_lr"], hp["beta"])


def adam(hp):
    return optimizers.adam(hp["client_lr"], hp["beta1"], hp["beta2"], hp["eps"])


def adagrad(hp):
    return optimizers.adagrad(hp["client_lr"], initial_accumulator_value=0.0, eps=hp["eps"])


def server_adagrad(hp):
    # The initial value of v is that of the paper.
    return optimizers.adagrad(
        hp["server_lr"], initial_accumulator_value=hp["tau"] ** 2, eps=hp["tau"]
    )


jax.config.update("jax_enable_x64", True)
main(
    "fedjax",
    {
        "FedAvg": fedavg(lambda hp: optimizers.sgd(hp["server_lr"])),
        "FedAvgM": fedavg(lambda hp: optimizers.sgd(hp["server_lr"], hp["beta1"])),
        "FedAdagrad": fedavg(server_adagrad),
        "FedAdam": fedavg(
            lambda hp: optimizers.adam(hp["server_lr"], hp["beta1"], hp["beta2"], hp["tau"])
        ),
        "FedYogi": fedavg(
            lambda hp: optimizers.yogi(hp["server_lr"], hp["beta1"], hp["beta2"], hp["tau"])
        ),
        "Mime, SGDM": of_mime(mime.mime, momentum),
        "Mime, Adam": of_mime(mime.mime, adam),
        "Mime, AdaGrad": of_mime(mime.mime, adagrad),
        "MimeLite, SGDM": of_mime(mime_lite.mime_lite, momentum),
        "MimeLite, Adam": of_mime(mime_lite.mime_lite, adam),
        "MimeLite, AdaGrad": of_mime(mime_lite.mime_lite, adagrad),
    },
)
