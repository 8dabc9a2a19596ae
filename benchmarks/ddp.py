"""A plain DDP job over the torch backend `mpi4py` and over gloo. Every rank runs this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import distcell.runtime.mpi  # noqa: F401  registers the backend
from benchmarks.measure import Row, Together, Variant, alike, row_of, take_pairs
from benchmarks.model import Batch, Size, make_batches, make_gpt
from benchmarks.peers import eager_step

LIMITS = {2: {"ddp-mlp": 1 / 1.25, "ddp-gpt": 1 / 1.1}, 4: {"ddp-mlp": 1 / 1.1, "ddp-gpt": 1.0}}
"""By number of ranks, what the ratio of the times should be at most."""

_WIDTH = 1024
_ROWS_PER_RANK = 8
_GPT_ROWS_PER_RANK = 1


class Mlp(nn.Module):
    """Three square layers; returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, targets)


def measure(size: Size, pairs: int, only: Sequence[str] = (), *, small: bool = False) -> list[Row]:
    """The rows: an MLP of three layers and the GPT, both under DDP as torch ships it.

    Args:
        size: The GPT.
        pairs: How many pairs of times each row is made of.
        only: Names of cases; all when empty.
        small: A narrow MLP: for trying the command.
    """
    dist.init_process_group("mpi4py")
    gloo = dist.new_group(backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width = 16 if small else _WIDTH
    rows = []
    for case, limit in LIMITS.get(ranks, dict.fromkeys(LIMITS[2])).items():
        if only and case not in only:
            continue
        variants = []
        for name, group in (("mpi4py", dist.group.WORLD), ("gloo", gloo)):
            torch.manual_seed(0)
            if case == "ddp-mlp":
                net, batches = Mlp(width), _vectors(width, rank)
            else:
                net = make_gpt(size)
                texts = make_batches(size, _GPT_ROWS_PER_RANK * ranks)
                batches = [(a.chunk(ranks)[rank], b.chunk(ranks)[rank]) for a, b in texts]
            variants.append(_ddp_step(name, net, batches, group))
        ours, peer = variants
        alike(ours, peer)
        found = take_pairs(ours.run, peer.run, pairs=pairs, together=_together())
        rows.append(row_of(case, ours.name, peer.name, found, limit=limit))
    dist.destroy_process_group()
    return rows


def _ddp_step(
    name: str, net: nn.Module, batches: list[Batch], group: dist.ProcessGroup | None
) -> Variant:
    """The ordinary loop; the loss that is reported is the mean over the ranks."""
    inner = eager_step(name, DistributedDataParallel(net, process_group=group), batches)

    def mean(loss: float) -> float:
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    inner.reported = mean
    inner.warm()
    return inner


def _vectors(width: int, rank: int) -> list[Batch]:
    draws = torch.Generator().manual_seed(1 + rank)
    shape = (_ROWS_PER_RANK, width)
    return [
        (torch.randn(shape, generator=draws), torch.randn(shape, generator=draws)) for _ in range(4)
    ]


def _together() -> Together:
    one = torch.zeros(1)

    def meet() -> None:
        dist.all_reduce(one)

    def total(number: float) -> float:
        found = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    return Together(meet, total)
