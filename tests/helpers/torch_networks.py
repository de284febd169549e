"""Networks of PyTorch: the kinds that its users train, as small as they can be."""

import torch
from torch import nn

F = nn.functional


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)), (3, 4)


def emnist_cnn():
    """The network of the federated EMNIST experiments, 1,206,590 parameters."""
    layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(128, 62)), (1, 28, 28)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, after), nn.GroupNorm(2, after)
        self.shortcut = nn.Sequential()
        if before != after:
            shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.GroupNorm(2, after))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


def resnet18(width=64, size=32, classes=10):
    """As of torchvision, with GroupNorm in place of BatchNorm."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.GroupNorm(2, width), nn.ReLU()]
    widths = [width * 2 ** (number // 2) for number in range(8)]
    blocks = [
        Block(before, after, 2 if before != after else 1)
        for before, after in zip([width, *widths], widths, strict=False)
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head), (3, size, size)


WORDS, LENGTH = 11, 6


class LSTMLanguageModel(nn.Module):
    """The next word of every word, with the embedding as output layer (tied weights)."""

    def __init__(self, cell=nn.LSTM, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5, padding_idx=0)
        self.cell = cell(5, 5, num_layers=2, batch_first=True, **options)
        self.out = nn.Linear(5, WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        outputs, _ = self.cell(self.embedding(x))
        return self.out(outputs[..., :5]).transpose(1, 2)


class TransformerLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.places = nn.Parameter(torch.randn(LENGTH, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)
        self.out = nn.Linear(8, WORDS)

    def forward(self, x):
        x = self.embedding(x) + self.places
        return self.out(self.encoder(x, mask=self.mask, is_causal=True)).transpose(1, 2)


class Attention(nn.Module):
    """Attention as most people write it now."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, 8)
        return self.out(F.gelu(x)).mean(1)


def autoencoder():
    encoder = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(4, 6, 3, 2, 1)]
    larger = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1)
    decoder = [nn.AvgPool2d(1), larger, nn.SiLU(), nn.ConvTranspose2d(4, 1, 2, stride=2)]
    return nn.Sequential(*encoder, *decoder, nn.Sigmoid()), (1, 12, 12)


class LoRA(nn.Module):
    """A linear layer that does not change, plus a trained matrix of low rank."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def lora():
    network, shape = mlp()
    network[1], network[3] = LoRA(network[1]), LoRA(network[3])
    return network, shape


def one_axis():
    """Convolutions of sequences, with dilation and groups."""
    layers = [nn.Conv1d(2, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 4, 3, dilation=2, groups=2)]
    layers += [nn.MaxPool1d(2), nn.InstanceNorm1d(4, affine=True), nn.ConvTranspose1d(4, 2, 3, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)), (2, 12)


NETWORKS = {
    "mlp": mlp,
    "emnist_cnn": emnist_cnn,
    "resnet18": resnet18,
    "lstm": lambda: (LSTMLanguageModel(), (LENGTH,)),
    "lstm, both ways": lambda: (LSTMLanguageModel(bidirectional=True), (LENGTH,)),
    "gru": lambda: (LSTMLanguageModel(nn.GRU), (LENGTH,)),
    "rnn": lambda: (LSTMLanguageModel(nn.RNN, nonlinearity="relu"), (LENGTH,)),
    "transformer": lambda: (TransformerLanguageModel(), (LENGTH,)),
    "attention": lambda: (Attention(), (5, 8)),
    "autoencoder": autoencoder,
    "lora": lora,
    "one_axis": one_axis,
}


def made(name, dtype=torch.float32, examples=3):
    """A network in evaluation mode, and inputs. They are the same in every process."""
    torch.manual_seed(1)
    network, shape = NETWORKS[name]()
    words = "embedding" in dict(network.named_children())
    x = torch.randint(WORDS, (examples, *shape)) if words else torch.randn(examples, *shape)
    if not words:
        network(x)  # for layers that are made on their first call
        x = x.to(dtype)
    return network.to(dtype).eval(), x


class SmallCNN(nn.Module):
    """A convolution, pooling, dropout and a linear layer; `jax_cnn` computes the same."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = F.max_pool2d(F.silu(self.conv(x)), 2)
        return self.out(self.dropout(x.flatten(1)))


def small_cnn():
    torch.manual_seed(2)
    return SmallCNN().double()
