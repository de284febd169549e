"""FedLab: the handlers and trainers of `fedlab.contrib`, in its standalone pipeline."""

import logging
import sys
from unittest.mock import MagicMock

# FedLab imports this for data sets that are not used here, and the package index has no build of it
# for a PyTorch without CUDA.
sys.modules["torchvision"] = MagicMock()

import torch  # noqa: E402
from fedlab.contrib.algorithm.fedavg import (  # noqa: E402
    FedAvgSerialClientTrainer,
    FedAvgServerHandler,
)
from fedlab.contrib.algorithm.fedprox import (  # noqa: E402
    FedProxSerialClientTrainer,
    FedProxServerHandler,
)
from fedlab.contrib.algorithm.scaffold import (  # noqa: E402
    ScaffoldSerialClientTrainer,
    ScaffoldServerHandler,
)
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

from conformance.audit.adapter import CLIENTS, ROUNDS, main  # noqa: E402
from conformance.audit.peer_linear import linear, matrix, tensors  # noqa: E402


class Rounds(StandalonePipeline):
    """The cohorts and batches of the vectors."""

    def __init__(self, handler, trainer):
        super().__init__(handler, trainer)
        self.models = []
        handler.sample_clients = lambda: list(ROUNDS[handler.round])
        trainer.setup_dataset(self)

    def get_dataloader(self, client, batch_size):
        data = torch.utils.data.TensorDataset(*tensors(ROUNDS[self.handler.round][client]))
        return torch.utils.data.DataLoader(data, batch_size)

    def evaluate(self):
        self.models.append(matrix(self.handler.model.state_dict()))


def run(handler, trainer, hp, **chosen):
    module = linear()
    server = handler(module, len(ROUNDS), sample_ratio=len(ROUNDS[0]) / CLIENTS)
    clients = trainer(module, CLIENTS)
    clients.setup_optim(epochs=1, batch_size=4, lr=hp["client_lr"], **chosen)
    if handler is ScaffoldServerHandler:
        server.setup_optim(hp["server_lr"])
    pipeline = Rounds(server, clients)
    pipeline.main()
    return pipeline.models


logging.disable(logging.INFO)
torch.set_default_dtype(torch.float64)
main(
    "fedlab",
    {
        "FedAvg": lambda hp: run(FedAvgServerHandler, FedAvgSerialClientTrainer, hp),
        "FedProx": lambda hp: run(
            FedProxServerHandler, FedProxSerialClientTrainer, hp, mu=hp["mu"]
        ),
        "SCAFFOLD": lambda hp: run(ScaffoldServerHandler, ScaffoldSerialClientTrainer, hp),
    },
)
