"""`torch.func` inside of a network: on ranks it means what it means on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

import distcell as dc
from distcell.testing import assert_one_meaning


class Net(nn.Module):
    """Two layers, dropout, and a function of them."""

    def __init__(self, does: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x).square().mean()


def ensemble(net: Net, x: Tensor) -> Tensor:
    params, buffers = stack_module_state([net.one, net.two])

    def call(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(net.one, (params, buffers), x)

    return vmap(call)(params, buffers)


USES = {
    "each row": lambda net, x: vmap(net.one)(x),
    "in chunks": lambda net, x: vmap(net.one, chunk_size=2)(x),
    "two arguments": lambda net, x: vmap(torch.dot)(net.one(x), net.two(x)),
    "dropout": lambda net, x: vmap(lambda v: net.drop(net.one(v)), randomness="different")(x),
    "ensemble": ensemble,
    "gradient of each row": lambda net, x: vmap(grad(lambda v: net.one(v).pow(2).sum()))(x),
    "jacobian": lambda net, x: jacrev(lambda v: net.one(v).tanh())(x[0]) + net.two(x).sum(),
    "hessian": lambda net, x: hessian(lambda v: net.one(v).pow(3).sum())(x[0]) + net.two(x).sum(),
    "directional": lambda net, x: jvp(net.one, (x,), (x,))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("does", USES.values(), ids=USES)
def test_a_transform_means_what_it_means_on_one_device(does) -> None:
    torch.manual_seed(0)
    strategy = "distcell: 1\nmesh: {dp: 2}\ninputs: {x: [dp]}\n"
    assert_one_meaning(Net(does).double(), torch.randn(6, 4, dtype=torch.float64), strategy, 2)


REFUSED = {
    "a branch": (lambda v: v * 2 if v.sum() > 0 else v, "data-dependent control flow"),
    "a value": (lambda v: v * v.sum().item(), r"calling \.item\(\)"),
    "dropout of one mask or many": (nn.functional.dropout, "'same' or 'different'"),
}


@pytest.mark.parametrize(("does", "match"), REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_in_a_transform_stays_torchs_error(does, match: str) -> None:
    net = Net(lambda net, x: vmap(does)(net.one(x)))
    with pytest.raises(RuntimeError, match=match):
        dc.plan(net, torch.randn(6, 4), "data", 2)
