"""Every collective of torch.distributed over MPI against a computed value, on any number of ranks.

Run with `mpirun -n 4 python -m pytest --with-mpi tests/ranks/test_mpi_backend.py`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from distcell.errors import BackendError

pytestmark = pytest.mark.usefixtures("mpi4py_backend")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]
MOVED = [*DTYPES, torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex128]
SIZES = [0, 1, 5, 9001]  # the last: in shared memory, and no multiple of anything

R = dist.ReduceOp
ARITHMETIC: dict[R, Callable[[Tensor, Tensor], Tensor]] = {
    R.SUM: torch.add,
    R.PRODUCT: torch.mul,
    R.MIN: torch.minimum,
    R.MAX: torch.maximum,
}
BITWISE = {R.BAND: torch.bitwise_and, R.BOR: torch.bitwise_or, R.BXOR: torch.bitwise_xor}


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def value(member: int, numel: int, dtype: torch.dtype, *, signs: bool = False) -> Tensor:
    """What a member brings: small enough that sums of eight are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + member)
    whole = torch.randint(-4, 5, (numel,), generator=generator)
    if signs:
        whole = whole.sign() + (whole == 0)
    if dtype == torch.bool:
        return whole > 0
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double()).to(dtype)
    if dtype.is_floating_point:
        return (whole / (1 if signs else 2)).to(dtype)
    return (whole.abs() if dtype in (torch.uint8, torch.uint16, torch.uint64) else whole).to(dtype)


def same(got: Tensor, want: Tensor) -> bool:
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    one, other = (x.contiguous().view(-1).view(torch.uint8) for x in (got, want))
    return torch.equal(one, other)


def combined(op: R, numel: int, dtype: torch.dtype) -> Tensor:
    signs = op == R.PRODUCT
    terms = [value(r, numel, dtype, signs=signs) for r in range(size())]
    return functools.reduce({**ARITHMETIC, **BITWISE}[op], terms)


def kinds() -> list[object]:
    found = []
    for dtype in DTYPES:
        ops = [R.SUM] if dtype.is_complex else list(ARITHMETIC)
        if dtype in INTEGERS or dtype == torch.bool:
            ops += BITWISE
        found += [pytest.param(op, dtype, id=f"{op.name}-{str(dtype)[6:]}") for op in ops]
    return found


@pytest.mark.parametrize(("op", "dtype"), kinds())
def test_all_reduce_gives_every_rank_the_combined_tensor(op: R, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = value(rank(), numel, dtype, signs=op == R.PRODUCT)
        dist.all_reduce(x, op)
        assert same(x, combined(op, numel, dtype)), numel


@pytest.mark.parametrize(("op", "dtype"), kinds())
def test_reduce_gives_the_root_the_combined_tensor(op: R, dtype: torch.dtype) -> None:
    for root in range(size()):
        x = value(rank(), 9, dtype, signs=op == R.PRODUCT)
        dist.reduce(x, root, op)
        assert rank() != root or same(x, combined(op, 9, dtype))


@pytest.mark.parametrize(("op", "dtype"), kinds())
def test_reduce_scatter_gives_every_rank_its_part(op: R, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = value(rank(), numel * size(), dtype, signs=op == R.PRODUCT)
        out = torch.empty(numel, dtype=dtype)
        want = combined(op, numel * size(), dtype)
        dist.reduce_scatter_single(out, x, op)
        assert same(out, want.view(size(), numel)[rank()])
    sizes = [2 * member + 1 for member in range(size())]
    x = value(rank(), sum(sizes), dtype, signs=op == R.PRODUCT)
    out = torch.empty(sizes[rank()], dtype=dtype)
    dist.reduce_scatter(out, list(x.split(sizes)), op)
    assert same(out, combined(op, sum(sizes), dtype).split(sizes)[rank()])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, *INTEGERS])
def test_the_average_is_the_sum_over_the_number_of_ranks(dtype: torch.dtype) -> None:
    total = combined(R.SUM, 7, dtype)
    if dtype.is_complex:
        want = torch.view_as_complex(torch.view_as_real(total) / size())
    else:
        exact = dtype.is_floating_point
        want = total.div(size(), rounding_mode=None if exact else "trunc").to(dtype)
    x = value(rank(), 7, dtype)
    dist.all_reduce(x, R.AVG)
    assert same(x, want)
    out = torch.empty(7, dtype=dtype)
    dist.reduce_scatter_single(out, value(rank(), 7, dtype).repeat(size()), R.AVG)
    assert same(out, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_scaled_sum_multiplies_first(dtype: torch.dtype, as_tensor: bool) -> None:
    factor = torch.tensor([0.5], dtype=dtype) if as_tensor else 0.5
    op = dist._make_nccl_premul_sum(factor)
    want = combined(R.SUM, 6, dtype) / 2
    x = value(rank(), 6, dtype)
    dist.all_reduce(x, op)
    assert same(x, want)
    out, whole = torch.empty(6, dtype=dtype), value(rank(), 6, dtype).repeat(size())
    kept = whole.clone()
    dist.reduce_scatter_single(out, whole, op)
    assert same(out, want) and same(whole, kept)


@pytest.mark.parametrize("dtype", FLOATS)
def test_minimum_and_maximum_keep_nan(dtype: torch.dtype) -> None:
    for op in (R.MIN, R.MAX):
        for numel in (3, 9001):
            x = torch.full((numel,), float(rank())).to(dtype)
            if rank() == size() - 1:
                x[1] = float("nan")
            dist.all_reduce(x, op)
            assert x[1].isnan() and not x[0].isnan()


def test_a_long_tensor_is_reduced_alike_on_all_ranks() -> None:
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(rank()))
    terms = [
        torch.randn(700_001, generator=torch.Generator().manual_seed(r)) for r in range(size())
    ]
    dist.all_reduce(x)
    torch.testing.assert_close(x, sum(terms), rtol=1e-6, atol=1e-5)
    seen = torch.empty(size(), dtype=torch.float64)
    dist.all_gather_single(seen, x.double().sum().view(1))
    assert (seen == seen[0]).all()


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_broadcast_gives_every_rank_the_roots(dtype: torch.dtype) -> None:
    for root in range(size()):
        for numel in SIZES:
            x = value(rank(), numel, dtype)
            dist.broadcast(x, root)
            assert same(x, value(root, numel, dtype))


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_all_gather_gives_every_rank_all_tensors(dtype: torch.dtype) -> None:
    for numel in SIZES:
        want = torch.cat([value(r, numel, dtype) for r in range(size())])
        out = torch.empty(numel * size(), dtype=dtype)
        dist.all_gather_single(out, value(rank(), numel, dtype))
        assert same(out, want)
    sizes = [3 * (size() - 1 - member) for member in range(size())]  # the last is empty
    outs = [torch.empty(n, dtype=dtype) for n in sizes]
    dist.all_gather(outs, value(rank(), sizes[rank()], dtype))
    for member, out in enumerate(outs):
        assert same(out, value(member, sizes[member], dtype))


def test_all_gather_may_begin_in_its_own_output() -> None:
    out = torch.zeros(3 * size())
    mine = out[3 * rank() : 3 * rank() + 3]
    mine.copy_(value(rank(), 3, torch.float32))
    dist.all_gather_single(out, mine)
    assert same(out, torch.cat([value(r, 3, torch.float32) for r in range(size())]))


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_gather_and_scatter_move_tensors_to_and_from_the_root(dtype: torch.dtype) -> None:
    for root in range(size()):
        mine, here = value(rank(), 11, dtype), rank() == root
        outs = [torch.empty(11, dtype=dtype) for _ in range(size())] if here else None
        dist.gather(mine, outs, root)
        for member, out in enumerate(outs or []):
            assert same(out, value(member, 11, dtype))
        back = torch.empty(11, dtype=dtype)
        dist.scatter(back, outs, root)
        assert same(back, mine)


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_all_to_all_sends_part_i_to_rank_i(dtype: torch.dtype) -> None:
    for width in (0, 1, 3):
        x = value(rank(), size() * width, dtype)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        every = [value(r, size() * width, dtype).view(size(), width) for r in range(size())]
        assert same(out, torch.cat([whole[rank()] for whole in every]))


def split_sizes(member: int) -> list[int]:
    """What a member sends to each, in rows."""
    return [(member + 2 * other) % 4 for other in range(size())]


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_all_to_all_takes_uneven_parts(dtype: torch.dtype) -> None:
    sent, received = split_sizes(rank()), [split_sizes(r)[rank()] for r in range(size())]
    x = value(rank(), 2 * sum(sent), dtype).view(-1, 2)
    want = [
        value(r, 2 * sum(split_sizes(r)), dtype).view(-1, 2).split(split_sizes(r))[rank()]
        for r in range(size())
    ]
    out = torch.empty(sum(received), 2, dtype=dtype)
    dist.all_to_all_single(out, x, received, sent)
    assert same(out, torch.cat(want))
    outs = [torch.empty(n, 2, dtype=dtype) for n in received]
    dist.all_to_all(outs, [part.contiguous() for part in x.split(sent)])
    assert all(same(one, other) for one, other in zip(outs, want, strict=True))


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d)[6:])
def test_messages_arrive(dtype: torch.dtype) -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    for numel in SIZES:
        out = torch.empty(numel, dtype=dtype)
        sending = dist.isend(value(rank(), numel, dtype), after)
        dist.irecv(out, before).wait()
        sending.wait()
        assert same(out, value(before, numel, dtype))


def test_blocking_messages_go_along_a_chain() -> None:
    x = torch.zeros(4)
    if rank() > 0:
        assert dist.recv(x, rank() - 1) == rank() - 1
    x += 1
    if rank() < size() - 1:
        dist.send(x, rank() + 1)
    assert (x == rank() + 1).all()


def test_messages_are_told_apart_by_their_tags() -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    sent = [dist.isend(torch.tensor([float(tag)]), after, tag=tag) for tag in (3, 1, 2)]
    outs = {tag: torch.empty(1) for tag in (1, 2, 3)}
    for tag, out in outs.items():
        dist.irecv(out, before, tag=tag).wait()
    for work in sent:
        work.wait()
    assert all(out.item() == tag for tag, out in outs.items())


def test_a_message_may_come_from_any_rank() -> None:
    if size() == 1:
        return
    if rank() == 0:
        seen = []
        for _ in range(size() - 1):
            x = torch.empty(2)
            source = dist.recv(x)
            assert (x == source).all()
            seen.append(source)
        assert sorted(seen) == list(range(1, size()))
    else:
        dist.send(torch.full((2,), float(rank())), 0)


def test_a_batch_of_messages_has_no_order() -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    big = 300_000  # too long for MPI to keep until it is received
    outs = [torch.empty(big), torch.empty(big)]
    ops = [
        dist.P2POp(dist.irecv, outs[0], before),
        dist.P2POp(dist.irecv, outs[1], after, tag=1),
        dist.P2POp(dist.isend, torch.full((big,), float(rank())), after),
        dist.P2POp(dist.isend, torch.full((big,), float(rank())), before, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops if rank() % 2 else ops[::-1]):
        work.wait()
    assert (outs[0] == before).all() and (outs[1] == after).all()


def test_objects_travel() -> None:
    mine = {"rank": rank(), "text": "x" * (rank() * 1000)}
    every = [{"rank": r, "text": "x" * (r * 1000)} for r in range(size())]
    got: list[object] = [None] * size()
    dist.all_gather_object(got, mine)
    assert got == every
    shared = [mine, rank()]
    dist.broadcast_object_list(shared, size() - 1)
    assert shared == [every[-1], size() - 1]
    out: list[object] = [None]
    dist.scatter_object_list(out, every if rank() == 0 else None, 0)
    assert out == [mine]
    gathered: list[object] = [None] * size()
    dist.gather_object(mine, gathered if rank() == 0 else None, 0)
    assert rank() != 0 or gathered == every
    if size() > 1 and rank() < 2:
        if rank() == 0:
            dist.send_object_list([mine], 1)
        else:
            received: list[object] = [None]
            dist.recv_object_list(received, 0)
            assert received == [every[0]]


@pytest.mark.parametrize("layout", ["strided", "transposed", "zero-dim", "requires grad"])
def test_tensors_may_lie_anyhow_in_memory(layout: str) -> None:
    def make(member: int) -> Tensor:
        base = value(member, 24, torch.float32).view(4, 6).clone()
        views = {
            "strided": base[:, ::2],
            "transposed": base.t(),
            "zero-dim": base[0, 0],
            "requires grad": base.requires_grad_(layout == "requires grad"),
        }
        return views[layout]

    x = make(rank())
    dist.all_reduce(x)
    want = sum(make(r).detach() for r in range(size()))
    assert torch.equal(x.detach(), want)
    outs = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(outs, make(rank()))
    assert all(torch.equal(out, make(r).detach()) for r, out in enumerate(outs))
    y = make(rank())
    dist.broadcast(y, 0)
    assert torch.equal(y.detach(), make(0).detach())


def test_sparse_tensors_are_summed() -> None:
    def make(member: int) -> Tensor:
        indices = torch.tensor([[0, member, member + 2], [0, 1, 0]])
        values = torch.arange(6.0).view(3, 2) + member
        used = member % 3 + 1
        shape = (size() + 3, 2, 2)
        return torch.sparse_coo_tensor(
            indices[:, :used], values[:used], shape, check_invariants=True
        )

    x = make(rank())
    dist.all_reduce(x)
    want = sum(make(r).to_dense() for r in range(size()))
    assert torch.equal(x.to_dense(), want)


def test_messages_longer_than_mpi_counts_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from distcell.runtime.mpi import transport

    monkeypatch.setattr(transport, "PIECE", 64)  # bytes
    test_broadcast_gives_every_rank_the_roots(torch.float32)
    test_all_gather_gives_every_rank_all_tensors(torch.bfloat16)
    test_gather_and_scatter_move_tensors_to_and_from_the_root(torch.float64)
    test_all_to_all_takes_uneven_parts(torch.float64)
    test_messages_arrive(torch.int16)
    test_a_message_may_come_from_any_rank()
    out = torch.empty(50)
    if size() > 1 and rank() == 1:
        dist.recv(out)
        assert (out == 7).all()
    elif size() > 1 and rank() == 0:
        dist.send(torch.full((50,), 7.0), 1)


def test_coalesced_collectives_are_the_collectives() -> None:
    for device in (None, torch.device("cpu")):
        xs = [value(rank(), n, torch.float32) for n in (3, 5, 9001)]
        with dist._coalescing_manager(device=device):
            for x in xs:
                dist.all_reduce(x)
        assert all(same(x, combined(R.SUM, x.numel(), torch.float32)) for x in xs)
        outs = [torch.empty(size() * n) for n in (2, 4)]
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for out, n in zip(outs, (2, 4), strict=True):
                dist.all_gather_into_tensor(out, value(rank(), n, torch.float32))
        manager.wait()
        for out, n in zip(outs, (2, 4), strict=True):
            assert same(out, torch.cat([value(r, n, torch.float32) for r in range(size())]))
        parts = [torch.empty(n) for n in (2, 4)]
        with dist._coalescing_manager(device=device):
            for part, n in zip(parts, (2, 4), strict=True):
                dist.reduce_scatter_tensor(part, value(rank(), n * size(), torch.float32))
        for part, n in zip(parts, (2, 4), strict=True):
            want = combined(R.SUM, n * size(), torch.float32)
            assert same(part, want.view(size(), n)[rank()])


def test_tensors_of_several_dtypes_are_reduced_as_one() -> None:
    xs = [value(rank(), 4, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(xs[::2])
    assert same(xs[0], combined(R.SUM, 4, torch.float32)) and same(xs[0], xs[2])


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "truth values have no average": (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), R.AVG),
        "AVG of torch.bool is not defined",
    ),
    "floats have no bits": (
        lambda: dist.all_reduce(torch.ones(2), R.BAND),
        "BAND of torch.float32 is not defined",
    ),
    "a gather into too little": (
        lambda: dist.all_gather_single(torch.empty(3 * size() + 1), torch.ones(3)),
        "all_gather_into_tensor got a tensor",
    ),
    "too few outputs": (
        lambda: dist.all_gather([torch.empty(1)] * (size() + 1), torch.ones(1)),
        "pass one tensor for each rank",
    ),
    "splits that do not add up": (
        lambda: dist.all_to_all_single(
            torch.empty(size()), torch.ones(size()), [2] * size(), [1] * size()
        ),
        "output_split_sizes",
    ),
    "a negative tag": (lambda: dist.isend(torch.ones(1), 0, tag=-1), "this MPI has tags from 0"),
    "a meta tensor": (
        lambda: dist.all_reduce(torch.empty(2, device="meta")),
        "the mpi4py backend got a",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error_before_anything_travels(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(BackendError, match=message):
        call()
    dist.barrier()


def test_no_address_and_no_environment_are_needed() -> None:
    assert dist.get_backend() == "mpi4py"
    assert "MASTER_ADDR" not in os.environ
