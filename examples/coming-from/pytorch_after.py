"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import fedda
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
clients = [Subset(digits, range(number, 1500, 30)) for number in range(30)]
x, y = digits[1500:]

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
loss = nn.CrossEntropyLoss()
settings = {"rounds": 30, "batch": 20, "local_work": 1, "local_unit": "epochs", "client_lr": 0.3}
fedda.run("fedavg", network, clients, loss, cohort=10, **settings).to(network)

print(f"accuracy {(network(x).argmax(1) == y).float().mean():.2f}")
torch.save(network.state_dict(), "network.pt")
