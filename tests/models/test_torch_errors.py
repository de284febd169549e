"""What is wrong with a PyTorch module, a loss or weights, and how to fix it."""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest

import fedda
from fedda.errors import InputError, MissingExtraError

if not (find_spec("torchax") or os.environ.get("CI")):
    pytest.skip("torchax is not installed: make torch", allow_module_level=True)

import torch
from torch import nn

from fedda.models import torch_environment
from helpers.torch_networks import F

CLIENTS = [(np.ones((4, 4), np.float32), np.array([0, 1, 2, 3]))]


def run(model, loss="cross_entropy", clients=CLIENTS, **settings):
    return fedda.run("fedavg", model, clients, loss, cohort=1, rounds=1, **settings)


# --------------------------------------------------------------------------------- the module


def frozen():
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.ReLU, "must have parameters, got none"),
        (frozen, r"parameters to train, but all 2 are frozen\. Set requires_grad"),
        (
            lambda: nn.Linear(4, 4, device="meta"),
            r"on the CPU, got weight on meta.*module\.cpu\(\)",
        ),
        (lambda: nn.Linear(4, 4).double(), r"got weight of torch\.float64.*jax_enable_x64"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            r"BatchNorm1d '1' keeps running statistics.*GroupNorm",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            r"layer '1' \(BatchNorm1d\) normalises over the examples.*Replace it by torch\.nn\.Gro",
        ),
        (
            lambda: nn.EmbeddingBag(4, 4, scale_grad_by_freq=True),
            r"EmbeddingBag has one of the modes.*no scale_grad_by_freq.*got mode='mean'",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
            r"layer '0' \(Embedding\) has max_norm, which changes the weights.*Leave out max_norm",
        ),
    ],
)
def test_modules_that_cannot_be_trained(module, words):
    with pytest.raises(InputError, match=words):
        run(module())


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Odd(nn.Module):
    """A module that calls a function on itself and its outputs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer, self.plain = function, nn.Linear(4, 4), torch.zeros(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.function(self, self.layer(x))


class Remembering(nn.Module):
    """Keeps its outputs, as some do for a look at them later."""

    def forward(self, x):
        self.last = x
        return x


def counted(module, h):
    module.calls += 1
    return h


def reassigned(module, h):
    module.calls = module.calls + 1
    return h


def unregistered(module, h):
    module.plain += 1
    return h


KEEPS = "changes its buffer or attribute '{}' when it is called.*Remove the update"
VALUES = r"Odd\) decides in Python by the values.*torch\.where in place of if"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (counted, KEEPS.format("0.calls")),
        (reassigned, KEEPS.format("0.calls")),
        (unregistered, KEEPS.format("0.plain")),
        (lambda _, h: h if h.sum() > 0 else -h, VALUES),
        (lambda _, h: h * h.max().item(), VALUES),
        (lambda _, h: h[h > 0], VALUES),
        (lambda _, h: torch.tensor(np.tanh(h.detach().numpy())), VALUES),
        (
            lambda _, h: Rounded.apply(h),
            r"torch\.autograd\.Function Rounded.*\(y - x\)\.detach\(\)",
        ),
        (lambda _, h: h + torch.empty_like(h).exponential_(), "exponential_.*torch.rand or"),
        (lambda _, h: F.batch_norm(h, None, None, training=True), "batch_norm normalises over the"),
        (
            lambda _, h: F.adaptive_max_pool2d(h.view(-1, 1, 2, 2), 1).flatten(1),
            r"layer '0' \(Odd\) uses an operation that cannot be converted.*adaptive_max_pool2d",
        ),
    ],
)
def test_layers_that_cannot_be_converted(function, words):
    with pytest.raises(InputError, match=words):
        run(nn.Sequential(Odd(function), nn.ReLU()))
    with torch.no_grad():  # nothing that was set for the call is left behind
        assert nn.Linear(2, 2)(torch.ones(2)).shape == (2,)


def test_outputs_that_a_module_keeps():
    with pytest.raises(InputError, match=KEEPS.format("1.last")):
        run(nn.Sequential(nn.Linear(4, 4), Remembering()))


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("function", "loss", "words"),
    [
        (Output, "cross_entropy", r"must return a tensor, got Output\. Put it.*output\.logits"),
        (lambda h: {"logits": h}, "cross_entropy", r"cross_entropy cannot.*\(\{'logits': \(4,\)\}"),
        (
            lambda h: (h, h),
            nn.CrossEntropyLoss(),
            r"CrossEntropyLoss cannot.*Tensor, not tuple.*Gi",
        ),
    ],
)
def test_modules_that_return_more_than_a_tensor(function, loss, words):
    with pytest.raises(InputError, match=words):
        run(Odd(lambda _, h: function(h)), loss)


def test_the_layer_where_the_shape_is_wrong():
    message = r"examples of shape \(4,\): layer '1' \(Linear\): .* Give examples of the shape"
    with pytest.raises(InputError, match=message):
        run(nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4)))


def test_neither_a_model_nor_a_module():
    with pytest.raises(InputError, match=r"a module of PyTorch, Flax NNX or Equinox, got type"):
        run(nn.Linear)


# ----------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("crossentropy", "unknown loss or metric 'crossentropy'. Did you mean cross_entropy"),
        (nn.CrossEntropyLoss(reduction="sum"), r"'mean' or 'none', got 'sum'.*reduction='sum'"),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), "divides by the weights.*reduction='none'"),
        (nn.CrossEntropyLoss, r"got the class CrossEntropyLoss. Give .*: CrossEntropyLoss\(\)"),
        (lambda outputs, y: ((outputs - 1.0) ** 2).mean(), "one number for each example"),
        (
            lambda outputs, y: F.cross_entropy(outputs, y),
            r"gets arrays of JAX.*torch\.nn\.CrossEntropyLoss\(\)",
        ),
    ],
)
def test_losses_that_are_no_mean_over_examples(loss, words):
    with pytest.raises(InputError, match=words):
        run(nn.Linear(4, 4), loss)


@pytest.mark.parametrize(
    ("loss", "labels", "words"),
    [
        (nn.MSELoss(), np.ones(4, "f4"), r"same shape, got \(1,\) and \(\) .*y\.reshape\(-1, 1\)"),
        (
            nn.BCEWithLogitsLoss(),
            np.ones(4, "f4"),
            r"BCEWithLogitsLoss cannot.*\(\[batch\]\).*Give",
        ),
        (
            nn.CrossEntropyLoss(),
            np.zeros((4, 1), "i4"),
            r"class probabilities, got Int.*shapes \(\(1,\), \(1,\)\)",
        ),
    ],
)
def test_labels_of_another_shape_than_the_outputs(loss, labels, words):
    with pytest.raises(InputError, match=words):
        run(nn.Linear(4, 1), loss, [(CLIENTS[0][0], labels)])


def test_labels_beyond_the_outputs():
    with pytest.raises(InputError, match=r"label 3 in row 3, but the model has outputs for 0\.\.2"):
        run(nn.Linear(4, 3), nn.CrossEntropyLoss())


# ---------------------------------------------------------------------------------- the weights


def test_weights_of_another_module():
    result = run(nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"bias has shape \(5,\) in the module, got .*\(4,\)"):
        result.to(nn.Linear(4, 5))
    with pytest.raises(InputError, match=r"other names, for example 0\.bias"):
        result.to(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got dict"):
        result.to({})


# ---------------------------------------------------------------------------------- the clients


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*CLIENTS[0], strict=True)


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {"pixels": torch.ones(4), "label": 0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.utils.data.TensorDataset(torch.ones(3, 4)), r"of pairs \(x, y\).* that is a tuple"),
        (Named(), r"of pairs \(x, y\) .*got an example that is a dict"),
        (torch.utils.data.DataLoader(Stream()), "with a length, got Stream. Give a list"),
    ],
)
def test_datasets_that_hold_no_pairs(data, words):
    with pytest.raises(InputError, match="client 0 must be a dataset " + words):
        run(nn.Linear(4, 4), clients=[data])


@pytest.mark.parametrize("wrap", [torch.utils.data.DataLoader, lambda dataset: dataset])
def test_one_dataset_is_no_list_of_clients(wrap):
    """Each batch of a loader, which can be iterated over, would be a client."""
    data = wrap(torch.utils.data.TensorDataset(*map(torch.tensor, CLIENTS[0])))
    with pytest.raises(InputError, match=r"the data of each client, got one .*Dat.*is \[data\]"):
        run(nn.Linear(4, 4), clients=data)


def test_datasets_of_unequal_examples():
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return torch.ones(number + 1), 0

    with pytest.raises(
        InputError, match=r"examples of client 'a' must be arrays of one shape.*Pad"
    ):
        run(nn.Linear(4, 4), clients={"a": Words()})


# -------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize(
    ("package", "look_up"),
    [
        ("torch", lambda: fedda.models.from_torch),
        ("torchax", torch_environment.environment.__wrapped__),
    ],
)
def test_an_extra_that_is_missing(monkeypatch, package, look_up):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        if name == "torch" or package == "torchax":
            monkeypatch.setitem(sys.modules, name, None)
    message = rf"{package} is not installed\. Install it: pip install 'fedda\[torch\]'"
    with pytest.raises(MissingExtraError, match=message):
        look_up()
