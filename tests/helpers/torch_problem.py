"""A small network in PyTorch and in JAX, and the server's side of a round."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flwr.app import Context, RecordDict
from jax import random
from torch.utils.data import DataLoader, TensorDataset

import fedda.torch
from fedda import algorithms, api
from fedda.flower import messages
from helpers.problems import BATCH, FITTED

F = torch.nn.functional
CLIENTS = [pair for pair in FITTED if len(pair[0])]
HYPER = {
    "fedda-sgdm": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.9},
    "fedda-adam": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.9, "beta2": 0.99, "eps": 0.05},
    "fedda-adagrad": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.9, "eps": 0.05},
    "fedavg": {"client_lr": 0.3, "server_lr": 0.7},
}


def network(dtype=torch.float64):
    """The same network whenever it is asked for."""
    generator = torch.Generator().manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for w in net.parameters():
            w.copy_(0.7 * torch.randn(w.shape, generator=generator))
    return net.to(dtype)


def apply(p, x):
    """What the network computes, in JAX."""
    hidden = jnp.tanh(x @ p["0.weight"].T + p["0.bias"][None])
    return hidden @ p["2.weight"].T + p["2.bias"][None]


def twin(dtype=torch.float64):
    """The network as a model that JAX clients train."""
    return fedda.torch.model(network(dtype))._replace(apply=apply)


def context(number=0):
    return Context(1, number, {"partition-id": number}, RecordDict(), {})


def loader(pair, size=BATCH, dtype=torch.float64, **settings):
    x, y = (torch.tensor(np.asarray(column)).to(dtype) for column in pair)
    return DataLoader(TensorDataset(x, y), size, **settings)


def apart(one, other):
    """The largest difference of two trees of numbers; of leaves above 1, a share of the largest."""
    assert jax.tree.structure(one) == jax.tree.structure(other)

    def leaf(a, b):
        a, b = np.asarray(a), np.asarray(b)
        return np.abs(a - b).max() / max(1, np.abs(b).max())

    return np.max(jax.tree.leaves(jax.tree.map(leaf, one, other)))  # nan if a number is


class Side:
    """An algorithm's server, and what it sends to its clients."""

    def __init__(self, name, hyper, model, **options):
        self.name, self.options = name, options
        self.algorithm = algorithms.get(name, **options)
        self.hyper = self.algorithm.Hyper(**hyper)
        self.hp = api.traced(self.hyper, model)
        self.state = self.algorithm.init(self.hp, model.init(random.key(0)))
        (self.phase,) = self.algorithm.phases

    def content(self, number=0, full=False):
        order = messages.Order(
            algorithm=self.name,
            options=json.dumps(self.options),
            seed=7,
            round=number,
            phase=0,
            full=full,
            clients=len(CLIENTS),
            serial=number + 1,
            resume_from=0,
            keep_from=0,
            hyper=self.hyper._asdict(),
        )
        message = messages.pack(self.phase.send(self.hp, self.state))
        return RecordDict({**order.records(), "message": message})

    def merge(self, uploads):
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *uploads)
        self.state = self.phase.merge(self.hp, self.state, jax.tree.map(jnp.asarray, total))


def assert_equal_modules(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def backward(module, pair):
    x, y = (torch.tensor(np.asarray(column)) for column in pair)
    F.mse_loss(module(x), y).backward()


def counting():
    return Side("fedda-adam", HYPER["fedda-adam"], twin(), bias="steps")
