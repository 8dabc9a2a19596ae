"""A step of simulated ranks in one process, beside LocalTensorMode and beside one device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import distributed as dist

# Private in torch, and no part of distcell: it is here to be compared with.
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import Row, Variant, alike, row_of, take_pairs
from benchmarks.model import SMALL, Batch, Size, make_batches, make_gpt
from benchmarks.ours import our_step
from benchmarks.peers import eager_step, split_by_dtensor
from distcell.context import LaunchOptions, set_launch

ROWS = (2, 8)
"""Of the batches."""

LIMITS = {"local-tensor": 0.2, "eager": 12.0}


def measure(ranks: int, pairs: int, *, small: bool = False) -> list[Row]:
    """The rows: a training step of all ranks under the `tensor` strategy.

    Args:
        ranks: How many ranks are simulated.
        pairs: How many pairs of times each row is made of.
        small: A tiny model: for trying the command.
    """
    torch.set_num_threads(1)
    size = replace(SMALL if small else Size(), heads=ranks)  # each rank needs a whole head
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    set_launch(LaunchOptions(mode="simulate", ranks=ranks))
    rows = []
    for rows_of_batch in ROWS[:1] if small else ROWS:
        batches = make_batches(size, rows_of_batch)
        ours = our_step("simulated", make_gpt(size), batches, "tensor")
        ours.warm()
        for make in (_local_tensor_step, _eager_step):
            peer = make(size, batches, ranks)
            peer.warm()
            alike(ours, peer)
            times = take_pairs(ours.run, peer.run, pairs=pairs)
            case = f"simulate/{size.layers}-layers/{ranks}"
            limit = LIMITS[peer.name]
            rows.append(
                row_of(case, "distcell", peer.name, times, limit=limit, batch=rows_of_batch)
            )
    dist.destroy_process_group()
    return rows


def _eager_step(size: Size, batches: list[Batch], ranks: int) -> Variant:
    """The same model on one device."""
    return eager_step("eager", make_gpt(size), batches)


def _local_tensor_step(size: Size, batches: list[Batch], ranks: int) -> Variant:
    """DTensor's tensor parallelism on ranks that LocalTensorMode simulates."""
    mode = LocalTensorMode(ranks)
    with mode:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        inner = eager_step("", split_by_dtensor(make_gpt(size), mesh), batches)

    def step(number: int) -> float:
        with mode:
            return inner.step(number)

    return Variant("local-tensor", step)
