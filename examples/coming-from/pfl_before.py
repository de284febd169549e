"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from sklearn.datasets import load_digits
from torch import nn

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
clients = [(x[number:1500:30], y[number:1500:30]) for number in range(30)]
x, y = x[1500:], y[1500:]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


network = Network()
data = FederatedDataset(lambda number: Dataset(clients[number]), lambda: np.random.randint(30))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=30,
        evaluation_frequency=30,
        train_cohort_size=10,
        val_cohort_size=0,
    ),
    SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
    PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
    NNTrainHyperParams(local_learning_rate=0.3, local_num_epochs=1, local_batch_size=20),
    send_metrics_to_platform=False,
)

print(f"accuracy {(network(x).argmax(1) == y).float().mean():.2f}")
