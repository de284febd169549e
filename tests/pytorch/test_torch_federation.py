"""PyTorch clients against JAX clients, and against PyTorch's own optimisers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import random

import fedda.torch
from fedda.core import tree
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.flower import Secure, Settings, messages, secure_mods, serve
from fedda.flower import client_app as jax_client_app
from fedda.torch import ALGORITHMS, DecoupledSGD, begin_round, client_app, end_round, load
from helpers.batches import most_of, read
from helpers.flower_grid import LocalGrid
from helpers.problems import BATCH
from helpers.torch_problem import (
    CLIENTS,
    HYPER,
    F,
    Side,
    apart,
    assert_equal_modules,
    backward,
    context,
    loader,
    network,
    twin,
)

pytestmark = pytest.mark.usefixtures("x64")

PLAN = Plan(BATCH, 2, "epochs")


@partial(jax.jit, static_argnames=("phase", "task"))
def jax_work(phase, task, hp, state, shard, key):
    upload, _, seen = phase.work(hp, task, phase.send(hp, state), (), shard, key)
    batches = task.batches(shard, key)
    return upload, seen, read(batches, most_of(task.plan, shard))


def of_jax(side, task, shards, client, key):
    """A JAX client's upload, and the batches it came from."""
    upload, seen, drawn = jax_work(side.phase, task, side.hp, side.state, shards.shard(client), key)
    steps, rows, mask = jax.device_get(drawn)
    batches = [rows[t, 0][mask[t, 0]] for t in range(steps)]
    return upload, seen, [tuple(column[each] for column in CLIENTS[client]) for each in batches]


def of_torch(side, module, optimizer, batches, examples, dtype, like):
    """A PyTorch client's upload, from a loop as its user might write it."""
    order = begin_round(side.content(), module, optimizer)
    total, visited = 0.0, 0
    for x, y in (tuple(torch.tensor(column).to(dtype) for column in batch) for batch in batches):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        total, visited = total + len(y) * loss.item(), visited + len(y)
    reply = end_round(order, context(), module, optimizer, examples, total, visited)
    return messages.unpack(reply["upload"], like), reply["seen"]


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("name", "options", "mu"),
    [
        ("fedda-sgdm", {}, {"mu": 0.3}),
        ("fedda-adam", {}, {"mu": 0.0}),
        ("fedda-adam", {"bias": "steps", "units": "delta"}, {"mu": 0.3}),
        ("fedda-adam", {"units": "delta", "sends": "model"}, {"mu": 0.3}),
        ("fedda-adagrad", {}, {"mu": 0.3}),
        ("fedda-adagrad", {"sends": "model"}, {"mu": 0.3}),
        ("fedavg", {}, {}),
    ],
)
def test_a_pytorch_client_uploads_what_a_jax_client_does(name, options, mu, double):
    dtype, tolerance = (torch.float64, 1e-12) if double else (torch.float32, 1e-5)
    with jax.enable_x64(double):
        model = twin(dtype)
        task = Task(model, squared_error, PLAN)
        hyper = HYPER[name] | {"client_lr": 0.1} | mu
        jaxs, torchs = (Side(name, hyper, model, **options) for _ in range(2))
        module, shards = network(dtype), from_clients(CLIENTS)
        optimizer = DecoupledSGD(module.parameters())
        for number in range(4):
            uploads = []
            for client, pair in enumerate(CLIENTS):
                key = random.fold_in(random.key(number), client)
                upload, seen, batches = of_jax(jaxs, task, shards, client, key)
                examples = len(pair[0])
                other, said = of_torch(torchs, module, optimizer, batches, examples, dtype, upload)
                assert apart(upload, other) <= tolerance
                assert apart(seen.loss, said["loss"]) <= tolerance
                assert float(seen.examples) == said["examples"]
                uploads.append((upload, other))
            for side, own in zip((jaxs, torchs), zip(*uploads, strict=True), strict=True):
                side.merge(own)
            assert apart(jaxs.state, torchs.state) <= tolerance
        assert apart(jaxs.state.params, model.init(random.key(0))) > 0.1  # ... and they train


def test_bfloat16_comes_down_as_it_is_and_goes_up_in_the_precision_of_sums():
    module = network(torch.bfloat16)
    side = Side("fedda-sgdm", HYPER["fedda-sgdm"], fedda.torch.model(module))
    side.state = side.state._replace(momentum=tree.scale(0.5, side.state.params))
    other = network(torch.bfloat16)
    with torch.no_grad():
        for w in other.parameters():
            w.zero_()
    optimizer = DecoupledSGD(other.parameters())
    order = begin_round(side.content(), other, optimizer)
    assert_equal_modules(module, other)
    reply = end_round(order, context(), other, optimizer, 1, 0.0, 0)
    wide = tree.widen(side.state)
    like = {"gradients": wide.params, "momentum": wide.momentum}
    upload = messages.unpack(reply["upload"], {"sum": like, "weight": jnp.ones(())})["sum"]
    assert upload["momentum"]["0.weight"].dtype == jnp.result_type(float)
    for name, m in wide.momentum.items():
        np.testing.assert_array_equal(upload["momentum"][name], m)


def torch_clients(pairs=CLIENTS, **settings):
    return [
        client_app(network(), F.mse_loss, lambda _, pair=pair: loader(pair), **settings)
        for pair in pairs
    ]


def settings(name, **others):
    task = Task(twin(), squared_error, Plan(BATCH, 1, "full"))
    defaults = {"rounds": 5, "cohort": len(CLIENTS), "chosen": HYPER[name]}
    return Settings(name, task, CLIENTS[0], **defaults | others)


SPEED = 0.4 * 0.3

CENTRALISED = {
    # Not damped: this momentum is m / (1 - beta1), which the rate makes up for. PyTorch's dampening
    # leaves the first gradient whole, which is no start from 0.
    "fedda-sgdm": lambda w: torch.optim.SGD(w, SPEED * (1 - 0.9), momentum=0.9),
    "fedda-adam": lambda w: torch.optim.Adam(w, SPEED, (0.9, 0.99), 0.05),
    "fedda-adagrad": lambda w: torch.optim.Adagrad(w, SPEED, eps=0.05),
    "fedavg": lambda w: torch.optim.SGD(w, 0.7 * 0.3),
}


@pytest.mark.parametrize("name", CENTRALISED)
def test_one_full_step_of_all_clients_is_pytorchs_optimiser_on_the_pooled_data(name):
    rounds = 20
    # Pooled data know no clients: the weight of one that adds most to the sum must not be lowered.
    agreed = settings(name, rounds=rounds, stabilise=rounds, most_sum_ratio=None)
    served = serve(LocalGrid(torch_clients()), agreed)
    module = network()
    optimizer = CENTRALISED[name](module.parameters())
    pooled = [np.concatenate(columns) for columns in zip(*CLIENTS, strict=True)]
    for _ in range(rounds):
        optimizer.zero_grad()
        backward(module, pooled)
        optimizer.step()
    expected = fedda.torch.model(module).init(random.key(0))
    assert apart(served.state.params, expected) <= 1e-13
    assert apart(expected, twin().init(random.key(0))) > 0.3  # ... and it does train
    assert not served.events


def same_size(count, size=8):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(size, 3))
        yield x, np.stack([np.sin(x.sum(1)), x[:, 0]], 1)


@pytest.mark.parametrize("name", HYPER)
def test_a_federation_of_both_kinds_is_one_of_jax_clients(name):
    # Each batch is all of a client's examples, so that the order in which they come is no matter.
    pairs = list(same_size(4))
    task = Task(twin(), squared_error, Plan(8, 3, "steps"))
    of_jax = [jax_client_app(task, lambda _, pair=pair: pair) for pair in pairs]
    of_torch = [
        client_app(
            network(), F.mse_loss, lambda _, pair=pair: loader(pair, 8, shuffle=True), local_work=3
        )
        for pair in pairs
    ]
    agreed = Settings(
        name, task, pairs[0], 12, 3, HYPER[name] | {"server_lr": 0.3}, stabilise=3, test=pairs[0]
    )
    mixed = [of_jax[0], of_torch[1], of_jax[2], of_torch[3]]
    expected, found = (serve(LocalGrid(apps), agreed) for apps in (of_jax, mixed))
    assert apart(expected.state, found.state) <= 1e-11
    losses = [row["train_loss"] for row in found.history]
    np.testing.assert_allclose(losses, [row["train_loss"] for row in expected.history], atol=1e-11)
    assert found.history[-1]["loss"] < 0.5 * found.history[0]["loss"]
    assert not found.events


def test_a_secure_sum_has_room_for_the_examples_of_all_epochs():
    pairs = list(same_size(3))
    losses = []
    for secure in (None, Secure(most=50.0, most_weight=8)):
        apps = [
            client_app(
                network(), F.mse_loss, lambda _, pair=pair: loader(pair, 4), local_work=2,
                local_unit="epochs", mods=secure_mods() if secure else None,
            )
            for pair in pairs
        ]  # fmt: skip
        agreed = Settings(
            "fedda-sgdm", fedda.torch.task(network(), epochs=2), pairs[0], 3, 3, secure=secure
        )
        served = serve(LocalGrid(apps), agreed)
        assert not served.events, "nothing was clipped"
        losses.append([row["train_loss"] for row in served.history])
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_a_server_with_an_algorithm_that_pytorch_clients_lack_learns_it_at_once():
    """With their answers to the first question, before any client has trained."""
    network = LocalGrid(torch_clients())
    message = "the server trains scaffold, which this client does not support"
    with pytest.raises(InputError, match=message) as error:
        serve(network, settings("fedavg")._replace(algorithm="scaffold", chosen={}, deadline=600.0))
    assert f"supports {', '.join(ALGORITHMS)}" in str(error.value)
    assert {message.metadata.message_type for message in network.sent} == {"query"}


def test_a_test_set_that_the_server_cannot_evaluate_is_refused_at_once():
    nodes = LocalGrid(torch_clients())
    task = fedda.torch.task(network())
    pair = CLIENTS[0]
    with pytest.raises(Exception, match="the server cannot evaluate a PyTorch module"):
        serve(nodes, settings("fedavg")._replace(task=task, test=pair))
    assert not nodes.sent


def test_a_server_needs_no_more_than_the_module():
    module = network()
    agreed = settings("fedda-sgdm")._replace(task=fedda.torch.task(module))
    served = serve(LocalGrid(torch_clients()), agreed)
    losses = [row["train_loss"] for row in served.history]
    assert losses[-1] < 0.9 * losses[0]
    again = network()
    load(again, served.state.params)
    for name, w in again.named_parameters():
        np.testing.assert_array_equal(w.detach(), served.state.params[name])
