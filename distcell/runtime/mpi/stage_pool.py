"""Shared memory that outlives the groups that use it.

Giving a window back to MPI is collective: a rank that leaves a group later, or never, would hang
the others. So a window stays, for the next group of the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from mpi4py import MPI

from distcell.runtime.groups import Members
from distcell.runtime.mpi_window import SharedStage

_MOST = 64  # of the stages of one set of ranks: as many bits as are agreed on


@dataclass
class _Stages:
    made: list[SharedStage | None] = field(default_factory=list)
    free: int = 0


class StagePool:
    """The stages of this process, by the world ranks that share them."""

    def __init__(self) -> None:
        self._stages: dict[Members, _Stages] = {}
        self._changing = Lock()

    def take(self, comm: MPI.Intracomm, members: Members) -> tuple[int, SharedStage | None]:
        """Returns a stage that no other group uses, with its number. Collective.

        The ranks may have left earlier groups in different order, so they agree on one that is
        free on all of them.

        Args:
            comm: The communicator of the group.
            members: Its world ranks, in its order.
        """
        stages = self._stages.setdefault(members, _Stages())
        free = bytearray(stages.free.to_bytes(8, "little"))
        comm.Allreduce(MPI.IN_PLACE, [free, MPI.UINT64_T], MPI.BAND)
        common = int.from_bytes(free, "little")
        if common:
            number = (common & -common).bit_length() - 1
            with self._changing:
                stages.free &= ~(1 << number)
        else:
            number = len(stages.made)
            # Its own communicator: that of the group ends with the group.
            stages.made.append(SharedStage.make(comm.Dup()) if number < _MOST else None)
        return number, stages.made[number] if number < _MOST else None

    def give_back(self, number: int, members: Members) -> None:
        """Lets the next group of these ranks have the stage."""
        if number < _MOST:
            with self._changing:
                self._stages[members].free |= 1 << number
