"""How much memory the ranks of this host can share."""

from __future__ import annotations

import os

SHARED_MEMORY = "/dev/shm"


def free_shared_memory() -> int:
    """Returns the bytes that are free where shared memory lies; 0 where there is no such place.

    >>> free_shared_memory() >= 0
    True
    """
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # no such file system: a window would have nowhere to be
        return 0
    return found.f_bavail * found.f_frsize
