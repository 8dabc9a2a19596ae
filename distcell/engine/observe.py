"""Who looks on while the engine works: the commands `plan`, `explain` and `check`.

The engine tells one observer of each outermost call, of each plan, and of each training step that
runs as one program. Most of the time nobody looks on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from distcell.cell import Cell

if TYPE_CHECKING:
    from distcell.engine.planning import Planned
    from distcell.strategy import Strategy


class Stop(BaseException):
    """Ends the user's script: the observer has seen enough.

    It is no `Exception`, so that a script's own `except Exception` lets it pass.
    """


@dataclass(frozen=True)
class PlanEvent:
    """A call or a step was planned; nothing of it has run.

    Args:
        cell: The outermost Cell.
        planned: Its plan and program.
        strategy: What was asked for, `Cell.shard` calls included.
        trains: Whether the program computes gradients.
    """

    cell: Cell
    planned: Planned
    strategy: Strategy
    trains: bool


@dataclass(frozen=True)
class StepEvent:
    """A training step that is one program has run.

    Args:
        cell: The network.
        optimizer: The optimizer whose update it made.
        loss: The global loss.
        gradients: By path of the parameter, global; empty unless the observer wants them.
        weights: By path of the parameter, global, after the update.
    """

    cell: Cell
    optimizer: Optimizer
    loss: Tensor
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


class Observer:
    """Is told what the engine does; this one does nothing with it.

    Args:
        wants_gradients: Whether a step that is one program shall give its gradients out.
        wants_steps: Whether `stepped` is called at all.
    """

    wants_gradients: bool = False
    wants_steps: bool = False

    def called(self, cell: Cell, optimizer: Optimizer | None = None) -> None:
        """An outermost Cell is about to be called, or a step that is one program to be made."""

    def planned(self, event: PlanEvent) -> None:
        """A call or a step was planned."""

    def stepped(self, event: StepEvent) -> None:
        """A step that is one program has run."""


_observer = Observer()


def observer() -> Observer:
    """Who looks on now."""
    return _observer


@contextmanager
def observing(who: Observer) -> Iterator[None]:
    """A context in which `who` looks on."""
    global _observer  # noqa: PLW0603 (the engine of this process has one observer at a time)
    before, _observer = _observer, who
    try:
        yield
    finally:
        _observer = before
