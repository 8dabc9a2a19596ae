"""Groups of ranks over MPI: which ranks, in which order, beside which others, and their end."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distcell.errors import BackendError

pytestmark = pytest.mark.usefixtures("mpi4py_backend")


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def total(group: dist.ProcessGroup | None) -> float:
    x = torch.tensor([float(rank() + 1)])
    dist.all_reduce(x, group=group)
    return x.item()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_kib() -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_every_subset_of_ranks_may_be_a_group() -> None:
    for count in range(1, size() + 1):
        for ranks in itertools.islice(itertools.combinations(range(size()), count), 8):
            group = dist.new_group(list(ranks))
            if rank() in ranks:
                assert total(group) == sum(ranks) + count
                assert dist.get_process_group_ranks(group) == list(ranks)
                dist.destroy_process_group(group)


def test_ranks_keep_the_order_that_they_are_given_in() -> None:
    order = [*range(1, size()), 0][::-1]
    group = dist.new_group(order, sort_ranks=False)
    assert dist.get_rank(group) == order.index(rank())
    out = torch.empty(size())
    dist.all_gather_single(out, torch.tensor([float(rank())]), group=group)
    assert out.tolist() == order
    x = torch.tensor([float(rank())])
    dist.broadcast(x, group=group, group_src=0)
    assert x.item() == order[0]


def test_groups_overlap() -> None:
    groups = [dist.new_group([r, (r + 1) % size()]) for r in range(size())] if size() > 2 else []
    for first, group in enumerate(groups):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert total(group) == first + 1 + (first + 1) % size() + 1


def test_members_alone_may_make_a_group() -> None:
    half = [r for r in range(size()) if r % 2 == rank() % 2]
    group = dist.new_group(half, use_local_synchronization=True)
    assert total(group) == sum(half) + len(half)


def test_subgroups_divide_the_ranks() -> None:
    if size() % 2:
        return
    mine, every = dist.new_subgroups(2)
    assert len(every) == size() // 2
    first = rank() // 2 * 2
    assert total(mine) == 2 * first + 3


def test_a_gloo_group_stands_beside_it() -> None:
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo"
    assert total(group) == total(None) == size() * (size() + 1) / 2
    dist.monitored_barrier(group, timeout=timedelta(seconds=60))
    dist.destroy_process_group(group)


def test_two_groups_of_the_same_ranks_do_not_meet() -> None:
    one, other = dist.new_group(), dist.new_group()
    x, y = torch.full((9001,), 1.0), torch.full((9001,), 2.0)
    first, second = (one, other) if rank() % 2 else (other, one)
    works = [dist.all_reduce(x if g is one else y, group=g, async_op=True) for g in (first, second)]
    for work in works:
        work.wait()
    assert (x == size()).all() and (y == 2 * size()).all()
    for group in (first, second):  # in different order
        dist.destroy_process_group(group)
    again = [dist.new_group(), dist.new_group()]
    for group in again:
        x = torch.ones(9001)
        dist.all_reduce(x, group=group)
        assert (x == size()).all()


def test_two_threads_use_two_groups() -> None:
    groups = [dist.new_group(), dist.new_group()]
    seen: list[float] = [0.0, 0.0]

    def work(which: int) -> None:
        torch.set_num_threads(1)
        for _ in range(20):
            x = torch.full((9001,), float(which + 1))
            dist.all_reduce(x, group=groups[which])
            seen[which] += x[0].item()

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [20.0 * size(), 40.0 * size()]


def test_a_device_mesh_has_a_group_for_each_axis() -> None:
    inner = 2 if size() % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size() // inner, inner), mesh_dim_names=("dp", "tp"))
    row = [rank() // inner * inner + i for i in range(inner)]
    assert total(mesh.get_group("tp")) == sum(row) + inner
    column = list(range(rank() % inner, size(), inner))
    assert total(mesh["dp"].get_group()) == sum(column) + len(column)
    flat = mesh._flatten("all")
    assert total(flat.get_group()) == size() * (size() + 1) / 2
    backwards = DeviceMesh("cpu", list(range(size()))[::-1])
    assert total(backwards.get_group()) == size() * (size() + 1) / 2
    wrapped = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert total(wrapped.get_group()) == size() * (size() + 1) / 2


def test_a_destroyed_group_says_so() -> None:
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(BackendError, match="was destroyed"):
        group.allreduce([torch.ones(1)])
    group.shutdown()  # twice does no harm


def test_destroying_a_group_ends_what_was_issued() -> None:
    group = dist.new_group()
    x = torch.ones(9001)
    dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    assert (x == size()).all()


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.full)])
def test_groups_leave_nothing_behind(count: int) -> None:
    def make_and_destroy(times: int) -> None:
        for turn in range(times):
            group = dist.new_group(list(range(size()))[:: 1 if turn % 2 else -1], sort_ranks=False)
            x = torch.ones(9001)  # in shared memory
            dist.all_reduce(x, group=group, async_op=turn % 3 == 0)
            dist.destroy_process_group(group)

    make_and_destroy(20)
    gc.collect()
    files, memory, threads = open_files(), resident_kib(), threading.active_count()
    make_and_destroy(count)
    gc.collect()
    assert open_files() == files
    assert threading.active_count() == threads
    assert resident_kib() - memory < 4096 + count * 4, "KiB more"


def test_the_default_group_may_be_made_again() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("mpi4py", init_method="mpi://")
    assert total(None) == size() * (size() + 1) / 2


def test_a_gloo_job_needs_no_address_either() -> None:
    dist.destroy_process_group()
    try:
        dist.init_process_group("gloo")
        assert total(None) == size() * (size() + 1) / 2
        group = dist.new_group(backend="mpi4py")
        assert total(group) == size() * (size() + 1) / 2
    finally:
        dist.destroy_process_group()
        dist.init_process_group("mpi4py")


def test_ranks_that_mpi_does_not_know_are_refused() -> None:
    here, ranks = rank(), size()
    dist.destroy_process_group()
    try:
        with pytest.raises(BackendError, match=f"has {ranks + 1} ranks, MPI sees {ranks}"):
            dist.init_process_group(
                "mpi4py", store=dist.HashStore(), rank=here, world_size=ranks + 1
            )
    finally:
        dist.init_process_group("mpi4py")


def test_a_second_backend_in_one_group_is_not_forgotten() -> None:
    dist.destroy_process_group()
    try:
        dist.init_process_group("cpu:mpi4py,cuda:gloo")
        with pytest.raises(BackendError, match="mpi4py for one device and gloo for another"):
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
        dist.init_process_group("mpi4py")


def test_distcells_own_ranks_and_torchs_groups_stand_side_by_side() -> None:
    from distcell.mesh import Mesh
    from distcell.runtime import world

    here = world.init("mpi")
    assert (here.rank, here.size) == (rank(), size())
    mesh = Mesh((("dp", size()),))
    x = world.collectives_for(mesh).all_reduce(torch.ones(9001), ("dp",)) if size() > 1 else None
    y = torch.ones(9001)
    dist.all_reduce(y)
    assert x is None or torch.equal(x, y)


def test_nothing_of_the_environment_was_changed() -> None:
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & set(os.environ)
