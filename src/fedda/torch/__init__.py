"""FedDA for clients that train a PyTorch module.

`client_app` returns a complete Flower client for a module and a `DataLoader`. For a custom training
loop, use `begin_round`, `DecoupledSGD` and `end_round`. `task` describes the module to the server,
and `load` copies the trained parameters into the module.
"""

from fedda.flower.client import introduce
from fedda.models.torch import DTYPES, load, parameters
from fedda.torch.bridge import model, task
from fedda.torch.client import ALGORITHMS, begin_round, client_app, end_round
from fedda.torch.decoupled_sgd import DecoupledSGD

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "DecoupledSGD",
    "begin_round",
    "client_app",
    "end_round",
    "introduce",
    "load",
    "model",
    "parameters",
    "task",
]
