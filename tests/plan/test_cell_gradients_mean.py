"""`gradients_mean=False`: gradients are those of one device, times the parts of the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import distcell as dc
from distcell import nn
from distcell.context import LaunchOptions, launch, set_launch
from distcell.errors import StrategyError

RANKS = 4
BATCH = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
TARGETS = torch.linspace(1, -1, 16, dtype=torch.float64).reshape(8, 2)
PARTS = {"data": 4, "data-tensor": 2}
"""Of a batch on four ranks."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = launch()
    torch.manual_seed(0)
    yield
    set_launch(before)
    dc.reset_auto_parallel_context()


class Mlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Dense(3, 8), nn.GELU(), nn.Dense(8, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def construct(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def twins(strategy: str, *, mean: bool) -> tuple[Net, Net]:
    """A net that is split, and the same on one device."""
    plain = Net().double()
    set_launch(LaunchOptions(mode="simulate", ranks=RANKS, strategy=strategy))
    dc.set_auto_parallel_context(gradients_mean=mean)
    return copy.deepcopy(plain).set_auto_parallel(), plain


def loss_of(net: nn.Cell, x: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(net(x), TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("strategy", PARTS)
def test_backward_multiplies_the_gradients_of_parameters_alone(strategy: str, mean: bool) -> None:
    split, plain = twins(strategy, mean=mean)
    factor = 1 if mean else PARTS[strategy]
    ours, theirs = (BATCH.clone().requires_grad_() for _ in range(2))
    assert torch.equal(loss_of(split, ours), loss_of(plain, theirs))
    loss_of(split, ours).backward()
    loss_of(plain, theirs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for one, other in zip(split.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad * factor)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PARTS)
def test_a_whole_step_updates_by_the_multiplied_gradients(strategy: str) -> None:
    split, plain = twins(strategy, mean=False)
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1, momentum=0.9)
    step = dc.compile_step(split, torch.nn.MSELoss(), optimizer)
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = loss_of(plain, BATCH)
        loss.backward()
        for param in plain.parameters():
            assert param.grad is not None
            param.grad *= PARTS[strategy]
        by_hand.step()
        by_hand.zero_grad()
        torch.testing.assert_close(step(BATCH, TARGETS), loss.detach())
    for one, other in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, check_dtype=False)


def test_a_single_device_has_one_part() -> None:
    dc.set_auto_parallel_context(gradients_mean=False)
    plain = Net().double()
    net = copy.deepcopy(plain).set_auto_parallel()
    for each in (net, plain):
        loss_of(each, BATCH).backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_strategy_that_splits_no_batch_is_refused() -> None:
    split, _ = twins("tensor", mean=False)
    with pytest.raises(StrategyError, match="names no axes that split one"):
        split(BATCH)
