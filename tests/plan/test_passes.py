"""Splitting a program at the incoming gradients, and fusing the reductions of gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcell.errors import UserValueError
from distcell.graph import Border, Graph, Input, Op, Output, Ref, Value, verify
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.passes.comm_fusion import fuse_gradients
from distcell.passes.split import split_forward_backward
from distcell.program import Program
from distcell.runtime.codegen import load
from distcell.simulate.values import SimulatedRanks, gather, gather_outputs, scatter, scatter_inputs

torch.set_num_threads(1)


class Writer:
    """Writes a program by hand: layouts are given as they print."""

    def __init__(self, mesh=""):
        self.mesh = Mesh.parse(mesh)
        self.values, self.layouts, self.inputs, self.ops, self.outputs = {}, {}, [], [], []
        self.borders = []

    def value(self, name, layout):
        self.layouts[name] = Layout.parse(layout)
        self.values[name] = Value(name, self.layouts[name].shape, "f32")

    def input(self, name, layout="[4, 4]", kind="input"):
        self.value(name, layout)
        self.inputs.append(Input(name, kind, name))
        return Ref(name)

    def op(self, target, *args, to="[4, 4]", name=None, **attributes):
        name = name or f"v{len(self.ops)}"
        self.value(name, to)
        self.ops.append(Op(target, args, outputs=(name,), **attributes))
        return Ref(name)

    def output(self, ref, kind="output", path="0"):
        self.outputs.append(Output(ref.name, kind, path))

    def program(self):
        graph = Graph(
            tuple(self.inputs),
            tuple(self.ops),
            tuple(self.outputs),
            self.values,
            tuple(self.borders),
        )
        verify(graph)
        return Program(self.mesh, graph, self.layouts)


def kinds(program):
    return [op.target.split(".")[1] for op in program.graph.ops]


def linear(w):
    """y = relu(x @ weight.t()) with the backward that autograd would write."""
    x, weight = w.input("x"), w.input("weight", kind="param")
    dy = w.input("dy", kind="tangent")
    t = w.op("aten.t.default", weight, name="t")
    h = w.op("aten.mm.default", x, t, name="h")
    y = w.op("aten.relu.default", h, name="y")
    w.output(y)
    dh = w.op("aten.threshold_backward.default", dy, y, 0, phase="backward")
    dt = w.op("aten.mm.default", w.op("aten.t.default", x, name="xt"), dh, phase="backward")
    w.output(w.op("aten.t.default", dt, phase="backward"), "grad", "weight")
    back = w.op("aten.t.default", t, name="tt")
    w.output(w.op("aten.mm.default", dh, back, phase="backward"), "grad", "x")


def test_forward_is_what_depends_on_no_incoming_gradient():
    w = Writer()
    linear(w)
    joint = split_forward_backward(w.program())
    assert joint.saved == ("y",)
    assert kinds(joint.forward) == ["t", "mm", "relu"]
    assert [i.kind for i in joint.forward.graph.inputs] == ["input", "param"]
    assert [(o.kind, o.path) for o in joint.forward.graph.outputs] == [
        ("output", "0"),
        ("saved", "y"),
    ]
    assert [(i.kind, i.path) for i in joint.backward.graph.inputs] == [
        ("input", "x"),
        ("param", "weight"),
        ("tangent", "dy"),
        ("saved", "y"),
    ]
    for half in (joint.forward, joint.backward):
        verify(half.graph)
        assert set(half.layouts) == set(half.graph.values)


def test_views_of_inputs_are_made_again_and_not_saved():
    w = Writer()
    linear(w)
    joint = split_forward_backward(w.program())
    assert kinds(joint.backward) == ["t", "t", "t", "threshold_backward", "mm", "t", "mm"]


def test_a_value_and_its_views_are_saved_once():
    w = Writer()
    x, dy = w.input("x"), w.input("dy", kind="tangent")
    y = w.op("aten.exp.default", x, name="y")
    flat = w.op("aten.view.default", y, (16,), to="[16]", name="flat")
    square = w.op("aten.view.default", flat, (2, 8), to="[2, 8]", name="square")
    w.output(w.op("aten.sum.default", square, to="[]"))
    g = w.op("aten.mul.Tensor", w.op("aten.view.default", dy, (16,), to="[16]"), flat, to="[16]")
    h = w.op("aten.mul.Tensor", w.op("aten.view.default", dy, (2, 8), to="[2, 8]"), square,
             to="[2, 8]")  # fmt: skip
    w.output(g, "grad", "a")
    w.output(h, "grad", "b")
    joint = split_forward_backward(w.program())
    assert joint.saved == ("y",)


class Halves:
    """Runs the halves of a program one after the other, as the engine does."""

    def __init__(self, joint, forward, backward):
        self.joint, self._forward, self._backward = joint, forward, backward
        self.inputs = joint.forward.graph.inputs
        self.outputs = joint.forward.graph.outputs[: -len(joint.saved) or None]
        self.gradients = joint.backward.graph.outputs

    def forward(self, boxed):
        left = {(i.kind, i.path): item for i, item in zip(self.inputs, boxed, strict=True)}
        made = self._forward(boxed)
        outputs = self.joint.forward.graph.outputs
        left |= {
            ("saved", o.path): item
            for o, item in zip(outputs, made, strict=True)
            if o.kind == "saved"
        }
        return made[: len(self.outputs)], left

    def backward(self, left, tangents):
        coming = iter(tangents)
        inputs = self.joint.backward.graph.inputs
        return self._backward(
            [next(coming) if i.kind == "tangent" else left[i.kind, i.path] for i in inputs]
        )


def on_one_rank(joint):
    return Halves(joint, load(joint.forward, 0, None), load(joint.backward, 0, None))


def test_one_reshape_alone_is_saved_as_it_is():
    w = Writer()
    x, dy = w.input("x"), w.input("dy", "[16]", kind="tangent")
    y = w.op("aten.t.default", w.op("aten.exp.default", x, name="y"), name="yt")
    flat = w.op("aten.view.default", y, (16,), to="[16]", name="flat")  # copies
    w.output(flat)
    w.output(w.op("aten.mul.Tensor", dy, flat, to="[16]"), "grad", "x")
    assert split_forward_backward(w.program()).saved == ("flat",)


def test_backward_sees_a_buffer_as_it_was_before_forward_changed_it():
    w = Writer()
    x, buffer = w.input("x"), w.input("buffer", kind="buffer")
    dy = w.input("dy", kind="tangent")
    w.output(w.op("aten.mul.Tensor", x, buffer))
    w.output(w.op("aten.add.Scalar", buffer, 1), "buffer", "buffer")
    w.output(w.op("aten.mul.Tensor", dy, buffer), "grad", "x")
    joint = split_forward_backward(w.program())
    assert joint.saved == ("buffer",)
    run = on_one_rank(joint)
    x, buffer, dy = torch.randn(3, 4, 4)
    before = buffer.clone()
    (y, new), saved = run.forward([x, buffer])
    (dx,) = run.backward(saved, [dy])
    assert torch.equal(y, x * before)
    assert new is buffer
    assert torch.equal(buffer, before + 1)
    assert torch.equal(dx, dy * before)


def test_a_gradient_that_depends_on_no_incoming_one_leaves_backward():
    w = Writer()
    x = w.input("x")
    w.output(w.op("aten.exp.default", x))
    w.output(w.op("aten.neg.default", x, name="constant"), "grad", "x")
    joint = split_forward_backward(w.program())
    assert joint.saved == ("constant",)
    assert [o.kind for o in joint.backward.graph.outputs] == ["grad"]


def test_borders_stay_where_their_values_are():
    w = Writer()
    linear(w)
    w.borders = [Border("net", ("x",), ("y",)), Border("back", ("dy",), ("v6",))]
    joint = split_forward_backward(w.program())
    assert [b.cell for b in joint.forward.graph.borders] == ["net"]


def test_both_halves_compute_what_autograd_computes():
    w = Writer()
    linear(w)
    run = on_one_rank(split_forward_backward(w.program()))
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    dy = torch.randn(4, 4)
    boxed = [x, weight]
    (y,), saved = run.forward(boxed)
    assert boxed == []
    gradients = run.backward(saved, [dy])
    expected = torch.relu(x @ weight.t())
    expected.backward(dy)
    assert torch.equal(y, expected)
    by_path = {o.path: g for o, g in zip(run.gradients, gradients, strict=True)}
    assert torch.equal(by_path["x"], x.grad)
    assert torch.equal(by_path["weight"], weight.grad)


def data_parallel(w, layers=3, size=4):
    """A chain of layers over a split batch, each with a gradient that is summed over dp."""
    w.input("x", f"[8@dp, {size}]")
    value = Ref("x")
    inputs, weights = [], []
    for layer in range(layers):
        weights.append(w.input(f"w{layer}", f"[{size}, {size}]", "param"))
        inputs.append(value)
        value = w.op("aten.mm.default", value, weights[-1], to=f"[8@dp, {size}]")
    w.output(value)
    grad = w.input("dy", f"[8@dp, {size}]", "tangent")
    back = {"phase": "backward"}
    for layer in reversed(range(layers)):
        xt = w.op("aten.t.default", inputs[layer], to=f"[{size}, 8@dp]", **back)
        dw = w.op("aten.mm.default", xt, grad, to=f"[{size}, {size}]{{+dp}}", **back)
        dw = w.op("distcell.all_reduce", dw, ("dp",), "sum", to=f"[{size}, {size}]",
                  name=f"r{layer}", cell=f"layers.{layer}", **back)  # fmt: skip
        w.output(w.op("aten.neg.default", dw, to=f"[{size}, {size}]", **back), "grad", f"w{layer}")
        wt = w.op("aten.t.default", weights[layer], to=f"[{size}, {size}]", **back)
        grad = w.op("aten.mm.default", grad, wt, to=f"[8@dp, {size}]", **back)
    w.output(grad, "grad", "x")


def test_the_simulated_halves_compute_what_one_device_computes():
    w = Writer("dp=4")
    data_parallel(w)
    program = fuse_gradients(w.program())
    joint = split_forward_backward(program)
    halves = SimulatedRanks(joint.forward), SimulatedRanks(joint.backward)
    run = Halves(joint, halves[0].run, halves[1].run)
    tensors = {i.value: torch.randint(-3, 3, w.layouts[i.value].shape).float() for i in w.inputs}
    (y,), saved = run.forward([scatter(program, i.value, tensors[i.value]) for i in run.inputs])
    found = run.backward(saved, [scatter(program, "dy", tensors["dy"])])
    given = {name: t.clone().requires_grad_() for name, t in tensors.items() if name != "dy"}
    expected = given["x"] @ given["w0"] @ given["w1"] @ given["w2"]
    expected.backward(tensors["dy"])
    assert torch.equal(gather(program, run.outputs[0].value, y), expected)
    for output, pieces in zip(run.gradients, found, strict=True):
        sign = 1 if output.path == "x" else -1  # the program negates what it has summed
        whole = gather(program, output.value, pieces)
        assert torch.equal(whole, sign * given[output.path].grad)
    assert halves[1].logs[0].totals == {("all_reduce", ("dp",)): (1, 3 * 64)}


# Fusion


def test_the_reductions_of_gradients_become_one_when_the_last_is_ready():
    w = Writer("dp=2")
    data_parallel(w)
    before = w.program()
    after = fuse_gradients(before)
    verify(after.graph)
    many = [op for op in after.graph.ops if op.target == "distcell.all_reduce_many"]
    assert kinds(after).count("all_reduce") == 0
    assert [op.outputs for op in many] == [("r2", "r1", "r0")]
    assert many[0].cell == "layers.2 .. layers.0"
    place = after.graph.ops.index(many[0])
    assert kinds(after)[place + 1 : place + 4] == ["neg", "neg", "neg"]
    assert len(after.graph.ops) == len(before.graph.ops) - 2
    assert after.graph.outputs == before.graph.outputs


@pytest.mark.parametrize(("limit", "sizes"), [(64, []), (128, [2]), (191, [2]), (192, [3])])
def test_a_message_holds_no_more_than_it_may(limit, sizes):
    w = Writer("dp=2")
    data_parallel(w)
    after = fuse_gradients(w.program(), max_bytes=limit)
    fused = [op for op in after.graph.ops if op.target == "distcell.all_reduce_many"]
    assert [len(op.outputs) for op in fused] == sizes


def test_a_limit_that_nothing_fits_is_refused():
    w = Writer("dp=2")
    data_parallel(w)
    with pytest.raises(UserValueError, match="at most 0 bytes"):
        fuse_gradients(w.program(), max_bytes=0)


def test_reductions_that_the_network_waits_for_are_left_alone():
    w = Writer("tp=2")
    x = w.input("x", "[4, 4]{+tp}")
    back = {"phase": "backward"}
    a = w.op("distcell.all_reduce", x, ("tp",), "sum", **back)
    b = w.op("aten.mul.Scalar", a, 1, to="[4, 4]{+tp}", **back)
    c = w.op("distcell.all_reduce", b, ("tp",), "sum", **back)
    w.output(c, "grad", "x")
    y = w.op("distcell.all_reduce", w.input("y", "[4, 4]{+tp}"), ("tp",), "sum", **back)
    w.output(y, "grad", "y")
    after = fuse_gradients(w.program())
    assert kinds(after) == ["all_reduce", "mul", "all_reduce_many"]
    assert after.graph.ops[2].outputs == (c.name, y.name)


def test_reductions_of_different_kinds_stay_apart():
    w = Writer("dp=2 tp=2")
    back = {"phase": "backward"}
    for number, (axis, kind) in enumerate([("dp", "sum"), ("tp", "sum"), ("dp", "max")]):
        sign = "+" if kind == "sum" else "max "
        x = w.input(f"x{number}", f"[4, 4]{{{sign}{axis}}}")
        w.output(w.op("distcell.all_reduce", x, (axis,), kind, **back), "grad", f"x{number}")
    program = w.program()
    assert fuse_gradients(program) is program


def test_the_norm_of_all_gradients_does_not_keep_them_apart():
    w = Writer("dp=2 tp=2")
    back, optimizer = {"phase": "backward"}, {"phase": "optimizer"}
    gradients, norms = [], []
    for number in range(3):
        x = w.input(f"x{number}", "[4@tp, 4]{+dp}")
        g = w.op("distcell.all_reduce", x, ("dp",), "sum", to="[4@tp, 4]", **back)
        gradients.append(g)
        square = w.op("aten.mul.Tensor", g, g, to="[4@tp, 4]", **back)
        norm = w.op("aten.sum.default", square, to="[]{+tp}", **back)
        norms.append(w.op("distcell.all_reduce", norm, ("tp",), "sum", to="[]", **back))
    total = w.op("aten.add.Tensor", *norms[:2], to="[]", **back)
    total = w.op("aten.add.Tensor", total, norms[2], to="[]", **back)
    for number, g in enumerate(gradients):
        w.output(
            w.op("aten.div.Tensor", g, total, to="[4@tp, 4]", **optimizer), "grad", str(number)
        )
    after = fuse_gradients(w.program())
    assert [n for n in kinds(after) if n.startswith("all")] == ["all_reduce_many"] * 2
    tensors = [torch.randn(4, 4) for _ in range(3)]
    results = [
        gather_outputs(p, SimulatedRanks(p).run(scatter_inputs(p, tensors)))
        for p in (w.program(), after)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@st.composite
def random_gradients(draw):
    """Programs of element-wise ops and all-reduces that depend on each other in any way."""
    w = Writer("dp=2 tp=2")
    whole = [w.input(name, "[3]") for name in "abc"]
    for _ in range(draw(st.integers(1, 12))):
        phase = draw(st.sampled_from(["forward", "backward", "backward", "optimizer"]))
        x, y = draw(st.sampled_from(whole)), draw(st.sampled_from(whole))
        if draw(st.booleans()):
            axis = draw(st.sampled_from(["dp", "dp", "tp"]))
            x = w.op("distcell.neutral_unless_first", x, (axis,), to=f"[3]{{+{axis}}}", phase=phase)
            whole.append(w.op("distcell.all_reduce", x, (axis,), "sum", to="[3]", phase=phase))
        else:
            whole.append(w.op("aten.add.Tensor", x, y, to="[3]", phase=phase))
    for number, ref in enumerate(whole[3:]):
        w.output(ref, "grad", str(number))
    return w.program(), draw(st.sampled_from([12, 24, 1000]))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(random_gradients())
def test_fusion_changes_no_result(case):
    program, limit = case
    after = fuse_gradients(program, max_bytes=limit)
    verify(after.graph)
    tensors = list(torch.randn(3, 3))
    results = [
        gather_outputs(p, SimulatedRanks(p).run(scatter_inputs(p, tensors)))
        for p in (program, after)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    again = fuse_gradients(after, max_bytes=limit)
    assert len(again.graph.ops) <= len(after.graph.ops)


def test_a_program_without_ops_passes_through():
    w = Writer()
    w.output(w.input("x"))
    joint = split_forward_backward(fuse_gradients(w.program()))
    x = torch.randn(4, 4)
    (y,) = load(joint.forward, 0, None)([x])
    assert y is x
