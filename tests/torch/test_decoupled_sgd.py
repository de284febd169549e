"""PyTorch clients against JAX clients, against PyTorch's own optimisers and against NumPy.

All in float64 unless a test is of something else. Needs `pip install torch flwr`; in CI both must
be there.
"""

import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from fedda import algorithms, api
from fedda.core import tree
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from helpers.problems import BATCH, FITTED

if os.environ.get("CI"):
    import flwr

    import torch
else:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install flwr")

from flwr.app import Context, Message, RecordDict
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedda.torch
from fedda.flower import Secure, Settings, messages, secure_mods, serve
from fedda.flower import client_app as jax_client_app
from fedda.torch import DecoupledSGD, begin_round, client_app, end_round, load
from helpers.flower_grid import LocalGrid

pytestmark = pytest.mark.usefixtures("x64")

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
            counted=0,
            settled=0,
            hyper=self.hyper._asdict(),
        )
        message = messages.pack(self.phase.send(self.hp, self.state))
        return RecordDict({**order.records(), "message": message})

    def merge(self, uploads):
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *uploads)
        self.state = self.phase.merge(self.hp, self.state, jax.tree.map(jnp.asarray, total))


# -------------------------------------------------------------------------------- the optimiser


def recursion(w, gradients, lr, beta1, mu, m):
    """The equations, in NumPy; None stands for no gradient."""
    W = w
    for gradient in gradients:
        g = (0 if gradient is None else gradient) + mu * (w - W)
        w = w - lr * g
        m = beta1 * m + (1 - beta1) * g
    return w, m


def follow(optimizer, gradients):
    """Takes a step for each row of gradients, of which there is one for each parameter."""
    for row in gradients:
        optimizer.zero_grad()
        for w, gradient in zip(optimizer.param_groups[0]["params"], row, strict=True):
            w.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()


@pytest.mark.parametrize("mu", [0.0, 0.4])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_the_equations(beta1, mu):
    rng = np.random.default_rng(0)
    first, momenta = ([rng.normal(size=shape) for shape in ((3, 2), (4,))] for _ in range(2))
    rows = [[rng.normal(size=w.shape) for w in first] for _ in range(6)]
    rows[2][1] = rows[5][1] = None
    params = [torch.nn.Parameter(torch.tensor(w)) for w in first]
    optimizer = DecoupledSGD(params, lr=0.3, beta1=beta1, mu=mu)
    follow(optimizer, rows[:1])  # a round before, which must leave no trace
    with torch.no_grad():
        for w, start in zip(params, first, strict=True):
            w.copy_(torch.tensor(start))
    optimizer.start(dict(zip(params, map(torch.tensor, momenta), strict=True)))
    follow(optimizer, rows)
    for place, w in enumerate(params):
        gradients = [row[place] for row in rows]
        expected = recursion(first[place], gradients, 0.3, beta1, mu, momenta[place])
        found = w.detach().numpy(), optimizer.state[w]["momentum"].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
        assert optimizer.state[w]["step"] == len(rows)


def test_a_momentum_without_gradients_decays():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = DecoupledSGD([w], beta1=0.5)
    optimizer.start({w: torch.full((2,), 8.0)})
    follow(optimizer, [[None]] * 3)
    assert optimizer.state[w]["momentum"].tolist() == [1, 1]
    assert w.tolist() == [1, 1]


def test_groups_have_numbers_of_their_own():
    one, other = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = DecoupledSGD([{"params": [one]}, {"params": [other], "lr": 2.0, "beta1": 0.5}])
    for w in (one, other):
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert (one.item(), other.item()) == (-0.1, -2.0)
    assert optimizer.state[other]["momentum"].item() == 0.5


def test_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    dense = copy.deepcopy(table)
    dense.sparse = False
    for module in (table, dense):
        optimizer = DecoupledSGD(module.parameters(), mu=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.tensor([1, 3, 1])).square().sum().backward()
            optimizer.step()
    assert torch.equal(table.weight, dense.weight)


def test_a_closure_computes_the_loss():
    plain, closed = network(), network()
    x, y = (torch.tensor(column) for column in CLIENTS[0])
    one, other = DecoupledSGD(plain.parameters()), DecoupledSGD(closed.parameters())

    def closure():
        other.zero_grad()
        loss = F.mse_loss(closed(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        one.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        assert one.step() is None
        assert other.step(closure).item() == loss.item()
    assert_equal_modules(plain, closed)


def assert_equal_modules(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def backward(module, pair):
    x, y = (torch.tensor(np.asarray(column)) for column in pair)
    F.mse_loss(module(x), y).backward()


def test_a_state_dict_in_the_middle_of_a_round():
    server = Side("fedda-adam", HYPER["fedda-adam"] | {"mu": 0.1}, twin(), bias="steps")
    server.state = server.state._replace(momentum=tree.scale(0.5, server.state.params))
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(server.content(), module, optimizer)

    def steps(module, optimizer, pairs):
        for pair in pairs:
            optimizer.zero_grad()
            backward(module, pair)
            optimizer.step()

    steps(module, optimizer, CLIENTS[:2])
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = network()
    resumed = DecoupledSGD(again.parameters())
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    replies = []
    for each in ((module, optimizer), (again, resumed)):
        steps(*each, CLIENTS[2:4])
        replies.append(end_round(order, context(), *each, examples=3, loss=1.0, visited=5))
    assert_equal_modules(module, again)
    one, other = (reply["upload"] for reply in replies)
    assert {name: one[name].data for name in one} == {name: other[name].data for name in other}
    assert one["sum/steps/value"].numpy() == 3 * 4


def compiled_rounds(backend):
    """Two rounds with a compiled step and a compiled network, and without."""
    plain, compiled = network(), network()
    called = torch.compile(compiled, backend=backend)
    one, other = (DecoupledSGD(net.parameters(), mu=0.1) for net in (plain, compiled))
    step = torch.compile(other.step, backend=backend, fullgraph=True)
    for number in range(2):
        for optimizer in (one, other):
            optimizer.start(
                {w: torch.full_like(w, number) for w in optimizer.param_groups[0]["params"]}
            )
        for _ in range(2):
            for module, optimizer, move in ((plain, one, one.step), (called, other, step)):
                optimizer.zero_grad()
                backward(module, CLIENTS[0])
                move()
    for w, v in zip(plain.parameters(), compiled.parameters(), strict=True):
        for found, expected in ((v, w), (other.state[v], one.state[w])):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler"),
            ],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_compiled_once_for_all_rounds(backend):
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled_rounds(backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    here, there = network(), network().cuda()
    one, other = (DecoupledSGD(net.parameters(), mu=0.1) for net in (here, there))
    for _ in range(3):
        for module, optimizer in ((here, one), (there, other)):
            optimizer.zero_grad()
            device = next(module.parameters()).device
            x, y = (torch.tensor(column, device=device) for column in CLIENTS[0])
            F.mse_loss(module(x), y).backward()
            optimizer.step()
    for w, v in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(v.cpu(), w, rtol=0, atol=1e-13)
        m = other.state[v]["momentum"]
        assert m.is_cuda
        torch.testing.assert_close(m.cpu(), one.state[w]["momentum"], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ({"lr": 0.0}, "lr of DecoupledSGD must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr of DecoupledSGD must be a positive number, got nan"),
        ({"lr": torch.tensor(0.1)}, "lr of DecoupledSGD must be a positive number, got tensor"),
        ({"beta1": 1.0}, r"beta1 of DecoupledSGD must be a number in \[0, 1\), got 1.0"),
        ({"mu": -1.0}, "mu of DecoupledSGD must be zero or a positive number, got -1.0"),
        ({"mu": True}, "mu of DecoupledSGD must be zero or a positive number, got True"),
    ],
    ids=str,
)
def test_numbers_that_are_refused(number, words):
    with pytest.raises(InputError, match=words):
        DecoupledSGD(network().parameters(), **number)
    with pytest.raises(InputError, match=words):
        DecoupledSGD([{"params": network().parameters(), **number}])


# --------------------------------------------------- one client of each kind on the same batches

PLAN = Plan(BATCH, 2, "epochs")


@partial(jax.jit, static_argnames=("phase", "task"))
def jax_work(phase, task, hp, state, shard, key):
    upload, _, seen = phase.work(hp, task, phase.send(hp, state), (), shard, key)
    batches = task.batches(shard, key)
    return upload, seen, (batches.steps, batches.rows, batches.mask)


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


# ------------------------------------------------------------------------- whole federations


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
    served = serve(LocalGrid(torch_clients()), settings(name, rounds=rounds, stabilise=rounds))
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


def test_steps_that_are_lost_beside_the_weights_are_in_the_sum():
    """In float32 a step of 2e-8 leaves a w of 1 where it is."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = DecoupledSGD([w], lr=1e-3)
    for _ in range(5):
        w.grad = torch.full((1,), 2e-5)
        optimizer.step()
    assert w.item() == 1
    assert optimizer.state[w]["sum"].item() == pytest.approx(1e-4, rel=1e-6)


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


# --------------------------------------------------------------------------------- the module


def test_a_model_starts_from_the_weights_of_its_module():
    module = network()
    model = fedda.torch.model(module)
    before = {name: w.detach().clone() for name, w in module.named_parameters()}
    with torch.no_grad():
        module[0].weight.zero_()  # of the module, later
    for made in (model.init(random.key(0)), jax.jit(model.init)(random.key(1))):
        assert made.keys() == before.keys()
        for name, w in before.items():
            np.testing.assert_array_equal(made[name], w)


def test_a_model_cannot_be_evaluated_without_pytorch():
    model = fedda.torch.model(network())
    params = model.init(random.key(0))
    with pytest.raises(Exception, match=r"leave test out, .* fedda\.torch\.load"):
        jax.block_until_ready(jax.jit(model.apply)(params, jnp.zeros((2, 3))))


def test_a_compiled_module_has_the_names_of_the_module():
    module = network()
    names = fedda.torch.parameters(module).keys()
    compiled = torch.compile(module, backend="eager")
    assert fedda.torch.parameters(compiled).keys() == names
    assert "0.weight" in names


def quantised():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: F.tanh, "must be a torch.nn.Module, got"),
        (lambda: torch.nn.Tanh(), "must have parameters, got none"),
        (quantised, r"got torch.int8 in weight. .* module.float\(\)"),
        (
            lambda: torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2)),
            "BatchNorm1d '1' keeps running statistics, .* such as GroupNorm",
        ),
    ],
    ids=["function", "none", "integers", "BatchNorm"],
)
def test_modules_that_are_refused(module, words):
    with pytest.raises(InputError, match=words):
        fedda.torch.model(module())
    with pytest.raises(InputError, match=words):
        client_app(module(), F.mse_loss, lambda _: None)


def test_constant_buffers_are_no_matter():
    module = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2, track_running_stats=False))
    module.register_buffer("scale", torch.ones(2))
    assert len(fedda.torch.parameters(module)) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda params: params.pop("0.bias"), "4 parameters, got 3 .* 0.bias"),
        (
            lambda params: params.update({"0.bias": np.ones(2)}),
            r"0.bias has shape \(4,\) .* \(2,\)",
        ),
    ],
)
def test_other_parameters_are_not_loaded(change, words):
    module, params = network(), dict(twin().init(random.key(0)))
    change(params)
    with pytest.raises(InputError, match=words):
        load(module, params)
    assert_equal_modules(module, network())


# --------------------------------------------------------------------------------- the client


def ask(app, content, number=0, kind="train"):
    message = Message(content, number, kind)
    return app(message, context(number)).content


def steps_of(reply):
    """The number of steps that a client took; its upload says that with the option bias=steps."""
    upload = reply["upload"]
    return float(upload["sum/steps/value"].numpy() / upload["weight"].numpy())


def counting():
    return Side("fedda-adam", HYPER["fedda-adam"], twin(), bias="steps")


@pytest.mark.parametrize(
    ("work", "unit", "full", "steps", "visited"),
    [
        (2, "steps", False, 2, 8),
        (6, "steps", False, 6, 4 + 4 + 4 + 1 + 4 + 4),  # of 13 examples
        (2, "epochs", False, 8, 26),
        (2, "epochs", True, 1, 13),
    ],
)
def test_local_work(work, unit, full, steps, visited):
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]), work, unit)
    reply = ask(app, counting().content(full=full))
    assert steps_of(reply) == steps
    assert reply["seen"]["examples"] == visited
    assert reply["upload"]["weight"].numpy() == 13
    about = dict(ask(app, RecordDict(), kind="query")["fedda"])
    assert about == {"partition": 0, "has_examples": True}


def test_a_loss_may_give_one_number_for_each_example():
    def each(outputs, y):
        return (outputs - y).square().mean(1)

    uploads = [
        ask(client_app(network(), loss, lambda _: loader(CLIENTS[0])), counting().content())
        for loss in (F.mse_loss, each)
    ]
    for name, array in uploads[0]["upload"].items():
        np.testing.assert_allclose(array.numpy(), uploads[1]["upload"][name].numpy(), atol=1e-12)


@pytest.mark.parametrize(("dropout", "shuffle"), [(0.5, False), (0.0, True)])
def test_random_numbers_belong_to_the_round_and_the_client(dropout, shuffle):
    noisy = torch.nn.Sequential(network(), torch.nn.Dropout(dropout)).eval()  # it is put to train
    side = Side("fedda-sgdm", HYPER["fedda-sgdm"], fedda.torch.model(noisy))
    app = client_app(noisy, F.mse_loss, lambda _: loader(CLIENTS[0], shuffle=shuffle))

    def upload(number, client):
        sent = ask(app, side.content(number), client)["upload"]
        return np.concatenate([array.numpy().ravel() for array in sent.values()])

    before = torch.random.get_rng_state()
    first = upload(0, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    np.testing.assert_array_equal(upload(0, 0), first)
    others = [upload(1, 0), upload(0, 1)]
    assert all(np.abs(first - other).max() > 1e-3 for other in others)
    assert np.abs(others[0] - others[1]).max() > 1e-3


def test_training_that_changes_a_buffer_is_refused():
    module = network()
    torch.nn.utils.parametrizations.spectral_norm(module[0])
    side = Side("fedda-sgdm", HYPER["fedda-sgdm"], fedda.torch.model(module))
    app = client_app(module, F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match=r"changes the buffer '0\.parametrizations.* GroupNorm"):
        ask(app, side.content())


def test_an_algorithm_of_which_pytorch_clients_know_nothing():
    side = Side("scaffold", {}, twin())
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match=r"'scaffold', but a PyTorch client .* JAX clients"):
        ask(app, side.content())


def test_numbers_of_the_server_are_checked():
    side = counting()
    side.hyper = side.hyper._replace(client_lr=-1.0)
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match="client_lr of fedda-adam must be a positive number"):
        ask(app, side.content())


def test_a_message_for_another_module_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.float64))
    with pytest.raises(messages.Refused, match=r"among the arrays .* is not expected\. Server"):
        begin_round(counting().content(), module, DecoupledSGD(module.parameters()))


def test_a_rate_that_changes_within_a_round_is_refused():
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(counting().content(), module, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.param_groups[0]["lr"] = 0.15
    with pytest.raises(InputError, match=r"lr of DecoupledSGD must stay 0\.3 .* got 0\.15"):
        end_round(order, context(), module, optimizer, 1, 0.0, 0)


def test_a_client_without_examples_is_refused():
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(counting().content(), module, optimizer)
    with pytest.raises(InputError, match="at least one example, got examples=0"):
        end_round(order, context(), module, optimizer, 0, 0.0, 0)


def test_an_optimiser_with_a_part_of_the_parameters_is_refused():
    module = network()
    optimizer = DecoupledSGD(module[0].parameters())
    with pytest.raises(InputError, match=r"lacks 2, the first of them 2\.weight"):
        begin_round(counting().content(), module, optimizer)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3)])


EXAMPLES = TensorDataset(torch.zeros(5, 3), torch.zeros(5, 2))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (EXAMPLES, "must give a DataLoader, got TensorDataset"),
        (DataLoader(EXAMPLES, 2, drop_last=True), "no drop_last"),
        (DataLoader(EXAMPLES, None), "must have a batch_size"),
        (DataLoader(Stream(), 2), "a dataset with a length"),
        (DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, 2)), 2), "at least one"),
    ],
    ids=["no loader", "drop_last", "no batches", "stream", "empty"],
)
def test_data_that_are_refused(data, words):
    app = client_app(network(), F.mse_loss, lambda _: data)
    with pytest.raises(InputError, match=words):
        ask(app, RecordDict(), kind="query")


def test_batches_that_are_refused():
    three = DataLoader(TensorDataset(*(torch.zeros(5, 2) for _ in range(3))), 2)
    named = DataLoader([{"x": torch.zeros(3), "y": torch.zeros(2)}], 1)
    for data, words in ((three, "a list of 3"), (named, "a dict of 2")):
        app = client_app(network(), F.mse_loss, lambda _, data=data: data)
        with pytest.raises(InputError, match=rf"pair \(x, y\) of tensors, got {words}"):
            ask(app, counting().content())


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ({"local_work": 0}, "local_work must be a whole number of at least 1, got 0"),
        ({"local_work": True}, "local_work must be a whole number of at least 1, got True"),
        ({"local_unit": "epoch"}, "unknown value of local_unit 'epoch'. Did you mean epochs"),
    ],
    ids=str,
)
def test_local_work_that_is_refused(work, words):
    with pytest.raises(InputError, match=words):
        client_app(network(), F.mse_loss, lambda _: None, **work)


# ----------------------------------------------------------------------------------- the page

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
FEDERATION = """
from flwr.app import Context, RecordDict

import client_app, own_loop, server_app
from helpers.flower_grid import LocalGrid

grid = LocalGrid(5 * [client_app.app] + 5 * [own_loop.app])
server_app.app(grid, Context(1, 1, {}, RecordDict(), {}))
"""


def test_the_page_is_a_program(tmp_path, monkeypatch):
    """Its files are a federation, in which each of its two clients runs on half of the nodes."""
    files = re.findall(r"`(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(files) == PAGE.read_text().count("```python")
    for name, text in files:
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a plain session
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other slow others down
    done = subprocess.run(
        [sys.executable, "-c", FEDERATION],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"accuracy (0\.\d+)\n", done.stdout)
    assert float(said[1]) > 0.85
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
