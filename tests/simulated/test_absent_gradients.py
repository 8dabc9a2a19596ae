"""Outputs that the user's loss leaves out: their gradients are absent, not wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import distcell as dc
from distcell import random as dc_random
from distcell.context import LaunchOptions, set_launch
from distcell.errors import BackwardError

SIMULATED = LaunchOptions(mode="simulate", ranks=4, strategy="data")


class Net(nn.Module):
    """Returns a loss and what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.down(torch.tanh(self.norm(self.up(x))))
        return {"loss": (logits**2).mean(), "logits": logits}


def _train(options: LaunchOptions, with_logits: list[bool]) -> dict[str, Tensor]:
    set_launch(options)
    torch.manual_seed(0)
    dc_random.seed(0)
    net = dc.parallelize(Net().double())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = torch.Generator().manual_seed(1)
    try:
        for uses in with_logits:
            result = net(torch.randn(12, 8, generator=data, dtype=torch.float64))
            loss = result["loss"] + (result["logits"].pow(3).mean() if uses else 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        set_launch(LaunchOptions())
    return {name: value.double() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    "with_logits",
    [[False] * 3, [False, False, True, True], [True, False, False, True, False]],
    ids=["never", "later", "now and then"],
)
def test_training_is_that_of_one_device_whichever_gradients_come_in(
    with_logits: list[bool],
) -> None:
    reference = _train(LaunchOptions(), with_logits)
    found = _train(SIMULATED, with_logits)
    for name, value in reference.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name


class TwoHeads(nn.Module):
    """Two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.left(hidden), self.right(hidden)


@pytest.mark.parametrize("strategy", ["data", None], ids=["split", "one device"])
def test_parameters_that_no_gradient_reaches_have_none(strategy: str | None) -> None:
    def run(options: LaunchOptions) -> list[Tensor]:
        set_launch(options)
        torch.manual_seed(0)
        net = dc.parallelize(TwoHeads().double())
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5)
        for step in range(4):
            head = net(torch.ones(12, 8, dtype=torch.float64))[step % 2]
            head.square().mean().backward()
            idle = (net.right, net.left)[step % 2]
            assert idle.weight.grad is None and idle.bias.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()]

    try:
        wanted = run(LaunchOptions())
        found = run(SIMULATED if strategy else LaunchOptions())
    finally:
        set_launch(LaunchOptions())
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


def test_gradients_of_gradients_are_refused() -> None:
    set_launch(SIMULATED)
    try:
        net = dc.parallelize(Net().double())
        x = torch.ones(12, 8, dtype=torch.float64, requires_grad=True)
        with pytest.raises(BackwardError, match="gradients of gradients"):
            torch.autograd.grad(net(x)["loss"], x, create_graph=True)
    finally:
        set_launch(LaunchOptions())


@pytest.mark.parametrize("options", [LaunchOptions(), SIMULATED], ids=["one device", "split"])
def test_a_second_backward_adds_the_same_gradients(options: LaunchOptions) -> None:
    set_launch(options)
    torch.manual_seed(0)
    try:
        net = dc.parallelize(Net().double())
        loss = net(torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(12, 8))["loss"]
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in net.parameters()]
        moved = net.norm.running_mean.clone()
        loss.backward()
        for parameter, gradient in zip(net.parameters(), once, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=0, atol=1e-12)
        assert torch.equal(net.norm.running_mean, moved)
    finally:
        set_launch(LaunchOptions())


def test_a_parameter_that_changes_between_forward_and_backward_is_refused() -> None:
    set_launch(SIMULATED)
    try:
        net = dc.parallelize(Net().double())
        loss = net(torch.ones(12, 8, dtype=torch.float64))["loss"]
        with torch.no_grad():
            net.down.weight.mul_(2)
        with pytest.raises(BackwardError, match=r"down\.weight. was changed in place"):
            loss.backward()
    finally:
        set_launch(LaunchOptions())
