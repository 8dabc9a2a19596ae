"""What the captured graph computes is bitwise what the module computes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcell.capture import Captured, capture_call
from distcell.dtype import DTYPES
from distcell.graph import DeviceArg, DtypeArg, Graph, Op, Ref, from_json, to_json, verify
from distcell.random import random_mode

KEY = torch.tensor([11, 2, 0])


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(graph: Graph, inputs: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """The outputs by kind and path, one op after the other."""
    env = {i.value: inputs[i.kind, i.path] for i in graph.inputs}
    with torch.no_grad():
        for op in graph.ops:
            result = call(op, env)
            parts = [part for part in result if part is not None] if op.many else [result]
            for name, part in zip(op.outputs, parts, strict=True):
                value = graph.values[name]
                if value.is_tensor:
                    assert (tuple(part.shape), part.dtype) == (value.shape, DTYPES[value.dtype])
                env[name] = part
    return {(o.kind, o.path): env[o.value] for o in graph.outputs}


def call(op: Op, env: dict[str, Any]) -> Any:
    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return env[arg.name]
        if isinstance(arg, tuple):
            return [value(item) for item in arg]
        if isinstance(arg, DtypeArg):
            return DTYPES[arg.name]
        return torch.device("cpu") if isinstance(arg, DeviceArg) else arg

    args, kwargs = value(op.args), {key: value(arg) for key, arg in op.kwargs}
    if op.target == "aten.view.default":
        return torch.reshape(*args)
    if op.target == "aten.clone.default":
        return args[0].contiguous()
    if op.target.startswith("py."):
        return getattr(operator, op.target.removeprefix("py."))(*args)
    function: Any = torch.ops
    for part in op.target.split("."):
        function = getattr(function, part)
    return function(*args, **kwargs)


def state_inputs(module: nn.Module, captured: Captured) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {("random", "key"): KEY}
    found |= {("param", path): p.detach().clone() for path, p in module.named_parameters()}
    found |= {("buffer", path): b.clone() for path, b in module.named_buffers()}
    found |= {("constant", path): c for path, c in captured.constants.items()}
    return found


def check(module: nn.Module, *args: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Captured:
    """Captures the call, runs the graph and compares all that it makes with eager torch."""
    captured = capture_call(module, args, kwargs)
    verify(captured.graph)
    given = state_inputs(module, captured)
    given |= {("input", path): tensor.detach() for path, tensor in inputs.items()}
    with random_mode(KEY):
        expected = module(*args, **kwargs)
    leaves = tensors_of(expected)
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    given |= {("tangent", str(n)): tangent for n, tangent in enumerate(tangents)}
    got = run(captured.graph, given)
    outputs = [got["output", str(number)] for number in range(len(leaves))]
    result = captured.result(outputs)
    assert type(result) is type(expected)
    for ours, theirs in zip(tensors_of(result), leaves, strict=True):
        assert torch.equal(ours, theirs)
    wanted = {path: p for path, p in module.named_parameters() if p.requires_grad}
    wanted |= {path: tensor for path, tensor in inputs.items() if tensor.requires_grad}
    pairs = [(y, t) for y, t in zip(leaves, tangents, strict=True) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(wanted.values()), [t for _, t in pairs], allow_unused=True
    )
    for path, grad in zip(wanted, grads, strict=True):
        assert ("grad", path) in got if grad is not None else ("grad", path) not in got
        if grad is not None:
            assert torch.equal(got["grad", path], grad), path
    for path, buffer in module.named_buffers():
        if ("buffer", path) in got:
            assert torch.equal(got["buffer", path], buffer), path
    return captured


def tensors_of(item: Any) -> list[Tensor]:
    from distcell.capture.tree import flatten

    return list(flatten(item)[1].values())


def targets(captured: Captured) -> set[str]:
    return {op.target for op in captured.graph.ops}


def mlp(dim: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, 3))


def test_an_mlp_is_captured_with_its_backward() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    captured = check(mlp(), x, inputs={"input": x})
    assert captured.with_gradients == ("0.weight", "0.bias", "2.weight", "2.bias", "input")
    assert captured.differentiable == (0,)
    assert {op.phase for op in captured.graph.ops} == {"forward", "backward"}


def test_the_same_module_and_shapes_give_the_same_digest() -> None:
    first = capture_call(mlp(), (torch.randn(5, 4),), {}).graph
    second = capture_call(mlp(), (torch.ones(5, 4),), {}).graph
    other = capture_call(mlp(), (torch.randn(6, 4),), {}).graph
    assert first.digest == second.digest != other.digest
    assert from_json(to_json(first)) == first
