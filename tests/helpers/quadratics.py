"""Clients with f_i = (x - b_i)' H_i (x - b_i) / 2, whose optima and fixed points are known."""

import jax.numpy as jnp
import numpy as np

import fedda
from fedda import api
from fedda.simulate.train import train


def height(away, H):
    return jnp.einsum("ni,nij,nj->n", away, H, away) / 2


class Quadratics:
    """Every example of a client is b_i and H_i, so that every mini-batch has the full gradient.

    `copies` of a client's one example weigh it, and change nothing else.
    """

    def __init__(self, H, b, copies=None, start=None):
        self.H, self.b = np.asarray(H, float), np.asarray(b, float)
        self.copies = np.ones(len(b), int) if copies is None else np.asarray(copies)
        start = np.zeros(self.b.shape[1]) if start is None else start
        self.model = fedda.Model(lambda key: jnp.asarray(start), lambda point, b: point[None] - b)
        pairs = zip(self.b, self.H, self.copies, strict=True)
        self.clients = [(np.stack([b] * n), np.stack([H] * n)) for b, H, n in pairs]

    def gradient(self, i, x):
        return self.H[i] @ (x - self.b[i])

    def optimum(self, weights=None):
        weights = np.ones(len(self.b)) if weights is None else weights
        A = np.einsum("n,nij->ij", weights, self.H)
        return np.linalg.solve(A, np.einsum("n,nij,nj->i", weights, self.H, self.b))

    def where_fedavg_rests(self, rate, steps):
        """K steps take x to b_i + (1 - rate H_i)^K (x - b_i): the weighted mean must be x."""
        one = np.eye(self.b.shape[1])
        D = [one - np.linalg.matrix_power(one - rate * H, steps) for H in self.H]
        A = np.einsum("n,nij->ij", self.copies, D)
        return np.linalg.solve(A, np.einsum("n,nij,nj->i", self.copies, D, self.b))

    def evaluations(self, name, rounds, seed=7, **settings):
        """The whole of a run of all clients, at its evaluations; its memory is reused."""
        settings = {"cohort": len(self.b), "local_work": 5, "batch": 1} | settings
        setup, hyper = api.prepare(
            name, self.model, self.clients, height, rounds=rounds, **settings
        )
        return train(setup, api.traced(hyper, self.model), [seed])

    def train(self, name, rounds, **settings):
        """The whole of a run at its end: the server's state and what the clients keep."""
        settings = {"client_lr": 0.05, "eval_every": 1000} | settings
        *_, last = self.evaluations(name, rounds, **settings)
        return last.run


def five_clients():
    rng = np.random.default_rng(5)
    A = rng.normal(size=(5, 3, 3))
    return A @ A.transpose(0, 2, 1) / 3 + 0.3 * np.eye(3), 2 * rng.normal(size=(5, 3))


def six_clients():
    rng = np.random.default_rng(3)
    A = rng.normal(size=(6, 3, 3))
    return A @ A.transpose(0, 2, 1) / 3 + 0.2 * np.eye(3), rng.normal(size=(6, 3))


def two_kinds_of_clients():
    """Three each of a = 1, b = -1 and of a = 4, b = 3, the same in all three dimensions."""
    a, b = np.array([1.0, 4.0] * 3), np.array([-1.0, 3.0] * 3)
    return a[:, None, None] * np.eye(3), b[:, None] * np.ones(3)
