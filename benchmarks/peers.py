"""What distcell is compared with: torch's own ways to make the same step."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Variant
from benchmarks.model import LEARNING_RATE, Batch, Gpt


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """SGD over lists of tensors: the fewest calls. A list may not mix DTensors with others."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in net.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    lists = [{"params": parameters} for parameters in groups.values()]
    return torch.optim.SGD(lists, lr=LEARNING_RATE, foreach=True)


def eager_step(name: str, net: nn.Module, batches: list[Batch]) -> Variant:
    """The ordinary loop, whatever the module is."""
    optimizer = sgd(net)

    def step(number: int) -> float:
        ids, targets = batches[number % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        loss = net(ids, targets)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return Variant(name, step)


def split_by_dtensor(gpt: Gpt, mesh: DeviceMesh) -> Gpt:
    """The model with DTensor's tensor parallelism in attention and feed-forward.

    The vocabulary stays whole: DTensor cannot split a table that is the head as well.
    """
    plan = {}
    for index in range(len(gpt.blocks)):
        block = f"blocks.{index}"
        plan |= {f"{block}.attn.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.mlp.up": ColwiseParallel()}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("attn.o", "mlp.down")}
    parallelize_module(gpt, mesh, plan)
    return gpt


def dtensor_step(gpt: Gpt, batches: list[Batch]) -> Variant:
    """Tensor parallelism by DTensor, over gloo."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return eager_step("dtensor-gloo", split_by_dtensor(gpt, mesh), batches)


def ddp_step(gpt: Gpt, batches: list[Batch]) -> Variant:
    """Data parallelism by DDP, over gloo: each rank takes its rows of the global batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [(ids.chunk(size)[rank], targets.chunk(size)[rank]) for ids, targets in batches]
    net = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    variant = eager_step("ddp-gloo", net, mine)

    def mean(loss: float) -> float:
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / size

    variant.reported = mean
    return variant
