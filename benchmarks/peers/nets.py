"""The networks in PyTorch, written from their descriptions, with weights in and out of its layout.

Inputs have channels first. Without dropout, as in all peers.
"""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from protocol import Problem, Weights
from torch import Tensor, nn


class CNN(nn.Module):
    """Two 3x3 convolutions, 2x2 maxima, a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.out = nn.Linear(12 * 12 * 64, 128), nn.Linear(128, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(x)))


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels, eps=1e-3)


class Block(nn.Module):
    """Two convolutions, each after norm and ReLU, are added to the block's own input."""

    def __init__(self, inputs: int, outputs: int, first: bool) -> None:
        super().__init__()
        self.norm1 = None if first else norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm1 is None else F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return y + (x if self.shortcut is None else self.shortcut(x))


class ResNet18(nn.Module):
    """The residual network of the CIFAR-100 experiments, for 24x24 pixels: no stage has a stride.

    TensorFlow's SAME pads the last rows and columns more, where the padding is odd.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2, bias=False)
        self.stem_norm = norm(64)
        channels = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.ModuleList(
            Block(before, after, first=number == 0)
            for number, (before, after) in enumerate(pairwise(channels))
        )
        self.norm = norm(512)
        self.out = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(F.pad(x, (2, 3, 2, 3)))))
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)  # after a ReLU, a zero is never too large
        for block in self.blocks:
            x = block(x)
        return self.out(F.relu(self.norm(x)).mean((2, 3)))


NETWORKS = {"cnn": CNN, "mlp": MLP, "resnet18": ResNet18}
FLATTENED = {("cnn", "hidden/kernel"): (12, 12)}  # kernels that read an image: its height, width


def build(problem: Problem) -> Any:
    """The problem's network with the problem's weights."""
    model = NETWORKS[problem.model]()
    insert(model, problem, problem.weights)
    return model


def insert(model: Any, problem: Problem, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in _named(model, problem).items():
            array = weights[name]
            if name.endswith("kernel"):
                height_width = _extent(problem, name, array.shape)
                array = array.reshape(*height_width, -1, array.shape[-1]).transpose(3, 2, 0, 1)
            parameter.copy_(torch.from_numpy(array.copy()).reshape(parameter.shape))


def extract(model: Any, problem: Problem) -> Weights:
    found = {}
    for name, parameter in _named(model, problem).items():
        array = parameter.detach().float().cpu().numpy()
        if name.endswith("kernel"):
            shape = problem.weights[name].shape
            array = array.reshape(shape[-1], -1, *_extent(problem, name, shape))
            array = array.transpose(2, 3, 1, 0).reshape(shape)
        found[name] = array.copy()
    return found


def _extent(problem: Problem, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width of a kernel; a dense layer is a convolution of a single pixel."""
    return shape[:2] if len(shape) == 4 else FLATTENED.get((problem.model, name), (1, 1))


def _named(model: Any, problem: Problem) -> dict[str, Any]:
    """The module's parameters by the problem's names, in the module's order."""
    theirs = {}
    for name in problem.weights:
        *layers, kind = name.replace("/layers/", "/").split("/")
        theirs[".".join((*layers, "bias" if kind == "bias" else "weight"))] = name
    return {theirs[name]: parameter for name, parameter in model.named_parameters()}


def channels_first(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, -1, -3).copy() if x.ndim == 4 else x


def tensors(
    x: list[np.ndarray], y: list[np.ndarray], device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Clients as PyTorch wants them: images with channels first, labels of 64 bits."""
    images = [torch.from_numpy(channels_first(own)).to(device) for own in x]
    return images, [torch.from_numpy(own).long().to(device) for own in y]
