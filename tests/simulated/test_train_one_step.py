"""TrainOneStepCell trains whichever of its cells is made parallel, and whenever."""

from __future__ import annotations

import pytest
import torch

import distcell as dc
from distcell import nn
from distcell import random as dc_random
from distcell.context import LaunchOptions, set_launch


def _losses(options: LaunchOptions, which: str) -> list[float]:
    set_launch(options)
    torch.manual_seed(0)
    dc_random.seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with_loss = nn.WithLossCell(net.double(), nn.MSELoss())
    step = nn.TrainOneStepCell(with_loss, torch.optim.SGD(net.parameters(), 0.1))
    {"step": step.set_auto_parallel, "loss": with_loss.set_auto_parallel,
     "net": lambda: dc.parallelize(net)}[which]()  # fmt: skip
    try:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
        return [float(step(x, x[:, :2])) for _ in range(3)]
    finally:
        set_launch(LaunchOptions())


@pytest.mark.parametrize("which", ["step", "loss", "net"])
def test_three_steps_are_those_of_one_device(which: str) -> None:
    wanted = _losses(LaunchOptions(), which)
    found = _losses(LaunchOptions(mode="simulate", ranks=2, strategy="data"), which)
    assert wanted[0] > wanted[1] > wanted[2]
    assert found == pytest.approx(wanted, abs=1e-12)
