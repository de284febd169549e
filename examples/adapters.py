"""Fine-tune a small transformer by adapters: clients train and send 2 % of its parameters.

The texts come with Python. The transformer first learns the docstrings of a module, letter by
letter, in PyTorch. Each client has one topic of the language reference to adapt it to.
"""

import inspect
from pydoc_data.topics import topics

import fedda
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

LENGTH, WIDTH = 32, 64


class Adapter(nn.Module):
    """A matrix of low rank that is added to the weights of a layer. It is 0 at first."""

    def __init__(self, weight: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(len(weight), rank))
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.letters(x) + self.places(torch.arange(LENGTH))
        return self.out(self.block(x, mask, is_causal=True)).transpose(1, 2)


def examples(text: str) -> tuple[Tensor, Tensor]:
    """Return windows of a text, and the next letter of each of their letters."""
    windows = torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, LENGTH + 1, LENGTH)
    return windows[:, :-1], windows[:, 1:]


torch.manual_seed(0)
network, loss = Transformer(), nn.CrossEntropyLoss()
x, y = examples("\n".join(inspect.getdoc(member) or "" for member in vars(inspect).values()))
optimizer = torch.optim.Adam(network.parameters(), 3e-3)
for _ in range(300):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    loss(network(x[rows]), y[rows]).backward()
    optimizer.step()

network.requires_grad_(False)
for layer in (network.block.linear1, network.block.linear2, network.block.self_attn.out_proj):
    register_parametrization(layer, "weight", Adapter(layer.weight))
test, *clients = (examples(text) for _, text in sorted(topics.items()) if len(text) > 2000)
result = fedda.run(
    "fedda-adam", network, clients, loss, test=test, rounds=15, client_lr=1.0, server_lr=0.3
)
before, after = (result.history[row]["loss"] for row in (0, -1))
trained = sum(w.size for w in result.params.values())
total = sum(w.numel() for w in network.parameters())
print(f"loss {before:.2f} before, {after:.2f} after: {trained} of {total} parameters are sent")
