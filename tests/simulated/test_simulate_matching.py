"""Programs of ranks whose collectives do not meet."""

from __future__ import annotations

import pytest

from distcell.errors import RankMismatchError, StallError
from distcell.graph import Graph, Input, MemberExtents, Op, Output, Ref, Value
from distcell.layout import Layout, Part
from distcell.mesh import Mesh
from distcell.program import Program
from distcell.simulate.matching import match_collectives


def collective(kind, *args, cell=""):
    return kind, args, cell


def program(*collectives, shape="[8, 4]", dtype="f32", mesh="dp=2 tp=2"):
    """Collectives of one input, one after the other."""
    layout = Layout.parse(shape)
    values, layouts = {"x": Value("x", layout.shape, dtype)}, {"x": layout}
    ops = []
    for number, (kind, args, cell) in enumerate(collectives):
        name = f"y{number}"
        values[name], layouts[name] = Value(name, layout.shape, dtype), layout
        ops.append(Op(f"distcell.{kind}", (Ref("x"), *args), outputs=(name,), cell=cell))
    graph = Graph((Input("x", "input", "x"),), tuple(ops), (Output("x", "output", "0"),), values)
    return Program(Mesh.parse(mesh), graph, layouts)


def test_equal_programs_meet():
    steps = [collective("all_reduce", (axis,), "sum") for axis in ("dp", "tp", "dp")]
    match_collectives([program(*steps)] * 4)
    match_collectives([program()] * 4)


def test_groups_that_do_not_overlap_may_run_ahead_of_each_other():
    over_tp = collective("all_reduce", ("tp",), "sum")
    one, three = program(over_tp), program(over_tp, over_tp, over_tp)
    match_collectives([one, one, three, three])


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (program(collective("all_reduce", ("tp",), "max")), "arguments"),
        (program(collective("all_reduce", ("tp",), "sum"), shape="[8, 5]"), "shapes"),
        (program(collective("all_reduce", ("tp",), "sum"), dtype="f64"), "dtypes"),
        (program(collective("reduce_scatter", ("tp",), 0, (4, 4), "sum")), "collectives"),
    ],
)
def test_what_the_members_disagree_on_is_said(other, problem):
    good = program(collective("all_reduce", ("tp",), "sum", cell="mlp.down"))
    with pytest.raises(RankMismatchError, match=f"different {problem}") as caught:
        match_collectives([good, good, good, other])
    text = str(caught.value)
    assert "rank 2: #1 all_reduce of f32[8, 4] over tp  mlp.down" in text
    assert "rank 3: #1" in text
    assert "rank 0" not in text


def test_ranks_that_wait_for_each_other_are_listed():
    dp, tp = (collective("all_reduce", (axis,), "sum") for axis in ("dp", "tp"))
    with pytest.raises(StallError) as caught:
        match_collectives([program(dp, tp), program(tp, dp), program(tp, dp), program(dp, tp)])
    assert "wait for each other for ever" in str(caught.value)
    for rank, axis in enumerate(["dp", "tp", "tp", "dp"]):
        assert f"rank {rank}: #1 all_reduce of f32[8, 4] over {axis}" in str(caught.value)


def test_a_rank_that_finished_early_is_listed():
    step = collective("all_reduce", ("tp",), "sum")
    with pytest.raises(StallError, match="rank 3: has finished"):
        match_collectives([program(step), program(step), program(step, step), program(step)])


def test_axes_in_another_order_are_a_mismatch():
    one = program(collective("all_reduce", ("dp", "tp"), "sum"))
    other = program(collective("all_reduce", ("tp", "dp"), "sum"))
    with pytest.raises(RankMismatchError, match="different orders of the members"):
        match_collectives([one, one, one, other])


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (collective("all_gather", ("tp",), 0, (4, 3)), "extents of dim 0"),
        (collective("reduce_scatter", ("tp",), 1, (2, 1), "sum"), "extents of dim 1"),
        (collective("all_to_all", ("tp",), 1, 0, (2, 1), (4, 4)), "extents of dim 1"),
        (collective("all_to_all", ("tp",), 1, 0, (2, 2), (4, 3)), "extents of dim 0"),
    ],
)
def test_sizes_that_do_not_fit_the_tensors_are_found(step, problem):
    with pytest.raises(RankMismatchError, match=problem):
        match_collectives([program(step, shape="[8@tp, 4]")] * 4)


def test_uneven_sizes_that_fit_meet():
    rows, columns = Part(7, ("tp",)), Part(5, ("tp",))
    of = MemberExtents
    steps = [
        collective("all_gather", ("tp",), 0, of(rows, ("tp",))),
        collective("all_to_all", ("tp",), -1, 0, of(columns, ("tp",)), of(rows, ("tp",))),
        collective("reduce_scatter", ("tp",), 1, of(columns, ("tp",)), "sum"),
    ]
    match_collectives([program(*steps[:2], shape="[7@tp, 5]")] * 4)
    match_collectives([program(steps[2], shape="[7, 5]{+tp}")] * 4)
