"""Jobs of real processes, as a user starts them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distcell.runtime.mpi_installation import find_mpirun

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "distcell.launch"]
MPIRUN = find_mpirun()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
PATIENCE_S = 90

needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun")

_LEFT_OUT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FOR_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""More ranks than cores, as root too, under a plain mpirun; other MPIs do not look at it."""


def environment(**more: str) -> dict[str, str]:
    """The environment of a job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PMI") and k not in _LEFT_OUT}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return _FOR_OPEN_MPI | kept | {"PYTHONPATH": path} | more


def run(command: Sequence[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What the command printed, and its exit code."""
    return subprocess.run(
        list(command),
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def all_gone(pids: Sequence[int], within: float) -> bool:
    """Whether the processes end in time; waits on the processes themselves."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([fd], [], [], within)[0]
        os.close(fd)
        if not ended:
            return False
    return True
