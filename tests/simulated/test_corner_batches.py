"""Batches in which nothing counts, and inputs that need no gradient: as on one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distcell as dc
from tests.training import launched, simulated


class Classes(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.up, self.smoothing = nn.Linear(4, 6), smoothing

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.up(x), y, label_smoothing=self.smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("strategy", ["data", "tensor"])
def test_a_batch_of_which_all_is_ignored_has_gradients_of_zero(strategy, smoothing):
    torch.manual_seed(0)
    net, x, y = Classes(smoothing), torch.randn(4, 4), torch.full((4,), -100)
    alone = copy.deepcopy(net)
    with launched(simulated(2, strategy)):
        dc.parallelize(net)
        loss = net(x, y)
        loss.backward()
    whole = alone(x, y)
    whole.backward()
    assert loss.isnan() and whole.isnan()
    for made, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(made.grad, wanted.grad, equal_nan=True)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(self.conv(x), grid, align_corners=False)


def test_an_op_may_make_a_gradient_that_nobody_asked_for():
    torch.manual_seed(0)
    net, x, grid = Sampled(), torch.randn(4, 1, 5, 5), torch.rand(4, 2, 2, 2)
    net(x, grid).square().sum().backward()
    wanted = net.conv.weight.grad.clone()
    net.zero_grad()
    with launched(simulated(2, "data")):
        dc.parallelize(net)
        net(x, grid).square().sum().backward()
    torch.testing.assert_close(net.conv.weight.grad, wanted)
