"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import fedda
import torch
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


network = Network()
settings = {"rounds": 30, "batch": 20, "local_work": 1, "local_unit": "epochs", "client_lr": 0.3}
fedda.run("fedavg", network, clients, "cross_entropy", cohort=10, **settings).to(network)

print(f"accuracy {(network(x).argmax(1) == y).float().mean():.2f}")
