"""The names of `fedda.torch` that need JAX."""

from fedda.models.torch import DTYPES, load, parameters
from fedda.torch.bridge import model, task
from fedda.torch.client import ALGORITHMS, begin_round, client_app, end_round, introduce

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "begin_round",
    "client_app",
    "end_round",
    "introduce",
    "load",
    "model",
    "parameters",
    "task",
]
