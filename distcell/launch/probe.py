"""What a rank says to `doctor`: what it is made of, and how long an all-reduce takes.

As a script it is run under the launcher, which starts ranks as for any other.
"""

from __future__ import annotations

import json
import math
import platform
import socket
import statistics
import sys
import time
from importlib import metadata
from typing import Any

import torch

from distcell.compat import PrefixStore
from distcell.launch.threads import core_quota, usable_cores
from distcell.mesh import Mesh
from distcell.runtime import world
from distcell.runtime.collectives import Collectives
from distcell.runtime.rank_collectives import RankCollectives
from distcell.runtime.shared_memory import free_shared_memory
from distcell.runtime.torch_collectives import TorchGroups

MARK = "distcell-probe "
"""Stands before the line of JSON that rank 0 prints."""

_MESSAGE = 1 << 20
_REPEATS = 20


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that must be alike on all ranks.

    >>> sorted(versions())
    ['distcell', 'mpi4py', 'python', 'torch']
    """
    packages = {"torch": str(torch.__version__)}
    for name in ("distcell", "mpi4py"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that is on the path
            packages[name] = "not installed"
    return {"python": platform.python_version(), **packages}


def describe_rank() -> dict[str, Any]:
    """Returns what this process is made of and where it runs: JSON values."""
    quota = core_quota()
    return {
        "versions": versions(),
        "host": socket.gethostname(),
        "cores": len(usable_cores()),
        "quota": None if math.isinf(quota) else quota,
        "threads": torch.get_num_threads(),
        "shared": free_shared_memory(),
        "devices": torch.cuda.device_count(),
        "resolves": _resolves(socket.gethostname()),
    }


def seconds_of_all_reduce(collectives: Collectives, device: str) -> float:
    """Returns the median seconds of an all-reduce of 1 MiB. Collective.

    Args:
        collectives: Of all ranks.
        device: Where the tensor lies.
    """
    x = torch.ones(_MESSAGE // 4, device=device)
    times = []
    for _ in range(_REPEATS):
        collectives.barrier()
        start = time.perf_counter()
        collectives.all_reduce(x, collectives.mesh.names, "max", inplace=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def probe(*, also_gloo: bool = False) -> dict[str, Any]:
    """Returns what all ranks say and what was timed: JSON values. Collective.

    Args:
        also_gloo: Whether gloo is timed beside what carries the collectives here.
    """
    here, store = world.current_world(), world.store()
    mesh = Mesh((("rank", here.size),))
    collectives = world.collectives_for(mesh)
    described = collectives.all_gather_object(describe_rank())
    device = "cuda" if here.backend == "nccl" else "cpu"
    seconds = {here.backend: seconds_of_all_reduce(collectives, device)}
    if also_gloo and here.backend != "gloo" and store is not None:
        one_host = here.local_size == here.size
        gloo = TorchGroups("gloo", PrefixStore("probe", store), here.rank, one_host=one_host)
        over_gloo = RankCollectives(mesh, here.rank, gloo.group_of)
        seconds["gloo"] = seconds_of_all_reduce(over_gloo, "cpu")
    return {"ranks": described, "seconds": seconds}


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    found = probe()
    if world.current_world().rank == 0:
        sys.stdout.write(MARK + json.dumps(found) + "\n")
