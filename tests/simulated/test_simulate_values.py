"""Hand-written programs on simulated ranks, compared with torch on one device."""

from __future__ import annotations

import pytest
import torch

from distcell.errors import InternalError
from distcell.graph import Extent, Graph, Input, MemberExtents, Offset, Op, Output, Ref, Value
from distcell.layout import Layout, Part
from distcell.mesh import Mesh
from distcell.program import Program
from distcell.simulate.values import SimulatedRanks, gather_outputs, scatter_inputs

torch.set_num_threads(1)


class Writer:
    """Writes a program by hand: layouts are given as they print."""

    def __init__(self, mesh, dtype="f32"):
        self.mesh, self.dtype = Mesh.parse(mesh), dtype
        self.values, self.layouts, self.inputs, self.ops, self.outputs = {}, {}, [], [], []

    def value(self, name, layout, dtype=None):
        self.layouts[name] = Layout.parse(layout)
        shape = self.layouts[name].shape
        self.values[name] = Value(name, shape, dtype or self.dtype)

    def input(self, name, layout, kind="input", dtype=None):
        self.value(name, layout, dtype)
        self.inputs.append(Input(name, kind, name))
        return Ref(name)

    def op(self, target, *args, to, dtype=None, **attributes):
        results = to if isinstance(to, list) else [to]
        names = [
            f"{target.split('.')[1].strip('_')}{len(self.ops)}_{i}" for i in range(len(results))
        ]
        for name, layout in zip(names, results, strict=True):
            self.value(name, layout, dtype)
        many = isinstance(to, list)
        self.ops.append(Op(target, args, outputs=tuple(names), many=many, **attributes))
        refs = tuple(map(Ref, names))
        return refs if many else refs[0]

    def output(self, ref, kind="output", path=None):
        self.outputs.append(Output(ref.name, kind, path or str(len(self.outputs))))

    def program(self):
        graph = Graph(tuple(self.inputs), tuple(self.ops), tuple(self.outputs), self.values)
        return Program(self.mesh, graph, self.layouts)


def simulate(program, *tensors, **options):
    simulated = SimulatedRanks(program, **options)
    outputs = simulated.run(scatter_inputs(program, tensors))
    return gather_outputs(program, outputs), simulated


def integers(*shape):
    """Random integers as floats: sums of them are exact in any order."""
    return torch.randint(-8, 8, shape).float()


def mlp(mesh="dp=2 tp=2", batch=8):
    w = Writer(mesh)
    x = w.input("x", f"[{batch}@dp, 6]")
    up, down = w.input("up", "[6, 10@tp]", "param"), w.input("down", "[10@tp, 4]", "param")
    h = w.op("aten.mm.default", x, up, to=f"[{batch}@dp, 10@tp]")
    h = w.op("aten.relu.default", h, to=f"[{batch}@dp, 10@tp]")
    y = w.op("aten.mm.default", h, down, to=f"[{batch}@dp, 4]{{+tp}}")
    y = w.op("distcell.all_reduce", y, ("tp",), "sum", to=f"[{batch}@dp, 4]", cell="mlp.down")
    w.output(y)
    return w.program()


@pytest.mark.parametrize("mesh", ["dp=1 tp=1", "dp=2 tp=2", "dp=4 tp=1", "dp=3 tp=4", "dp=1 tp=16"])
@pytest.mark.parametrize("batch", [8, 5, 1])
def test_a_column_and_row_parallel_mlp_gives_the_global_result(mesh, batch):
    program = mlp(mesh, batch)
    x, up, down = integers(batch, 6), integers(6, 10), integers(10, 4)
    (y,), _ = simulate(program, x, up, down)
    assert torch.equal(y, torch.relu(x @ up) @ down)


def test_what_is_replicated_is_computed_once():
    program = mlp("dp=2 tp=4")
    source = SimulatedRanks(program).source
    assert source.count("= _mm_default(") == 8 + 8
    data_parallel = Writer("dp=8")
    w = data_parallel.input("w", "[4, 4]", "param")
    data_parallel.output(data_parallel.op("aten.t.default", w, to="[4, 4]"))
    assert SimulatedRanks(data_parallel.program()).source.count("= _t_default(") == 1


def test_every_rank_logs_the_bytes_of_its_own_tensor():
    program = mlp("dp=2 tp=2", batch=5)
    _, simulated = simulate(program, integers(5, 6), integers(6, 10), integers(10, 4))
    totals = [log.totals for log in simulated.logs]
    assert totals[0] == totals[1] == {("all_reduce", ("tp",)): (1, 3 * 4 * 4)}
    assert totals[2] == totals[3] == {("all_reduce", ("tp",)): (1, 2 * 4 * 4)}
    assert simulated.logs[0].ring[-1].label == "mlp.down"


@pytest.mark.parametrize("batch", [8, 6, 3])
def test_a_data_parallel_gradient_is_that_of_the_whole_batch(batch):
    w = Writer("dp=4")
    x, g = w.input("x", f"[{batch}@dp, 6]"), w.input("g", f"[{batch}@dp, 5]", "tangent")
    xt = w.op("aten.t.default", x, to=f"[6, {batch}@dp]")
    grad = w.op("aten.mm.default", xt, g, to="[6, 5]{+dp}")
    bias = w.op("aten.sum.dim_IntList", g, (0,), to="[5]{+dp}")
    many = w.op("distcell.all_reduce_many", (grad, bias), ("dp",), "sum", to=["[6, 5]", "[5]"])
    w.output(many[0], "grad", "w")
    w.output(many[1], "grad", "b")
    x, g = integers(batch, 6), integers(batch, 5)
    (grad, bias), simulated = simulate(w.program(), x, g)
    assert torch.equal(grad, x.t() @ g)
    assert torch.equal(bias, g.sum(0))
    assert simulated.logs[0].totals == {("all_reduce", ("dp",)): (1, (30 + 5) * 4)}


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [8, 7, 2])
def test_gathered_reduced_and_scattered_again_a_tensor_is_a_multiple_of_itself(dim, size):
    shape = [3, 4, 5]
    shape[dim] = size
    split = [str(n) for n in shape]
    split[dim] += "@tp"
    whole = f"[{', '.join(map(str, shape))}]"
    part = Part(size, ("tp",))
    w = Writer("tp=4")
    x = w.input("x", f"[{', '.join(split)}]")
    sizes = MemberExtents(part, ("tp",))
    y = w.op("distcell.all_gather", x, ("tp",), dim, sizes, to=whole)
    w.output(y)
    partial = w.op("aten.mul.Scalar", y, 2, to=f"{whole}{{+tp}}")
    z = w.op("distcell.reduce_scatter", partial, ("tp",), dim, sizes, "sum", to=str(w.layouts["x"]))
    w.output(z)
    n = w.op("distcell.narrow", y, dim, Offset(part), Extent((part,)), to=str(w.layouts["x"]))
    w.output(n)
    x = integers(*shape)
    (y, z, n), simulated = simulate(w.program(), x)
    assert torch.equal(y, x)
    assert torch.equal(z, 8 * x)
    assert torch.equal(n, x)
    for rank, log in enumerate(simulated.logs):
        block = w.layouts["x"].local_shape(w.mesh, rank)
        assert log.totals["all_gather", ("tp",)] == (1, 4 * torch.Size(block).numel())
        assert log.totals["reduce_scatter", ("tp",)] == (1, 4 * x.numel())


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 2)])
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-1, -2)])
def test_an_all_to_all_moves_an_axis_from_one_dim_to_another(shape, dims):
    new, old = dims
    before, after = [str(n) for n in shape], [str(n) for n in shape]
    before[old] += "@tp"
    after[new] += "@tp"
    w = Writer("dp=2 tp=4")
    x = w.input("x", f"[{', '.join(before)}]")
    y = w.op(
        "distcell.all_to_all",
        x,
        ("tp",),
        new,
        old,
        MemberExtents(Part(shape[new], ("tp",)), ("tp",)),
        MemberExtents(Part(shape[old], ("tp",)), ("tp",)),
        to=f"[{', '.join(after)}]",
    )
    w.output(y)
    x = integers(*shape)
    (y,), _ = simulate(w.program(), x)
    assert torch.equal(y, x)


def test_a_dim_of_parts_is_gathered_between_two_reshapes():
    w = Writer("dp=2 tp=3")
    x = w.input("x", "[5@dp*4@tp, 3]")
    y = w.op(
        "distcell.reshape",
        x,
        (Extent((Part(5, ("dp",)),)), Extent((Part(4, ("tp",)),)), 3),
        to="[5@dp, 4@tp, 3]",
    )
    y = w.op(
        "distcell.all_gather",
        y,
        ("tp",),
        1,
        MemberExtents(Part(4, ("tp",)), ("tp",)),
        to="[5@dp, 4, 3]",
    )
    y = w.op("distcell.reshape", y, (Extent((Part(5, ("dp",)), Part(4))), 3), to="[5@dp*4, 3]")
    w.output(y)
    x = integers(20, 3)
    (y,), _ = simulate(w.program(), x)
    assert torch.equal(y, x)


def test_a_replicated_value_becomes_partial_on_the_first_member_alone():
    w = Writer("dp=2 tp=3")
    x = w.input("x", "[4]")
    for kind, sign in (("sum", "+"), ("max", "max "), ("min", "min ")):
        y = w.op("distcell.neutral_unless_first", x, ("tp",), kind, to=f"[4]{{{sign}tp}}")
        w.output(w.op("distcell.all_reduce", y, ("tp",), kind, to="[4]"))
    x = integers(4)
    outputs, _ = simulate(w.program(), x)
    assert all(torch.equal(y, x) for y in outputs)


def test_a_rank_with_an_empty_operand_skips_the_kernel():
    w = Writer("tp=4")
    q = w.input("q", "[1, 2@tp, 3, 4]")
    y = w.op("aten.amax.default", q, (1,), to="[1, 3, 4]{max tp}")  # raises on an empty dim
    y = w.op("distcell.all_reduce", y, ("tp",), "max", to="[1, 3, 4]")
    w.output(y)
    q = torch.randn(1, 2, 3, 4)
    (y,), _ = simulate(w.program(), q)
    assert torch.equal(y, q.amax(1))


def test_the_base_of_a_scatter_survives_on_a_rank_without_indices():
    w = Writer("tp=4")
    base, index = w.input("base", "[5]"), w.input("index", "[2@tp]", dtype="i64")
    source = w.input("source", "[2@tp]")
    partial = w.op("aten.mul.Scalar", base, 1, to="[5]{+tp}")  # every rank brings the base
    y = w.op("aten.index_add.default", partial, 0, index, source, to="[5]{+tp}")
    w.output(w.op("distcell.all_reduce", y, ("tp",), "sum", to="[5]"))
    base, index, source = integers(5), torch.tensor([1, 4]), integers(2)
    (y,), _ = simulate(w.program(), base, index, source)
    assert torch.equal(y, (4 * base).index_add(0, index, source))


def test_layouts_that_call_different_tensors_replicas_are_found_where_they_arise():
    w = Writer("dp=2")
    x = w.input("x", "[4@dp]")
    w.output(w.op("aten.sum.default", x, to="[]", cell="loss"))
    with pytest.raises(InternalError, match=r"ranks differ .*aten\.sum\.default.*loss"):
        simulate(w.program(), torch.arange(4.0))


def test_a_tensor_that_is_not_what_its_layout_says_is_found_where_it_arises():
    w = Writer("dp=2")
    x = w.input("x", "[5@dp, 3]")
    w.output(w.op("aten.t.default", x, to="[5@dp, 3]", cell="mlp"))
    with pytest.raises(InternalError, match=r"= aten\.t\.default\(%x\).*mlp") as caught:
        simulate(w.program(), torch.randn(5, 3))
    assert "float32[3, 3], not [3, 3]" in str(caught.value)
    assert "float32[3, 2], not [2, 3]" in str(caught.value)
    w = Writer("dp=2")
    w.output(w.op("aten.isnan.default", w.input("x", "[4@dp]"), to="[4@dp]", dtype="f32"))
    with pytest.raises(InternalError, match=r"bool\[2\], not \[2\]"):
        simulate(w.program(), torch.randn(4))


def test_only_what_a_program_writes_is_copied_when_it_is_scattered():
    w = Writer("dp=2")
    p, x = w.input("p", "[4]", "param"), w.input("x", "[4]")
    w.output(w.op("aten.add.Tensor", p, x, to="[4]"), "param", "p")
    p, x = torch.ones(4), torch.ones(4)
    inputs = scatter_inputs(w.program(), [p, x])
    assert inputs[0][0] is inputs[0][1]
    assert inputs[0][0].data_ptr() != p.data_ptr()
    assert inputs[1][0] is inputs[1][1]
    assert inputs[1][0].data_ptr() == x.data_ptr()


def test_replicas_that_disagree_are_named_when_they_are_gathered():
    w = Writer("dp=2")
    w.output(w.input("x", "[2]"))
    with pytest.raises(InternalError, match=r"x: f32\[2\]"):
        gather_outputs(w.program(), [[torch.zeros(2), torch.ones(2)]])


def test_at_two_ranks_every_order_of_reduction_gives_the_same_bits():
    program = mlp("dp=1 tp=2")
    tensors = [torch.randn(8, 6), torch.randn(6, 10), torch.randn(10, 4)]
    results = [simulate(program, *tensors, order=order)[0][0] for order in ("rank", "ring", "tree")]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    h = torch.relu(tensors[0] @ tensors[1])
    assert torch.equal(results[0], h[:, :5] @ tensors[2][:5] + h[:, 5:] @ tensors[2][5:])


def test_the_order_of_reduction_shows_in_the_last_bits():
    w = Writer("dp=4")
    x = w.input("x", "[4, 64]{+dp}")
    w.output(w.op("distcell.all_reduce", x, ("dp",), "sum", to="[4, 64]"))
    program, pieces = w.program(), [torch.randn(4, 64) for _ in range(4)]

    def reduced(order):
        return SimulatedRanks(program, order=order).run([list(pieces)])[0][0]

    a, b, c, d = pieces
    assert torch.equal(reduced("rank"), ((a + b) + c) + d)
    assert torch.equal(reduced("tree"), (a + b) + (c + d))
    ring = torch.stack([((b + c) + d) + a, ((c + d) + a) + b, ((d + a) + b) + c, ((a + b) + c) + d])
    assert torch.equal(reduced("ring"), torch.stack([ring[i, i] for i in range(4)]))


def test_new_values_of_parameters_are_written_into_every_replica():
    w = Writer("dp=2 tp=2")
    p, g = w.input("p", "[6@tp]", "param"), w.input("g", "[6@tp]")
    w.output(w.op("aten.sub.Tensor", p, g, to="[6@tp]"), "param", "p")
    program = w.program()
    old, g = integers(6), integers(6)
    for donated in ((), ("p",)):
        inputs = scatter_inputs(program, [old, g])
        shared = list(inputs[0])
        (new,) = SimulatedRanks(program, donated=donated).run(inputs)
        assert all(a is b for a, b in zip(new, shared, strict=True))
        assert torch.equal(gather_outputs(program, [new])[0], old - g)
        apart = [
            [piece.clone() for piece in pieces] for pieces in scatter_inputs(program, [old, g])
        ]
        own = list(apart[0])
        SimulatedRanks(program, donated=donated).run(apart)
        assert torch.equal(gather_outputs(program, [own])[0], old - g)


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_terms_that_are_one_tensor_are_combined_once_for_each_member(kind):
    # the term dies in the reduction, but it is every member's term: it may not be overwritten
    w = Writer("dp=4")
    x = w.input("x", "[3]")
    sign = "+" if kind == "sum" else "max "
    term = w.op("aten.exp.default", x, to=f"[3]{{{sign}dp}}")
    w.output(w.op("distcell.all_reduce", term, ("dp",), kind, to="[3]"))
    x = torch.tensor([0.5, 1.0, -2.0])
    (result,), simulated = simulate(w.program(), x)
    assert torch.equal(result, x.exp() * 4 if kind == "sum" else x.exp())
    assert "reduce_into_first" not in simulated.source


def test_a_term_that_dies_is_where_its_sum_is_made():
    w = Writer("dp=4")
    x = w.input("x", "[4@dp, 3]")
    term = w.op("aten.sum.dim_IntList", x, (0,), to="[3]{+dp}")
    w.output(w.op("distcell.all_reduce", term, ("dp",), "sum", to="[3]"))
    x = torch.randn(4, 3)
    (result,), simulated = simulate(w.program(), x)
    assert torch.equal(result, ((x[0] + x[1]) + x[2]) + x[3])
    assert "reduce_into_first" in simulated.source
