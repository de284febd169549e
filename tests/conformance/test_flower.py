"""The Flower server and its clients reproduce the test vectors, through Flower's messages."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

from conformance.reader import first_difference, read_vectors
from fedda import flower
from fedda.flower import Settings, client_app, serve
from helpers.conformance import (
    CLIENTS,
    COHORT,
    MODEL,
    PROBLEM,
    ROUNDS,
    SEED,
    TOLERANCE,
    as_matrix,
    cohort,
    full_rounds,
    named,
    prepared,
    task,
)
from helpers.flower_grid import LocalGrid

pytestmark = pytest.mark.usefixtures("x64")

# Each client has examples of another shape, so its program is compiled for it alone. Some tests are
# enough for every change: one exchange and two, with memory and without, full batches.
FAST = ("fedda-adam: default", "fedda-adam: sums", "climb: default", "scaffold: default")
VECTORS = read_vectors()
needs_torch = pytest.mark.skipif(
    not (find_spec("torchax") or os.environ.get("CI")), reason="PyTorch: make torch"
)


def of_each(vectors, *fast):
    """A test with each of these vectors, of which only a few are fast tests."""
    found = [
        pytest.param(
            vector, marks=[] if str(vector) in fast else [pytest.mark.slow], id=str(vector)
        )
        for vector in vectors
    ]
    return pytest.mark.parametrize("vector", found)


def served(vector, monkeypatch, server_task, app):
    """The model after each round, and the server's state after the last."""
    monkeypatch.setattr(flower.server, "draw_cohort", cohort)
    models = []

    def evaluate(params):
        models.append({"params": as_matrix(params)})
        return {}

    settings = Settings(
        vector.algorithm, server_task, PROBLEM.clients[0], ROUNDS, COHORT,
        chosen=vector.options | vector.hyper, seed=SEED, stabilise=full_rounds(vector),
        evaluate=evaluate, nodes=CLIENTS,
        most_norm_ratio=None, most_sum_ratio=None, most_weight_ratio=None,
    )  # fmt: skip
    result = serve(LocalGrid([app(client) for client in range(CLIENTS)]), settings)
    assert not result.events
    return models[1:], result.state  # without the initial model


def assert_reproduced(vector, models, state, model=MODEL):
    difference = first_difference(vector.rounds, models, TOLERANCE)
    assert difference is None, difference
    _, hp = prepared(vector)
    last = named(vector, hp, state)
    difference = first_difference(vector.rounds[-1:], [last], TOLERANCE)
    assert difference is None, difference


@of_each(VECTORS, *FAST)
def test_flower_reproduces_the_vector(vector, monkeypatch):
    own = task(vector)
    app = lambda client: client_app(own, lambda _: PROBLEM.clients[client])  # noqa: E731
    assert_reproduced(vector, *served(vector, monkeypatch, own, app))


def with_module(vector):
    import torch

    from fedda.models import from_torch

    module = torch.nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(PROBLEM.weights[:-1].T))
        module.bias.copy_(torch.tensor(PROBLEM.weights[-1]))
    return module, task(vector, from_torch(module))


@needs_torch
@of_each([vector for vector in VECTORS if vector.name == "default"], "fedda-adam: default")
def test_flower_reproduces_the_vector_with_a_pytorch_module(vector, monkeypatch):
    _, own = with_module(vector)
    app = lambda client: client_app(own, lambda _: PROBLEM.clients[client])  # noqa: E731
    assert_reproduced(vector, *served(vector, monkeypatch, own, app))


# PyTorch clients take the mean of their losses, and refuse beta1_per=round.
OF_TORCH = [
    vector
    for vector in VECTORS
    if vector.algorithm.startswith(("fedavg", "fedda-"))
    and vector.reduction == "mean"
    and vector.options.get("beta1_per") != "round"
]


@needs_torch
@of_each(OF_TORCH, "fedavg: default", "fedda-sgdm: default", "fedda-adam: bias=steps")
def test_pytorch_clients_reproduce_the_vector(vector, monkeypatch):
    import torch

    import fedda.torch

    class Given(torch.utils.data.Sampler):
        """The rows of a client's batches, one round after the other."""

        def __init__(self, client):
            cohorts = PROBLEM.schedules[vector.schedule]
            visits = [each for cohort in cohorts for each in cohort if each["client"] == client]
            self.rounds = iter([np.concatenate(each["batches"]).tolist() for each in visits])
            self.examples = len(PROBLEM.clients[client][0])
            self.steps = {len(each["batches"]) for each in visits} or {1}

        def __iter__(self):
            return iter(next(self.rounds))

        def __len__(self):
            return self.examples

    def app(client):
        sampler, data = Given(client), map(torch.tensor, PROBLEM.clients[client])
        (steps,) = sampler.steps
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*data), PROBLEM.batch, sampler=sampler
        )
        module, _ = with_module(vector)
        loss = torch.nn.functional.cross_entropy
        return fedda.torch.client_app(module, loss, lambda _: loader, local_work=steps)

    module, _ = with_module(vector)
    models, state = served(vector, monkeypatch, fedda.torch.task(module, epochs=2), app)
    assert_reproduced(vector, models, state)


@needs_torch
def test_the_vectors_are_those_of_all_algorithms_with_pytorch_clients():
    import fedda.torch

    assert {vector.algorithm for vector in OF_TORCH} == set(fedda.torch.ALGORITHMS)
