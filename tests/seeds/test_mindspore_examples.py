"""The examples of MindSpore's page on Cell, their import lines changed, values compared.

Corrected, as little as it takes: the example of `shard` lacks `super().__init__()` and names a
layer `Dense2` that there never was; that of `set_inputs` asks for an Ascend device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import distcell as ms
from distcell import Tensor, context, nn, ops
from distcell import dtype as mstype
from distcell.ops import GradOperation
from tests.seeds.about import about


@about("example.Cell", "Cell.auto_prefix", "Cell.construct")
def test_a_wrapper_without_auto_prefix_keeps_the_names_of_what_it_wraps() -> None:
    class MyCell(nn.Cell):
        def __init__(self, forward_net: nn.Cell, **prefix: bool) -> None:
            super().__init__(**prefix)
            self.net = forward_net
            self.relu = ops.ReLU()

        def construct(self, x: Any) -> Any:
            y = self.net(x)
            return self.relu(y)

    inner_net = nn.Conv2d(120, 240, 4, has_bias=False, weight_init="normal")
    my_net = MyCell(inner_net, auto_prefix=False)
    printed = "shape=(240, 120, 4, 4), dtype=Float32, requires_grad=True)]"
    assert str(my_net.trainable_params()) == f"[Parameter (name=weight, {printed}"
    prefixed = MyCell(nn.Conv2d(120, 240, 4, has_bias=False))
    assert str(prefixed.trainable_params()) == f"[Parameter (name=net.weight, {printed}"
    x = torch.randn(1, 120, 5, 5)
    assert torch.equal(my_net(x), inner_net(x).relu())
    assert torch.equal(my_net.construct(x), my_net(x))


@about("example.cells_and_names", "Cell.cells_and_names")
def test_cells_and_names_gives_all_cells() -> None:
    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 3)

        def construct(self, x: Any) -> Any:
            return self.conv(x)

    n = Net()
    assert [m[0] for m in n.cells_and_names() if m[0]] == ["conv"]
    assert next(iter(n.cells_and_names())) == ("", n)
    assert [m[0] for m in n.cells_and_names(name_prefix="net")] == ["net", "net.conv"]
    assert list(n.cells_and_names({n.conv})) == [("", n)]
    with pytest.raises(TypeError, match="`cells` is a str"):
        list(n.cells_and_names("conv"))  # type: ignore[arg-type]


@about("example.get_parameters", "Cell.get_parameters")
def test_get_parameters_gives_the_parameters_of_a_dense() -> None:
    net = nn.Dense(3, 4)
    parameters = list(net.get_parameters())
    assert list(map(id, parameters)) == [id(net.weight), id(net.bias)]
    assert [tuple(item.shape) for item in parameters] == [(4, 3), (4,)]
    assert list(nn.SequentialCell(net).get_parameters(expand=False)) == []


@about("example.parameters_and_names", "Cell.parameters_and_names")
def test_parameters_and_names_gives_names() -> None:
    n = nn.Dense(3, 4)
    assert [m[0] for m in n.parameters_and_names() if m[0]] == ["weight", "bias"]
    assert [m[0] for m in n.parameters_and_names("net")] == ["net.weight", "net.bias"]
    assert list(nn.SequentialCell(n).parameters_and_names(expand=False)) == []


ONE = np.ones([1]).astype(np.float32)


@about("example.register_backward_hook", "Cell.register_backward_hook")
def test_a_backward_hook_is_called_with_both_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    def backward_hook_fn(cell_id: Any, grad_input: Any, grad_output: Any) -> None:
        print("backward input: ", grad_input)
        print("backward output: ", grad_output)

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.handle = self.relu.register_backward_hook(backward_hook_fn)

        def construct(self, x: Any) -> Any:
            x = x + x
            return self.relu(x)

    context.set_context(mode=context.PYNATIVE_MODE)
    grad = GradOperation(get_all=True)
    net = Net()
    output = grad(net)(Tensor(ONE))
    printed = "backward input:  (tensor([1.]),)\nbackward output:  (tensor([1.]),)\n"
    assert capsys.readouterr().out == printed
    assert str(output) == "(tensor([2.]),)"
    net.handle.remove()
    grad(net)(Tensor(ONE))
    assert capsys.readouterr().out == ""


class MulNet(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mul = nn.MatMul()

    def construct(self, x: Any, y: Any) -> Any:
        x = x + x
        return self.mul(x, y)


@about("example.register_forward_hook", "Cell.register_forward_hook")
def test_a_forward_hook_is_called_with_inputs_and_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forward_hook_fn(cell_id: Any, inputs: Any, output: Any) -> None:
        print("forward inputs: ", inputs)
        print("forward output: ", output)

    net = MulNet()
    handle = net.mul.register_forward_hook(forward_hook_fn)
    output = GradOperation(get_all=True)(net)(Tensor(ONE), Tensor(ONE))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("forward inputs:  (tensor([2.]")
    assert lines[1].startswith("forward output:  tensor(2.")
    assert str(output) == "(tensor([2.]), tensor([2.]))"
    handle.remove()
    net.mul.register_forward_hook(hook_fn=lambda cell, inputs, output: output * 3)
    assert net(Tensor(ONE), Tensor(ONE)).item() == 6.0


@about("example.register_forward_pre_hook", "Cell.register_forward_pre_hook")
def test_a_forward_pre_hook_is_called_with_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    def forward_pre_hook_fn(cell_id: Any, inputs: Any) -> None:
        print("forward inputs: ", inputs)

    net = MulNet()
    handle = net.mul.register_forward_pre_hook(forward_pre_hook_fn)
    output = GradOperation(get_all=True)(net)(Tensor(ONE), Tensor(ONE))
    assert capsys.readouterr().out.startswith("forward inputs:  (tensor([2.]")
    assert str(output) == "(tensor([2.]), tensor([2.]))"
    handle.remove()
    net.mul.register_forward_pre_hook(hook_fn=lambda cell, inputs: (inputs[0] + 1, inputs[1]))
    assert net(Tensor(ONE), Tensor(ONE)).item() == 3.0


@about("example.set_data_parallel", "Cell.set_data_parallel")
def test_set_data_parallel_marks_the_cell_and_all_below() -> None:
    net = nn.Dense(3, 4)
    net.set_data_parallel()
    outer = nn.SequentialCell(nn.ReLU(), net)
    assert net.is_data_parallel
    assert not outer.is_data_parallel
    outer.set_data_parallel()
    assert outer[0].is_data_parallel


@about("example.set_inputs", "Cell.set_inputs", "Cell.get_inputs")
def test_set_inputs_takes_a_size_that_calls_choose() -> None:
    class ReluNet(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def construct(self, x: Any) -> Any:
            return self.relu(x)

    context.set_context(mode=context.GRAPH_MODE, device_target="CPU")
    net = ReluNet()
    input_dyn = Tensor(shape=[3, None], dtype=ms.float32)
    net.set_inputs(input_dyn)
    for size in (10, 4):
        input1 = Tensor(np.random.random([3, size]), dtype=ms.float32)
        assert torch.equal(net(input1), input1.relu())
    assert net.get_inputs() == (input_dyn,)
    context.set_context(mode=context.PYNATIVE_MODE)


@about("example.shard", "Cell.shard")
def test_shard_notes_layouts_and_leaves_the_rest_to_propagation() -> None:
    class Block(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense1 = nn.Dense(10, 10)
            self.relu = nn.ReLU()
            self.dense2 = nn.Dense(10, 10)

        def construct(self, x: Any) -> Any:
            return self.relu(self.dense2(self.relu(self.dense1(x))))

    class Example(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.block1 = Block()
            self.block2 = Block()
            self.block2.shard(in_strategy=((2, 1),), out_strategy=(None,))

        def construct(self, x: Any) -> Any:
            x = self.block1(x)
            return self.block2(x)

    net = Example()
    plan = ms.plan(net, torch.ones(4, 10), "distcell: 1\nmesh: {d0: 2}", ranks=2)
    assert [str(found) for found in plan.input_layouts("block2")] == ["[4@d0, 10]"]
    assert [str(found) for found in plan.output_layouts("block2")] == ["[4@d0, 10]"]


@about("example.to_float", "Cell.to_float")
def test_to_float_casts_inputs_and_parameters_where_they_are_used() -> None:
    net = nn.Conv2d(120, 240, 4, has_bias=False, weight_init="normal")
    assert net.to_float(mstype.float16) is net
    assert net.get_flags() == {"fp16": True, "fp32": False, "bf16": False}
    assert net.weight.dtype == torch.float32
    small = nn.SequentialCell(nn.Dense(2, 3), torch.nn.Linear(3, 1)).to_float(ms.bfloat16)
    out = small(torch.ones(1, 2))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert {p.grad.dtype for p in small.parameters() if p.grad is not None} == {torch.float32}
    small.to_float(ms.float32)
    assert small(torch.ones(1, 2)).dtype == torch.float32
