"""What the captured graph computes is bitwise what the module computes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from distcell.capture import Captured, capture_call
from distcell.dtype import DTYPES
from distcell.errors import CaptureError
from distcell.graph import DeviceArg, DtypeArg, Graph, Op, Ref, from_json, to_json, verify
from distcell.random import random_mode
from distcell.scope import track

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
    with track(module), random_mode(KEY):
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
    wanted = {("grad", path): p for path, p in module.named_parameters() if p.requires_grad}
    wanted |= {("grad_input", path): t for path, t in inputs.items() if t.requires_grad}
    pairs = [(y, t) for y, t in zip(leaves, tangents, strict=True) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(wanted.values()), [t for _, t in pairs], allow_unused=True
    )
    for place, grad in zip(wanted, grads, strict=True):
        assert place in got if grad is not None else place not in got
        if grad is not None:
            assert torch.equal(got[place], grad), place
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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images))
        x += 1.0
        return self.head(F.max_pool2d(self.relu(x), 2).mean((2, 3)))


def test_batch_norm_writes_its_buffers_as_outputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6)
    captured = check(Residual(), x, inputs={"images": x})
    written = [o.path for o in captured.graph.outputs if o.kind == "buffer"]
    assert sorted(written) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert not [t for t in targets(captured) if t.split(".")[1].endswith("_") or "copy" in t]


def test_batch_norm_in_evaluation_writes_nothing() -> None:
    x = torch.randn(4, 3, 6, 6)
    captured = check(Residual().eval(), x, inputs={"images": x})
    assert not [o for o in captured.graph.outputs if o.kind == "buffer"]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).split(d, dim=-1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, d))


class Block(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.ln2, self.drop = nn.LayerNorm(dim), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    def __init__(self, layers: int = 1, *, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def gpt(layers: int = 1, **options: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(layers, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_gpt_block_with_attention_and_dropout(dropout: float) -> None:
    ids, labels = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    inputs = {"ids": ids, "labels": labels}
    captured = check(gpt(dropout=dropout), ids, labels=labels, inputs=inputs)
    random = [i for i in captured.graph.inputs if i.kind == "random"]
    assert len(random) == (dropout > 0)


def test_tied_weights_appear_once() -> None:
    ids = torch.randint(11, (2, 8))
    captured = check(gpt(), ids, inputs={"ids": ids})
    assert captured.tied == {"head.weight": "tokens.weight"}
    assert "head.weight" not in {i.path for i in captured.graph.inputs}


def test_none_in_the_result_stays_none() -> None:
    ids = torch.randint(11, (2, 8))
    captured = check(gpt(), ids, inputs={"ids": ids})
    assert captured.result([1.0]) == {"loss": None, "logits": 1.0}


class Llama(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        width = dim // heads
        self.norm = nn.RMSNorm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, groups * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, dim, bias=False)
        frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]).float(), self.frequencies)
        angles = torch.cat((angles, angles), -1)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        y = self.norm(x)
        q = self.q(y).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (m(y).view(b, t, self.groups, -1).transpose(1, 2) for m in (self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (k, v))
        scores = (q @ k.transpose(-2, -1) / 2.0).masked_fill(~mask, float("-inf"))
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.slow
def test_a_llama_block_with_keyword_arguments() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, 16, requires_grad=True), torch.ones(6, 6).tril().bool()
    captured = check(Llama(), x, mask=mask, inputs={"x": x, "mask": mask})
    assert [i.path for i in captured.graph.inputs if i.kind == "input"] == ["x", "mask"]


@dataclass
class Result:
    hidden: Tensor
    parts: tuple[Tensor, ...]
    note: str = "kept"


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Returning(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(3, 3), make

    def forward(self, batch: dict[str, Any], *more: Tensor, scale: float = 1.0) -> Any:
        x = self.linear(batch["x"]) * scale + sum(more)
        return self.make(x, batch["nested"][0])


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x, [y * x, None], 3),
        lambda x, y: {"a": x, "b": {"c": x + y}},
        lambda x, y: Result(x, (y + x, x)),
        Pair,
        lambda x, y: x,
    ],
    ids=["tuple", "dict", "dataclass", "namedtuple", "tensor"],
)
def test_arguments_and_results_of_any_structure(make: Any) -> None:
    torch.manual_seed(0)
    x, y, z = torch.randn(2, 3), torch.randn(3), torch.randn(2, 3)
    inputs = {"batch.x": x, "batch.nested.0": y, "more.0": z}
    check(Returning(make), {"x": x, "nested": [y, 5]}, z, scale=2.0, inputs=inputs)


class Odd(nn.Module):
    """Holds a plain tensor, replaces a buffer, writes into slices, makes tensors of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scales = torch.tensor([1.0, 2.0, 3.0])
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scales
        y = y + torch.tensor([0.5, 0.25, 0.125])
        z = torch.zeros_like(y)
        z[:, 0] = y[:, 1]
        z[:, 1:].add_(y[:, :2])
        self.average = self.average * 0.9 + y.detach().mean(0)
        self.count += 1
        return z + y.new_ones(3)


def test_buffers_that_are_replaced_and_tensors_that_are_no_buffers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    captured = check(Odd(), x, inputs={"x": x})
    assert sorted(captured.constants) == ["constant1", "scales"]
    written = [o.path for o in captured.graph.outputs if o.kind == "buffer"]
    assert sorted(written) == ["average", "count"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(dropout=0.5), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_a_plain_call(reentrant: bool) -> None:
    plain = capture_call(Block(dropout=0.5), (torch.ones(2, 4, 16),), {}).graph
    graph = capture_call(Checkpointed(reentrant), (torch.ones(2, 4, 16),), {}).graph
    assert [op.target for op in graph.ops] == [op.target for op in plain.ops]


def test_autocast_casts_forward_and_not_backward() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture_call(net := mlp(), (x,), {})
        y = net(x)
    tangent = torch.randn_like(y)
    y.backward(tangent)
    given = state_inputs(net, captured) | {("input", "input"): x, ("tangent", "0"): tangent}
    got = run(captured.graph, given)
    assert torch.equal(got["output", "0"], y) and y.dtype == torch.bfloat16
    assert torch.equal(got["grad_input", "input"], x.grad)
    assert all(torch.equal(got["grad", path], p.grad) for path, p in net.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(net(x + 1), y)  # no tensor without values stays in its cache


def test_forward_alone_where_no_gradient_is_wanted() -> None:
    x = torch.randn(5, 4)
    with torch.no_grad():
        graph = capture_call(mlp(), (x,), {}).graph
    assert {op.phase for op in graph.ops} == {"forward"}
    assert [i.kind for i in graph.inputs].count("tangent") == 0
    assert capture_call(mlp(), (x,), {}, grad=False).graph == graph
    frozen = mlp().requires_grad_(False)
    assert capture_call(frozen, (x,), {}).graph.digest == graph.digest


def test_outputs_that_get_no_gradient_have_no_tangent() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.a(x), self.b(x), x.argmax()

    captured = capture_call(Two(), (torch.ones(2, 3),), {}, gradients_present=(False, True))
    assert captured.differentiable == (0, 1)
    assert [i.path for i in captured.graph.inputs if i.kind == "tangent"] == ["1"]
    assert captured.with_gradients == ("b.weight", "b.bias")


def test_global_shapes_replace_those_of_slices() -> None:
    x = torch.randn(5, 4)
    whole = capture_call(mlp(), (x,), {}).graph
    net = mlp()
    net[0].weight.data = net[0].weight.data[:2]
    net[0].bias.data = net[0].bias.data[:2]
    net[2].weight.data = net[2].weight.data[:, :2]
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (3, 8)}
    assert capture_call(net, (x,), {}, shapes=shapes).graph.digest == whole.digest
    assert net[0].weight.shape == (2, 4)


def test_ops_know_their_cell_and_line_and_backward_inherits_them() -> None:
    ids = torch.randint(11, (2, 8))
    graph = capture_call(gpt(), (ids, ids), {}).graph
    lines = {op.source.split(":")[0] for op in graph.ops}
    assert lines == {"tests/plan/test_capture.py"}
    forward = {op.cell for op in graph.ops if op.phase == "forward"}
    backward = {op.cell for op in graph.ops if op.phase == "backward"}
    assert forward - backward == {"blocks.0"}  # the gradient passes through an addition
    assert backward <= forward and "blocks.0.attn.qkv" in backward
    attention = [op for op in graph.ops if "scaled_dot" in op.target]
    assert {op.cell for op in attention} == {"blocks.0.attn"} and len(attention) == 2
    assert len({op.source for op in attention}) == 1


def test_borders_are_the_tensors_that_enter_and_leave_a_cell() -> None:
    x, mask = torch.randn(2, 6, 16), torch.ones(6, 6).bool()
    captured = capture_call(Llama(), (x,), {"mask": mask})
    borders = {border.cell: border for border in captured.graph.borders}
    assert borders[""].inputs == ("x", "mask")
    assert borders[""].outputs == (captured.graph.outputs[0].value,)
    assert borders["q"].inputs == borders["k"].inputs == borders["norm"].outputs
    assert len(borders) == 9


def test_borders_survive_functionalisation() -> None:
    graph = capture_call(Residual(), (torch.ones(4, 3, 6, 6),), {}).graph
    borders = {border.cell: border for border in graph.borders}
    assert list(borders) == ["conv", "norm", "relu", "head", ""]
    assert borders["norm"].inputs == borders["conv"].outputs
    assert graph.producers[borders["relu"].outputs[0]].target == "aten.relu.default"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_use_the_parameters_of_the_graph(kind: Any) -> None:
    torch.manual_seed(0)
    net, x = kind(3, 4, batch_first=True), torch.randn(2, 5, 3, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=False):
        captured = check(net, x, inputs={"input": x})
    assert captured.with_gradients[:2] == ("weight_ih_l0", "weight_hh_l0")
    assert net._flat_weights[0] is net.weight_ih_l0


def test_transposing_twice_leaves_no_op() -> None:
    graph = capture_call(nn.Linear(3, 2), (torch.ones(4, 3),), {}).graph
    assert [op.target for op in graph.ops].count("aten.t.default") == 2


class Scaled(nn.Module):
    """Has a parameter of the name of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * self.scale * scale.square()


def test_the_gradients_of_an_input_and_of_a_parameter_of_its_name_are_two() -> None:
    x, scale = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    captured = check(Scaled(), x, scale, inputs={"x": x, "scale": scale})
    assert captured.with_gradients == ("scale", "scale")


@pytest.mark.slow
@pytest.mark.parametrize("data", [True, False])
def test_ranks_tell_the_gradients_of_an_input_from_those_of_a_parameter(
    data: bool, tmp_path: Path
) -> None:
    import distcell as dc
    from distcell.context import LaunchOptions, set_launch

    x, scale = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    net, twin = Scaled(), dc.parallelize(Scaled())
    split = tmp_path / "split.yaml"
    split.write_text("distcell: 1\nmesh: {tp: 3}\ninputs: {x: [_, tp], scale: [tp]}\n")
    strategy = "data" if data else str(split)
    net(x, scale).square().sum().backward()
    expected, scale.grad = scale.grad, None
    set_launch(LaunchOptions(mode="simulate", ranks=2 if data else 3, strategy=strategy))
    try:
        for _ in range(2):
            scale.grad = None
            twin.zero_grad()
            twin(x, scale).square().sum().backward()
    finally:
        set_launch(LaunchOptions())
    torch.testing.assert_close(scale.grad, expected)
    torch.testing.assert_close(twin.scale.grad, net.scale.grad)


class Doubled(nn.Module):
    """Gives back the containers whose tensors have one path."""

    def forward(self, x: Any) -> Any:
        return {1: x[1] * 2, "1": x["1"] * 3, "a": {"b": x["a"]["b"] * 4}, "a.b": x["a.b"] * 5}


def test_tensors_whose_paths_are_alike_are_all_captured() -> None:
    one, two, three, four = (torch.full((2,), float(n), requires_grad=True) for n in range(4))
    given = {1: one, "1": two, "a": {"b": three}, "a.b": four}
    names = {"x.1": one, "x.1#2": two, "x.a.b": three, "x.a.b#2": four}
    captured = check(Doubled(), given, inputs=names)
    assert len([o for o in captured.graph.outputs if o.kind == "output"]) == 4


def test_arguments_of_one_name_are_an_error() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, /, **rest: Tensor) -> Tensor:
            return x + rest["x"]

    with pytest.raises(CaptureError, match="two arguments have the name `x`"):
        capture_call(Both(), (torch.ones(2),), {"x": torch.ones(2)})


class Masked(nn.Module):
    """A cell whose first argument is a tensor that nobody computes with."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.inner = Inner(uses)
        self.mask = torch.ones(3)

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.mask, x)[1]


class Inner(nn.Module):
    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses, self.linear = uses, nn.Linear(3, 3)

    def forward(self, mask: Tensor, x: Tensor) -> Any:
        return mask.sum(), self.linear(x * mask if self.uses else x)


def test_dead_tensors_keep_the_places_of_the_others_in_a_border() -> None:
    for uses in (True, False):
        graph = capture_call(Masked(uses), (torch.ones(2, 3),), {}).graph
        border = next(border for border in graph.borders if border.cell == "inner")
        assert len(border.inputs) == len(border.outputs) == 2
        assert border.inputs[1] == "x" and border.outputs[1] in graph.values
        assert (border.inputs[0] in graph.values) is uses
        assert border.outputs[0] not in graph.values


@pytest.mark.slow
def test_a_border_with_a_dead_tensor_is_annotated_at_its_place() -> None:
    from distcell.testing import plan

    text = (
        "distcell: 1\nmesh: {dp: 2, tp: 2}\ninputs: {'*': [dp, _]}\n"
        "cells: {inner: {in: [null, [[dp, tp], _]]}}"
    )
    planned = plan(Masked(uses=False), torch.ones(4, 3), text, 4)
    explained = planned.explain("inner")
    assert "input 1 of `inner`  f32[4@(dp,tp), 3]" in explained
    assert "input 0" not in explained
