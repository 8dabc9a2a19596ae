"""Looks on while a script trains: its losses, its gradients before and its weights after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distcell.cell import Cell
from distcell.engine.observe import Observer, PlanEvent, StepEvent, Stop
from distcell.piece import plain

LEAST_EPS = 1e-3
"""What Adam's `eps` and its like are raised to in single precision. A gradient that is zero but for
rounding (of a bias before a batch norm, of a key's bias) would else become a step of the weight."""


class Key(NamedTuple):
    """What a tensor is: its kind, the number of the step, the optimizer's, and its name."""

    kind: str
    step: int
    optimizer: int
    name: str


Take = Callable[[Key, Tensor | None], None]
"""Told a tensor, which may change afterwards; None for a parameter without gradient."""


class Recorder(Observer):
    """Tells `take` what a script trains, and stops the script after some steps.

    Args:
        take: Told every tensor.
        steps: The number of steps, of the optimizer that steps first.
    """

    wants_gradients = True
    wants_steps = True

    def __init__(self, take: Take, steps: int) -> None:
        self.take, self.steps = take, steps
        self.num_calls, self.num_losses = 0, 0
        self.notes: list[str] = []
        self.plans: list[PlanEvent] = []
        self._cells: list[Cell] = []
        self._names: dict[int, str] = {}
        self._optimizers: list[Optimizer] = []
        self._counts: list[int] = []

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer that stepped first has made."""
        return self._counts[0] if self._counts else 0

    def called(self, cell: Cell, optimizer: Optimizer | None = None) -> None:
        """Notes the network's parameters by their paths."""
        if self.num_steps >= self.steps:
            raise Stop
        self.num_calls += 1
        if not any(known is cell for known in self._cells):
            self._cells.append(cell)
            prefix = f"network {len(self._cells)}: " if len(self._cells) > 1 else ""
            for path, parameter in cell.named_parameters():
                self._names.setdefault(id(parameter), prefix + path)
        if optimizer is not None:
            self._raise_eps(optimizer)

    def planned(self, event: PlanEvent) -> None:
        self.plans.append(event)

    def stepped(self, event: StepEvent) -> None:
        """Takes what a step that is one program gives out."""
        number, step = self._count(event.optimizer)
        self._take_loss(event.loss)
        for name in self._names_of(event.optimizer):
            self.take(Key("gradients", step, number, name), event.gradients.get(name))
            self.take(Key("weights", step, number, name), event.weights[name])
        self._take_buffers(step, number)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A context in which every optimizer's step and every backward is seen."""
        backward = torch.autograd.backward

        def seen(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for loss in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    self._take_loss(loss)
            return backward(tensors, *args, **kwargs)

        handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        torch.autograd.backward = seen  # `Tensor.backward` goes through it too
        try:
            yield
        finally:
            torch.autograd.backward = backward
            for handle in handles:
                handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_known(optimizer):
            return
        if self.num_steps >= self.steps:
            raise Stop
        self._raise_eps(optimizer)
        number, step = self._count(optimizer)
        for name, parameter in self._parameters(optimizer).items():
            grad = parameter.grad
            self.take(Key("gradients", step, number, name), None if grad is None else plain(grad))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_known(optimizer):
            return
        number = self._number(optimizer)
        step = self._counts[number]
        for name, parameter in self._parameters(optimizer).items():
            self.take(Key("weights", step, number, name), plain(parameter))
        self._take_buffers(step, number)

    def _take_loss(self, loss: Tensor) -> None:
        self.num_losses += 1
        self.take(Key("losses", self.num_losses, 0, f"loss {self.num_losses}"), loss.detach())

    def _take_buffers(self, step: int, number: int) -> None:
        for cell in self._cells:
            for path, buffer in cell.named_buffers():
                self.take(Key("buffers", step, number, path), buffer.detach())

    def _is_known(self, optimizer: Optimizer) -> bool:
        """Whether it trains a parallel network; the engine also steps small copies of it."""
        return bool(self._parameters(optimizer))

    def _parameters(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        found = (p for group in optimizer.param_groups for p in group["params"])
        return {self._names[id(p)]: p for p in found if id(p) in self._names}

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        return list(self._parameters(optimizer))

    def _number(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._counts.append(0)
        return len(self._counts) - 1

    def _count(self, optimizer: Optimizer) -> tuple[int, int]:
        """The optimizer's number, and that of the step which it makes now, from 1."""
        number = self._number(optimizer)
        self._counts[number] += 1
        return number, self._counts[number]

    def _raise_eps(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            exact = all(parameter.dtype == torch.float64 for parameter in group["params"])
            if isinstance(eps, float) and eps < LEAST_EPS and not exact:
                group["eps"] = LEAST_EPS
                self.notes.append(
                    f"{type(optimizer).__name__} had eps={eps:g}; both runs used {LEAST_EPS:g}, "
                    "for with less the rounding noise of zero gradients moves weights"
                )
