"""The GPT that is measured, and what it is fed with: the same for every variant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEARNING_RATE = 0.01
BATCHES = 4
"""How many batches there are; steps go round them."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """What is measured: without dropout, in float32, trained by SGD."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    tokens: int = 128
    vocabulary: int = 256


SMALL = Size(layers=2, width=32, tokens=16, vocabulary=64)
"""For trying the command, not for measuring."""


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # by the width of a head: a peer that splits the projections has fewer heads on each rank
        split = (-1, self.head_width)
        q, k, v = (f(x).unflatten(-1, split).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(size.width), Attention(size)
        self.ln2, self.mlp = nn.LayerNorm(size.width), Mlp(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.pos = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_gpt(size: Size) -> Gpt:
    """The model with its initial values: equal at every call, on every rank."""
    torch.manual_seed(0)
    return Gpt(size)


def make_batches(size: Size, rows: int) -> list[Batch]:
    """The global batches."""
    draws = torch.Generator().manual_seed(1)
    shape = (rows, size.tokens + 1)
    drawn = (torch.randint(size.vocabulary, shape, generator=draws) for _ in range(BATCHES))
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in drawn]
