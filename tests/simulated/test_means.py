"""Losses that are means: over what counts of all ranks together, not a mean of the ranks' means."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import Batch, History, assert_equal, simulated, train

F64 = torch.float64
CLASSES, WIDTH = 10, 8
WEIGHTS = torch.linspace(0.1, 3.0, CLASSES, dtype=F64)
STRATEGIES = ("data", "tensor", "data-tensor")

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Two layers before a loss."""

    def __init__(self, loss: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", WEIGHTS.clone())
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.down(F.relu(self.up(x))))
        return self.loss(self, logits, targets)


CLASS_LOSSES = {
    "ignore": lambda net, x, y: F.cross_entropy(x, y, ignore_index=-100),
    "ignore-a-class": lambda net, x, y: F.cross_entropy(x, y.clamp_min(0), ignore_index=0),
    "weights": lambda net, x, y: F.cross_entropy(x, y.clamp_min(0), weight=net.weights),
    "smoothing": lambda net, x, y: F.cross_entropy(x, y.clamp_min(0), label_smoothing=0.1),
    "all-three": lambda net, x, y: F.cross_entropy(
        x, y, weight=net.weights, label_smoothing=0.2, ignore_index=-100
    ),
    "sum": lambda net, x, y: F.cross_entropy(x, y, weight=net.weights, reduction="sum"),
    "none-then-mean": lambda net, x, y: F.cross_entropy(x, y, reduction="none").mean(),
    "nll": lambda net, x, y: F.nll_loss(F.log_softmax(x, -1), y, weight=net.weights),
    "by-hand": lambda net, x, y: (
        (F.cross_entropy(x, y.clamp_min(0), reduction="none") * (y >= 0)).sum() / (y >= 0).sum()
    ),
}
ROW_LOSSES = {
    "mse": lambda net, x, y: F.mse_loss(x, y),
    "huber": lambda net, x, y: F.huber_loss(x, y, delta=0.7),
    "smooth-l1": lambda net, x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "l1": lambda net, x, y: F.l1_loss(x, y),
    "bce": lambda net, x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "mse-by-row": lambda net, x, y: (x - y).pow(2).mean(-1).mean(),
}


def class_batches() -> list[Batch]:
    """Batches of 12 rows whose first quarter (a shard of 4) and some more are ignored."""
    draws = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        targets = torch.randint(0, CLASSES, (12,), generator=draws)
        targets[:3] = -100
        targets[7] = -100
        batches.append((torch.randn(12, WIDTH, generator=draws, dtype=F64), targets))
    return batches


def row_batches() -> list[Batch]:
    """Batches of 7 rows."""
    draws = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(7, WIDTH, generator=draws, dtype=F64),
            torch.randn(7, CLASSES, generator=draws, dtype=F64),
        )
        for _ in range(3)
    ]


def build(name: str) -> Net:
    return Net({**CLASS_LOSSES, **ROW_LOSSES}[name]).to(F64)


def batches(name: str) -> list[Batch]:
    return class_batches() if name in CLASS_LOSSES else row_batches()


@cache
def plain_torch(name: str) -> History:
    return train(lambda: build(name), batches(name), plain=True)


@pytest.mark.parametrize(
    "ranks", [4, pytest.param(2, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*CLASS_LOSSES, *ROW_LOSSES])
def test_a_mean_is_that_of_one_device(name: str, strategy: str, ranks: int) -> None:
    found = train(lambda: build(name), batches(name), simulated(ranks, strategy))
    assert_equal(found, plain_torch(name), F64)
