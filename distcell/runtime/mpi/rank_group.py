"""One group of ranks: its name, its order, its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from distcell.compat import PythonProcessGroup, Store, backend_names
from distcell.errors import BackendError
from distcell.runtime.groups import Scratch
from distcell.runtime.mpi.point_to_point import Message, courier
from distcell.runtime.mpi.ranks import Ranks, at_exit
from distcell.runtime.mpi.transport import Transport
from distcell.runtime.mpi.turns import Turns
from distcell.runtime.mpi.work import Together, Work

NAME = "mpi4py"


class RankGroup(PythonProcessGroup):  # type: ignore[misc]
    """What every operation of a process group needs.

    Args:
        ranks: The processes of the job.
        members: Those of this group, in its order. Collective among them.
        store: torch's key-value store for this group.
        timeout: How long a piece of work that is waited for with a time may take.
    """

    def __init__(
        self, ranks: Ranks, members: tuple[int, ...], store: Store, timeout: timedelta
    ) -> None:
        comm = ranks.communicator(members)
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self._transport = Transport(comm, members, one_host=ranks.on_one_host(members))
        self._turns = Turns(
            f"the group of ranks {', '.join(map(str, members))}",
            self._transport.arrivals,
            spare=ranks.cores_to_spare,
        )
        self._scratch = Scratch()
        self._store, self._timeout = store, timeout
        self._name, self._description = "", "undefined"
        self._coalesced: list[Work] | None = None
        self._closed, self._checked = False, False
        _open.add(self)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        """Returns torch's key-value store for this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Notes the timeout; a blocking call of MPI knows none: see `--stall-after`."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Ends what was issued, then the group."""
        self._close(drop=False)

    def abort(self) -> None:
        """Ends the group; what has not begun is left undone."""
        self._close(drop=True)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: MPI keeps the order."""

    def getRank(self) -> int:  # noqa: N802 (what torch's C++ asks for)
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _start_coalescing(self, _device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device | None = None) -> Work:
        parts, self._coalesced = self._coalesced or [], None
        return Together(parts)

    def _issue(self, body: Callable[[], None], outputs: list[Tensor], opts: Any) -> Work:
        self._check_open()
        at_once = not getattr(opts, "asyncOp", True) and self._coalesced is None
        return self._noted(self._turns.issue(body, outputs, at_once=at_once))

    def _under_way(self, message: Message) -> Work:
        courier.take(message)
        return self._noted(message)

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _close(self, *, drop: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._turns.close(drop=drop)
        if not drop:
            courier.finish()
            self._transport.close()
        _open.discard(self)

    def _check_open(self) -> None:
        if not self._checked:
            self._check_alone()
        if self._closed:
            raise BackendError(
                "the process group was destroyed",
                hint="keep the group until its last collective",
            )

    def _check_alone(self) -> None:
        """Torch lets a group in Python stand for all devices, and forgets other backends."""
        others = sorted(backend_names(self) - {NAME})
        if others:
            raise BackendError(
                f"a group cannot use {NAME} for one device and {', '.join(others)} for another",
                hint=f'new_group(backend="{others[0]}") beside this group',
            )
        self._checked = True

    def _root(self, opts: Any) -> int:
        root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
        if not 0 <= root < self._size:
            raise BackendError(f"root {root} of a group of {self._size} ranks")
        return root

    def _count(self, what: str, which: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise BackendError(
                f"{what} got {len(tensors)} {which} in a group of {self._size} ranks",
                hint="pass one tensor for each rank",
            )

    def _packed(self, slot: int, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of the tensors, one after the other."""
        flat = self._scratch.take(slot, sum(x.numel() for x in tensors), tensors[0])
        torch.cat([x.view(-1) for x in tensors], out=flat)
        return flat


_open: weakref.WeakSet[RankGroup] = weakref.WeakSet()


def _finish_all() -> None:
    """Ends what was issued on groups that the script has left open."""
    for group in tuple(_open):
        group.shutdown()


at_exit(_finish_all)
