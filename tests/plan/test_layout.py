"""Layouts: what each rank holds, and how it is printed."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcell.errors import LayoutError
from distcell.layout import Layout, Part, canonical, shares, split
from distcell.mesh import Mesh

MESH = Mesh.parse("dp=2 tp=3 ep=2")


@st.composite
def layouts(draw: st.DrawFn, *, partial: bool = True) -> Layout:
    """Any layout on MESH of up to three dims, compound and uneven ones among them."""
    axes = list(draw(st.permutations(MESH.names)))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            count = draw(st.integers(0, len(axes)))
            taken, axes = tuple(axes[:count]), axes[count:]
            parts.append(Part(draw(st.integers(1, 7)), taken))
        dims.append(tuple(parts))
    summed = tuple(axes[: draw(st.integers(0, len(axes)))]) if partial else ()
    kind = draw(st.sampled_from(("sum", "max", "min"))) if summed else "sum"
    return Layout(tuple(dims), summed, kind)


@given(st.integers(0, 50), st.integers(1, 9))
def test_a_split_covers_everything_once_and_is_balanced(size: int, ways: int) -> None:
    pieces = [split(size, ways, index) for index in range(ways)]
    covered = [i for offset, length in pieces for i in range(offset, offset + length)]
    assert covered == list(range(size))
    lengths = [length for _, length in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(layouts())
def test_gathering_the_shards_gives_the_tensor_back(layout: Layout) -> None:
    whole = torch.randint(-9, 9, layout.shape).to(torch.float64)
    pieces = [layout.shard(whole, MESH, rank) for rank in range(MESH.size)]
    for rank, piece in enumerate(pieces):
        assert piece.is_contiguous() and tuple(piece.shape) == layout.local_shape(MESH, rank)
    assert torch.equal(layout.gather(pieces, MESH), whole)
    into = torch.randn(layout.shape, dtype=torch.float64)
    assert layout.gather(pieces, MESH, into=into).data_ptr() == into.data_ptr()
    assert torch.equal(into, whole)


@given(layouts(partial=False))
def test_pieces_that_lie_in_a_tensor_are_gathered_by_leaving_them_there(layout: Layout) -> None:
    whole = torch.randint(-9, 9, layout.shape).to(torch.float64)
    pieces = [layout.shard(whole, MESH, rank) for rank in range(MESH.size)]
    for share in shares(layout, MESH):
        pieces[share.ranks[0]].add_(1.0)  # some are copies, some lie in the tensor
    expected = layout.gather(pieces, MESH)
    assert torch.equal(layout.gather(pieces, MESH, into=whole), expected)


@given(layouts())
def test_the_shares_of_a_layout_hold_each_rank_once(layout: Layout) -> None:
    found = shares(layout, MESH)
    assert sorted(rank for share in found for rank in share.ranks) == list(range(MESH.size))
    for share in found:
        coords = [MESH.coords(rank) for rank in share.ranks]
        assert all(len({c[axis] for c in coords}) == 1 for axis in layout.axes)


@given(layouts())
def test_the_printed_form_of_a_layout_parses_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_the_canonical_form_says_the_same(layout: Layout) -> None:
    short = canonical(layout, MESH)
    whole = torch.arange(float(torch.Size(layout.shape).numel())).reshape(layout.shape)
    for rank in range(MESH.size):
        assert torch.equal(short.shard(whole, MESH, rank), layout.shard(whole, MESH, rank))


def test_a_pickled_layout_does_not_bring_the_hash_of_its_process() -> None:
    layout = Layout.parse("[8@dp, 4]")
    assert hash(layout) == hash(Layout.parse("[8@dp, 4]"))
    assert b"_hash" not in pickle.dumps((layout, MESH))
    assert pickle.loads(pickle.dumps((layout, MESH))) == (layout, MESH)


def test_slices_and_replicas_are_those_of_mindspore() -> None:
    # golden vectors: device matrix (2, 2, 2), layout ("dp", ("sp", "mp")) on (4, 8)
    mesh = Mesh.parse("dp=2 sp=2 mp=2")
    whole = torch.arange(32).reshape(4, 8)
    columns = [0, 2, 4, 6, 0, 2, 4, 6]
    for rank in range(8):
        rows, column = slice(0, 2) if rank < 4 else slice(2, 4), columns[rank]
        piece = Layout.of((4, 8), ("dp", ("sp", "mp"))).shard(whole, mesh, rank)
        assert torch.equal(piece, whole[rows, column : column + 2])
    # ("dp", ("mp", "sp")): the order inside the tuple matters
    columns = [0, 4, 2, 6]
    for rank in range(4):
        piece = Layout.of((4, 8), ("dp", ("mp", "sp"))).shard(whole, mesh, rank)
        assert torch.equal(piece, whole[0:2, columns[rank] : columns[rank] + 2])
    assert Mesh.parse("dp=2 tp=4").group_of(5, ("tp",)) == (4, 5, 6, 7)


def test_an_uneven_dim_is_split_with_the_dim_that_it_was_merged_from() -> None:
    mesh = Mesh.parse("dp=4")
    merged = Layout.parse("[5@dp*8]")
    assert [merged.local_shape(mesh, rank) for rank in range(4)] == [(16,), (8,), (8,), (8,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[8@dp, 8@dp]", "used twice"),
        ("[8@dp]{+dp}", "used twice"),
        ("8, 8", "not a layout"),
        ("[8@]", "not a dim"),
        ("[8]{avg dp}", "unknown reduction"),
    ],
)
def test_a_bad_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="has not the layout"):
        Layout.of((4, 4)).shard(torch.zeros(4, 3), MESH, 0)
    with pytest.raises(LayoutError, match="3 entries for a tensor of 2 dims"):
        Layout.of((4, 4), ("dp", None, "tp"))
