"""FedDA for clients that train a PyTorch module.

With the strategy `fedda.flower.FedDA`, a Flower client keeps its training loop: it trains with
`DecoupledSGD` and replies with `reply_arrays`. This needs no JAX in the client's process.

With `fedda.flower.serve`, `client_app` returns a complete client for a module and a `DataLoader`.
For a custom training loop, use `begin_round`, `DecoupledSGD` and `end_round`. `task` describes the
module to the server, and `load` copies the trained parameters into the module.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedda.torch.decoupled_sgd import DecoupledSGD
from fedda.torch.reply import reply_arrays

if TYPE_CHECKING:
    from fedda.torch.public import (
        ALGORITHMS,
        DTYPES,
        begin_round,
        client_app,
        end_round,
        introduce,
        load,
        model,
        parameters,
        task,
    )
else:

    def __getattr__(name: str) -> Any:
        """Import JAX only for the names that need it: a client's process starts faster."""
        return getattr(importlib.import_module("fedda.torch.public"), name)


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
    "reply_arrays",
    "task",
]
