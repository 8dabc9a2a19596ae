"""The four models that tests train, as plain torch modules, with batches for each.

Every model's call takes a batch and returns its loss; without the targets it returns its output.
The names of the parts are those that the library's strategies know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention with own layers for q, k, v and o."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.mlp = nn.LayerNorm(width), Mlp(width, 4 * width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    """A GPT with learned positions, whose embedding and head are one matrix."""

    def __init__(
        self, *, layers: int, width: int, heads: int, vocab: int, context: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.pos.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.pos(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), targets)


class GroupedAttention(nn.Module):
    """Attention with rotary positions, in which several queries share a key and a value."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        size = width // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        rates = 10000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), self.rates)
        angles = torch.cat((angles, angles), dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Grouped-query attention and SwiGLU, each after an RMS norm and beside a residual."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), GroupedAttention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width), GatedMlp(width, 3 * width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """A network of Llama-style blocks with own embedding and head."""

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, vocab: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, dropout) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), targets)


class Cnn(nn.Module):
    """Two convolutions with batch norm, then two linear layers with dropout."""

    def __init__(self, *, channels: int, size: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.bn2, self.drop = nn.BatchNorm2d(2 * channels), nn.Dropout(dropout)
        self.fc1 = nn.Linear(2 * channels * (size // 4) ** 2, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        return _loss(self.fc2(x), labels)


class ReluMlp(nn.Module):
    """A layer of the plain network: up, ReLU, dropout, down."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up, self.relu = nn.Linear(width, hidden), nn.ReLU()
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.relu(self.up(x))))


class DeepMlp(nn.Module):
    """Plain layers one after the other; the loss is the mean square."""

    def __init__(self, *, layers: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReluMlp(width, hidden, dropout) for _ in range(layers))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if targets is None else F.mse_loss(x, targets)


def gpt(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocab: int = 64,
    context: int = 16,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Gpt:
    """A GPT of the given sizes."""
    model = Gpt(
        layers=layers, width=width, heads=heads, vocab=vocab, context=context, dropout=dropout
    )
    return model.to(dtype)


def llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Llama:
    """A Llama-style network of the given sizes."""
    model = Llama(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, vocab=vocab, dropout=dropout
    )
    return model.to(dtype)


def cnn(
    *,
    channels: int = 8,
    size: int = 8,
    classes: int = 10,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Cnn:
    """A CNN of the given sizes, for square images of one channel."""
    return Cnn(channels=channels, size=size, classes=classes, dropout=dropout).to(dtype)


def mlp(
    *,
    layers: int = 2,
    width: int = 16,
    hidden: int = 64,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> DeepMlp:
    """A plain network of the given sizes."""
    return DeepMlp(layers=layers, width=width, hidden=hidden, dropout=dropout).to(dtype)


def token_batches(
    count: int, *, batch: int = 8, context: int = 16, vocab: int = 64, seed: int = 0
) -> list[Batch]:
    """Random tokens with their successors, for GPT and Llama."""
    draws = torch.Generator().manual_seed(seed)
    shape = (batch, context + 1)
    rows = [torch.randint(vocab, shape, generator=draws) for _ in range(count)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def image_batches(
    count: int,
    *,
    batch: int = 8,
    size: int = 8,
    classes: int = 10,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Batch]:
    """Random images with labels, for the CNN."""
    draws = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(batch, 1, size, size, generator=draws, dtype=dtype),
            torch.randint(classes, (batch,), generator=draws),
        )
        for _ in range(count)
    ]


def vector_batches(
    count: int,
    *,
    batch: int = 8,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Batch]:
    """Random vectors with random targets, for the plain network."""
    draws = torch.Generator().manual_seed(seed)
    shape = (2, batch, width)
    pairs = [torch.randn(shape, generator=draws, dtype=dtype) for _ in range(count)]
    return [(pair[0], pair[1]) for pair in pairs]


@dataclass(frozen=True)
class Case:
    """A model with its batches, at the default sizes.

    Args:
        build: Takes `dropout` and `dtype` and sizes, all by name.
        batches: Takes a count and a dtype.
    """

    build: Callable[..., nn.Module]
    batches: Callable[[int, torch.dtype], list[Batch]]


CASES = {
    "gpt": Case(gpt, lambda count, dtype: token_batches(count)),
    "llama": Case(llama, lambda count, dtype: token_batches(count)),
    "cnn": Case(cnn, lambda count, dtype: image_batches(count, dtype=dtype)),
    "mlp": Case(mlp, lambda count, dtype: vector_batches(count, dtype=dtype)),
}


def _loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    if targets is None:
        return logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
