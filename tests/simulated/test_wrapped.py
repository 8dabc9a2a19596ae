"""Other ways to split or transform a network, around a parallel one or on it: one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import distcell as dc
import distcell.random
from distcell.context import LaunchOptions
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


def gradients(options: LaunchOptions, reentrant: bool | None) -> list[Tensor]:
    """Gradients of a network with dropout, in a checkpoint or without one."""
    with launched(options):
        torch.manual_seed(0)
        distcell.random.seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
        net = dc.parallelize(net.double())
        x = torch.arange(16, dtype=torch.float64).reshape(4, 4).requires_grad_()
        for _ in range(2):  # the second is not captured anew
            y = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
            y.square().sum().backward()
        return [p.grad for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:hooks on saved tensors")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [LaunchOptions(), simulated(2, "data")], ids=["one", "two"])
def test_a_checkpoint_around_a_network_draws_the_same_masks_again(options, reentrant) -> None:
    wanted = gradients(LaunchOptions(), None)
    torch.testing.assert_close(gradients(options, reentrant), wanted, rtol=1e-12, atol=1e-12)


def test_hooks_on_saved_tensors_are_told_that_they_see_nothing() -> None:
    with torch.autograd.graph.save_on_cpu(), pytest.warns(UserWarning, match="saved tensors"):
        make()(X).sum().backward()
