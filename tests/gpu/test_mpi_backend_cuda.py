"""CUDA tensors over MPI: staged through pinned memory. Ranks may share one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    import distcell.runtime.mpi  # noqa: F401 (registers the backend)

    dist.init_process_group("mpi4py")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_cuda_tensors_are_reduced_and_gathered(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((9001,), rank + 1, dtype=dtype, device="cuda")
    dist.all_reduce(x)
    assert (x == size * (size + 1) // 2).all()
    out = torch.empty(size * 4, dtype=dtype, device="cuda")
    dist.all_gather_single(out, torch.full((4,), rank, dtype=dtype, device="cuda"))
    assert out.tolist() == [r for r in range(size) for _ in range(4)]


def test_what_the_stream_still_computes_is_waited_for() -> None:
    size = dist.get_world_size()
    x = torch.ones(1 << 22, device="cuda")
    for _ in range(20):
        x = x * 1.0
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert (x == size).all()


def test_messages_between_cuda_tensors_arrive() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.empty(1000, device="cuda")
    sending = dist.isend(torch.full((1000,), float(rank), device="cuda"), (rank + 1) % size)
    dist.irecv(out, (rank - 1) % size).wait()
    sending.wait()
    assert (out == (rank - 1) % size).all()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_an_nccl_group_stands_beside_it() -> None:
    if dist.get_world_size() > torch.cuda.device_count():
        pytest.skip("NCCL wants a device for each rank")
    group = dist.new_group(backend="nccl")
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size()).all()
