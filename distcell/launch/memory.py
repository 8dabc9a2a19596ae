"""How a rank's process keeps main memory."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of settings, from malloc.h
_KEPT = 512 << 20
_LARGEST = 32 << 20  # glibc accepts no more


def keep_freed_memory() -> bool:
    """Returns whether this process now keeps what it frees for what it allocates next.

    A training step frees its activations and allocates as many again. Where the C library gives
    the pages back in between, each step faults them in anew, which takes several percent of it.
    Only glibc has the setting; elsewhere nothing is changed.

    >>> keep_freed_memory() in (True, False)
    True
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    kept = set_option(_TRIM_THRESHOLD, _KEPT)
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and kept)
