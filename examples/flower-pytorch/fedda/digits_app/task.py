"""The model, the data and the loops for training and evaluation."""

import torch
from fedda.torch import DecoupledSGD
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAINED = 1500  # the examples of the clients; the server evaluates on the others


class Net(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.head(self.features(x))


def load_all():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return TensorDataset(images, torch.tensor(labels))


def load_client(partition_id, num_partitions, batch_size):
    """Return the training and the validation data of a client."""
    data = load_all()
    rows = list(range(partition_id, TRAINED, num_partitions))
    cut = len(rows) * 4 // 5
    train_set, test_set = (torch.utils.data.Subset(data, part) for part in (rows[:cut], rows[cut:]))
    return DataLoader(train_set, batch_size, shuffle=True), DataLoader(test_set, batch_size)


def load_test(batch_size=100):
    data = load_all()
    rows = range(TRAINED, len(data))
    return DataLoader(torch.utils.data.Subset(data, rows), batch_size)


def train(net, loader, epochs, lr, device):
    """Train the model, and return the mean loss of a batch."""
    net.to(device).train()
    optimizer = DecoupledSGD(net.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader)), optimizer


def test(net, loader, device):
    """Return the mean loss of a batch, and the accuracy."""
    net.to(device).eval()
    criterion = nn.CrossEntropyLoss()
    total, right = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images.to(device))
            total += criterion(outputs, labels.to(device)).item()
            right += (outputs.argmax(1).cpu() == labels).sum().item()
    return total / len(loader), right / len(loader.dataset)
