"""Federated training of PyTorch modules: every algorithm, and the rounds of PyTorch itself."""

import copy
import functools
import os
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

import fedda
from fedda import algorithms
from fedda.core import losses
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients

if not (find_spec("torchax") or os.environ.get("CI")):
    pytest.skip("torchax is not installed: make torch", allow_module_level=True)

import torch

from fedda.models import from_torch
from fedda.models.torch import to_array
from helpers.batches import read
from helpers.torch_networks import F, small_cnn

pytestmark = pytest.mark.usefixtures("x64")

SIZES, BATCH, STEPS, SEED = (6, 3, 5, 4), 3, 2, 4
SETTINGS = {
    "batch": BATCH,
    "local_work": STEPS,
    "cohort": 3,
    "rounds": 5,
    "eval_every": 5,
    "seed": SEED,
}


def examples(client):
    rng = np.random.default_rng(client)
    return rng.normal(size=(SIZES[client], 1, 4, 4)), rng.integers(2, size=SIZES[client])


CLIENTS = [examples(client) for client in range(len(SIZES))]


def outputs(params, x, key=None):
    """What `SmallCNN` computes, written with JAX."""
    x = lax.conv_general_dilated(x, params["conv.weight"], (1, 1), "SAME")
    x = jax.nn.silu(x + params["conv.bias"][None, :, None, None])
    window = (1, 1, 2, 2)
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID").reshape(len(x), 8)
    if key is not None:  # the noise of the first random layer
        x = jnp.where(random.bernoulli(random.fold_in(key, 0), 0.5, x.shape), x / 0.5, 0)
    return x @ params["out.weight"].T + params["out.bias"][None]


@functools.cache
def models():
    ours = from_torch(small_cnn())
    return ours, ours._replace(apply=outputs, train=outputs)


def of_each(names, *fast):
    """A test with each of these names, of which only a few are fast tests."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name not in fast]
    return pytest.mark.parametrize("name", [*fast, *slow])


@of_each(algorithms.names(), "fedavg", "stem")
def test_every_algorithm_trains_a_module_like_the_same_network_in_jax(name):
    """With dropout: the same noise for all gradients on a batch."""
    got, expected = (
        fedda.run(name, model, CLIENTS, losses.cross_entropy, **SETTINGS) for model in models()
    )
    assert got.params.keys() == expected.params.keys()
    start = models()[0].init(random.key(0))
    for weight in start:
        np.testing.assert_allclose(got.params[weight], expected.params[weight], rtol=0, atol=1e-8)
    assert max(np.abs(got.params[weight] - start[weight]).max() for weight in start) > 1e-4
    assert got.history[-1]["train_loss"] == pytest.approx(expected.history[-1]["train_loss"])


def draws(model, number, client):
    """The rows of the batches of a client in a round."""
    shard = replace(from_clients([CLIENTS[client]]).shard(0), num_clients=len(SIZES))
    key = random.key(SEED)
    for part in (1, number, 0, client):  # the rounds, this round, its first phase, the client
        key = random.fold_in(key, part)
    task = Task(model, losses.cross_entropy, Plan(BATCH, STEPS))
    return np.asarray(read(task.batches(shard, key), STEPS)[1])[:, 0]


def test_fedavg_of_pytorch():
    """A loop over clients with torch.optim.SGD, on the batches that the simulator draws."""
    module = small_cnn()
    module.dropout.p = 0.0
    model = from_torch(module)
    settings = SETTINGS | {"cohort": len(SIZES)}
    loss = torch.nn.CrossEntropyLoss()
    result = fedda.run("fedavg", model, CLIENTS, loss, client_lr=0.3, server_lr=0.7, **settings)
    for number in range(5):
        total = [torch.zeros_like(w) for w in module.parameters()]
        for client, (x, y) in enumerate(CLIENTS):
            local = copy.deepcopy(module)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.3)
            for rows in draws(model, number, client):
                optimizer.zero_grad()
                loss(local(torch.tensor(x[rows])), torch.tensor(y[rows])).backward()
                optimizer.step()
            with torch.no_grad():
                for part, new, old in zip(
                    total, local.parameters(), module.parameters(), strict=True
                ):
                    part += SIZES[client] / sum(SIZES) * (new - old)
        with torch.no_grad():
            for w, part in zip(module.parameters(), total, strict=True):
                w += 0.7 * part
    for name, w in module.named_parameters():
        np.testing.assert_allclose(result.params[name], to_array(w), rtol=0, atol=1e-6)


def momentum_of_zero(params):
    """SGD whose momentum is a mean that starts at 0. PyTorch's starts with the first gradient."""
    params = list(params)
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.9)
    for w in params:
        optimizer.state[w]["momentum_buffer"] = torch.zeros_like(w)
    return optimizer


OPTIMIZERS = {
    "fedda-sgdm": (momentum_of_zero, {}),
    "fedda-adam": (
        lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.9, 0.99), eps=0.1),
        {"beta2": 0.99, "eps": 0.1},
    ),
    "fedda-adagrad": (
        lambda params: torch.optim.Adagrad(params, lr=0.05, eps=0.1),
        {"eps": 0.1},
    ),
}


@of_each(OPTIMIZERS, "fedda-adam")
def test_fedda_with_one_full_step_is_an_optimiser_of_pytorch(name):
    """The step of the server is server_lr client_lr."""
    module, (optimizer, hyper) = small_cnn(), OPTIMIZERS[name]
    module.dropout.p = 0.0
    x, y = (np.concatenate(parts) for parts in zip(*CLIENTS, strict=True))
    settings = {"batch": len(x), "local_work": 1, "local_unit": "epochs", "cohort": 1, "rounds": 5}
    result = fedda.run(
        name, module, [(x, y)], "cross_entropy",
        client_lr=0.1, server_lr=0.5, beta1=0.9, **hyper, **settings,
    )  # fmt: skip
    steps = optimizer(module.parameters())
    for _ in range(5):
        steps.zero_grad()
        F.cross_entropy(module(torch.tensor(x)), torch.tensor(y)).backward()
        steps.step()
    for weight, w in module.named_parameters():
        np.testing.assert_allclose(result.params[weight], to_array(w), rtol=0, atol=1e-10)


@of_each(algorithms.names(), "fedda-adam")
def test_clients_on_flower_train_a_module(name):
    pytest.importorskip("flwr")
    from fedda.flower import Settings, client_app, serve
    from helpers.flower_grid import LocalGrid

    model, _ = models()
    task = Task(model, losses.cross_entropy, Plan(BATCH, STEPS))
    grid = LocalGrid([client_app(task, lambda _, k=k: CLIENTS[k]) for k in range(len(SIZES))])
    # With three clients, an honest one may exceed the limit. A simulation lowers no weight.
    free = {"most_sum_ratio": None, "seed": SEED, "nodes": 4}
    served = serve(grid, Settings(name, task, CLIENTS[0], 5, 3, **free))
    here = fedda.run(name, model, CLIENTS, losses.cross_entropy, **SETTINGS)
    for weight, expected in here.params.items():
        np.testing.assert_allclose(served.state.params[weight], expected, rtol=0, atol=1e-10)


def test_a_module_a_torch_loss_and_datasets_on_flower():
    """As in `fedda.run`: both take them as they are."""
    pytest.importorskip("flwr")
    from fedda.flower import Settings, client_app, serve, task
    from helpers.flower_grid import LocalGrid

    datasets = [torch.utils.data.TensorDataset(*map(torch.tensor, pair)) for pair in CLIENTS]
    loss, names = torch.nn.CrossEntropyLoss(), ["accuracy"]
    agreed = task(small_cnn(), loss, metrics=names, batch=BATCH, local_work=STEPS)
    apps = [client_app(agreed, lambda _, k=k: datasets[k]) for k in range(len(SIZES))]
    settings = Settings(
        "scaffold", agreed, CLIENTS[0], 2, 3, seed=SEED, nodes=4, test=CLIENTS[1], eval_every=1
    )
    served = serve(LocalGrid(apps), settings)
    here = fedda.run(
        "scaffold", small_cnn(), datasets, loss, metrics=names, test=datasets[1],
        **SETTINGS | {"rounds": 2, "eval_every": 1},
    )  # fmt: skip
    for weight, expected in here.params.items():
        np.testing.assert_allclose(served.state.params[weight], expected, rtol=0, atol=1e-10)
    assert served.history[-1]["accuracy"] == here.history[-1]["accuracy"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"local_unit": "epoch"}, "unknown value of local_unit 'epoch'. Did you mean epochs"),
        ({"reduction": "max"}, "unknown value of reduction 'max'"),
    ],
)
def test_wrong_settings_of_a_task_on_flower(settings, words):
    pytest.importorskip("flwr")
    from fedda.errors import InputError
    from fedda.flower import task

    with pytest.raises(InputError, match=words):
        task(small_cnn(), "cross_entropy", **settings)
