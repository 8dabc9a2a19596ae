"""The collectives of one group on contiguous tensors of the host, of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from distcell.runtime.groups import Group, Members, SoloGroup
from distcell.runtime.mpi.arrivals import Arrivals
from distcell.runtime.mpi.places import PlacePool
from distcell.runtime.mpi.reduction import Reduce
from distcell.runtime.mpi_collectives import MpiGroup, mpi_reduction

PIECE = 1 << 30  # bytes of one message: many libraries count in 31 bits
_REDUCED = 2 << 20  # bytes: MPI's own temporaries then stay in the cache
_TAG = 11

_places = PlacePool()
_address = MPI.buffer.fromaddress


class Transport:
    """How tensors travel within one group.

    Args:
        comm: The communicator of the group; this object frees it.
        members: The world ranks, in the order of the group.
        one_host: Whether all of them can share memory.
    """

    def __init__(self, comm: MPI.Intracomm, members: Members, *, one_host: bool) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._group: Group = SoloGroup(members[0])
        self._place = None
        if self.size > 1:
            stage = None
            if one_host:  # now: later, threads of two groups could be at it in different order
                self._place = _places.take(comm, members)
                stage = self._place.stage
            self._group = MpiGroup(comm, members, one_host=one_host, make_stage=lambda _: stage)

    @property
    def arrivals(self) -> Arrivals | None:
        """How far each rank has come, where that can be seen."""
        return self._place.arrivals if self._place is not None else None

    def all_reduce(self, x: Tensor, reduce: Reduce) -> None:
        """Reduces `x` in place."""
        reduce.before(x)
        self._group.all_reduce_in_place(x, reduce.kind)  # type: ignore[arg-type]
        reduce.after(x)

    def reduce(self, x: Tensor, reduce: Reduce, root: int) -> None:
        """Reduces into the root's `x`; that of the others is left with any values."""
        reduce.before(x)
        if self.size > 1:
            datatype, op = mpi_reduction(x.dtype, reduce.kind)
            for piece in _pieces(x, _REDUCED):
                message = [_memory(piece), datatype]
                if self.rank == root:
                    self.comm.Reduce(MPI.IN_PLACE, message, op, root)
                else:
                    self.comm.Reduce(message, None, op, root)
        if self.rank == root:
            reduce.after(x)

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fills `x` with the root's."""
        for piece in _pieces(x, PIECE):
            self._group.broadcast(piece, root)

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fills `out` with the members' blocks, one after the other; counts are elements."""
        if out.nbytes <= PIECE or self.size == 1:
            self._group.all_gather(x, out, counts)
            return
        for member, block in enumerate(torch.split(out.view(-1), list(counts))):
            if member == self.rank and block.data_ptr() != x.data_ptr():
                block.copy_(x.view(-1))
            self.broadcast(block, member)

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int], reduce: Reduce) -> None:
        """Fills `out` with this member's part of the reduced `x`."""
        if reduce.factor is not None:
            x = x.clone()
            reduce.before(x)
        self._group.reduce_scatter(x, out, counts, reduce.kind)  # type: ignore[arg-type]
        reduce.after(out)

    def all_to_all(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """Sends part i of `x` to member i; fills `out` with what arrives, in member order."""
        self.exchange(
            torch.split(x.view(-1), list(sent)), torch.split(out.view(-1), list(received))
        )

    def exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Sends tensor i to member i, and receives as many."""
        targets[self.rank].view(-1).copy_(sources[self.rank].view(-1))
        for step in range(1, self.size):
            to, from_ = (self.rank + step) % self.size, (self.rank - step) % self.size
            requests = [*self._receive(targets[from_], from_), *self._send(sources[to], to)]
            MPI.Request.Waitall(requests)

    def gather(self, x: Tensor, targets: Sequence[Tensor], root: int) -> None:
        """Fills the root's targets with the members' tensors."""
        if self.rank != root:
            MPI.Request.Waitall(self._send(x, root))
            return
        requests = []
        for member, target in enumerate(targets):
            if member == root:
                target.view(-1).copy_(x.view(-1))
            else:
                requests += self._receive(target, member)
        MPI.Request.Waitall(requests)

    def scatter(self, x: Tensor, sources: Sequence[Tensor], root: int) -> None:
        """Fills `x` with the root's tensor for this member."""
        if self.rank != root:
            MPI.Request.Waitall(self._receive(x, root))
            return
        requests = []
        for member, source in enumerate(sources):
            if member == root:
                x.view(-1).copy_(source.view(-1))
            else:
                requests += self._send(source, member)
        MPI.Request.Waitall(requests)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self.comm.Barrier()

    def close(self) -> None:
        """Frees the communicator; nothing travels any more."""
        if self._place is not None:
            _places.give_back(self._place)
        if not MPI.Is_finalized():
            self.comm.Free()

    def _send(self, x: Tensor, to: int) -> list[MPI.Request]:
        return [self.comm.Isend(message, to, _TAG) for message in messages(x)]

    def _receive(self, x: Tensor, from_: int) -> list[MPI.Request]:
        return [self.comm.Irecv(message, from_, _TAG) for message in messages(x)]


def messages(x: Tensor) -> list[list[object]]:
    """Returns the bytes of a contiguous tensor as MPI's messages: at least one, if it is empty."""
    pieces = _pieces(x, PIECE) or [x]
    return [[_memory(piece), MPI.BYTE] for piece in pieces]


def _pieces(x: Tensor, nbytes: int) -> list[Tensor]:
    if x.nbytes <= nbytes:
        return [x] if x.nbytes else []
    return list(torch.split(x.view(-1), max(1, nbytes // x.element_size())))


def _memory(x: Tensor) -> MPI.buffer:
    return _address(x.data_ptr(), x.nbytes)
