"""Small networks as people bring them: attention written in several ways, recurrent layers, tied
weights, and mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models import build

STEPS, INPUTS, CLASSES, WORDS = 6, 5, 4, 11


class FusedAttention(nn.Module):
    """One linear layer for q, k and v; sizes from the input's shape, as `C // heads`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class OwnHeads(nn.Module):
    """Separate q, k and v; heads have a size of their own, so they can be cut by themselves."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """As GPT-2 is often written: the width is kept as an attribute, and split by it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_embd, self.n_head = dim, heads
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    """Norm, attention, norm, perceptron, with shortcuts."""

    def __init__(self, dim: int, attention: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Class token, positions, blocks, a norm at the end."""

    def __init__(self, *attention: nn.Module, dim: int = 12, hidden: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, STEPS + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, each, hidden) for each in attention))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self, dim: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=self.weights)[0]
        return out


class Encoder(nn.Module):
    """Layers of `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 10, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer and a reader of its last step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear((1 + layer.bidirectional) * layer.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class OwnCell(nn.Module):
    """A recurrent cell that the network calls itself, with a first state that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 7
        self.cell = nn.GRUCell(INPUTS, self.hidden)
        self.head = nn.Linear(self.hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.hidden)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class Mixed(nn.Module):
    """Convolution, recurrent layer, attention, and a shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(INPUTS, 6, 3, padding=1)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.attention = OwnHeads(8, 3, 4)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))[0]
        return self.head((x + self.attention(x)).amax(1))


class TiedWords(nn.Module):
    """A language model whose embedding is its output layer, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.positions = nn.Embedding(STEPS, 12)
        self.block = Block(12, CausalAttention(12, 3), 10)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.block(self.embed(x) + self.positions(places)))


class TiedLayers(nn.Module):
    """An autoencoder whose ways in and out are one matrix, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 8)
        self.twice = nn.Linear(8, 8)
        self.again = self.twice
        self.wide = nn.Linear(8, 6)
        self.wide_too = nn.Linear(8, 6)
        self.wide_too.weight = self.wide.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.mean(1)))
        x = x + F.relu(self.again(F.relu(self.twice(x))))
        return self.head(F.relu(self.wide(x)) * torch.sigmoid(self.wide_too(x)))


MODERN = {
    "fused": lambda: Transformer(FusedAttention(12, 3), FusedAttention(12, 3)),
    "own heads": lambda: Transformer(OwnHeads(12, 3, 5), OwnHeads(12, 2, 4)),
    "causal": lambda: Transformer(CausalAttention(12, 4), CausalAttention(12, 2)),
    "multihead": lambda: Transformer(SelfAttention(12, 3, False), SelfAttention(12, 3, True)),
    "encoder": Encoder,
    "lstm": lambda: Recurrent(nn.LSTM(INPUTS, 7, batch_first=True)),
    "lstm, two ways": lambda: Recurrent(
        nn.LSTM(INPUTS, 6, num_layers=2, batch_first=True, bidirectional=True)
    ),
    "gru": lambda: Recurrent(nn.GRU(INPUTS, 7, num_layers=2, batch_first=True)),
    "rnn": lambda: Recurrent(nn.RNN(INPUTS, 7, batch_first=True)),
    "own cell": OwnCell,
    "mixed": Mixed,
    "gpt": lambda: build(
        "gpt", shape=(STEPS,), classes=WORDS, dim=8, depth=2, heads=3, head_dim=4, hidden=10
    ),
    "lstm at every step": lambda: build(
        "lstm", shape=(STEPS,), classes=WORDS, words=WORDS, hidden=(6, 7), dim=8, every=True
    ),
    "autoencoder": lambda: build(
        "autoencoder", shape=(STEPS, INPUTS), classes=CLASSES, hidden=(9, 8), code=4
    ),
    "forecaster": lambda: build(
        "forecaster", shape=(STEPS, INPUTS), classes=CLASSES, channels=8, depth=2
    ),
    "tied words": TiedWords,
    "tied layers": TiedLayers,
}


TEXTS = ("gpt", "lstm at every step", "tied words")


def inputs(name: str, rows: int = 3) -> Tensor:
    """A batch for one of the networks."""
    if name in TEXTS:
        return torch.randint(WORDS, (rows, STEPS))
    return torch.randn(rows, STEPS, INPUTS)


def shape_of(name: str) -> tuple[int, ...]:
    """The shape of a sample."""
    return (STEPS,) if name in TEXTS else (STEPS, INPUTS)
