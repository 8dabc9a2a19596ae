"""The ranks of the job and what carries their collectives."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from distcell.compat import PrefixStore, Store, TCPStore
from distcell.context import BACKENDS
from distcell.errors import BackendError, MeshError, did_you_mean
from distcell.mesh import Mesh
from distcell.runtime.collectives import Collectives
from distcell.runtime.groups import Group, Members, SoloGroup
from distcell.runtime.mpi_installation import INSTALL, check_launcher, named
from distcell.runtime.rank_collectives import RankCollectives
from distcell.runtime.rank_environment import RankEnvironment, find_ranks
from distcell.runtime.torch_collectives import TorchGroups

_UNREACHABLE_S, _LATE_S, _RETRY_S = 20.0, 300.0, 0.1

PREPARING = "preparing"
"""The key under which the store counts the ranks that are `preparing`."""


@dataclass(frozen=True)
class World:
    """The ranks of the job, as this one sees them.

    Args:
        rank: The number of this process.
        size: How many there are.
        local_rank: Its number among those of this host.
        local_size: How many are on this host.
        backend: `mpi`, `gloo` or `nccl`; `none` for a single process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    backend: str = "none"


class _Groups(Protocol):
    def group_of(self, members: Members) -> Group: ...


@dataclass
class _Session:
    """What `init` made: there is one in a process."""

    world: World
    store: Store | None = None
    groups: _Groups | None = None
    control: _Groups | None = None
    master: tuple[str, int] = ("127.0.0.1", 29500)
    made: dict[Mesh, RankCollectives] = field(default_factory=dict)


_session: _Session | None = None


def current_world() -> World:
    """Returns the ranks of the job: a single one before `init`.

    >>> current_world().size
    1
    """
    return _session.world if _session else World()


def init(backend: str = "auto") -> World:
    """Returns the ranks that the launcher started, after joining them. Collective.

    Args:
        backend: `mpi`, `gloo`, `nccl`, or `auto`: MPI when an MPI launcher started the ranks and
            mpi4py finds a library, else NCCL when every rank has a CUDA device, else gloo.

    Raises:
        BackendError: The backend is not known, cannot be used here, or is not the one in use.

    >>> init().size
    1
    """
    global _session  # noqa: PLW0603 (a process is a rank of one job)
    if backend not in BACKENDS:
        raise BackendError(f"no backend `{backend}`", hint=did_you_mean(backend, BACKENDS))
    if _session is None:
        _session = _start(backend)
    elif backend not in ("auto", _session.world.backend) and _session.world.size > 1:
        raise BackendError(f"the ranks talk over {_session.world.backend}, not over {backend}")
    return _session.world


def collectives_for(mesh: Mesh) -> Collectives:
    """Returns the collectives of this rank over a mesh of all ranks; the same object every time.

    Raises:
        MeshError: When the mesh has another number of ranks than the job.

    >>> collectives_for(Mesh()).rank
    0
    """
    init()
    session = _require()
    if mesh.size != session.world.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks, the job has {session.world.size}",
            hint=f"start {mesh.size} ranks, or change the mesh",
        )
    found = session.made.get(mesh)
    if found is None:
        found = RankCollectives(
            mesh,
            session.world.rank,
            _makes_groups(session.groups),
            control_of=_makes_groups(session.control),
        )
        session.made[mesh] = found
    return found


def collectives_in_use() -> list[RankCollectives]:
    """Returns what `collectives_for` has made: for the watchdog."""
    return list(_session.made.values()) if _session else []


@contextmanager
def preparing() -> Iterator[None]:
    """A context in which this rank works out what the others wait for: that is no stall."""
    shared = store()
    if shared is not None:
        shared.add(PREPARING, 1)
    try:
        yield
    finally:
        if shared is not None:
            shared.add(PREPARING, -1)


def store() -> Store | None:
    """Returns the key-value store that all ranks reach; None for a single rank."""
    return _session.store if _session else None


def master() -> tuple[str, int]:
    """Returns the address and port that the script may use to meet in, for torch's own groups."""
    return _session.master if _session else ("127.0.0.1", 29500)


def abort(code: int) -> None:
    """Ends this process at once and, under MPI, all others with it.

    Elsewhere the launcher that started the ranks ends the others when it sees the exit code.

    Args:
        code: The exit code; not 0.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if current_world().backend == "mpi":
        with Path(os.devnull).open("w", encoding="ascii") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # MPI repeats the code; why we end has been said
        _mpi().COMM_WORLD.Abort(code)
    os._exit(code)


def _require() -> _Session:
    assert _session is not None  # init has run
    return _session


def _makes_groups(groups: _Groups | None) -> Callable[[Members], Group]:
    def group_of(members: Members) -> Group:
        if groups is None or len(members) == 1:
            return SoloGroup(members[0])
        return groups.group_of(members)

    return group_of


def _start(backend: str) -> _Session:
    found = find_ranks(os.environ)
    if found is None:
        if backend == "mpi":
            _mpi()  # a missing library is said now, not when a second rank appears
        return _Session(World())
    chosen = _choose(backend, found)
    return _start_mpi(found) if chosen == "mpi" else _start_torch(chosen, found)


def _choose(backend: str, found: RankEnvironment) -> str:
    if backend != "auto":
        return backend
    if found.by_mpi:
        if mpi_missing() is None:
            return "mpi"
        if "MASTER_ADDR" not in os.environ:
            _mpi()  # raises: without MPI there is no address to meet at either
    local_size = found.local_size or found.size
    return "nccl" if local_size <= torch.cuda.device_count() else "gloo"


def mpi_missing() -> str | None:
    """Returns why MPI cannot be used; None when it can. Initialises MPI.

    Raises:
        BackendError: Another MPI than the library started the ranks.
    """
    found = find_ranks(os.environ)
    try:
        rc = importlib.import_module("mpi4py").rc
        if "mpi4py.MPI" not in sys.modules:
            # Not by the import: a library that another MPI's mpirun has started ends the process.
            rc.initialize, rc.finalize = False, True
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    if not mpi.Is_initialized():
        if found is not None:
            check_launcher(found.launcher, named(mpi.Get_library_version(), ""))
        _let_waiting_ranks_yield(found)
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    return None


def _mpi() -> ModuleType:
    reason = mpi_missing()
    if reason is not None:
        raise BackendError(
            "no MPI library found",
            where=[reason],
            hint=f"{INSTALL}; or use --backend gloo",
        )
    return importlib.import_module("mpi4py.MPI")


def _let_waiting_ranks_yield(found: RankEnvironment | None) -> None:
    """Sets, before MPI starts, that ranks which wait leave the core to those that compute.

    Not where every rank has a core: there, yielding makes each message slower.
    """
    local_size = (found.local_size or found.size) if found else 1
    if local_size > len(os.sched_getaffinity(0)):
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _start_mpi(found: RankEnvironment) -> _Session:
    mpi = _mpi()
    comm = mpi.COMM_WORLD
    if comm.Get_size() != found.size:
        library = mpi.Get_library_version().splitlines()[0].replace("\x00", "")
        raise BackendError(
            f"{found.launcher} started {found.size} ranks, MPI sees {comm.Get_size()}",
            where=[f"the library is {' '.join(library.split())}"],
            hint="use the mpirun that belongs to this library, or --backend gloo",
        )
    local = comm.Split_type(mpi.COMM_TYPE_SHARED)
    world = World(comm.Get_rank(), comm.Get_size(), local.Get_rank(), local.Get_size(), "mpi")
    if world.size == 1:
        return _Session(world)
    from distcell.runtime.mpi_collectives import MpiGroups  # importing them initialises MPI
    from distcell.runtime.mpi_window import unlink_startup_files

    unlink_startup_files(local)
    local_ranks = local.Get_group().Translate_ranks(None, comm.Get_group())
    local.Free()
    groups = MpiGroups(frozenset(local_ranks))
    one_host = world.local_size == world.size
    host = "127.0.0.1" if one_host else socket.gethostname()
    hosted = _connect(host, 0, hosts=True) if world.rank == 0 else None
    where = json.dumps([host, hosted.port, free_port()]) if hosted else ""
    host, port, master_port = json.loads(_from_first(comm, where))
    store = hosted or _connect(host, port, hosts=False)
    return _Session(world, store, groups, groups, (host, master_port))


def _from_first(comm: Any, text: str) -> str:
    """The text of rank 0, of at most 512 bytes."""
    frame = bytearray(text.encode().ljust(512))
    comm.Bcast(frame, 0)
    return frame.decode().strip()


def _start_torch(backend: str, found: RankEnvironment) -> _Session:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BackendError(
            f"{' and '.join(missing)} not set: {backend} ranks have nowhere to meet",
            hint="start with torchrun or `python -m distcell.launch -n N`, or set both",
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = _connect(host, port, hosts=found.rank == 0 and not agent)
    store = PrefixStore(f"distcell/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    if not agent:  # the port is taken by our own store now; the script gets another one
        if found.rank == 0:
            store.set("port", str(free_port()))
        port = int(store.get("port"))
    local_rank, local_size = found.local_rank, found.local_size
    if local_rank is None or local_size is None:
        local_rank, local_size = _place_on_host(store, found)
    world = World(found.rank, found.size, local_rank, local_size, backend)
    if world.size == 1 and backend == "gloo":
        return _Session(world)
    one_host = world.local_size == world.size
    gloo = TorchGroups("gloo", store, world.rank, one_host=one_host)
    if backend == "gloo":
        return _Session(world, store, gloo, gloo, (host, port))
    if local_size > torch.cuda.device_count():
        raise BackendError(
            f"{local_size} ranks on this host, {torch.cuda.device_count()} CUDA devices",
            hint="start as many ranks as there are devices, or use --backend gloo",
        )
    torch.cuda.set_device(local_rank)
    nccl = TorchGroups("nccl", store, world.rank, one_host=one_host)
    return _Session(world, store, nccl, gloo, (host, port))


def _connect(host: str, port: int, *, hosts: bool) -> TCPStore:
    try:
        if not hosts:
            _await_listener(host, port)
        return TCPStore(host, port, is_master=hosts, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise BackendError(
            f"cannot {'listen at' if hosts else 'reach'} {host}:{port}, where the ranks meet",
            where=[str(error).strip().splitlines()[0]],
            hint="set MASTER_ADDR and MASTER_PORT to a free port of the host of rank 0",
        ) from error


def _await_listener(host: str, port: int) -> None:
    """Returns when somebody listens there.

    Rank 0 may start minutes later than others, and refuses until then. A host that cannot be
    reached at all is given less time; torch's store would fill the screen with its own traces.

    Raises:
        OSError: Why nobody could be reached.
    """
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=_UNREACHABLE_S).close()
            return
        except OSError as error:
            patience = _LATE_S if isinstance(error, ConnectionRefusedError) else _UNREACHABLE_S
            if time.monotonic() - start > patience:
                raise
        time.sleep(_RETRY_S)


def _place_on_host(store: Store, found: RankEnvironment) -> tuple[int, int]:
    """The local rank and local size, from the host names of all ranks."""
    here = socket.gethostname()
    store.set(f"host/{found.rank}", here)
    hosts = [store.get(f"host/{rank}").decode() for rank in range(found.size)]
    return hosts[: found.rank].count(here), hosts.count(here)


def free_port() -> int:
    """Returns a port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
