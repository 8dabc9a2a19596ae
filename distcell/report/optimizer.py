"""What an optimizer will hold for each element of a parameter, found out before its first step."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from distcell.capture.optimizer import shadow_of, step
from distcell.random import current_state

_SHAPE = (2, 3)
_CHANGEABLE = (list, dict, set)


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizers of a network.

    Args:
        bytes: For each parameter's path the bytes for each of its elements.
        text: Where that is known from, for the report.
    """

    bytes: Mapping[str, int]
    text: str


def state_of_optimizers(net: torch.nn.Module) -> OptimizerState:
    """What the optimizers of a network's parameters will hold.

    Where nobody has made one yet, Adam is assumed, and the text says so.
    """
    paths = {id(parameter): path for path, parameter in net.named_parameters()}
    found = [o for o in _optimizers() if any(id(p) in paths for p in _parameters(o))]
    if not found:
        sizes = {
            path: 2 * p.element_size() for path, p in net.named_parameters() if p.requires_grad
        }
        return OptimizerState(sizes, "assumed: two values for each element, as of Adam")
    sizes, names = {}, []
    for optimizer in found:
        names.append(type(optimizer).__name__)
        if _needs_closure(optimizer):
            names[-1] += " (what it holds is not known before it runs: counted as nothing)"
            continue
        for number, group in enumerate(optimizer.param_groups):
            by_dtype = {p.dtype for p in group["params"]}
            each = {dtype: _bytes_of_element(optimizer, number, dtype) for dtype in by_dtype}
            for parameter in group["params"]:
                path = paths.get(id(parameter))
                if path is not None and parameter.requires_grad:
                    sizes[path] = each[parameter.dtype]
    return OptimizerState(sizes, ", ".join(dict.fromkeys(names)))


def _optimizers() -> list[Optimizer]:
    # torch keeps no list of them; by class, for an instance's attributes may be anything
    return [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _bytes_of_element(optimizer: Optimizer, group: int, dtype: torch.dtype) -> int:
    """Takes a first step with a copy of the optimizer that has one small parameter."""
    parameter = torch.nn.Parameter(torch.ones(_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    shadow = shadow_of(optimizer, {group: [parameter]})
    for name, item in optimizer.__dict__.items():  # torch's copy leaves out what a subclass adds
        shadow.__dict__.setdefault(name, copy.copy(item) if isinstance(item, _CHANGEABLE) else item)
    with current_state().held():
        step(optimizer, shadow)
    held = shadow.state[parameter].values()
    like = [s for s in held if isinstance(s, torch.Tensor) and tuple(s.shape) == _SHAPE]
    return sum(state.element_size() for state in like)
