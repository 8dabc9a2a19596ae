"""The transport over MPI, through mpi4py, on tensors in main memory.

Buffers are passed by address. mpi4py would take a tensor too, but sums bfloat16 wrongly then, and
ten times slower. Importing this module initialises MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from distcell.errors import BackendError
from distcell.runtime.groups import Members, Reduction, Scratch, reduce_into
from distcell.runtime.mpi_window import SharedBuffer, SharedStage

_CHUNK = 2 << 20  # bytes: MPI's own temporaries then stay in the cache, and their pages mapped
_PAIR_CHUNK = 1 << 20
_STAGED = 16 << 10  # bytes: below, a message is faster than a meeting
_REDUNDANT = 4 << 20  # bytes read: above, more than two ranks share the work
_TAG = 7
_SPIN_S = 2e-3
_PAUSE_S = 2e-3

_NATIVE: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_NATIVE_OPS: dict[Reduction, MPI.Op] = {
    "sum": MPI.SUM,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "product": MPI.PROD,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
_OF_BOOLS: dict[Reduction, MPI.Op] = {  # bytes of 0 and 1
    "sum": MPI.MAX,
    "max": MPI.MAX,
    "bor": MPI.MAX,
    "product": MPI.MIN,
    "min": MPI.MIN,
    "band": MPI.MIN,
    "bxor": MPI.BXOR,
}

_address = MPI.buffer.fromaddress


class _TorchOps:
    """MPI reductions that are computed by torch: half precision, and max and min that keep NaN.

    The datatype tells the callback the dtype: each torch dtype that is reduced here has its own.
    """

    def __init__(self) -> None:
        self._datatypes: dict[torch.dtype, MPI.Datatype] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._ops: dict[Reduction, MPI.Op] = {}

    def take(self, dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
        """Returns the datatype and the operation for elements of `dtype`."""
        datatype = self._datatypes.get(dtype)
        if datatype is None:
            datatype = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
            self._datatypes[dtype] = datatype
            self._dtypes[datatype.handle] = dtype
        if op not in self._ops:
            self._ops[op] = MPI.Op.Create(self._callback(op), commute=True)
        return datatype, self._ops[op]

    def _callback(self, op: Reduction) -> Callable[[Any, Any, MPI.Datatype], None]:
        def reduce(term: Any, total: Any, datatype: MPI.Datatype) -> None:
            if len(total) == 0:  # MPI does call with nothing; an exception here would abort the job
                return
            dtype = self._dtypes[datatype.handle]
            into = torch.frombuffer(total, dtype=dtype)
            reduce_into(into, torch.frombuffer(term, dtype=dtype), op)

        return reduce


_torch_ops = _TorchOps()


def mpi_reduction(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
    """Returns MPI's names for a dtype and for an operation on it."""
    if dtype == torch.bool:
        return MPI.UINT8_T, _OF_BOOLS[op]
    native = _NATIVE.get(dtype)
    if native is None or (op in ("max", "min") and dtype.is_floating_point):
        return _torch_ops.take(dtype, op)
    return native, _NATIVE_OPS[op]


class MpiGroup:
    """One group of ranks with its own communicator.

    Args:
        comm: The communicator of exactly these ranks, in the order of `members`.
        members: Their world ranks.
        one_host: Whether all of them can share memory.
        make_stage: Makes the memory that they share, when it is needed first. Collective.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        members: Members,
        *,
        one_host: bool,
        make_stage: Callable[[MPI.Intracomm], SharedStage | None] = SharedStage.make,
    ) -> None:
        self.members = members
        self.index = comm.Get_rank()
        self._comm = comm
        self._size = len(members)
        self._one_host = one_host
        self._make_stage = make_stage
        self._scratch = Scratch()
        self._shared: dict[int, SharedBuffer] = {}
        self._reductions: dict[tuple[torch.dtype, Reduction], tuple[MPI.Datatype, MPI.Op]] = {}

    def all_reduce(self, x: Tensor, op: Reduction) -> Tensor:
        """Returns the reduced tensor, a new one."""
        nbytes = x.nbytes
        out = torch.empty_like(x)
        if nbytes >= _STAGED and self._staged(x, out, op):
            return out
        if nbytes > _CHUNK:
            out.copy_(x)
            self.all_reduce_in_place(out, op)
        elif nbytes:
            datatype, mpi_op = self._reduction(x, op)
            source = [_address(_pointer(x), nbytes), datatype]
            self._comm.Allreduce(source, [_address(out.data_ptr(), nbytes), datatype], mpi_op)
        return out

    def all_reduce_in_place(self, x: Tensor, op: Reduction) -> None:
        """Reduces into `x`, piece by piece."""
        nbytes, start = x.nbytes, _pointer(x)
        shared = self._shared.get(start)
        if shared is not None:
            shared.reduce(op)
            return
        if nbytes >= _STAGED and self._staged(x, x, op):
            return
        datatype, mpi_op = self._reduction(x, op)
        for offset in range(0, nbytes, _CHUNK):
            piece = _address(start + offset, min(_CHUNK, nbytes - offset))
            self._comm.Allreduce(MPI.IN_PLACE, [piece, datatype], mpi_op)

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fills `out` with the members' blocks, one after the other."""
        size, start = x.element_size(), out.data_ptr()
        target = _address(start, out.nbytes)
        source: Any = [_address(_pointer(x), x.nbytes), MPI.BYTE]
        if x.data_ptr() == start + sum(counts[: self.index]) * size and x.nbytes:
            source = MPI.IN_PLACE  # the own block is in its place already
        if min(counts) == max(counts):
            self._comm.Allgather(source, [target, counts[0] * size, MPI.BYTE])
        else:
            sizes, starts = _byte_ranges(counts, size)
            self._comm.Allgatherv(source, [target, sizes, starts, MPI.BYTE])

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int], op: Reduction) -> None:
        """Fills `out` with this member's part of the reduced `x`.

        In shared memory where it fits, in member order. Else pairwise: the sum begins with the own
        part and goes round the members downwards.
        """
        size, start, me = x.element_size(), _pointer(x), self.index
        if x.nbytes >= _STAGED and self._stage is not None and self._stage.holds(x):
            self._stage.reduce_scatter(x, out, sum(counts[:me]), op)
            return
        sizes, starts = _byte_ranges(counts, size)
        total = out.view(-1)
        mine = starts[me] // size
        total.copy_(x.view(-1)[mine : mine + counts[me]])
        for step in range(1, self._size):
            source, target = (me - step) % self._size, (me + step) % self._size
            for offset in range(0, max(sizes[me], sizes[target]), _PAIR_CHUNK):
                sent = max(0, min(_PAIR_CHUNK, sizes[target] - offset))
                received = max(0, min(_PAIR_CHUNK, sizes[me] - offset))
                term = self._scratch.take(0, received // size, x)
                self._comm.Sendrecv(
                    [_address(start + starts[target] + offset, sent), MPI.BYTE],
                    target,
                    _TAG,
                    [_address(term.data_ptr(), received), MPI.BYTE],
                    source,
                    _TAG,
                )
                if received:
                    reduce_into(total[offset // size : (offset + received) // size], term, op)

    def all_to_all(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """Sends part i of `x` to member i; fills `out` with what arrives, in member order."""
        size = x.element_size()
        self._comm.Alltoallv(
            [_address(_pointer(x), x.nbytes), *_byte_ranges(sent, size), MPI.BYTE],
            [_address(out.data_ptr(), out.nbytes), *_byte_ranges(received, size), MPI.BYTE],
        )

    def exchange(self, x: Tensor, out: Tensor, source: int | None, target: int | None) -> None:
        """Sends `x` to member `target` and fills `out` from member `source`."""
        self._comm.Sendrecv(
            [_address(_pointer(x), 0 if target is None else x.nbytes), MPI.BYTE],
            MPI.PROC_NULL if target is None else target,
            _TAG,
            [_address(out.data_ptr(), 0 if source is None else out.nbytes), MPI.BYTE],
            MPI.PROC_NULL if source is None else source,
            _TAG,
        )

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fills `x` with the root's."""
        self._comm.Bcast([_address(_pointer(x), x.nbytes), MPI.BYTE], root)

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Returns flat memory that is fit to be reduced in place; shared where that is possible."""
        if self._one_host and numel:
            shared = SharedBuffer.make(self._comm, numel, like.dtype)
            if shared is not None:
                self._shared[shared.tensor.data_ptr()] = shared
                return shared.tensor
        return like.new_zeros(numel)

    def barrier(self) -> None:
        """Returns when all members have called it. A long wait leaves the cores to the others."""
        request = self._comm.Ibarrier()
        patience = time.monotonic() + _SPIN_S
        while not request.Test():
            if time.monotonic() > patience:
                time.sleep(_PAUSE_S)

    @cached_property
    def _stage(self) -> SharedStage | None:
        return self._make_stage(self._comm) if self._one_host else None

    def _staged(self, x: Tensor, out: Tensor, op: Reduction) -> bool:
        """Whether the tensor was reduced in shared memory: all ranks of the group are on a host."""
        if self._stage is None:
            return False
        if self._size == 2 or x.nbytes * self._size <= _REDUNDANT:
            self._stage.all_reduce(x, out, op)
        else:
            self._stage.all_reduce_by_shares(x, out, op)
        return True

    def _reduction(self, x: Tensor, op: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
        key = (x.dtype, op)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = mpi_reduction(*key)
        return found


class MpiGroups:
    """The groups of a job, each made once, by its members alone.

    Args:
        local_ranks: The world ranks on this host.
    """

    def __init__(self, local_ranks: frozenset[int]) -> None:
        self._world = MPI.COMM_WORLD.Dup()  # messages of ours never meet those of the script
        self._local = local_ranks
        self._made: dict[Members, MpiGroup] = {}

    def group_of(self, members: Members) -> MpiGroup:
        """Returns the group of these world ranks, in this order."""
        found = self._made.get(members)
        if found is None:
            if members == tuple(range(self._world.Get_size())):
                comm = self._world
            else:
                comm = self._world.Create_group(self._world.Get_group().Incl(members), tag=_TAG)
            one_host = self._local.issuperset(members)
            found = self._made[members] = MpiGroup(comm, members, one_host=one_host)
        return found


def _pointer(x: Tensor) -> int:
    if x.device.type != "cpu":
        raise BackendError(
            f"the MPI backend got a tensor on {x.device}",
            hint="use --backend nccl for CUDA tensors, or keep the model on the CPU",
        )
    return x.data_ptr()


def _byte_ranges(counts: Sequence[int], itemsize: int) -> tuple[list[int], list[int]]:
    """The lengths and starts, in bytes, of parts that lie one after the other."""
    sizes = [count * itemsize for count in counts]
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return sizes, starts
