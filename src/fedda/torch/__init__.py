"""FedDA for clients that train a PyTorch module.

`client_app` is a complete Flower client for a module and its `DataLoader`. `DecoupledSGD`, between
`begin_round` and `end_round`, does the same in a training loop of your own. `task` describes the
module to the server, and `load` copies the trained parameters into it.
"""

from fedda.flower.client import introduce
from fedda.torch.bridge import DTYPES, load, model, parameters, task
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
