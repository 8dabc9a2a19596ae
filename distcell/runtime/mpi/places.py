"""Shared memory that outlives the groups that use it.

Giving a window back to MPI is collective: a rank that leaves a group later, or never, would hang
the others. So a window stays, for the next group of the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from mpi4py import MPI

from distcell.runtime.groups import Members
from distcell.runtime.mpi.arrivals import Arrivals
from distcell.runtime.mpi_window import SharedStage

_MOST = 64  # places of one set of ranks: as many bits as are agreed on


@dataclass(frozen=True)
class Place:
    """What the ranks of one group share.

    Args:
        members: Their world ranks, in the order of the group.
        number: Its number among the places of these ranks.
        stage: Where tensors are shown to the others, if there is memory for it.
        arrivals: How far each rank has come, if there is memory for it.
    """

    members: Members
    number: int
    stage: SharedStage | None = None
    arrivals: Arrivals | None = None


@dataclass
class _Places:
    made: list[Place] = field(default_factory=list)
    free: int = 0


class PlacePool:
    """The places of this process, by the ranks that share them."""

    def __init__(self) -> None:
        self._places: dict[Members, _Places] = {}
        self._changing = Lock()

    def take(self, comm: MPI.Intracomm, members: Members) -> Place:
        """Returns a place that no other group uses. Collective.

        The ranks may have left earlier groups in different order, so they agree on one that is
        free on all of them.

        Args:
            comm: The communicator of the group; all its ranks are on one host.
            members: Its world ranks, in its order.
        """
        places = self._places.setdefault(members, _Places())
        free = bytearray(places.free.to_bytes(8, "little"))
        comm.Allreduce(MPI.IN_PLACE, [free, MPI.UINT64_T], MPI.BAND)
        common = int.from_bytes(free, "little")
        if common:
            found = places.made[(common & -common).bit_length() - 1]
            with self._changing:
                places.free &= ~(1 << found.number)
        elif len(places.made) < _MOST:
            own = comm.Dup()  # that of the group ends with the group
            number = len(places.made)
            found = Place(members, number, SharedStage.make(own), Arrivals.make(own))
            places.made.append(found)
        else:
            return Place(members, _MOST)
        if found.arrivals is not None:
            found.arrivals.restart()
            comm.Barrier()
        return found

    def give_back(self, place: Place) -> None:
        """Lets the next group of these ranks have the place."""
        if place.number < _MOST:
            with self._changing:
                self._places[place.members].free |= 1 << place.number
