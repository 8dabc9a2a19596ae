"""The pause of Python's garbage collector while the engine makes a plan."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Makes many objects that stay, without looking through all of them again and again.

    Planning makes hundreds of thousands of values, and torch's modules hold as many: the collector
    would take a third of the time and find nothing. Where it is off already, it stays off.

    Example:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
