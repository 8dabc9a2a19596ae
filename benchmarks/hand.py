"""A tensor-parallel step written by hand, on our collectives: the least that a step can take.

The way of Megatron: projections into attention and feed-forward are split by columns, those out of
them by rows, the table of tokens by the vocabulary, and the loss is computed on its parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Variant
from benchmarks.model import Batch, Gpt
from benchmarks.peers import eager_step
from distcell.runtime.collectives import Collectives


class _Enter(torch.autograd.Function):
    """Into a split part: the gradients of the parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Collectives) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce(grad, ctx.ranks.mesh.names), None


class _Leave(torch.autograd.Function):
    """Out of a split part: the parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Collectives) -> Tensor:
        return ranks.all_reduce(x, ranks.mesh.names)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Loss(torch.autograd.Function):
    """The mean cross-entropy of logits that are split by the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: Collectives) -> Tensor:
        axes, width = ranks.mesh.names, logits.shape[1]
        logits = logits - ranks.all_reduce(logits.amax(1), axes, "max").unsqueeze(1)
        local = targets - ranks.rank * width
        is_here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1).unsqueeze(1)
        here = logits.gather(1, local).squeeze(1) * is_here
        exponents = logits.exp_()
        total, chosen = ranks.all_reduce(torch.stack([exponents.sum(1), here]), axes).unbind()
        ctx.save_for_backward(exponents.div_(total.unsqueeze(1)), local, is_here)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, is_here = ctx.saved_tensors
        softmax.scatter_add_(1, local, -is_here.to(softmax.dtype).unsqueeze(1))
        return softmax.mul_(grad / len(softmax)), None, None


class SplitGpt(nn.Module):
    """This rank's part of a `Gpt`."""

    def __init__(self, gpt: Gpt, ranks: Collectives) -> None:
        super().__init__()
        self.gpt, self.ranks = gpt, ranks
        for block in gpt.blocks:
            for layer in (block.attn.q, block.attn.k, block.attn.v, block.mlp.up):
                layer.weight, layer.bias = self._part(layer.weight, 0), self._part(layer.bias, 0)
            for layer in (block.attn.o, block.mlp.down):
                layer.weight = self._part(layer.weight, 1)
        gpt.embed.weight = gpt.head.weight = self._part(gpt.embed.weight, 0)

    def _part(self, whole: nn.Parameter, dim: int) -> nn.Parameter:
        part = whole.detach().chunk(self.ranks.mesh.size, dim)[self.ranks.rank]
        return nn.Parameter(part.clone())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        gpt = self.gpt
        x = self._embed(ids) + gpt.pos(torch.arange(ids.shape[1]))
        for block in gpt.blocks:
            x = x + self._attention(block.attn, self._enter(block.ln1(x)))
            h = F.gelu(block.mlp.up(self._enter(block.ln2(x))))
            x = x + self._by_rows(block.mlp.down, h)
        logits = gpt.head(self._enter(gpt.norm(x)))
        loss: Tensor = _Loss.apply(logits.flatten(0, 1), targets.flatten(), self.ranks)
        return loss

    def _attention(self, attn: nn.Module, x: Tensor) -> Tensor:
        split = (-1, attn.head_width)
        q, k, v = (f(x).unflatten(-1, split).transpose(1, 2) for f in (attn.q, attn.k, attn.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._by_rows(attn.o, mixed.transpose(1, 2).flatten(2))

    def _embed(self, ids: Tensor) -> Tensor:
        table = self.gpt.embed.weight
        local = ids - self.ranks.rank * len(table)
        is_here = (local >= 0) & (local < len(table))
        found = F.embedding(local.clamp(0, len(table) - 1), table) * is_here.unsqueeze(-1)
        left: Tensor = _Leave.apply(found, self.ranks)
        return left

    def _by_rows(self, layer: nn.Linear, x: Tensor) -> Tensor:
        summed: Tensor = _Leave.apply(F.linear(x, layer.weight), self.ranks)
        return summed + layer.bias

    def _enter(self, x: Tensor) -> Tensor:
        entered: Tensor = _Enter.apply(x, self.ranks)
        return entered


def hand_step(gpt: Gpt, batches: list[Batch], ranks: Collectives) -> Variant:
    """Tensor parallelism by hand."""
    return eager_step("hand", SplitGpt(gpt, ranks), batches)
