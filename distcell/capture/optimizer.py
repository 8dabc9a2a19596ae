"""A torch optimizer without its effects: its hyperparameters, state and step."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcell import compat
from distcell.capture.probe import StateMeta, initial_fills
from distcell.capture.source import lacks_values, optimizer_line
from distcell.errors import CaptureError

SCALARS = ("lr", "betas", "momentum", "weight_decay")
"""Hyperparameters that schedulers change: inputs of the graph, unless they are 0."""


@dataclass(frozen=True)
class Slot:
    """A parameter that gets a gradient: where the optimizer has it, and its global shape."""

    path: str
    group: int
    tensor: Tensor
    shape: tuple[int, ...]


@contextmanager
def explained(optimizer: Optimizer) -> Iterator[None]:
    """A context in which errors of the step say what about the optimizer cannot be captured."""
    name = type(optimizer).__name__
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and error.name in optimizer.__dict__:
            # torch's copy of an optimizer leaves out what a subclass adds
            raise CaptureError(
                f"{name} reads its attribute `{error.name}` in its step",
                where=["a captured step would use what it holds now, every time"],
                hint="keep it in the optimizer's groups, as lr is, or in its state; or train in a "
                "loop of your own",
            ) from error
        if isinstance(error, TypeError) and "closure" in str(error):
            raise CaptureError(
                f"{name} computes the loss again and again in its step",
                hint="use an optimizer whose step needs no closure",
            ) from error
        if compat.needs_value(error) or lacks_values(error):
            raise CaptureError(
                f"{name} decides by the value of a tensor what its step does",
                where=[optimizer_line(error)],
                hint="use another optimizer, or train in a loop of your own",
            ) from error
        raise


def hyperparameters(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    """The hyperparameters that are inputs of a captured step, with their values now.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> dict(hyperparameters(optimizer))
        {'group0.lr': 0.1, 'group0.momentum': 0.9}
    """
    for number, group in enumerate(optimizer.param_groups):
        for name in SCALARS:
            item = group.get(name)
            parts = enumerate(item) if isinstance(item, tuple) else [(None, item)]
            for place, part in parts:
                if isinstance(part, bool) or not isinstance(part, (int, float, Tensor)):
                    continue
                if float(part) != 0 or name == "lr":
                    suffix = "" if place is None else f".{place}"
                    yield f"group{number}.{name}{suffix}", float(part)


def refuse_hooks(optimizer: Optimizer) -> None:
    """Raises when the optimizer has hooks on its step: a captured step would not call them."""
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks"):
            raise CaptureError(
                f"{type(optimizer).__name__} has hooks on its step, which would not be called",
                hint="remove them, or train in a loop of your own",
            )


def slots_of(
    optimizer: Optimizer, paths: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Slot]:
    """The optimizer's parameters that are in `shapes`.

    Raises:
        CaptureError: When it has parameters that are not in `paths`.
    """
    foreign = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            path = paths.get(id(parameter))
            foreign += path is None
            if path is not None and path in shapes:
                yield Slot(path, number, parameter, shapes[path])
    if foreign:
        raise CaptureError(
            f"{type(optimizer).__name__} has {foreign} parameters that are not the network's",
            hint="make the module that owns them part of the network",
        )


def state_of(
    optimizer: Optimizer, slots: Sequence[Slot]
) -> tuple[dict[str, dict[str, StateMeta]], dict[str, StateMeta]]:
    """The state of each parameter by name, and by full path that which does not exist yet."""
    known: dict[Any, dict[str, StateMeta]] = {}
    state: dict[str, dict[str, StateMeta]] = {}
    missing: dict[str, StateMeta] = {}
    for slot in slots:
        live = optimizer.state.get(slot.tensor)
        if live:
            state[slot.path] = {name: _live(slot, name, item) for name, item in live.items()}
            continue
        key = (slot.group, slot.shape, slot.tensor.dtype, slot.tensor.device)
        if key not in known:
            known[key] = _described(optimizer, slot)
        state[slot.path] = known[key]
        missing |= {f"{slot.path}/{name}": item for name, item in known[key].items()}
    return state, missing


def _live(slot: Slot, name: str, item: Any) -> StateMeta:
    """State that exists; as large as the parameter's slice means as large as the parameter."""
    if not isinstance(item, Tensor):
        raise _no_tensor(slot.path, name, item)
    shape = slot.shape if item.shape == slot.tensor.shape else tuple(item.shape)
    return StateMeta(shape, item.dtype, 0.0, item.device)


def _described(optimizer: Optimizer, slot: Slot) -> dict[str, StateMeta]:
    """The state that the first step would make: fills by trying, shapes without values."""
    with explained(optimizer):
        fills = initial_fills(optimizer, slot.group, len(slot.shape), slot.tensor.dtype)
    with explained(optimizer), torch.no_grad(), compat.fake_mode(numbers=True):
        fake = torch.empty(slot.shape, dtype=slot.tensor.dtype, device=device_of(slot.tensor))
        fake.grad = torch.empty_like(fake)
        shadow = shadow_of(optimizer, {slot.group: [fake]})
        step(optimizer, shadow)
        made = dict(shadow.state[fake])
    for name, item in made.items():
        if not isinstance(item, Tensor):
            raise _no_tensor(slot.path, name, item)
    return {
        name: StateMeta(tuple(item.shape), item.dtype, fills[name], item.device)
        for name, item in made.items()
    }


def _no_tensor(path: str, name: str, item: Any) -> CaptureError:
    return CaptureError(
        f"the optimizer keeps {item!r} as `{name}` of `{path}`, which is no tensor",
        hint="keep it as a tensor, so that the captured step can count on",
    )


def device_of(tensor: Tensor) -> torch.device:
    """Where the tensor will be once it has values."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def shadow_of(
    optimizer: Optimizer,
    params: Mapping[int, list[Tensor]],
    state: Mapping[Tensor, dict[str, Any]] | None = None,
    numbers: Mapping[tuple[int, str], Any] | None = None,
) -> Optimizer:
    """An optimizer like the given one with other parameters, state and hyperparameters.

    Args:
        optimizer: Left as it is.
        params: The parameters by the number of their group; other groups are empty.
        state: The state by parameter.
        numbers: Hyperparameters by number of the group and name.
    """
    shadow = copy.copy(optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        changed = {**group, "params": params.get(number, [])}
        changed |= {key: False for key in ("foreach", "fused") if key in group}
        changed |= {name: item for (n, name), item in (numbers or {}).items() if n == number}
        groups.append(changed)
    shadow.param_groups = groups
    shadow.state = defaultdict(dict, state or {})
    for when in ("pre", "post"):
        setattr(shadow, f"_optimizer_step_{when}_hooks", OrderedDict())
    return shadow


def step(optimizer: Optimizer, shadow: Optimizer) -> None:
    """Runs the step of the class: schedulers replace that of the object by one of their own."""
    type(optimizer).step(shadow)
