"""The MPI processes of the job: who they are, where they are, and where they meet."""

from __future__ import annotations

import atexit
import io
import json
import os
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any, cast

from mpi4py import MPI

from distcell.compat import Store, TCPStore, env_rendezvous
from distcell.errors import BackendError
from distcell.runtime.groups import Members
from distcell.runtime.mpi_window import unlink_startup_files

_MASTER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TAGS = 30011  # a prime below what every MPI allows for a tag


class Ranks:
    """All processes that MPI has started together. Collective to make; there is one."""

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BackendError(
                "MPI was initialised without MPI_THREAD_MULTIPLE",
                hint="import distcell.runtime.mpi before what initialises MPI",
            )
        self.comm = MPI.COMM_WORLD.Dup()  # messages of ours never meet those of the script
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        local = cast(MPI.Intracomm, self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.local = frozenset(local.Get_group().Translate_ranks(None, self.comm.Get_group()))
        self.cores_to_spare = 2 * len(self.local) <= len(os.sched_getaffinity(0))
        unlink_startup_files(local)
        local.Free()

    def communicator(self, members: Members) -> MPI.Intracomm:
        """Returns a new communicator of these ranks, in this order. Collective among them alone.

        Args:
            members: Ranks of the job.
        """
        tag = zlib.crc32(repr(members).encode()) % _TAGS
        return self.comm.Create_group(self.comm.Get_group().Incl(members), tag)

    def on_one_host(self, members: Sequence[int]) -> bool:
        """Whether all of these ranks can share memory."""
        return self.local.issuperset(members)


@cache
def ranks() -> Ranks:
    """Returns the processes of the job. The first call is collective."""
    found = Ranks()
    if found.size > 1:
        _end_all_when_one_fails()
    return found


def members_of(group_ranks: Sequence[int], rank: int, size: int) -> Members:
    """Returns the MPI ranks of a group, after checking that torch and MPI mean the same ranks.

    Args:
        group_ranks: The ranks of the job that torch says are in the group; none for all.
        rank: The place of this process among them.
        size: How many there are.

    Raises:
        BackendError: MPI did not start this job, or numbers its processes otherwise.
    """
    here = ranks()
    members = tuple(group_ranks) or tuple(range(size))
    if not group_ranks and size != here.size:
        raise BackendError(
            f"the job has {size} ranks, MPI sees {here.size}",
            hint="start the script with the mpirun of this MPI library, not with torchrun; "
            "or use the backend gloo",
        )
    if max(members) >= here.size or members[rank] != here.rank:
        raise BackendError(
            f"torch calls this process rank {members[rank]}, MPI calls it rank {here.rank} of "
            f"{here.size}",
            hint="leave RANK unset, or set it to MPI's rank",
        )
    return members


def rendezvous(_url: str, timeout: timedelta, **_options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yields a store that all ranks reach, the rank, and their number: for `mpi://`.

    Rank 0 holds the store, at a port that the system chooses; MPI tells the others.
    """
    here = ranks()
    one_host = here.on_one_host(range(here.size))
    host = "127.0.0.1" if one_host else socket.gethostname()
    held = _store(host, 0, timeout, holds=True) if here.rank == 0 else None
    frame = bytearray(json.dumps([host, held.port]).encode().ljust(512) if held else 512)
    here.comm.Bcast([frame, MPI.BYTE], 0)
    host, port = json.loads(frame)
    yield held or _store(host, port, timeout, holds=False), here.rank, here.size
    raise RuntimeError("the ranks of an MPI job meet once")


def env_or_mpi(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Meets where the environment says, as torch does; over MPI when it says nothing.

    Raises:
        BackendError: The environment says a part of it only.
    """
    said = [name for name in _MASTER if os.environ.get(name)]
    if said or "?" in url:
        yield from env_rendezvous(url, **options)
    else:
        yield from rendezvous(url, **options)


def at_exit(finish: Callable[[], None]) -> None:
    """Calls `finish` before MPI ends."""
    atexit.register(finish)  # mpi4py ends MPI after all functions that are registered so


def _store(host: str, port: int, timeout: timedelta, *, holds: bool) -> TCPStore:
    return TCPStore(host, port, is_master=holds, wait_for_workers=False, timeout=timeout)


def _end_all_when_one_fails() -> None:
    """Ends the job when an exception ends this rank: the others would wait for it for ever."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        stderr = sys.__stderr__
        if stderr is not None:
            if isinstance(sys.stderr, io.StringIO):  # torch keeps the text, to print it later
                stderr.write(f"[rank{ranks().rank}]: {sys.stderr.getvalue()}")
            stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook
