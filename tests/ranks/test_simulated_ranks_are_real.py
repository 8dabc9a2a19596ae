"""A program on real ranks and on simulated ones: the same pieces, the same bytes.

Run with `mpirun -n 2 python -m pytest --with-mpi tests/ranks/test_simulated_ranks_are_real.py`.
"""

from __future__ import annotations

import math

import pytest
import torch

from distcell.graph import Extent, Graph, Input, MemberExtents, Offset, Op, Output, Ref, Value
from distcell.layout import Layout, Part
from distcell.mesh import Mesh
from distcell.program import Program
from distcell.runtime import world
from distcell.runtime.codegen import load
from distcell.simulate.values import SimulatedRanks, scatter_inputs

pytestmark = pytest.mark.mpi

torch.set_num_threads(1)


def mesh_of_all_ranks() -> Mesh:
    size = world.init("mpi").size
    tp = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    return Mesh((("dp", size // tp), ("tp", tp)))


def every_collective(mesh: Mesh, batch: int, width: int) -> Program:
    """A step of a layer with weights split over tp and a batch split over dp, by hand."""
    values, layouts, inputs, ops, outputs = {}, {}, [], [], []

    def value(name: str, layout: str) -> Ref:
        layouts[name] = Layout.parse(layout)
        values[name] = Value(name, layouts[name].shape, "f32")
        return Ref(name)

    def enter(name: str, layout: str, kind: str) -> Ref:
        inputs.append(Input(name, kind, name))
        return value(name, layout)

    def op(target: str, *args, to: str, cell: str = "layer") -> Ref:
        name = f"v{len(ops)}"
        ops.append(Op(target, args, outputs=(name,), cell=cell, source="train.py:1"))
        return value(name, to)

    part, rows = Part(width, ("tp",)), Part(batch, ("dp",))
    tp, dp = MemberExtents(part, ("tp",)), MemberExtents(rows, ("dp",))
    x = enter("x", f"[{batch}@dp, 6]", "input")
    up = enter("up", f"[6, {width}@tp]", "param")
    down = enter("down", f"[{width}@tp, 6]", "param")
    h = op("aten.mm.default", x, up, to=f"[{batch}@dp, {width}@tp]")
    y = op("aten.mm.default", h, down, to=f"[{batch}@dp, 6]{{+tp}}")
    y = op("distcell.all_reduce", y, ("tp",), "sum", to=f"[{batch}@dp, 6]")
    whole = op("distcell.all_gather", h, ("tp",), 1, tp, to=f"[{batch}@dp, {width}]")
    again = op("distcell.narrow", whole, 1, Offset(part), Extent((part,)), to=str(layouts[h.name]))
    t = op("aten.t.default", x, to=f"[6, {batch}@dp]")
    grad = op("aten.mm.default", t, again, to=f"[6, {width}@tp]{{+dp}}")
    bias = op("aten.sum.dim_IntList", again, (0,), to=f"[{width}@tp]{{+dp}}")
    ops.append(
        Op(
            "distcell.all_reduce_many",
            ((grad, bias), ("dp",), "sum"),
            outputs=("g", "b"),
            many=True,
        )
    )
    grad, bias = value("g", f"[6, {width}@tp]"), value("b", f"[{width}@tp]")
    columns = MemberExtents(Part(width, ("dp",)), ("dp",))
    args = (whole, ("dp",), 1, 0, columns, dp)
    moved = op("distcell.all_to_all", *args, to=f"[{batch}, {width}@dp]")
    scattered = op("aten.mm.default", h, down, to=f"[{batch}@dp, 6]{{+tp}}")
    sixths = MemberExtents(Part(6, ("tp",)), ("tp",))
    args = (scattered, ("tp",), 1, sixths, "sum")
    scattered = op("distcell.reduce_scatter", *args, to=f"[{batch}@dp, 6@tp]")
    top = op("aten.amax.default", h, (0,), to=f"[{width}@tp]{{max dp}}")
    top = op("distcell.all_reduce", top, ("dp",), "max", to=f"[{width}@tp]")
    new = op("aten.sub.Tensor", up, grad, to=f"[6, {width}@tp]")
    for number, ref in enumerate([y, whole, bias, moved, scattered, top, grad]):
        outputs.append(Output(ref.name, "output", str(number)))
    outputs.append(Output(new.name, "param", "up"))
    return Program(mesh, Graph(tuple(inputs), tuple(ops), tuple(outputs), values), layouts)


@pytest.mark.parametrize(("batch", "width"), [(8, 8), (7, 5), (1, 3)])
@pytest.mark.parametrize("donated", [(), ("up",)])
@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_holds_the_pieces_and_has_sent_the_bytes_that_the_simulator_says(
    batch, width, donated, exact
):
    mesh = mesh_of_all_ranks()
    program = every_collective(mesh, batch, width)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(*program.graph.values[i.value].shape, generator=generator)
               for i in program.graph.inputs]  # fmt: skip
    if exact:  # sums of small integers are the same in any order
        tensors = [tensor.mul(3).round() for tensor in tensors]
    simulated = SimulatedRanks(program, donated=donated)
    expected = simulated.run(scatter_inputs(program, tensors))

    collectives = world.collectives_for(mesh)
    collectives.log.clear()
    run = load(program, collectives.rank, collectives, donated=donated)
    pieces = scatter_inputs(program, tensors)
    outputs = run([piece[collectives.rank].clone() for piece in pieces])
    kept = [output.clone() for output in outputs]
    run([piece[collectives.rank].clone() + 1 for piece in pieces])  # overwrites lent buffers

    for output, want, before in zip(outputs, expected, kept, strict=True):
        have = want[collectives.rank]
        assert torch.equal(output, before)
        if exact or mesh.size == 2:
            assert torch.equal(output, have)
        else:
            torch.testing.assert_close(output, have)
    twice = {
        key: (2 * n, 2 * size) for key, (n, size) in simulated.logs[collectives.rank].totals.items()
    }
    assert collectives.log.totals == twice
