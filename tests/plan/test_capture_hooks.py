"""Hooks: those of inner cells are captured, those of the outermost run around, at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distcell as dc
from distcell.capture import capture_call, capture_step
from distcell.context import LaunchOptions, set_launch
from distcell.errors import CaptureError


@pytest.fixture
def on_ranks() -> Iterator[None]:
    torch.set_num_threads(1)
    set_launch(LaunchOptions(mode="simulate", ranks=2, strategy="data"))
    yield
    set_launch(LaunchOptions())


def hooked(seen: list[Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    net.register_forward_hook(lambda _m, _a, out: 2 * out)
    net.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    net.register_full_backward_hook(lambda _m, _i, outs: seen.append(outs[0]))
    net[0].register_forward_hook(lambda _m, _a, out: out * 3)
    return net


def results(net: nn.Module, seen: list[Tensor]) -> list[Tensor]:
    found = []
    for step in range(3):
        x = torch.arange(12.0).reshape(4, 3) + step
        y = net(x.requires_grad_())
        y.pow(2).sum().backward()
        found += [y.detach(), x.grad]
    return [*found, *seen, *(p.grad for p in net.parameters())]


@pytest.mark.slow
def test_hooks_give_what_they_give_on_one_device(on_ranks: None) -> None:
    seen, theirs = list[Tensor](), list[Tensor]()
    expected = results(hooked(theirs), theirs)
    got = results(dc.parallelize(hooked(seen)), seen)
    assert len(seen) == len(theirs) == 6
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other)


REGISTER: list[Callable[[nn.Module], Any]] = [
    lambda cell: cell.register_full_backward_hook(lambda *_: None),
    lambda cell: cell.register_full_backward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_on_the_gradients_of_an_inner_cell_is_an_error(register: Any) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    register(net[0])
    with pytest.raises(CaptureError, match="cell `0` has a hook on its gradients"):
        capture_call(net, (x,), {})
    with pytest.raises(CaptureError, match="cell `0` has a hook on its gradients"):
        capture_step(net, lambda n, x: n(x).sum(), torch.optim.SGD(net.parameters()), (x,), {})
    with torch.no_grad():
        assert capture_call(net, (x,), {}).graph.ops


def test_a_hook_on_the_gradients_of_the_network_is_one_of_the_caller() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    plain = capture_call(net, (x,), {}).graph
    net.register_full_backward_hook(lambda *_: None)
    net.register_forward_hook(lambda _m, _a, out: 2 * out)
    assert capture_call(net, (x,), {}, own_hooks=False).graph.digest == plain.digest
    assert len(net._forward_hooks) == len(net._backward_hooks) == 1
    with pytest.raises(CaptureError, match="the network has a hook on its gradients"):
        capture_call(net, (x,), {})


def test_a_hook_on_the_gradients_of_all_modules_is_an_error() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="a hook on the gradients of all modules"):
            capture_call(nn.Linear(3, 3), (torch.ones(2, 3),), {})
    finally:
        handle.remove()
