"""Notices a script that trains the same model on every rank, because nothing of it is parallel.

`dc.parallelize` is easily forgotten, and nothing would fail: each rank trains a copy, with the
losses of one device, in the time of one device or more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from distcell.cell import Cell
from distcell.context import auto_parallel_context
from distcell.engine.observe import Observer, observing
from distcell.runtime import world

_HINT = "  = hint: `net = dc.parallelize(net)` before its first call; see docs/howto/cluster.md"


class Copies(Observer):
    """Looks on while the script runs.

    Args:
        script: The path of the script.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._issued = _issued()
        self._talks = False
        self._steps = 0

    def called(self, cell: Cell, optimizer: Optimizer | None = None) -> None:
        """A Cell is parallel, unless the context says that this device stands alone."""
        if auto_parallel_context().parallel_mode != "stand_alone":
            self._talks = True

    def warn_at_end(self) -> None:
        """Says on rank 0 that the script trained copies, if it did."""
        if self._steps and not self._talks:
            size = world.current_world().size
            _warn(f"all {size} ranks trained the same model, each the whole of it", [])

    def stepped_by_itself(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        self._talks = self._talks or dist.is_initialized() or _issued() > self._issued
        self._steps += 1
        if self._steps == 1 and not self._talks:
            size = world.current_world().size
            where = self._line()
            _warn(
                f"{size} ranks train the same model: an optimizer steps and no network is parallel",
                [where] if where else [],
            )

    def _line(self) -> str:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self._script:
            frame = frame.f_back  # type: ignore[assignment]
        return f"{self._script}:{frame.f_lineno}" if frame is not None else ""


@contextmanager
def looking_for_copies(script: str) -> Iterator[None]:
    """A context in which the script runs: warns at its first lonely step, and at its end again.

    Args:
        script: The path of the script.
    """
    copies = Copies(script)
    handle = register_optimizer_step_post_hook(copies.stepped_by_itself)
    try:
        with observing(copies):
            yield
    finally:
        handle.remove()
    copies.warn_at_end()


def _issued() -> int:
    return sum(each.log.number for each in world.collectives_in_use())


def _warn(text: str, where: list[str]) -> None:
    if world.current_world().rank:
        return
    lines = [f"warning: {text}", *(f"  |  {line}" for line in where), _HINT]
    sys.stdout.flush()
    print("\n".join(lines), file=sys.stderr, flush=True)
