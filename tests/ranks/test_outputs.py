"""What a network returns on real ranks: which outputs require gradients, and writing into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import distcell as dc
from distcell.context import LaunchOptions, set_launch
from distcell.errors import BackwardError
from distcell.runtime import world

Outputs = tuple[Tensor, ...]
RETURNS: dict[str, Callable[[Tensor], Outputs]] = {
    "itself twice": lambda h: (h, h),
    "detached": lambda h: (h, h.detach()),
    "detached first": lambda h: (h.detach(), h),
    "views": lambda h: (h, h.view(-1), h.t(), h[0]),
    "a detached view": lambda h: (h, h.detach().view(-1), h.view(-1)),
    "what changes nothing": lambda h: (h, h.contiguous(), h.to(torch.float64), h.detach()),
    "detached alone": lambda h: (h.sum(), h.detach()),
}


class Net(torch.nn.Module):
    def __init__(self, outputs: Callable[[Tensor], Outputs]) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Outputs:
        return self.outputs(self.down(self.up(x).tanh()).tanh())


@pytest.fixture(params=["data", "tensor"])
def strategy(request) -> Iterator[str]:
    here = world.init()
    if here.size == 1:
        pytest.skip("one rank holds everything")
    set_launch(LaunchOptions(mode="ranks", ranks=here.size, strategy=request.param))
    yield request.param
    set_launch(LaunchOptions())


def make(outputs: Callable[[Tensor], Outputs]) -> tuple[Net, Net]:
    torch.manual_seed(0)
    alone, net = Net(outputs).double(), Net(outputs).double()
    net.load_state_dict(alone.state_dict())
    return alone, dc.parallelize(net)


def gradients(net: Net, outputs: Outputs) -> list[Tensor]:
    terms = [o.square().mean() * (i + 1) for i, o in enumerate(outputs) if o.requires_grad]
    sum(terms).backward()
    return [dc.whole_tensor(p.grad).clone() for p in net.parameters()]


def check_gradients(case: str) -> None:
    """Checks that each output is that of one device, and has its gradient."""
    alone, net = make(RETURNS[case])
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = alone(x), net(x)
    assert [o.requires_grad for o in found] == [o.requires_grad for o in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    pairs = zip(gradients(net, found), gradients(alone, expected), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def check_writing() -> None:
    """Checks that outputs which are written into have the gradients of one device."""
    alone, net = make(lambda h: (h * 2.0, h.view(-1) * 3.0))
    x = torch.ones(6, 4, dtype=torch.float64)
    found = {}
    for each in (alone, net):
        first, second = each(x)
        first[:, 0] = -9.0
        second.mul_(0.5)
        found[each] = gradients(each, (first, second))
    for one, other in zip(found[net], found[alone], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("case", RETURNS)
def test_each_output_has_the_gradient_that_it_has_on_one_device(case: str) -> None:
    check_gradients(case)


@pytest.mark.usefixtures("strategy")
def test_an_output_may_be_written_into() -> None:
    check_writing()


def test_backward_is_refused_when_an_output_that_it_needs_was_overwritten(strategy: str) -> None:
    # the output is the tanh that backward needs: torch refuses it on one device as well
    alone, net = make(lambda h: (h,))
    x = torch.ones(6, 4, dtype=torch.float64)
    (expected,) = alone(x)
    expected.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        expected.sum().backward()
    (output,) = net(x)
    output.mul_(2.0)
    if strategy == "tensor":
        with pytest.raises(BackwardError, match="an output of the network was changed in place"):
            output.sum().backward()
        return
    output.sum().backward()  # the output is a copy: backward has the value that forward made
    found = [dc.whole_tensor(p.grad) for p in net.parameters()]
    alone.zero_grad()
    (alone(x)[0] * 2.0).sum().backward()
    for one, other in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=0, atol=1e-12)
