"""How far each rank of a group has come: seen without a message, in memory that they share."""

from __future__ import annotations

from mpi4py import MPI

from distcell.runtime.mpi_window import SharedMemory

_BYTES = 64  # a cache line


class Arrivals:
    """The number of collectives that each rank of a group has issued.

    It says when a collective can run through without waiting for anybody, and who is missing. It
    orders nothing: MPI does that.

    Args:
        memory: At least 8 bytes for each rank.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._issued = [part.numpy()[:8].view("int64") for part in memory.all]
        self._mine = self._issued[memory.index]
        self._least = 0

    @classmethod
    def make(cls, comm: MPI.Intracomm) -> Arrivals | None:
        """Returns them, or None on all ranks where they cannot share memory."""
        memory = SharedMemory.make(comm, _BYTES)
        return cls(memory) if memory is not None else None

    def restart(self) -> None:
        """Begins at none. No rank may look at the others' before all have called it."""
        self._mine[0] = 0
        self._least = 0

    def announce(self) -> int:
        """Returns the number of the collective that this rank issues now; the first is 1."""
        number = int(self._mine[0]) + 1
        self._mine[0] = number
        return number

    def all_at(self, number: int) -> bool:
        """Whether all ranks have issued this collective."""
        if self._least < number:
            self._least = min(int(issued[0]) for issued in self._issued)
        return self._least >= number

    def missing(self, number: int) -> list[int]:
        """Returns the places in the group of the ranks that have not issued it."""
        return [place for place, issued in enumerate(self._issued) if int(issued[0]) < number]
