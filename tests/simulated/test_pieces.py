"""What a simulated network refuses, and what it does like one on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import distcell as dc
from distcell.context import LaunchOptions
from distcell.errors import LayoutError, OptimizerStateError
from tests.training import launched, simulated


@pytest.fixture
def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.up, net.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    return dc.parallelize(net)


@pytest.fixture
def checked() -> Iterator[None]:
    with launched(LaunchOptions(mode="check", ranks=2, strategy="tensor")):
        yield


X = torch.ones(4, 8)


@pytest.mark.usefixtures("checked")
def test_check_refuses_what_real_ranks_refuse_of_pieces(net) -> None:
    net(X).mean().backward()
    for use in (net.up.weight.grad.norm, net.up.weight.data.mean):
        with pytest.raises(LayoutError, match=r"of `up\.weight`, of which this rank holds"):
            use()


@pytest.mark.usefixtures("checked")
def test_check_clips_norms_as_one_device_does(net) -> None:
    other = torch.nn.Sequential()
    other.up, other.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    other.load_state_dict(net.state_dict())
    for each in (net, other):
        each(X).square().mean().backward()
    found = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert found == pytest.approx(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1).item())


@pytest.mark.usefixtures("checked")
def test_check_refuses_a_gradient_of_before_the_first_call_and_cuts_nothing(net) -> None:
    net.down.weight.grad = torch.zeros(4, 16)
    with pytest.raises(OptimizerStateError, match=r"`down\.weight` has a gradient of its"):
        net(X)
    assert not dc.layout(net.up.weight).axes


@pytest.mark.usefixtures("checked")
def test_gradients_go_through_whole_tensors(net) -> None:
    net(X)
    dc.whole_tensor(net.up.weight).pow(2).sum().backward()
    wanted = 2 * dc.whole_tensor(net.up.weight).detach()
    assert torch.equal(dc.whole_tensor(net.up.weight.grad), wanted)


def test_simulated_parameters_are_whole_and_can_be_looked_at(net) -> None:
    with launched(simulated(2, "tensor")):
        net(X).mean().backward()
        assert net.up.weight.grad.norm() > 0
        assert dc.local_state_dict(net)["up.weight"].shape == (16, 8)


def test_the_state_dict_of_a_simulated_network_holds_copies_too(net) -> None:
    with launched(simulated(2, "tensor")):
        net(X)
        saved = net.state_dict()
        with torch.no_grad():
            net.up.bias.add_(1)
        assert not torch.equal(saved["up.bias"], net.up.bias)
        writes = (
            lambda value: value.copy_(X[0, 0]),
            lambda value: value.__setitem__(0, 1.0),
            lambda value: value.__iadd__(1.0),
            lambda value: setattr(value, "data", torch.zeros(16)),
            lambda value: torch.mul(value, 2.0, out=value),
            lambda value: torch._foreach_add_([value], 1.0),
            torch.nn.init.zeros_,
        )
        for write in writes:
            with pytest.raises(LayoutError, match="writes into a copy"):
                write(saved["up.bias"])
        assert type(saved["up.bias"] * 2) is torch.Tensor
