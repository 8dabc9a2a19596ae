"""What an optimizer's state is before its first step, found out on a tiny parameter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcell.errors import CaptureError


@dataclass(frozen=True)
class StateMeta:
    """A tensor of an optimizer's state: how to make it when it does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float
    device: torch.device

    def make(self) -> Tensor:
        """The state before the first step, at its global shape."""
        return torch.full(self.shape, self.fill, dtype=self.dtype, device=self.device)


class _First(dict[str, Any]):
    """Remembers what is put under each name first, as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, item: Any) -> None:
        if name not in self.first:
            self.first[name] = item.clone() if isinstance(item, Tensor) else item
        super().__setitem__(name, item)


def initial_fills(
    optimizer: Optimizer, group: int, dims: int, dtype: torch.dtype
) -> dict[str, float]:
    """The one value that each tensor of the state is filled with before the first step.

    Raises:
        CaptureError: When a first step that finds this state does something else than one that
            finds none.
    """
    values = torch.tensor([0.5, -0.25, 0.125, 1.5, -1.0, 0.75, -0.625, 0.375])
    shape = (2,) * dims
    parameter = _spread(values, shape).to(dtype)
    gradient = _spread(values.flip(0), shape).to(dtype)
    fresh = parameter.clone()
    without = _run(optimizer, group, fresh, gradient, _First())
    assert isinstance(without, _First)
    fills = {name: _fill(without.first.get(name)) for name in without}
    given = {name: torch.full_like(item, fills[name]) if isinstance(item, Tensor) else item
             for name, item in without.items()}  # fmt: skip
    again = parameter.clone()
    with_state = _run(optimizer, group, again, gradient, given)
    same = torch.equal(fresh, again) and all(
        torch.equal(item, with_state[name])
        for name, item in without.items()
        if isinstance(item, Tensor)
    )
    if not same:
        raise CaptureError(
            f"the first step of {type(optimizer).__name__} is unlike the others",
            where=[f"its state `{', '.join(fills)}` cannot be made before it"],
            hint="set dampening to 0, or take the first step in a loop of your own",
        )
    return fills


def _run(
    optimizer: Optimizer, group: int, parameter: Tensor, gradient: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """The state after one step."""
    from distcell.capture.optimizer import shadow_of, step

    parameter.grad = gradient.clone()
    shadow = shadow_of(optimizer, {group: [parameter]})
    shadow.state = defaultdict(_First)
    if not isinstance(state, _First):
        shadow.state[parameter] = state
    with torch.no_grad():
        step(optimizer, shadow)
    after: dict[str, Any] = shadow.state[parameter]
    return after


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return values.repeat(-(-count // len(values)))[:count].reshape(shape)


def _fill(item: Any) -> float:
    if not isinstance(item, Tensor) or item.numel() == 0:
        return 0.0
    first = item.flatten()[0]
    return float(first) if bool((item == first).all()) else 0.0
