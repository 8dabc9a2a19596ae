"""Buffers that all ranks of a host see: reduced where they lie, without a message."""

from __future__ import annotations

import math
import os

import torch
from mpi4py import MPI
from torch import Tensor

from distcell.runtime.collectives import ReduceKind
from distcell.runtime.groups import reduce_into

_PIECE = 1 << 18  # bytes: what is summed is still in the cache when it is written to the others
_RESERVE = 16 << 20
_SHARED_MEMORY = "/dev/shm"


class SharedBuffer:
    """The same flat buffer on every rank of a group, each in one MPI shared window.

    Each rank reduces its share of the elements over all buffers, in member order, and writes the
    result to all of them. So every rank gets the same bits, whatever their number.
    """

    def __init__(self, comm: MPI.Intracomm, numel: int, dtype: torch.dtype) -> None:
        nbytes = max(1, numel) * dtype.itemsize
        self._comm = comm
        self._window = MPI.Win.Allocate_shared(nbytes, dtype.itemsize, comm=comm)
        self._window.Lock_all()
        self._all = [self._of(member, dtype)[:numel] for member in range(comm.Get_size())]
        self.tensor = self._all[comm.Get_rank()]
        self.tensor.zero_()
        share = math.ceil(numel / comm.Get_size())
        start = min(numel, comm.Get_rank() * share)
        stop, step = min(numel, start + share), max(1, _PIECE // dtype.itemsize)
        spans = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        self._pieces = [[buffer[span] for buffer in self._all] for span in spans]

    @classmethod
    def make(cls, comm: MPI.Intracomm, numel: int, dtype: torch.dtype) -> SharedBuffer | None:
        """Returns the buffer, or None on all ranks where shared memory is too small for it.

        A window larger than what is free would be granted, and kill the process when touched.
        """
        need = numel * dtype.itemsize * comm.Get_size()
        fits = bytearray([_free_shared_memory() - _RESERVE >= need])
        comm.Bcast([fits, MPI.BYTE], 0)  # one rank's word, so that all do the same
        return cls(comm, numel, dtype) if fits[0] else None

    def reduce(self, op: ReduceKind) -> None:
        """Combines the buffers of all members into each of them."""
        self._meet()
        for first, *others in self._pieces:
            for other in others:
                reduce_into(first, other, op)
            for other in others:
                other.copy_(first)
        self._meet()

    def _meet(self) -> None:
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()

    def _of(self, member: int, dtype: torch.dtype) -> Tensor:
        memory, _ = self._window.Shared_query(member)
        return torch.frombuffer(memory, dtype=dtype)


def _free_shared_memory() -> int:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:  # no such file system: the window would have nowhere to be
        return 0
    return found.f_bavail * found.f_frsize
