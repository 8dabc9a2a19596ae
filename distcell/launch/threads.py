"""How many threads a rank computes with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from distcell.errors import LaunchError

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> list[int]:
    """Returns the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_quota(text: str | None = None) -> float:
    """Returns how many cores' worth of time a container grants; infinite where none is set.

    Args:
        text: The content of `cpu.max`; read from the system when left out.

    Example:
        >>> core_quota("200000 100000"), core_quota("max 100000")
        (2.0, inf)
    """
    if text is None:
        if not _QUOTA.is_file():
            return math.inf
        text = _QUOTA.read_text(encoding="ascii")
    granted, period = text.split()
    return math.inf if granted == "max" else int(granted) / int(period)


def threads_for(mine: Sequence[int], local: Sequence[Sequence[int]], quota: float) -> int:
    """Returns the number of threads of a rank.

    Ranks that a launcher bound to cores of their own share with nobody; ranks that may run on the
    same cores divide them.

    Args:
        mine: The cores that this rank may run on.
        local: The same for every rank of this host, this one included.
        quota: How many cores' worth of time the host grants to all of them.

    Example:
        >>> threads_for([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, math.inf)
        2
        >>> threads_for([2], [[0], [1], [2], [3]], math.inf)
        1
    """
    sharing = sum(1 for cores in local if list(cores) == list(mine))
    by_cores = len(mine) // max(1, sharing)
    by_quota = quota / max(1, len(local))
    return max(1, min(by_cores, math.floor(by_quota) if by_quota < math.inf else by_cores))


def own_cores(mine: Sequence[int], local: Sequence[Sequence[int]], place: int) -> list[int]:
    """Returns the cores of a rank when ranks that may run on the same ones divide them.

    Args:
        mine: The cores that this rank may run on.
        local: The same for every rank of this host, this one included.
        place: The place of this rank among those.

    Raises:
        LaunchError: There are more ranks than cores.

    Example:
        >>> [own_cores([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, place) for place in (0, 1)]
        [[0, 1], [2, 3]]
    """
    sharing = [index for index, cores in enumerate(local) if list(cores) == list(mine)]
    share = len(mine) // len(sharing)
    if share == 0:
        raise LaunchError(
            f"--bind: {len(sharing)} ranks share {len(mine)} cores of a host",
            hint="start fewer ranks there, or leave --bind out",
        )
    start = sharing.index(place) * share
    return list(mine[start : start + share])
