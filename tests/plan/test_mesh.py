"""The mesh: coordinates, groups, sub-axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcell.errors import MeshError
from distcell.mesh import Mesh, prime_factors

meshes = st.lists(st.integers(1, 4), max_size=3).map(
    lambda sizes: Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
)


@given(meshes)
def test_coordinates_and_ranks_are_inverse_and_row_major(mesh: Mesh) -> None:
    coords = [tuple(mesh.coords(rank).values()) for rank in range(mesh.size)]
    assert coords == sorted(coords)
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(meshes, st.data())
def test_groups_partition_the_ranks_and_members_know_their_place(
    mesh: Mesh, data: st.DataObject
) -> None:
    names = data.draw(
        st.permutations(mesh.names).flatmap(
            lambda p: st.sampled_from([tuple(p[:n]) for n in range(len(p) + 1)])
        )
    )
    groups = mesh.groups(names)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.extent(names)
        for place, rank in enumerate(group):
            assert mesh.group_of(rank, names) == group
            here = {name: mesh.coords(rank)[name] for name in names}
            assert mesh.unravel(place, names) == here


@given(meshes)
def test_the_printed_form_parses_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(st.integers(1, 500))
def test_a_mesh_of_ranks_has_one_axis_for_each_prime_factor(num_ranks: int) -> None:
    factors = prime_factors(num_ranks)
    assert math.prod(factors) == num_ranks
    assert Mesh.of_ranks(num_ranks).shape == factors


def test_sub_axes_keep_the_place_of_each_rank() -> None:
    mesh = Mesh.parse("dp=2 tp=4")
    fine = mesh.refine("tp", (2, 2))
    assert fine.resolve("tp") == ("tp.0", "tp.1") and fine.resolve("dp") == ("dp",)
    for rank in range(8):
        coords = fine.coords(rank)
        assert coords["tp.0"] * 2 + coords["tp.1"] == mesh.coords(rank)["tp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=0", "size 0"),
        ("Dp=2", "not an axis name"),
        ("dp=2 dp=2", "twice"),
        ("dp", "not of the form"),
    ],
)
def test_a_bad_mesh_is_refused(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh.parse(text)


def test_an_unknown_axis_is_refused_with_the_ones_that_exist() -> None:
    with pytest.raises(MeshError, match="no axis `tq`"):
        Mesh.parse("dp=2 tp=4").axis_size("tq")
    with pytest.raises(MeshError, match="rank 9"):
        Mesh.parse("dp=2 tp=4").coords(9)
