"""Attention in which several heads of queries share one head of keys and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distcell as dc


class GroupedAttention(nn.Module):
    """Four heads of queries, two of keys; the kernel is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, 4)
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.square().mean()


@pytest.mark.parametrize(("strategy", "ranks"), [("data", 4), ("tensor", 2), ("tensor", 4)])
def test_grouped_query_attention_is_that_of_one_device(
    assert_one_meaning, strategy: str, ranks: int
) -> None:
    torch.manual_seed(0)
    net = GroupedAttention().double()
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    assert_one_meaning(net, (x,), strategy, ranks)


def test_an_input_without_dims_is_not_split_by_the_pattern_for_all() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (self.up(x) * scale).mean()

    plan = dc.plan(Scale(), (torch.ones(8, 4), torch.tensor(2.0)), "data", 2)
    assert str(plan.layout("x")) == "[8@dp, 4]" and str(plan.layout("scale")) == "[]"
