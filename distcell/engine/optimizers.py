"""Which optimizers are right on slices, and guards against those that are not.

An optimizer that works element by element does on a slice what it would do on the whole. One that
looks at whole matrices or norms would be silently wrong, so it is refused until there is a rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distcell import compat
from distcell.engine.whole import backend_of, is_cut, piece_of, whole_tensor
from distcell.errors import OptimizerStateError
from distcell.parameter import global_shape, layout

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers, and subclasses that keep their `step`, which look at one element at a time."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each element for itself.

    Example:
        >>> is_elementwise(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
        True
    """
    if getattr(optimizer, "distcell_elementwise", False):
        return True
    # torch wraps the `step` of each class when its first optimizer is made
    own = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, known) and own is inspect.unwrap(known.step) for known in ELEMENTWISE
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Checks that an optimizer may be used on parameters that are, or will be, split.

    Raises:
        OptimizerStateError: When it holds state of the global shape for a parameter that is split
            already.
    """
    for parameter, state in optimizer.state.items():
        whole = tuple(global_shape(parameter))
        if tuple(parameter.shape) == whole:
            continue
        for name, item in state.items():
            if isinstance(item, torch.Tensor) and item.dim() and tuple(item.shape) == whole:
                raise OptimizerStateError(
                    f"the optimizer holds `{name}` of `{getattr(parameter, 'name', '')}` "
                    f"at its global shape {list(whole)}",
                    where=[f"this rank holds  {list(parameter.shape)}"],
                    hint="make the first call of the network before the optimizer is made "
                    "and before its state is loaded",
                )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    split = [p for group in optimizer.param_groups for p in group["params"] if layout(p).split_axes]
    # decided by layouts, not by the shapes of this rank's pieces: alike on all ranks, simulated too
    if not split:
        return
    if not is_elementwise(optimizer):
        raise OptimizerStateError(
            f"{type(optimizer).__name__} is not known to be right on slices of parameters",
            where=[f"{len(split)} of its parameters are split over ranks"],
            hint="use an element-wise optimizer, or set `optimizer.distcell_elementwise = True` "
            "when each element's update depends on that element alone",
        )
    check_optimizer(optimizer)


def _gather_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer saves, at global shapes. All ranks must call where parameters are split."""
    return _changed(optimizer, saved, whole_tensor, of_pieces=True)


def _cut_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer loads, as this rank's pieces."""
    return _changed(optimizer, saved, piece_of, of_pieces=False)


def _changed(
    optimizer: Optimizer,
    saved: dict[str, Any],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    of_pieces: bool,
) -> dict[str, Any]:
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
    pairs = [pair for s, g in groups for pair in zip(s["params"], g["params"], strict=False)]
    state = dict(saved["state"])
    for number, parameter in pairs:
        if not is_cut(parameter) or not isinstance(state.get(number), dict):
            continue
        shape = tuple(parameter.shape) if of_pieces else tuple(global_shape(parameter))
        state[number] = {
            name: change(parameter, item)
            if isinstance(item, torch.Tensor) and item.dim() and tuple(item.shape) == shape
            else item
            for name, item in state[number].items()
        }
    return {**saved, "state": state}


def _overflow_anywhere(optimizer: Optimizer, found: torch.Tensor) -> torch.Tensor:
    """Whether any rank found a gradient that is infinite or no number: all skip the step, or none.

    All ranks must call where parameters are split.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if is_cut(p)]
    backend = backend_of(held[0]) if held else None
    if backend is None:
        return found
    axes = backend.mesh.names
    return torch.as_tensor(
        backend.collectives.all_reduce(found.clone(), axes, "max", label="GradScaler")
    )


_hook = register_optimizer_step_pre_hook(_before_step)
compat.replace_overflow_check(_overflow_anywhere)
compat.replace_optimizer_state(_gather_state, _cut_state)
