"""Memory that all ranks of a host see: tensors are reduced where they lie, without a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from distcell.runtime.groups import Reduction, combine, reduce_into
from distcell.runtime.shared_memory import free_shared_memory

_PIECE = 1 << 18  # bytes: what is summed is still in the cache when it is written to the others
_HALF = 2 << 20
_RESERVE = 16 << 20
_STARTUP_FILE = "/dev/shm/mpich_shm_"
_MAPPED = Path("/proc/self/maps")


class SharedMemory:
    """The same number of bytes on every rank of a group, all seen by each.

    Args:
        comm: The communicator of the group; all its ranks are on one host.
        nbytes: The bytes of each rank.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.index, self.size = comm.Get_rank(), comm.Get_size()
        self._comm = comm
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
        self._window.Lock_all()
        queries = [self._window.Shared_query(member)[0] for member in range(self.size)]
        self.all = [torch.frombuffer(memory, dtype=torch.uint8)[:nbytes] for memory in queries]

    @classmethod
    def make(cls, comm: MPI.Intracomm, nbytes: int) -> SharedMemory | None:
        """Returns the memory, or None on all ranks where the host has too little of it.

        A window larger than what is free would be granted, and kill the process when touched.
        """
        fits = bytearray([free_shared_memory() - _RESERVE >= nbytes * comm.Get_size()])
        comm.Bcast([fits, MPI.BYTE], 0)  # one rank's word, so that all do the same
        return cls(comm, nbytes) if fits[0] else None

    def meet(self) -> None:
        """Returns when all ranks are here, and see what the others wrote before."""
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()


class SharedBuffer:
    """The same flat buffer on every rank of a group.

    Each rank reduces its share of the elements over all buffers, in member order, and writes the
    result to all of them. So every rank gets the same bits, whatever their number.
    """

    def __init__(self, memory: SharedMemory, numel: int, dtype: torch.dtype) -> None:
        self._memory = memory
        buffers = [part.view(dtype)[:numel] for part in memory.all]
        self.tensor = buffers[memory.index]
        self.tensor.zero_()
        share = math.ceil(numel / memory.size)
        start = min(numel, memory.index * share)
        stop, step = min(numel, start + share), max(1, _PIECE // dtype.itemsize)
        spans = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        self._pieces = [[buffer[span] for buffer in buffers] for span in spans]

    @classmethod
    def make(cls, comm: MPI.Intracomm, numel: int, dtype: torch.dtype) -> SharedBuffer | None:
        """Returns the buffer, or None on all ranks where shared memory is too small for it."""
        memory = SharedMemory.make(comm, numel * dtype.itemsize)
        return cls(memory, numel, dtype) if memory is not None else None

    def reduce(self, op: Reduction) -> None:
        """Combines the buffers of all members into each of them."""
        self._memory.meet()
        for first, *others in self._pieces:
            for other in others:
                reduce_into(first, other, op)
            for other in others:
                other.copy_(first)
        self._memory.meet()


class SharedStage:
    """Where ordinary tensors are copied to, so that the others may read them.

    There are two halves, used in turn: a rank that writes into one again has met the others since
    they read from it, so that one meeting for each piece is enough.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._half = 0
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    @classmethod
    def make(cls, comm: MPI.Intracomm) -> SharedStage | None:
        """Returns the stage, or None on all ranks where shared memory is too small for it."""
        memory = SharedMemory.make(comm, 2 * _HALF)
        return cls(memory) if memory is not None else None

    def holds(self, x: Tensor) -> bool:
        """Whether the tensor can be shown to the others in one piece."""
        return x.nbytes <= _HALF

    def all_reduce(self, x: Tensor, out: Tensor, op: Reduction) -> None:
        """Fills `out` with the reduced `x`, which it may be; in member order, on every rank."""
        step = _HALF // x.element_size()
        source, total = x.view(-1), out.view(-1)
        for start in range(0, x.numel(), step):
            parts = self._show(source[start : start + step])
            _combine_all(parts, total[start : start + step], op)

    def all_reduce_by_shares(self, x: Tensor, out: Tensor, op: Reduction) -> None:
        """The same; each rank computes its share, and a second meeting lets all read it."""
        step = _HALF // x.element_size()
        source, total = x.view(-1), out.view(-1)
        size, index = self._memory.size, self._memory.index
        for start in range(0, x.numel(), step):
            parts = self._show(source[start : start + step])
            count = parts[0].numel()
            mine = slice(count * index // size, count * (index + 1) // size)
            first, *others = (part[mine] for part in parts)
            for other in others:
                reduce_into(first, other, op)
            self._memory.meet()
            total[start : start + count].copy_(parts[0])

    def reduce_scatter(self, x: Tensor, out: Tensor, start: int, op: Reduction) -> None:
        """Fills `out` with the reduced elements of `x` from `start`; only where `holds(x)`."""
        parts = self._show(x.view(-1))
        count = out.numel()
        _combine_all([part[start : start + count] for part in parts], out.view(-1), op)

    def _show(self, x: Tensor) -> list[Tensor]:
        """Copies a flat tensor where all see it; returns those of all members."""
        self._half ^= 1
        key = (self._half, x.numel(), x.dtype)
        views = self._views.get(key)
        if views is None:
            span = slice(self._half * _HALF, self._half * _HALF + x.nbytes)
            views = self._views[key] = [part[span].view(x.dtype) for part in self._memory.all]
        views[self._memory.index].copy_(x)
        self._memory.meet()
        return views


def unlink_startup_files(local: MPI.Intracomm) -> None:
    """Removes the names of the files that MPICH shares memory through.

    It does so itself, but only at a proper end: a job that is aborted or killed would leave them.
    All ranks of the host have opened them by now, and nobody else will.

    Args:
        local: All ranks of this host.
    """
    local.Barrier()
    if local.Get_rank() == 0 and _MAPPED.is_file():
        lines = _MAPPED.read_text(encoding="utf-8", errors="replace").splitlines()
        for name in {line.split(maxsplit=5)[-1] for line in lines if _STARTUP_FILE in line}:
            Path(name).unlink(missing_ok=True)
    local.Barrier()


def _combine_all(parts: Sequence[Tensor], out: Tensor, op: Reduction) -> None:
    combine(parts[0], parts[1], op, out=out)
    for part in parts[2:]:
        reduce_into(out, part, op)
