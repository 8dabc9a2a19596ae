"""Between layouts and the splits of factors, and the notation itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcell.errors import RuleError
from distcell.graph import Box, Extent, Offset, Op, Ref, Value
from distcell.layout import Layout, Part, canonical
from distcell.mesh import Mesh
from distcell.rules.check import check_rule
from distcell.rules.factors import layout_of, local_op, partial_of, project
from distcell.rules.notation import Call, LocalArg, rule
from distcell.rules.table import rule_of

torch.set_num_threads(1)
MESH = Mesh.parse("dp=2 tp=4")


def call(target, *shapes, results, args=None, **kwargs):
    refs = tuple(Ref(f"x{i}") for i in range(len(shapes)))
    operands = tuple(Value(f"x{i}", shape, "f32") for i, shape in enumerate(shapes))
    made = tuple(Value(f"y{i}", shape, "f32") for i, shape in enumerate(results))
    return Call(Op(target, refs if args is None else args, tuple(kwargs.items())), operands, made)


def printed(dims):
    return None if dims is None else ["*".join(map(str, dim)) for dim in dims]


@pytest.mark.parametrize(
    ("dim", "sizes", "expected"),
    [
        ("32@(dp,tp)", (8, 4), ["8@(dp,tp)", "4"]),
        ("32@(dp,tp)", (2, 16), ["2@dp", "16@tp"]),
        ("32@tp", (2, 16), None),
        ("6@dp*8@tp", (6, 8), ["6@dp", "8@tp"]),
        ("6*8@tp", (6, 8), ["6", "8@tp"]),
        ("5@dp*8", (5, 8), ["5@dp", "8"]),
        ("40@dp", (5, 8), None),
        ("40@dp", (40,), ["40@dp"]),
        ("8@dp*4", (32,), ["32@dp"]),
        ("24", (2, 3, 4), ["2", "3", "4"]),
        ("24@dp", (4, 1, 6), ["4@dp", "1", "6"]),
        ("1", (), []),
    ],
)
def test_a_dim_is_cut_at_the_borders_of_its_factors(dim, sizes, expected):
    (parts,) = Layout.parse(f"[{dim}]").dims
    assert printed(project(parts, sizes, MESH)) == expected


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=3),
    where=st.tuples(*[st.sampled_from([(), ("dp",), ("tp",), ("dp", "tp")])] * 3),
)
@settings(max_examples=200, deadline=None)
def test_the_factors_of_a_dim_put_together_are_found_again(sizes, where):
    used, parts = set(), []
    for size, axes in zip(sizes, where, strict=False):
        free = tuple(axis for axis in axes if axis not in used)
        used |= set(free)
        parts.append(Part(size, free))
    whole = canonical(Layout((tuple(parts),)), MESH)
    found = project(whole.dims[0], sizes, MESH)
    if found is None:
        return
    again = Layout((tuple(part for dim in found for part in dim),))
    for rank in range(MESH.size):
        x = torch.arange(math.prod(sizes))
        assert torch.equal(again.shard(x, MESH, rank), whole.shard(x, MESH, rank))


def test_results_without_a_split_factor_are_partial():
    mm = rule_of(call("aten.mm.default", (4, 6), (6, 8), results=[(4, 8)]))
    split = {"k": (Part(6, ("dp",)),), "n": (Part(8, ("tp",)),)}
    assert str(layout_of(mm.operands[1], mm, split)) == "[6@dp, 8@tp]"
    assert str(layout_of(mm.results[0], mm, split)) == "[4, 8@tp]"
    assert partial_of(mm.results[0], mm, split) == (("dp",), "sum")


def test_a_reduction_to_a_maximum_is_a_partial_maximum():
    amax = rule_of(call("aten.amax.default", (4, 6), args=(Ref("x0"), (1,)), results=[(4,)]))
    assert partial_of(amax.results[0], amax, {"d1": (Part(6, ("tp",)),)}) == (("tp",), "max")


def local(made, split):
    return local_op(made, rule_of(made), split)


def test_the_shape_of_a_view_becomes_local():
    view = call("aten.view.default", (4, 6), args=(Ref("x0"), (24,)), results=[(24,)])
    op = local(view, {"v0": (Part(4, ("dp",)),)})
    assert [arg.at(MESH, {"dp": 0, "tp": 0}) for arg in op.args[1]] == [12]


def test_an_unsplit_op_stays_as_it_is():
    view = call("aten.view.default", (4, 6), args=(Ref("x0"), (24,)), results=[(24,)])
    assert local(view, {}) == view.op


def test_the_pieces_of_a_fused_projection_are_split_with_it():
    split = call("aten.split.Tensor", (2, 12), args=(Ref("x0"), 4, 1), results=[(2, 4)] * 3)
    heads = {"c": (Part(4, ("tp",)),)}
    made = rule_of(split)
    assert str(layout_of(made.operands[0], made, heads)) == "[2, 3*4@tp]"
    assert local(split, heads).args[1] == Extent((Part(4, ("tp",)),))


def test_the_bounds_of_an_aligned_slice_become_local():
    half = call("aten.slice.Tensor", (2, 8), args=(Ref("x0"), 1, 4, 8), results=[(2, 4)])
    op = local(half, {"c": (Part(4, ("dp",)),)})
    assert [arg.at(MESH, {"dp": 1, "tp": 0}) for arg in op.args[2:]] == [2, 4]


def test_offsets_and_boxes_say_where_a_share_lies():
    take = call(
        "distcell.take.default",
        (5, 3),
        (4,),
        args=(Ref("x0"), 0, Ref("x1")),
        results=[(4, 3)],
    )
    op = local(take, {"d0": (Part(5, ("tp",)),)})
    assert op.args[3] == Offset(Part(5, ("tp",)))
    op = local(take, {"d0": (Part(3, ("tp",)), Part(2))})
    assert op.args[3].at(MESH, {"dp": 0, "tp": 2}) == 4
    with pytest.raises(ValueError, match="has no single offset"):
        local(take, {"d0": (Part(3), Part(2, ("tp",)))})
    uniform = call("distcell.uniform.default", (3,), args=(Ref("x0"), 7, (4, 6)), results=[(4, 6)])
    op = local(uniform, {"d0": (Part(4, ("dp",)),)})
    assert op.args[3] == Box(Layout.of((4, 6), ("dp",)))
    assert op.args[2] == (Extent((Part(4, ("dp",)),)), 6)


def test_extents_multiply_factors_and_keep_numbers():
    text = "a b -> a b"
    of = rule(text, local=[LocalArg(1, "extents", "a, 1, a b"), LocalArg("n", "extent", "b", 3)])
    made = call("mylib.op", (4, 6), args=(Ref("x0"), ()), results=[(4, 6)], n=18)
    op = local_op(made, of(made), {"a": (Part(4, ("dp",)),), "b": (Part(6, ("tp",)),)})
    at = {"dp": 0, "tp": 3}
    assert [arg if isinstance(arg, int) else arg.at(MESH, at) for arg in op.args[1]] == [2, 1, 2]
    assert dict(op.kwargs)["n"].at(MESH, at) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k", "has no `->`"),
        ("m k -> m k", "is for 1 operands and 1 results, not 2 and 1"),
        ("m k, k n -> m ?", "is not factor notation"),
        ("m k, k n l -> m n", "does not fit"),
        ("m k, k m -> m m", "has sizes"),
        ("(a b) k, k n -> (a b) n", "do not follow from the shapes"),
    ],
)
def test_a_rule_that_cannot_be_read_is_an_error(text, message):
    with pytest.raises(RuleError, match=message):
        rule(text)(call("aten.mm.default", (4, 6), (6, 8), results=[(4, 8)]))


SIZES = st.sampled_from([1, 2, 3, 4, 6])


@pytest.mark.slow
@given(st.lists(SIZES, min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_reshape_holds_however_its_factors_are_split(shape, random):
    rest, target = math.prod(shape), []
    while rest > 1:
        size = random.choice([n for n in range(2, rest + 1) if rest % n == 0])
        target.append(size)
        rest //= size
    check_rule("aten.view.default", torch.randn(shape, dtype=torch.float64), tuple(target))
