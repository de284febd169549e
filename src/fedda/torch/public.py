"""The names of `fedda.torch` that need JAX."""

from fedda.flower.client import introduce
from fedda.torch.bridge import DTYPES, load, model, parameters, task
from fedda.torch.client import ALGORITHMS, begin_round, client_app, end_round

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
