"""Examples of MindSpore's own page on Cell, with this project's names in place of MindSpore's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distcell import nn


def test_a_wrapper_without_auto_prefix_keeps_the_names_of_what_it_wraps() -> None:
    class MyCell(nn.Cell):
        def __init__(self, forward_net: nn.Cell, auto_prefix: bool) -> None:
            super().__init__(auto_prefix=auto_prefix)
            self.net = forward_net
            self.relu = nn.ReLU()

        def construct(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return self.relu(y)

    names = {}
    for auto_prefix in (False, True):
        my_net = MyCell(nn.Conv2d(12, 24, 4, has_bias=False), auto_prefix)
        (weight,) = my_net.trainable_params()
        assert weight.shape == (24, 12, 4, 4)
        assert weight.requires_grad
        assert weight.dtype == torch.float32
        names[auto_prefix] = weight.name
        assert my_net(torch.zeros(1, 12, 8, 8)).shape == (1, 24, 8, 8)
    assert names == {False: "weight", True: "net.weight"}


def test_cells_and_names_gives_all_cells() -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 3)

        def construct(self, x: Tensor) -> Tensor:
            return self.conv(x)

    names = [m[0] for m in Net().cells_and_names() if m[0]]
    assert names == ["conv"]


def test_get_parameters_gives_the_parameters_of_a_dense() -> None:
    net = nn.Dense(3, 4)
    assert [tuple(item.shape) for item in net.get_parameters()] == [(4, 3), (4,)]


def test_parameters_and_names_gives_names() -> None:
    names = [m[0] for m in nn.Dense(3, 4).parameters_and_names() if m[0]]
    assert names == ["weight", "bias"]


class MatMul(nn.Cell):
    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


class HookedNet(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mul = MatMul()

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + x
        return self.mul(x, y)


def gradients(net: nn.Cell) -> list[list[float]]:
    inputs = [torch.ones(1, requires_grad=True) for _ in range(2)]
    return [g.tolist() for g in torch.autograd.grad(net(*inputs), inputs)]


def test_a_forward_hook_sees_inputs_and_output() -> None:
    seen: list[Any] = []
    net = HookedNet()
    net.mul.register_forward_hook(lambda cell, inputs, output: seen.append((*inputs, output)))
    assert gradients(net) == [[2.0], [2.0]]
    assert [[t.tolist() for t in call] for call in seen] == [[[2.0], [1.0], 2.0]]


def test_a_forward_pre_hook_sees_inputs() -> None:
    seen: list[Any] = []
    net = HookedNet()
    handle = net.mul.register_forward_pre_hook(lambda cell, inputs: seen.append(inputs))
    assert gradients(net) == [[2.0], [2.0]]
    handle.remove()
    gradients(net)
    assert [[t.tolist() for t in call] for call in seen] == [[[2.0], [1.0]]]


def test_a_backward_hook_sees_gradients() -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.handle = self.relu.register_full_backward_hook(
                lambda cell, into, out: seen.append((into[0].tolist(), out[0].tolist()))
            )

        def construct(self, x: Tensor) -> Tensor:
            x = x + x
            return self.relu(x)

    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(Net()(x), x)
    assert gradient.tolist() == [2.0]
    assert seen == [([1.0], [1.0])]
