"""Generated code on one rank, compared bit for bit with torch, and what it frees and overwrites."""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcell.errors import InternalError
from distcell.graph import DeviceArg, DtypeArg, Graph, Input, Op, Output, Ref, Value
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.program import Program
from distcell.runtime.codegen import load
from distcell.runtime.storage import plan_storage

torch.set_num_threads(1)


class Writer:
    """Writes a program of one rank by hand."""

    def __init__(self):
        self.values, self.inputs, self.ops, self.outputs = {}, [], [], []

    def input(self, name, shape=(4, 4), kind="input", dtype="f32"):
        self.values[name] = Value(name, shape, dtype)
        self.inputs.append(Input(name, kind, name))
        return Ref(name)

    def op(self, target, *args, to=(4, 4), dtype="f32", **attributes):
        results = to if isinstance(to, list) else [to]
        names = tuple(f"v{len(self.ops)}_{index}" for index in range(len(results)))
        for name, shape in zip(names, results, strict=True):
            self.values[name] = Value(name, shape, dtype)
        self.ops.append(Op(target, args, outputs=names, many=isinstance(to, list), **attributes))
        refs = tuple(map(Ref, names))
        return refs if isinstance(to, list) else refs[0]

    def output(self, ref, kind="output", path=None):
        self.outputs.append(Output(ref.name, kind, path or str(len(self.outputs))))

    def program(self):
        graph = Graph(tuple(self.inputs), tuple(self.ops), tuple(self.outputs), self.values)
        tensors = {name: v for name, v in self.values.items() if v.is_tensor}
        return Program(Mesh(), graph, {n: Layout.of(v.shape) for n, v in tensors.items()})


def run(writer, *tensors, donated=()):
    return load(writer.program(), 0, None, donated=donated)(list(tensors))


def test_one_rank_computes_bit_for_bit_what_torch_computes():
    w = Writer()
    x, weight = w.input("x"), w.input("blocks.0.weight", kind="param")
    h = w.op("aten.mm.default", x, w.op("aten.t.default", weight))
    h = w.op("aten.view.default", h, (2, 8), to=(2, 8))
    h = w.op("aten._to_copy.default", h, to=(2, 8), dtype="f64")
    w.ops[-1] = Op(
        w.ops[-1].target, w.ops[-1].args, (("dtype", DtypeArg("f64")),), w.ops[-1].outputs
    )
    left, right = w.op("aten.split.Tensor", h, 4, 1, to=[(2, 4), (2, 4)], dtype="f64")
    y = w.op("aten.mul.Tensor", left, right, to=(2, 4), dtype="f64")
    ones = w.op("aten.full.default", (2, 4), float("inf"), to=(2, 4), dtype="f64")
    w.ops[-1] = Op(
        w.ops[-1].target,
        w.ops[-1].args,
        (("dtype", DtypeArg("f64")), ("device", DeviceArg())),
        w.ops[-1].outputs,
    )
    w.output(w.op("aten.minimum.default", y, ones, to=(2, 4), dtype="f64"))
    x, weight = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
    (y,) = run(w, x, weight)
    left, right = (x @ weight.t()).view(2, 8).double().split(4, 1)
    assert torch.equal(y, (left * right).detach())
    assert not y.requires_grad


def test_a_view_of_a_transposed_tensor_copies():
    w = Writer()
    x = w.input("x", (2, 3))
    t = w.op("aten.t.default", x, to=(3, 2))
    w.output(w.op("aten.view.default", t, (6,), to=(6,)))
    x = torch.randn(2, 3)
    assert torch.equal(run(w, x)[0], x.t().reshape(6))


def test_numbers_of_the_host_are_plain_numbers():
    w = Writer()
    x, lr = w.input("x"), w.input("lr", (), "scalar", "float")
    half = w.op("py.mul", lr, 0.5, to=(), dtype="float")
    w.output(w.op("aten.mul.Scalar", x, half))
    w.output(half)
    x = torch.randn(4, 4)
    y, half = run(w, x, 3.0)
    assert half == 1.5
    assert torch.equal(y, x * 1.5)


def test_results_that_an_op_was_asked_not_to_make_are_left_out():
    w = Writer()
    g, x = w.input("g"), w.input("x")
    mean, rstd = w.input("mean", (4, 1)), w.input("rstd", (4, 1))
    weight = w.input("weight", (4,))
    (dx,) = w.op(
        "aten.native_layer_norm_backward.default",
        g, x, (4,), mean, rstd, weight, None, (True, False, False), to=[(4, 4)],
    )  # fmt: skip
    w.output(dx)
    x, g, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), torch.randn(4)
    y, mean, rstd = torch.native_layer_norm(x, (4,), weight, None, 1e-5)
    y.backward(g)
    assert torch.equal(run(w, g, x, mean.detach(), rstd.detach(), weight)[0], x.grad)


def test_every_value_is_freed_after_its_last_use():
    w = Writer()
    x = w.input("x")
    y = w.op("aten.exp.default", x)
    w.op("aten.neg.default", y)
    w.output(w.op("aten.sin.default", y))
    lines = [line.split("#")[0].strip() for line in load(w.program(), 0, None).source.splitlines()]
    assert lines[1:] == [
        "[x] = boxed",
        "boxed.clear()",
        "v0_0 = _exp_default(x)",
        "del x",
        "v1_0 = _neg_default(v0_0)",
        "del v1_0",
        f"v2_0 = {'_sin__default' if plan_storage(w.program()).inplace else '_sin_default'}(v0_0)",
        "del v0_0",
        "return [v2_0]",
    ]


def test_inputs_are_freed_while_the_program_runs():
    seen = []
    w = Writer()
    x = w.input("x")
    y = w.op("aten.exp.default", x)
    w.output(w.op("distcell.all_reduce", y, ("dp",), "sum"))
    tensor = torch.randn(4, 4)
    alive = weakref.ref(tensor)

    class Collectives:
        def all_reduce(self, y, axes, op, *, inplace=False, label=""):
            gc.collect()
            seen.append((alive() is None, axes, op, inplace))
            return y

    boxed = [tensor]
    del tensor
    load(w.program(), 0, Collectives())(boxed)
    assert boxed == []
    assert seen == [(True, ("dp",), "sum", True)]


def test_a_wrong_number_of_inputs_is_an_error():
    w = Writer()
    w.output(w.input("x"))
    with pytest.raises(InternalError, match="1 inputs, 0 were given"):
        run(w)


def test_a_traceback_shows_the_op_the_cell_and_the_line_of_the_user():
    w = Writer()
    x = w.input("x", (3, 5))
    w.output(w.op("aten.mm.default", x, x, cell="blocks.3.mlp", source="train.py:12"))
    with pytest.raises(RuntimeError) as caught:
        run(w, torch.ones(3, 5))
    text = "".join(traceback.format_exception(caught.value))
    assert "_mm_default(x, x)  # aten.mm.default blocks.3.mlp train.py:12" in text


def test_names_that_are_no_python_names_are_fitted():
    w = Writer()
    a, b, c = w.input("x~1"), w.input("x 1"), w.input("class")
    w.output(w.op("aten.add.Tensor", w.op("aten.sub.Tensor", a, b), c))
    a, b, c = torch.randn(3, 4, 4)
    assert torch.equal(run(w, a, b, c)[0], (a - b) + c)


# What may be overwritten


def inplace_targets(w, donated=()):
    program = w.program()
    return [plan_storage(program, donated).inplace.get(i) for i in range(len(program.graph.ops))]


def test_an_intermediate_that_dies_is_overwritten():
    w = Writer()
    x = w.input("x")
    w.output(w.op("aten.mul.Scalar", w.op("aten.exp.default", x), 2.0))
    assert inplace_targets(w) == [None, "aten.mul_.Scalar"]
    x = torch.randn(4, 4)
    before = x.clone()
    (y,) = run(w, x)
    assert torch.equal(y, before.exp() * 2)
    assert torch.equal(x, before)


def test_an_input_is_overwritten_only_when_it_is_donated():
    w = Writer()
    w.output(w.op("aten.mul.Scalar", w.input("x"), 2.0))
    assert inplace_targets(w) == [None]
    assert inplace_targets(w, donated=("x",)) == ["aten.mul_.Scalar"]


@pytest.mark.parametrize(
    "later",
    ["operand", "view of the operand", "operand leaves", "view leaves", "other operand"],
)
def test_what_is_still_needed_is_not_overwritten(later):
    w = Writer()
    x = w.input("x")
    y = w.op("aten.exp.default", x)
    view = w.op("aten.t.default", y)
    other = view if later == "other operand" else 2.0
    target = "aten.mul.Tensor" if later == "other operand" else "aten.mul.Scalar"
    z = w.op(target, y, other)
    number = len(w.ops) - 1
    if later == "operand":
        w.output(w.op("aten.sub.Tensor", x, y))
    elif later == "view of the operand":
        w.output(w.op("aten.sub.Tensor", x, view))
    elif later == "operand leaves":
        w.output(y)
    elif later == "view leaves":
        w.output(view)
    w.output(z)
    assert inplace_targets(w)[number] is None
    x = torch.randn(4, 4)
    y = x.exp()
    z = y * y.t() if later == "other operand" else y * 2.0
    expected = {
        "operand": x - y,
        "view of the operand": x - y.t(),
        "operand leaves": y,
        "view leaves": y.t(),
    }
    results = run(w, x)
    assert torch.equal(results[-1], z)
    if later in expected:
        assert torch.equal(results[0], expected[later])


def test_a_view_is_not_overwritten():
    w = Writer()
    x = w.input("x", (4, 1))
    y = w.op("aten.expand.default", w.op("aten.exp.default", x, to=(4, 1)), (4, 4))
    w.output(w.op("aten.mul.Scalar", y, 2.0))
    assert inplace_targets(w) == [None, None, None]
    x = torch.randn(4, 1)
    assert torch.equal(run(w, x)[0], x.exp().expand(4, 4) * 2.0)


def test_a_fresh_result_is_overwritten_under_another_shape():
    w = Writer()
    x = w.input("x", (4, 2))
    y = w.op("aten.view.default", w.op("aten.exp.default", x, to=(4, 2)), (8,), to=(8,))
    w.output(w.op("aten.mul.Scalar", y, 2.0, to=(8,)))
    assert inplace_targets(w) == [None, None, "aten.mul_.Scalar"]
    x = torch.randn(4, 2)
    assert torch.equal(run(w, x)[0], x.exp().view(8) * 2.0)


def test_an_input_under_another_shape_is_not_overwritten():
    # where the strides of the input make the view a copy, it would keep its old value
    w = Writer()
    p = w.input("p", (4, 2), "param")
    y = w.op("aten.mul.Scalar", w.op("aten.view.default", p, (8,), to=(8,)), 2.0, to=(8,))
    w.output(w.op("aten.view.default", y, (4, 2), to=(4, 2)), "param", "p")
    assert inplace_targets(w, donated=("p",)) == [None, None, None]
    p = torch.randn(2, 4).t()
    expected = p * 2.0
    assert torch.equal(run(w, p, donated=("p",))[0], expected)
    assert torch.equal(p, expected)


def test_a_result_of_another_shape_or_dtype_is_a_new_tensor():
    w = Writer()
    y = w.op("aten.exp.default", w.input("x", (1, 4)), to=(1, 4))
    w.output(w.op("aten.mul.Tensor", y, w.input("b")))
    assert inplace_targets(w) == [None, None]


def test_a_chain_of_updates_happens_in_the_state_itself():
    w = Writer()
    p, m, g = w.input("p", kind="param"), w.input("m", kind="state"), w.input("g", kind="tangent")
    new_m = w.op("aten.add.Tensor", w.op("aten.mul.Scalar", m, 0.9), g)
    w.output(w.op("aten.sub.Tensor", p, w.op("aten.mul.Scalar", new_m, 0.1)), "param", "p")
    w.output(new_m, "state", "m")
    assert inplace_targets(w, ("p", "m")) == [
        "aten.mul_.Scalar",
        "aten.add_.Tensor",
        None,
        "aten.sub_.Tensor",
    ]
    for donated in ((), ("p",), ("m",), ("p", "m")):
        p, m, g = torch.randn(3, 4, 4)
        p = torch.nn.Parameter(p)
        expected_m = m * 0.9 + g
        expected_p = p.detach() - expected_m * 0.1
        new_p, new_m = run(w, p, m, g, donated=donated)
        assert new_p is p
        assert new_m is m
        assert torch.equal(p.detach(), expected_p)
        assert torch.equal(m, expected_m)


@pytest.mark.parametrize("donated", [(), ("p", "q")])
def test_parameters_that_change_places_do(donated):
    w = Writer()
    p, q = w.input("p", kind="param"), w.input("q", kind="param")
    w.output(q, "param", "p")
    w.output(p, "param", "q")
    p, q = torch.randn(2, 4, 4)
    old_p, old_q = p.clone(), q.clone()
    run(w, p, q, donated=donated)
    assert torch.equal(p, old_q)
    assert torch.equal(q, old_p)


@pytest.mark.parametrize("donated", [(), ("p",)])
def test_an_output_keeps_the_old_value_of_a_parameter_that_changes(donated):
    w = Writer()
    p = w.input("p", kind="param")
    w.output(w.op("aten.t.default", p))
    w.output(w.op("aten.mul.Scalar", p, 2.0), "param", "p")
    w.output(p, "saved", "p")
    p = torch.randn(4, 4)
    old = p.clone()
    transposed, new, saved = run(w, p, donated=donated)
    assert new is p
    assert torch.equal(p, old * 2)
    assert torch.equal(transposed, old.t())
    assert torch.equal(saved, old)


@pytest.mark.parametrize("donated", [(), ("p",)])
def test_a_parameter_can_become_its_own_transpose(donated):
    w = Writer()
    p = w.input("p", kind="param")
    w.output(w.op("aten.t.default", p), "param", "p")
    p = torch.randn(4, 4)
    old = p.clone()
    run(w, p, donated=donated)
    assert torch.equal(p, old.t())


def test_a_donated_value_is_replaced_as_soon_as_nothing_needs_it():
    w = Writer()
    p = w.input("p", kind="param")
    new = w.op("aten.cumsum.default", p, 0)
    w.op("aten.neg.default", w.input("x"))
    w.output(new, "param", "p")
    lines = load(w.program(), 0, None, donated=("p",)).source.splitlines()
    copy = next(i for i, line in enumerate(lines) if "p.copy_" in line)
    assert lines[copy + 1].strip() == "del v0_0"
    assert "_neg_default" in lines[copy + 2]


def test_a_new_value_that_does_not_fit_its_parameter_is_an_error():
    w = Writer()
    w.input("p", kind="param")
    w.output(w.input("x", (4,)), "param", "p")
    with pytest.raises(InternalError, match=r"new value of param `p` does not fit it"):
        plan_storage(w.program())


def test_views_of_a_lent_buffer_are_copied_when_they_leave():
    w = Writer()
    a, b = w.op("distcell.all_reduce_many", (w.input("x"), w.input("y")), ("dp",), "sum",
                to=[(4, 4), (4, 4)])  # fmt: skip
    w.output(a, "grad", "x")
    w.output(w.op("aten.mul.Scalar", b, 2.0), "grad", "y")
    assert inplace_targets(w) == [None, None]
    flat = torch.zeros(32)

    class Collectives:
        def all_reduce_many(self, xs, axes, op, *, label):
            flat.copy_(torch.cat([x.reshape(-1) for x in xs]))
            return [flat[:16].view(4, 4), flat[16:].view(4, 4)]

    program = load(w.program(), 0, Collectives())
    x, y = torch.randn(2, 4, 4)
    first, _ = program([x, y])
    program([y, y])
    assert torch.equal(first, x)


class LendsItsBuffer:
    """Reduces in one flat tensor, which it lends, and copies nothing."""

    def __init__(self):
        self.flat = torch.zeros(32)

    def lend_many(self, xs, axes, op, *, label):
        return [self.flat[:16].view(4, 4), self.flat[16:].view(4, 4)]

    def all_reduce_many(self, xs, axes, op, *, label):
        return self.lend_many(xs, axes, op, label=label)


def fused_products(*, is_used_again):
    w = Writer()
    x, y = w.input("x"), w.input("y")
    products = [w.op("aten.mm.default", *pair, to=(4, 4)) for pair in ((x, y), (y, x))]
    a, b = w.op("distcell.all_reduce_many", tuple(products), ("dp",), "sum", to=[(4, 4)] * 2)
    w.output(a, "grad", "x")
    w.output(b, "grad", "y")
    if is_used_again:
        w.output(w.op("aten.neg.default", products[0], to=(4, 4)), "output", "0")
    return w


def test_products_are_computed_where_a_fused_reduction_sums_them():
    x, y = torch.randn(2, 4, 4)
    program = load(fused_products(is_used_again=False).program(), 0, LendsItsBuffer())
    assert program.source.count("_mm_out(") == 2
    first, second = program([x, y])
    assert torch.equal(first, x @ y)
    assert torch.equal(second, y @ x)


def test_a_product_that_is_used_elsewhere_keeps_memory_of_its_own():
    w = fused_products(is_used_again=True)
    assert load(w.program(), 0, LendsItsBuffer()).source.count("_mm_out(") == 1


UNARY = ("aten.exp.default", "aten.neg.default", "aten.t.default", "aten.sin.default")
BINARY = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")


def contiguous(x):
    return x.contiguous()


@st.composite
def random_programs(draw):
    """Programs of element-wise ops, transposes and views over two inputs and two parameters."""
    w = Writer()
    names = [w.input(n, (3, 3), "param" if n in "pq" else "input") for n in "xypq"]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.integers(0, 2))
        if kind == 0:
            ref = w.op("aten.view.default", draw(st.sampled_from(names)), (3, 3), to=(3, 3))
        elif kind == 1:
            ref = w.op(draw(st.sampled_from(UNARY)), draw(st.sampled_from(names)), to=(3, 3))
        else:
            args = [draw(st.sampled_from(names)) for _ in range(2)]
            ref = w.op(draw(st.sampled_from(BINARY)), *args, to=(3, 3))
        names.append(ref)
    for number in range(draw(st.integers(1, 3))):
        w.output(draw(st.sampled_from(names)), "output", str(number))
    for path in draw(st.sets(st.sampled_from("pq"))):
        w.output(draw(st.sampled_from(names)), "param", path)
    donated = draw(st.sets(st.sampled_from("xypq")))
    return w, tuple(donated)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(random_programs())
def test_no_choice_of_what_is_overwritten_changes_a_result(case):
    w, donated = case
    tensors = [torch.randn(3, 3) for _ in range(4)]
    env = {name: t.clone() for name, t in zip("xypq", tensors, strict=True)}
    for op in w.ops:
        is_view = op.target == "aten.view.default"  # where the strides allow it; else a copy
        function = getattr(torch.ops.aten, op.target.split(".")[1]) if not is_view else contiguous
        env[op.outputs[0]] = function(*(env[name] for name in op.inputs)).clone()
    given = [t.clone() for t in tensors]
    params = dict(zip("xypq", given, strict=True))
    results = run(w, *given, donated=donated)
    for output, result in zip(w.outputs, results, strict=True):
        assert torch.equal(result, env[output.value])
        if output.kind == "param":
            assert result is params[output.path]
    written = {o.path for o in w.outputs if o.kind == "param"} | set(donated)
    for name, tensor, old in zip("xypq", params.values(), tensors, strict=True):
        assert name in written or torch.equal(tensor, old)


def test_the_source_of_the_writer_is_found_by_inspect():
    w = Writer()
    w.output(w.input("x"))
    program = load(w.program(), 0, None)
    assert program.source == inspect.getsource(program._function)
