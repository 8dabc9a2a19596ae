"""Starts ranks on this machine: under its mpirun, or as plain processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

from distcell.compat import TCPStore
from distcell.errors import BackendError
from distcell.launch.command_line import Command
from distcell.launch.monitor import LAUNCHER_PID, last_word
from distcell.launch.output import COLOUR
from distcell.launch.threads import core_quota, threads_for, usable_cores
from distcell.runtime import world
from distcell.runtime.mpi_installation import INSTALL, find_mpirun, mpirun_at

_FOREIGN = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "TORCHELASTIC_")
_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_S = 0.02
_GRACE_S = 3.0


def start_ranks(command: Command) -> int:
    """Starts the ranks of `-n N` and returns the job's exit code.

    Under mpirun this process becomes mpirun and does not return.

    Args:
        command: The command, with `ranks` above 1.

    Raises:
        BackendError: MPI was asked for and there is no mpirun.
    """
    assert command.ranks is not None
    command.check(command.ranks)
    environ = _clean(os.environ)
    if sys.stdout.isatty():
        environ[COLOUR] = "1"
    mpirun = find_mpirun()
    if command.backend == "mpi" and mpirun is None:
        raise BackendError(
            "--backend mpi, but there is no mpirun",
            hint=INSTALL,
        )
    enough_devices = torch.cuda.device_count() >= command.ranks
    if command.backend == "mpi" or (
        command.backend == "auto" and mpirun is not None and not enough_devices
    ):
        assert mpirun is not None
        environ.update(_mpirun_settings(mpirun))
        # Where the ranks meet should they find no MPI library.
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(world.free_port()))
        ranks = ["-n", str(command.ranks), *_rank_command(command)]
        os.execve(mpirun, [str(mpirun), *ranks], environ)
    if command.backend == "auto" and not enough_devices:
        print("distcell: no mpirun here; the ranks talk over gloo", file=sys.stderr, flush=True)
    return _Processes(command, environ).run()


class _Processes:
    """Plain processes that meet at a store held by this one."""

    def __init__(self, command: Command, environ: Mapping[str, str]) -> None:
        assert command.ranks is not None
        self._command = command
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._environ = {
            **environ,
            "WORLD_SIZE": str(command.ranks),
            "LOCAL_WORLD_SIZE": str(command.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER_PID: str(os.getpid()),
        }
        cores = usable_cores()
        threads = threads_for(cores, [cores] * command.ranks, core_quota())
        self._environ.setdefault("OMP_NUM_THREADS", str(command.threads or threads))
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._signal = 0

    def run(self) -> int:
        """Returns the exit code of the first rank that failed, or 0."""
        handlers = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert self._command.ranks is not None
            for rank in range(self._command.ranks):
                self._start(rank)
            return self._wait()
        finally:
            self._end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _start(self, rank: int) -> None:
        environ = {**self._environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        # A group of its own for each: what a rank started, such as loader workers, ends with it.
        process = subprocess.Popen(
            _rank_command(self._command),
            env=environ,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self._ranks.append(process)

    def _wait(self) -> int:
        while not self._signal:
            codes = [process.poll() for process in self._ranks]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                return _exit_code(*failed[0])
            if all(code == 0 for code in codes):
                return 0
            time.sleep(_POLL_S)
        return 128 + self._signal

    def _end(self) -> None:
        """Ends what is left: asks first, then does not ask."""
        if all(process.poll() == 0 for process in self._ranks):
            return
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(p.poll() is None for p in self._ranks):
            time.sleep(_POLL_S)
        self._send(signal.SIGKILL)
        for process in self._ranks:
            process.wait()

    def _send(self, number: int) -> None:
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone
                os.killpg(process.pid, number)


def _exit_code(rank: int, code: int) -> int:
    """The job's exit code for a rank's; one killed before or with its watch had no last word."""
    if code > 0:
        return code
    print(last_word(rank, code).render(), file=sys.stderr, flush=True)
    return 128 - code


def _rank_command(command: Command) -> list[str]:
    return [sys.executable, "-m", "distcell.launch", *command.for_ranks()]


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another launcher said about this process."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN and not name.startswith(_FOREIGN)
    }


def _mpirun_settings(mpirun: Path) -> dict[str, str]:
    """What Open MPI needs to start more ranks than cores, as root too; MPICH needs nothing."""
    if mpirun_at(mpirun).name != "Open MPI":
        return {}
    settings = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            settings[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            settings[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return settings
