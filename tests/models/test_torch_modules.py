"""PyTorch modules as models: the numbers of PyTorch, its training mode, and what is trained."""

import copy
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import fedda
from fedda.core import losses, tree

if not (find_spec("torchax") or os.environ.get("CI")):
    pytest.skip("torchax is not installed: make torch", allow_module_level=True)

import torch
from torch import nn

from fedda.models import from_torch
from fedda.models.torch import from_torch_loss, load, to_array
from helpers.torch_networks import NETWORKS, F, lora, made, mlp

SINGLE, DOUBLE = (torch.float32, 1e-5), (torch.float64, 1e-10)
SLOW = [pytest.mark.slow]


def arrays(tensor):
    return jnp.asarray(to_array(tensor))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=SLOW if slow else [])
        for name in NETWORKS
        for precision in (DOUBLE, SINGLE)
        for slow in [name in ("resnet18", "emnist_cnn") or (precision == SINGLE and name != "mlp")]
    ],
    ids=str,
)
def test_outputs_loss_and_gradients_are_those_of_pytorch(name, precision):
    dtype, tolerance = precision
    with jax.enable_x64(dtype == torch.float64):
        network, x = made(name, dtype)
        model = from_torch(network)
        theirs = network(x)
        y = torch.randint(theirs.shape[1], (theirs.shape[0], *theirs.shape[2:]))
        their_loss = nn.CrossEntropyLoss()(theirs, y)
        their_loss.backward()
        loss = from_torch_loss(nn.CrossEntropyLoss())

        def ours(params):
            outputs = model.apply(params, arrays(x))
            return loss(outputs, arrays(y)).mean(), outputs

        run = jax.jit(jax.value_and_grad(ours, has_aux=True))
        (value, outputs), gradient = run(model.init(random.key(0)))
        trained = {name: w for name, w in network.named_parameters() if w.requires_grad}
        assert gradient.keys() == trained.keys()
        pairs = [(outputs, theirs), (value, their_loss)]
        for got, expected in pairs + [(gradient[name], w.grad) for name, w in trained.items()]:
            expected = expected.detach().numpy()
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            atol = tolerance * max(1, np.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "layer",
    [
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d((3, 2), (2, 3), 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(2, divisor_override=3),
        nn.MaxPool2d(2, 3, 1, ceil_mode=True),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose2d(4, 4, 3, dilation=2, groups=4),
    ],
    ids=str,
)
def test_layers_with_unusual_settings(layer):
    """Torchax 0.0.13 has other numbers for some of them."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Conv2d(2, 4, 1), layer).double(), torch.randn(2, 2, 9, 7).double()
    expected = network(x)
    expected.square().sum().backward()
    model = from_torch(network)
    outputs = jax.jit(model.apply)(model.init(None), arrays(x))
    np.testing.assert_allclose(outputs, expected.detach(), rtol=0, atol=1e-12)
    gradient = jax.grad(lambda p: jnp.square(model.apply(p, arrays(x))).sum())(model.init(None))
    for name, w in network.named_parameters():
        np.testing.assert_allclose(gradient[name], w.grad, rtol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bags(mode, padding):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding).double()
    words = torch.tensor([[1, 2, 2, 4], [0, 0, 0, 0], [5, 5, 5, 5], [3, 5, 0, 1]])
    expected = bag(words)
    expected.square().sum().backward()
    model = from_torch(bag)
    params = model.init(None)
    np.testing.assert_allclose(model.apply(params, arrays(words)), expected.detach(), atol=1e-15)
    gradient = jax.grad(lambda p: jnp.square(model.apply(p, arrays(words))).sum())(params)
    np.testing.assert_allclose(gradient["weight"], bag.weight.grad, atol=1e-14)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_state_dict_goes_there_and_back(name):
    network, _ = made(name)
    before = copy.deepcopy(network.state_dict())
    params = from_torch(network).init(random.key(5))
    load(network, {name: -w for name, w in params.items()})
    assert not torch.equal(next(iter(network.state_dict().values())), next(iter(before.values())))
    load(network, params)
    assert network.state_dict().keys() == before.keys()
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_tied_weights_are_one_parameter():
    network, x = made("lstm")
    assert network.state_dict().keys() >= {"embedding.weight", "out.weight"}
    model = from_torch(network)
    params = model.init(random.key(0))
    assert "out.weight" not in params
    moved = {**params, "embedding.weight": params["embedding.weight"] + 1}
    load(network, moved)
    assert network.out.weight is network.embedding.weight
    np.testing.assert_allclose(model.apply(moved, arrays(x)), network(x).detach(), atol=1e-5)


def test_a_model_keeps_the_weights_that_its_module_had():
    network, x = made("mlp")
    model = from_torch(network)
    before = network(x).detach().numpy()
    with torch.no_grad():
        for w in network.parameters():
            w.zero_()
    network.train()
    params = jax.jit(model.init)(random.key(3))
    np.testing.assert_allclose(model.apply(params, arrays(x)), before, atol=1e-6)
    assert network.training  # a call changes no mode
    assert all(not w.any() for w in network.parameters())


# ------------------------------------------------------------------------------ training mode


def dropping():
    return from_torch(nn.Sequential(nn.Linear(4, 200), nn.Dropout(0.3), nn.Dropout1d(0.0)))


def test_dropout_follows_the_key():
    model, x = dropping(), jnp.ones((50, 4))
    params = model.init(random.key(0))
    one, again, other = (model.train(params, x, random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    plain = model.apply(params, x)
    np.testing.assert_array_equal(plain, model.apply(params, x))
    kept = np.asarray(one) != 0
    np.testing.assert_allclose(one[kept], plain[kept] / 0.7, rtol=1e-6)
    # 10,000 draws: four standard deviations of their mean are 0.018.
    assert abs(kept.mean() - 0.7) < 0.018
    assert len(np.unique(kept, axis=0)) > 40  # every example has its own mask


@pytest.mark.parametrize(
    "function",
    [F.gumbel_softmax, torch.randn_like, torch.bernoulli, lambda h: F.alpha_dropout(h, 0.5, True)],
)
def test_random_operations_follow_the_key(function):
    class Noisy(nn.Linear):
        def forward(self, x):
            return function(super().forward(x).sigmoid())

    model, x = from_torch(Noisy(4, 200)), jnp.ones((50, 4))
    params = model.init(random.key(0))
    one, again, other = (model.train(params, x, random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.isfinite(one).all()
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[0], one[1]), "the examples are equal, their noise is not"


def test_hard_gumbel_softmax():
    """The frequencies of the classes are their probabilities, and the gradient is that of soft."""

    class Choice(nn.Module):
        def __init__(self, hard):
            super().__init__()
            self.hard, self.logits = hard, nn.Parameter(torch.tensor([0.1, 0.2, 0.7]).log())

        def forward(self, x):
            return F.gumbel_softmax(self.logits.expand(len(x), 3), hard=self.hard)

    x, numbers, key = jnp.ones((20_000, 1)), jnp.arange(3.0), random.key(0)
    hard, soft = (from_torch(Choice(hard)) for hard in (True, False))
    params = hard.init(None)
    chosen, mixed = (np.asarray(model.train(params, x, key)) for model in (hard, soft))
    assert set(np.unique(chosen.round(5))) == {0.0, 1.0}
    # Four standard deviations of a frequency are at most 4 sqrt(0.25 / 20,000) = 0.014.
    np.testing.assert_allclose(chosen.mean(0), [0.1, 0.2, 0.7], atol=0.014)
    np.testing.assert_array_equal(chosen.argmax(1), mixed.argmax(1))
    gradients = [
        jax.grad(lambda p, m=model: (m.train(p, x, key) * numbers[None]).mean())(params)["logits"]
        for model in (hard, soft)
    ]
    np.testing.assert_allclose(*gradients, atol=1e-6)


def test_two_gradients_on_a_batch_have_the_same_noise():
    """As STEM, Mime and FedLin compare them: at two points, inside and outside of a loop."""
    model, x = dropping(), jnp.ones((50, 4))
    params = model.init(random.key(0))

    @jax.jit
    def masks(params, key):
        twice = tree.scale(2, params)
        looped = jax.lax.map(
            lambda p: model.train(p, x, key), jax.tree.map(lambda w: w[None], twice)
        )
        return model.train(params, x, key) != 0, looped[0] != 0

    one, other = masks(params, random.key(1))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_layers_with_dropout_inside(name):
    network, x = made(name)
    if name == "lstm":
        network.cell.dropout = 0.5
    model = from_torch(network)
    params = model.init(random.key(0))
    one, again, other = (model.train(params, arrays(x), random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3


# ------------------------------------------------------------------------------- what is trained


def test_frozen_parameters_are_neither_trained_nor_sent():
    torch.manual_seed(0)
    network, shape = lora()
    before = copy.deepcopy(network)
    x, y = torch.randn(24, *shape), torch.randint(3, (24,))
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    result = fedda.run("fedavg", network, clients, "cross_entropy", rounds=2, cohort=3)
    trained = {name for name, w in network.named_parameters() if w.requires_grad}
    assert trained == {"1.down", "1.up", "3.down", "3.up"} == result.params.keys()
    sent = 4 * sum(w.numel() for name, w in network.named_parameters() if name in trained)
    assert result.history[-1]["bytes_down"] == 2 * 3 * sent
    assert result.to(network) is network
    for name, w in network.named_parameters():
        assert torch.equal(w, before.get_parameter(name)) == (name not in trained)


def test_a_predicate_chooses_what_is_trained():
    torch.manual_seed(0)
    network, shape = mlp()
    x, y = torch.randn(24, *shape), torch.randint(3, (24,))
    model = from_torch(network, trainable=lambda name: name.startswith("3."))
    result = fedda.run("fedavg", model, [(x, y)], "cross_entropy", rounds=2, cohort=1)
    assert result.params.keys() == {"3.weight", "3.bias"}
    torch.manual_seed(9)
    other, _ = mlp()  # with other weights: the frozen ones are loaded, too
    np.testing.assert_allclose(
        result.to(other)(x).detach(), model.apply(result.params, arrays(x)), atol=1e-6
    )


def test_buffers_and_tensors_of_a_module_are_constants():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
            self.offset = torch.tensor([4.0, 5.0, 6.0])  # not registered

        def forward(self, x):
            mask = torch.zeros(len(x), 3)  # made without a device
            mask[:, 1:] = 1
            return self.layer(x) * self.scale * mask + self.offset.type_as(x) + torch.arange(3)

    network, x = Scaled(), torch.randn(4, 3)
    model = from_torch(network)
    params = model.init(random.key(0))
    assert params.keys() == {"layer.weight", "layer.bias"}
    np.testing.assert_allclose(model.apply(params, arrays(x)), network(x).detach(), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * h.detach(),
        lambda h: h * h.data,
        lambda h: F.cosine_similarity(h, h + 1)[:, None],  # changes its norms under no_grad
        lambda h: h + (torch.round(h) - h).detach(),
        lambda h: F.max_pool2d(
            torch.round(h)[:, None, None].expand(-1, 1, 4, -1) * h[:, :1, None, None], 2
        ),
    ],
)
def test_gradients_stop_where_they_stop_in_pytorch(function):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            with torch.no_grad():
                factor = h[:, :1].to(h.device) * 2
            return factor * function(h).flatten(1)

    torch.manual_seed(0)
    network, x = Net(), torch.randn(5, 4)
    network(x).square().sum().backward()
    model = from_torch(network)
    gradient = jax.grad(lambda p: jnp.square(model.apply(p, arrays(x))).sum())(model.init(None))
    np.testing.assert_allclose(gradient["layer.weight"], network.layer.weight.grad, atol=1e-4)


# --------------------------------------------------------------------------------- precisions


def test_parameters_in_bfloat16():
    network, x = made("mlp", torch.bfloat16)
    params = from_torch(network).init(random.key(0))
    outputs = from_torch(network).apply(params, arrays(x))
    assert outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(outputs.astype("f4"), network(x).float().detach(), atol=0.02)
    load(network, params)
    for name, w in network.named_parameters():
        np.testing.assert_array_equal(to_array(w), params[name])


# -------------------------------------------------------------------------------------- losses


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (nn.CrossEntropyLoss(), "classes"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "classes"),
        (nn.CrossEntropyLoss(), "sequence"),
        (nn.MSELoss(), "numbers"),
        (nn.SmoothL1Loss(), "numbers"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()), "numbers"),
    ],
    ids=str,
)
def test_losses_of_pytorch_are_means_over_examples(loss, labels):
    torch.manual_seed(0)
    outputs = torch.randn(5, 3, *((4,) if labels == "sequence" else ())).double()
    y = torch.rand(5, 3).double()
    if labels != "numbers":
        y = torch.randint(3, (5,) if labels == "classes" else (5, 4))
    ours = from_torch_loss(loss)
    values = ours(arrays(outputs), arrays(y))
    assert values.shape == (5,)
    for number in range(5):
        one = loss(outputs[number : number + 1], y[number : number + 1])
        np.testing.assert_allclose(values[number], one, rtol=1e-12)
    np.testing.assert_allclose(values.mean(), loss(outputs, y), rtol=1e-12)
    assert ours.__name__ == type(loss).__name__
    assert ours is from_torch_loss(loss)  # one program for all runs with it


def test_ignored_labels_do_not_count():
    loss = nn.CrossEntropyLoss(ignore_index=7)
    outputs, y = torch.randn(2, 3, 4), torch.tensor([[0, 7, 1, 7], [2, 1, 0, 0]])
    values = from_torch_loss(loss)(arrays(outputs), arrays(y))
    for number in range(2):
        np.testing.assert_allclose(values[number], loss(outputs[[number]], y[[number]]), rtol=1e-5)


def test_a_loss_of_your_own():
    class Absolute(nn.Module):
        def forward(self, outputs, y):
            return (outputs - y).abs().mean(1)

    outputs, y = torch.randn(4, 3), torch.randn(4, 3)
    values = from_torch_loss(Absolute())(arrays(outputs), arrays(y))
    np.testing.assert_allclose(values, Absolute()(outputs, y), rtol=1e-6)


# ------------------------------------------------------------------------------------- clients


def test_tensors_datasets_loaders_and_names_of_losses():
    torch.manual_seed(0)
    network, shape = mlp()
    x, y = torch.randn(30, *shape), torch.randint(3, (30,))
    pairs = [(x[:10].clone().requires_grad_(), y[:10]), (x[10:], y[10:])]
    every = torch.utils.data.TensorDataset(x, y)
    subsets = [torch.utils.data.Subset(every, range(*ends)) for ends in ((0, 10), (10, 30))]
    loaders = {
        name: torch.utils.data.DataLoader(part, 7, shuffle=True)
        for name, part in zip("ab", subsets, strict=True)
    }
    numpy = [(a.detach().numpy(), b.numpy()) for a, b in pairs]
    model, settings = from_torch(network), {"rounds": 3, "cohort": 2, "batch": 5}
    plain = fedda.run(
        "fedavg", model, numpy, losses.cross_entropy,
        metrics=[losses.accuracy], test=(x.numpy(), y.numpy()), **settings,
    )  # fmt: skip
    for clients, test in ((pairs, (x, y)), (subsets, every), (loaders, subsets)):
        result = fedda.run(
            "fedavg", model, clients, "cross_entropy", metrics=["accuracy"], test=test, **settings
        )
        assert result.history[1:] == plain.history[1:]  # the first train_loss is nan
        jax.tree.map(np.testing.assert_array_equal, result.params, plain.params)


def test_a_compiled_module_is_the_module():
    network, x = made("mlp")
    model = from_torch(torch.compile(network, backend="eager"))
    params = model.init(random.key(0))
    assert params.keys() == dict(network.named_parameters()).keys()
    np.testing.assert_allclose(model.apply(params, arrays(x)), network(x).detach(), atol=1e-6)


# ------------------------------------------------------------------------------- side effects

CHECK = """
import os, sys, fedda
fedda.run, fedda.models, fedda.losses
assert not {"torch", "torchax"} & sys.modules.keys()
import torch
variables, lookup = dict(os.environ), torch._ops.OpOverloadPacket.__getattr__
apply = vars(torch.autograd.Function)["apply"]
assert torch.backends.mha.get_fastpath_enabled()
model = fedda.models.from_torch(torch.nn.Linear(3, 2))
import jax, numpy
model.apply(model.init(jax.random.key(0)), numpy.ones((4, 3), "float32"))
assert dict(os.environ) == variables
assert torch.backends.mha.get_fastpath_enabled()
assert torch._ops.OpOverloadPacket.__getattr__ is lookup
assert vars(torch.autograd.Function)["apply"] is apply
assert torch.get_default_device().type == "cpu"
assert not torch.accelerator.is_available() or torch.cuda.is_available()
assert torch.nn.DataParallel(torch.nn.Linear(2, 1))(torch.ones(3, 2)).shape == (3, 1)
assert torch.ones(2).sum().item() == 2
"""


def test_nothing_of_pytorch_is_changed_and_fedda_does_not_import_it():
    subprocess.run([sys.executable, "-W", "error", "-c", CHECK], check=True)
