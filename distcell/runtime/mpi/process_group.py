"""torch's process group over MPI."""

from __future__ import annotations

from mpi4py import MPI
from torch import Tensor

from distcell.errors import BackendError
from distcell.runtime.mpi.arguments import listed, single
from distcell.runtime.mpi.exchanges import Exchanges
from distcell.runtime.mpi.point_to_point import Message
from distcell.runtime.mpi.reductions import Reductions
from distcell.runtime.mpi.staging import Staging
from distcell.runtime.mpi.transport import messages
from distcell.runtime.mpi.work import Work

_FIRST_TAG = 1 << 10  # below are the tags of our own collectives
_LAST_TAG = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - _FIRST_TAG


class ProcessGroupMpi(Reductions, Exchanges):
    """A group of ranks whose tensors travel over MPI.

    torch makes it for `init_process_group("mpi4py")` and `new_group(backend="mpi4py")`.
    """

    def send(self, tensors: Tensor | list[Tensor], dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank of the group; never waits for it."""
        x, tag = single(listed(tensors)), self._tag(tag)
        staging = Staging()
        host = staging.source(x)
        staging.around(_nothing)()  # the copy must have arrived in main memory
        requests = [self._comm.Isend(message, dst, tag) for message in messages(host)]
        return self._under_way(Message(requests, [x, host]))

    def recv(self, tensors: Tensor | list[Tensor], src: int, tag: int = 0) -> Work:
        """Receives a tensor from a rank of the group."""
        x, tag = single(listed(tensors)), self._tag(tag)
        staging = Staging()
        host = staging.target(x)
        requests = [self._comm.Irecv(message, src, tag) for message in messages(host)]
        return self._under_way(Message(requests, [x], staging.around(_nothing)))

    def recv_anysource(self, tensors: Tensor | list[Tensor], tag: int = 0) -> Work:
        """Receives a tensor from whichever rank sends one first."""
        x, tag = single(listed(tensors)), self._tag(tag)
        staging = Staging()
        first, *rest = messages(staging.target(x))

        def more(source: int) -> list[MPI.Request]:
            return [self._comm.Irecv(message, source, tag) for message in rest]

        request = self._comm.Irecv(first, MPI.ANY_SOURCE, tag)
        return self._under_way(Message([request], [x], staging.around(_nothing), more=more))

    def _tag(self, tag: int) -> int:
        self._check_open()
        if not 0 <= tag <= _LAST_TAG:
            raise BackendError(f"tag {tag}: this MPI has tags from 0 to {_LAST_TAG}")
        return _FIRST_TAG + tag


def _nothing() -> None:
    pass
