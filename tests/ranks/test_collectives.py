"""Every collective against a value computed from all ranks' inputs, at any number of ranks.

Run with `mpirun -n 4 python -m pytest --with-mpi tests/ranks/test_collectives.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch

from distcell.errors import InternalError, MeshError
from distcell.mesh import Mesh
from distcell.runtime import world
from distcell.runtime.collectives import ReduceKind, payload_bytes
from distcell.runtime.groups import SoloGroup
from distcell.runtime.rank_collectives import RankCollectives
from distcell.runtime.torch_collectives import TorchGroups

pytestmark = pytest.mark.mpi

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@functools.cache
def meshes() -> list[Mesh]:
    size = world.init("mpi").size
    inner = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    return [Mesh((("x", size),)), Mesh((("a", size // inner), ("b", inner)))]


@functools.cache
def collectives(backend: str, mesh: Mesh) -> RankCollectives:
    here = world.init("mpi")
    if backend == "mpi":
        return world.collectives_for(mesh)
    store = world.store()
    if store is None:
        return RankCollectives(mesh, here.rank, lambda members: SoloGroup(members[0]))
    groups = _gloo_groups(backend)
    return RankCollectives(
        mesh,
        here.rank,
        lambda members: SoloGroup(members[0]) if len(members) == 1 else groups.group_of(members),
    )


@functools.cache
def _gloo_groups(backend: str) -> TorchGroups:
    return TorchGroups(backend, world.store(), world.current_world().rank, one_host=True)


@pytest.fixture(params=["mpi", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def cases(backend: str):
    """(collectives, axes, members, own index) for every group of every mesh."""
    for mesh in meshes():
        c = collectives(backend, mesh)
        names = mesh.names
        for axes in [names, *((name,) for name in names if len(names) > 1), names[::-1]]:
            members = mesh.group_of(c.rank, axes)
            yield c, axes, members, members.index(c.rank)


def local(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randint(-8, 9, tuple(shape), generator=generator)
    return (values > 0) if dtype == torch.bool else (values.to(torch.float32) / 4).to(dtype)


def reduced(terms: Sequence[torch.Tensor], op: ReduceKind) -> torch.Tensor:
    return functools.reduce(COMBINE[op], terms)


def extents(count: int, kind: str) -> list[int]:
    """The sizes of the members' blocks."""
    return {
        "even": [2] * count,
        "uneven": [3 if i % 2 == 0 else 1 for i in range(count)],
        "empty": [2 if i % 2 == 0 else 0 for i in range(count)],
        "nothing": [0] * count,
    }[kind]


def shaped(dim: int, extent: int) -> list[int]:
    shape = [3, 4, 5]
    shape[dim] = extent
    return shape


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_is_the_reduction_of_the_members_tensors(backend, dtype, op):
    for c, axes, members, _ in cases(backend):
        for shape in [(3, 5), (), (0, 4)]:
            x = local(c.rank, shape, dtype)
            want = reduced([local(r, shape, dtype) for r in members], op)
            got = c.all_reduce(x, axes, op)
            assert torch.equal(got, want)
            assert torch.equal(x, local(c.rank, shape, dtype))
            assert x.numel() == 0 or got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_in_place_writes_into_the_tensor_even_when_it_is_strided(backend, dtype):
    for c, axes, members, _ in cases(backend):
        want = reduced([local(r, (4, 6), dtype) for r in members], "sum")
        x = local(c.rank, (4, 6), dtype)
        assert c.all_reduce(x, axes, inplace=True) is x
        assert torch.equal(x, want)
        base = torch.zeros(6, 4, dtype=dtype)
        base.t().copy_(local(c.rank, (4, 6), dtype))
        assert c.all_reduce(base.t(), axes, inplace=True).data_ptr() == base.data_ptr()
        assert torch.equal(base.t(), want)


def test_all_reduce_of_a_strided_tensor_is_right(backend):
    for c, axes, members, _ in cases(backend):
        got = c.all_reduce(local(c.rank, (4, 6), torch.float32).t(), axes)
        assert torch.equal(
            got, reduced([local(r, (4, 6), torch.float32) for r in members], "sum").t()
        )


@pytest.mark.slow
@pytest.mark.parametrize("numel", [10_007, 300_001, 1_300_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_all_reduce_of_large_tensors_is_right(backend, dtype, numel):
    for c, axes, members, _ in cases(backend):
        shape = (numel,)
        for op in ("sum", "max"):
            want = reduced([local(r, shape, dtype) for r in members], op)
            x = local(c.rank, shape, dtype)
            assert torch.equal(c.all_reduce(x, axes, op), want)
            assert torch.equal(c.all_reduce(x, axes, op, inplace=True), want)


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_in_max_and_min(backend, op):
    for c, axes, members, index in cases(backend):
        x = torch.full((4,), float(index))
        x[index % 4] = float("nan")
        got = c.all_reduce(x, axes, op)
        assert got.isnan().tolist() == [i < len(members) for i in range(4)]


def test_two_ranks_get_the_bits_of_one_addition(backend):
    for c, axes, members, _ in cases(backend):
        if len(members) == 2:
            generators = [torch.Generator().manual_seed(r) for r in members]
            a, b = (torch.randn(999, generator=g) for g in generators)
            mine = a if c.rank == members[0] else b
            assert torch.equal(c.all_reduce(mine, axes), a + b)
            assert torch.equal(c.all_reduce_many([mine], axes)[0], a + b)
            sizes = [500, 499]
            part = c.reduce_scatter(mine, axes, 0, sizes)
            assert torch.equal(part, (a + b).split(sizes)[members.index(c.rank)])


def test_all_members_get_the_same_bits(backend):
    for c, axes, members, _ in cases(backend):
        generator = torch.Generator().manual_seed(c.rank)
        x = torch.randn(70_001, generator=generator)
        for got in (c.all_reduce(x, axes), c.all_reduce_many([x], axes)[0].clone()):
            every = c.all_gather(got[None], axes, 0, [1] * len(members))
            assert all(torch.equal(row, got) for row in every)


@pytest.mark.parametrize("kind", ["even", "uneven", "empty", "nothing"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_joins_the_blocks(backend, dtype, dim, kind):
    for c, axes, members, index in cases(backend):
        sizes = extents(len(members), kind)
        blocks = [local(r, shaped(dim, n), dtype) for r, n in zip(members, sizes, strict=True)]
        got = c.all_gather(blocks[index], axes, dim, sizes)
        assert got.is_contiguous()
        assert torch.equal(got, torch.cat(blocks, dim))


@pytest.mark.parametrize("kind", ["even", "uneven", "empty", "nothing"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_is_a_slice_of_the_reduction(backend, dtype, dim, kind):
    for c, axes, members, index in cases(backend):
        sizes = extents(len(members), kind)
        terms = [local(r, shaped(dim, sum(sizes)), dtype) for r in members]
        for op in ("sum", "max"):
            got = c.reduce_scatter(terms[index], axes, dim, sizes, op)
            assert got.is_contiguous()
            assert torch.equal(got, reduced(terms, op).split(sizes, dim)[index])


@pytest.mark.slow
@pytest.mark.parametrize("extent", [20_000, 400_000])
def test_reduce_scatter_of_large_tensors_is_right(backend, extent):
    for c, axes, members, index in cases(backend):
        sizes = [extent + 7 * i for i in range(len(members))]
        terms = [local(r, (sum(sizes),), torch.float32) for r in members]
        got = c.reduce_scatter(terms[index], axes, 0, sizes)
        assert torch.equal(got, reduced(terms, "sum").split(sizes)[index])


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize(("split_dim", "concat_dim"), [(0, 1), (1, 0), (0, 2), (2, 1), (-1, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_moves_the_split_to_another_dim(backend, dtype, split_dim, concat_dim, kind):
    for c, axes, members, index in cases(backend):
        split = extents(len(members), kind)
        concat = extents(len(members), "uneven")
        shape = [3, 4, 5]
        shape[split_dim], shape[concat_dim] = sum(split), sum(concat)
        whole = local(77, shape, dtype)
        x = whole.split(concat, concat_dim)[index]
        got = c.all_to_all(x, axes, split_dim, concat_dim, split, concat)
        assert got.is_contiguous()
        assert torch.equal(got, whole.split(split, split_dim)[index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_sends_whole_tensors_round(backend, dtype):
    for c, axes, members, index in cases(backend):
        size = len(members)
        source, target = (index - 1) % size, (index + 1) % size
        shapes = [(2 + i, 3) for i in range(size)]
        x = local(c.rank, shapes[index], dtype)
        got = c.permute(x, axes, source, target, shapes[source])
        assert torch.equal(got, local(members[source], shapes[source], dtype))


def test_permute_at_the_end_of_a_line_gives_zeros(backend):
    for c, axes, members, index in cases(backend):
        size = len(members)
        source = index - 1 if index > 0 else None
        target = index + 1 if index + 1 < size else None
        got = c.permute(local(c.rank, (5,), torch.float32), axes, source, target, (5,))
        want = torch.zeros(5) if source is None else local(members[source], (5,), torch.float32)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_gives_all_members_the_roots_tensor(backend, dtype):
    for c, axes, members, _ in cases(backend):
        for root, rank in enumerate(members):
            got = c.broadcast(local(c.rank, (3, 4), dtype), axes, root)
            assert torch.equal(got, local(rank, (3, 4), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_many_reduces_each_tensor_step_after_step(backend, dtype):
    shapes = [(3, 5), (7,), (), (0, 2), (600, 300)]
    for c, axes, members, _ in cases(backend):
        pointers = set()
        for step in range(3):
            xs = [local(c.rank + step, shape, dtype) for shape in shapes]
            got = c.all_reduce_many(xs, axes)
            for shape, tensor in zip(shapes, got, strict=True):
                assert torch.equal(
                    tensor, reduced([local(r + step, shape, dtype) for r in members], "sum")
                )
            pointers.add(got[0].data_ptr())
        assert len(pointers) == 1


def test_all_reduce_many_of_several_dtypes_is_refused(backend):
    for c, axes, _, _ in cases(backend):
        with pytest.raises(InternalError, match="several dtypes"):
            c.all_reduce_many([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], axes)


def test_a_block_of_another_extent_is_refused_before_it_is_sent(backend):
    for c, axes, members, _ in cases(backend):
        with pytest.raises(InternalError, match="extent 4"):
            c.all_gather(torch.zeros(3, 2), axes, 0, [4] * len(members))


def test_objects_and_barrier_reach_all_ranks(backend):
    for mesh in meshes():
        c = collectives(backend, mesh)
        got = c.all_gather_object({"rank": c.rank, "text": "é" * (1 + 100 * c.rank)})
        assert [entry["rank"] for entry in got] == list(range(mesh.size))
        assert [len(entry["text"]) for entry in got] == [1 + 100 * r for r in range(mesh.size)]
        c.barrier()


def test_the_log_counts_the_bytes_of_the_local_input(backend):
    mesh = meshes()[0]
    c = collectives(backend, mesh)
    axes, size = mesh.names, mesh.size
    c.log.clear()
    x = torch.zeros(size * 2, 3)
    c.all_reduce(x, axes, label="blocks.0.mlp")
    c.all_reduce_many([x, x], axes)
    c.all_gather(x, axes, 0, [size * 2] * size)
    c.reduce_scatter(x, axes, 0, [2] * size)
    c.all_to_all(x, axes, 0, 1, [2] * size, [3] * size)
    c.barrier()
    one = payload_bytes(x.shape, x.element_size())
    assert c.log.totals == {
        ("all_reduce", axes): (2, 3 * one),
        ("all_gather", axes): (1, one),
        ("reduce_scatter", axes): (1, one),
        ("all_to_all", axes): (1, one),
    }
    assert any(entry.label == "blocks.0.mlp" for entry in c.log.ring)
    assert c.log.pending is None


def test_a_mesh_of_another_size_is_an_error():
    size = world.init("mpi").size
    with pytest.raises(MeshError, match=f"has {size + 1} ranks, the job has {size}"):
        world.collectives_for(Mesh((("x", size + 1),)))
