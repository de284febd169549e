"""The model of the vectors in PyTorch, for the libraries that train PyTorch modules."""

import numpy as np
import torch

from conformance.audit.adapter import PROBLEM


def linear() -> torch.nn.Linear:
    """Return the initial model, with the default type of PyTorch."""
    classes = PROBLEM.weights.shape[1]
    module = torch.nn.Linear(len(PROBLEM.weights) - 1, classes)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(PROBLEM.weights[:-1].T))
        module.bias.copy_(torch.tensor(PROBLEM.weights[-1]))
    return module


def matrix(state) -> np.ndarray:
    """Return a state dict, or a dictionary of arrays, as the matrix of the vectors."""
    weight, bias = (np.array(state[name]) for name in ("weight", "bias"))
    return np.vstack([weight.T, bias])


def tensors(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's examples with the default type of PyTorch."""
    return torch.tensor(rows.x, dtype=torch.get_default_dtype()), torch.tensor(rows.y)
