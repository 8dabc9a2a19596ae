"""Networks that share or change parts or what they read, and what a training of each gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import distcell as dc
from distcell.context import LaunchOptions
from tests.training import launched


class Twice(nn.Module):
    """One layer under two names, and in a list too; a norm whose buffers have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.again = self.up
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 8)
        self.all = nn.ModuleList([self.down, self.norm, self.up, self.down])

    def forward(self, x: Tensor) -> Tensor:
        return self.all[3](self.norm(self.again(torch.tanh(self.up(x))))).square().mean()


BETA = 0.0
"""What a training anneals."""


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return y.square().mean() + BETA * y.abs().mean()


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def train(net: nn.Module, found: list[Tensor], steps: int = 2) -> None:
    """Trains a network, and notes losses and gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
    for _ in range(steps):
        loss = net(x)
        loss.backward()
        found += [loss.detach(), *(dc.whole_tensor(p, p.grad).clone() for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()


def shared_layers(net: nn.Module, found: list[Tensor]) -> None:
    train(net, found, 3)


def new_heads(net: nn.Module, found: list[Tensor]) -> None:
    """As in fine-tuning: other heads, with other parameters, and one of the same shape."""
    train(net, found)
    for outputs, has_bias in ((2, True), (4, False), (4, False)):
        net.down = nn.Linear(12, outputs, bias=has_bias).double()
        train(net, found)


def annealed(net: nn.Module, found: list[Tensor]) -> None:
    """A global that the network reads, and a variable that the loss reads, change."""
    global BETA
    for BETA in (0.0, 1.0, 2.0, 0.0):  # noqa: B007
        train(net, found, 1)
    weight = [1.0]
    x, y = torch.ones(8, 8, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = dc.compile_step(net, lambda out, label: weight[0] * (out - label) + BETA, optimizer)
    for BETA, weight[0] in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):  # noqa: B007
        found.append(step(x, y))
    BETA = 0.0


CHANGES: dict[str, tuple[type[nn.Module], Callable[[nn.Module, list[Tensor]], None]]] = {
    "shared layers": (Twice, shared_layers),
    "annealed": (Annealed, annealed),
    "new heads": (Headed, new_heads),
}


def what_comes_of(name: str, options: LaunchOptions) -> list[Tensor]:
    """Losses, gradients and the last state."""
    make, change = CHANGES[name]
    found: list[Tensor] = []
    with launched(options):
        torch.manual_seed(0)
        net = dc.parallelize(make().double())
        change(net, found)
        found += [value.clone() for value in net.state_dict().values()]
    return found
