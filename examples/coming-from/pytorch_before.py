"""FedAvg on handwritten digits: 30 rounds with 10 of 30 clients."""

import copy
import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
clients = [Subset(digits, range(number, 1500, 30)) for number in range(30)]
x, y = digits[1500:]

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
loss = nn.CrossEntropyLoss()
for _ in range(30):
    cohort, states = random.sample(clients, 10), []
    for client in cohort:
        local = copy.deepcopy(network)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.3)
        for batch in DataLoader(client, batch_size=20, shuffle=True):
            optimizer.zero_grad()
            loss(local(batch[0]), batch[1]).backward()
            optimizer.step()
        states.append(local.state_dict())
    weights = [len(client) / sum(map(len, cohort)) for client in cohort]
    for name in network.state_dict():
        parts = [weight * state[name] for weight, state in zip(weights, states, strict=True)]
        network.state_dict()[name].copy_(sum(parts))

print(f"accuracy {(network(x).argmax(1) == y).float().mean():.2f}")
torch.save(network.state_dict(), "network.pt")
