"""Other ways to split or transform a network, around a parallel one or on it: one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

import distcell as dc
from distcell.errors import CaptureError, UserTypeError
from tests.training import launched, simulated

X = torch.ones(4, 4)


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with launched(simulated(2, "data")):
        yield


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> nn.Module:
    net = nn.Sequential()
    net.up, net.down = nn.Linear(4, 4), nn.Linear(4, 4)
    return dc.parallelize(net)


@pytest.mark.usefixtures("_group")
def test_distributed_data_parallel_around_a_parallel_network_is_refused() -> None:
    net = nn.parallel.DistributedDataParallel(make())
    with pytest.raises(UserTypeError, match="called by DistributedDataParallel") as caught:
        net(X)
    assert "leave DistributedDataParallel out" in (caught.value.hint or "")


@pytest.mark.slow
@pytest.mark.usefixtures("_group")
def test_a_network_that_torch_has_split_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    whole, part = make(), make()
    fully_shard(whole)
    parallelize_module(part, init_device_mesh("cpu", (1,)), {"up": ColwiseParallel()})
    for net, name in ((whole, "the network"), (part, "cell `up`")):
        with pytest.raises(UserTypeError, match=f"{name} is split by torch already") as caught:
            net(X)
        assert "leave `fully_shard`" in (caught.value.hint or "")


@pytest.mark.slow
def test_what_is_compiled_is_named() -> None:
    whole, part = make(), make()
    whole.compile(backend="eager")
    part.up = torch.compile(part.up, backend="eager")
    for net, name in ((whole, "the network"), (part, "cell `up`")):
        with pytest.raises(UserTypeError, match=f"{name} is compiled by torch") as caught:
            net(X)
        assert "leave `torch.compile` out" in (caught.value.hint or "")


def test_a_transform_around_a_parallel_network_is_refused_at_every_call() -> None:
    net = make()
    for _ in range(2):  # captured, and not
        for transformed in (torch.func.vmap(net), torch.func.grad(lambda x: net(x).sum())):
            with pytest.raises(CaptureError, match=r"a transform of `torch\.func`") as caught:
                transformed(X)
            assert "inside of the network" in (caught.value.hint or "")
        net(X)
