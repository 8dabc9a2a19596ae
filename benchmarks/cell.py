"""What a Cell costs beside the same `torch.nn.Module`: to construct, and to call on one device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import distcell as dc
from benchmarks.measure import WARM_STEPS, Row, Run, row_of, take_pairs
from distcell import nn

LAYERS = 100
WIDTH = 8
ROWS = 2
"""Small: what the kernels take would hide what is measured."""
LIMIT = 1.1
CALLS = 3
"""How many calls each time is that of: a few milliseconds together."""


class TorchLayer(torch.nn.Module):
    """A layer as a user writes one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class CellLayer(nn.Cell):
    """The same as a Cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = dc.Parameter(torch.zeros(width, width))
        self.bias = dc.Parameter(torch.zeros(width))

    def construct(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchNet(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(TorchLayer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CellNet(nn.Cell):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.CellList([CellLayer(width) for _ in range(layers)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def torch_dense(layers: int, width: int) -> torch.nn.Module:
    """The library's layers, one after the other."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def cell_dense(layers: int, width: int) -> nn.Cell:
    """The same of Cells."""
    return nn.SequentialCell(*(nn.Dense(width, width) for _ in range(layers)))


NETS = (("Cell", CellNet, TorchNet), ("nn.Dense", cell_dense, torch_dense))
"""What is compared with torch, by name: layers that a user wrote, and those of the library."""


def measure(pairs: int, *, small: bool = False) -> list[Row]:
    """The rows, in one process.

    Args:
        pairs: How many pairs of times each row is made of.
        small: A few layers: for trying the command.
    """
    torch.set_num_threads(1)
    layers = 5 if small else LAYERS
    x = torch.ones(ROWS, WIDTH)
    rows = []
    for name, ours, peer in NETS:
        make, make_peer = partial(ours, layers, WIDTH), partial(peer, layers, WIDTH)
        rows.append(_row("cell-construct", name, make, make_peer, pairs))
        call, call_peer = partial(_call, make(), x), partial(_call, make_peer(), x)
        rows.append(_row("cell-call", name, call, call_peer, pairs, calls=CALLS))
    return sorted(rows, key=lambda row: row.case, reverse=True)


def _row(case: str, name: str, ours: Run, peer: Run, pairs: int, *, calls: int = 1) -> Row:
    for _ in range(WARM_STEPS):
        ours()
        peer()
    found = take_pairs(ours, peer, pairs=pairs)
    return row_of(case, name, "torch", found, calls=calls, limit=LIMIT)


def _call(net: torch.nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for _ in range(CALLS):
            net(x)
