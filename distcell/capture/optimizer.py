"""Captures what a torch optimizer does in one step: new parameters and new state."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcell import compat
from distcell.capture import trace
from distcell.capture.convert import to_graph
from distcell.capture.probe import StateMeta, initial_fills
from distcell.capture.source import lacks_values, optimizer_line
from distcell.capture.watch import scalar
from distcell.errors import CaptureError
from distcell.graph import Graph

SCALARS = ("lr", "betas", "momentum", "weight_decay")
"""Hyperparameters that schedulers change: inputs of the graph, unless they are 0."""

Adjust = Callable[[list[Tensor]], object]
"""What is done with the parameters' gradients before the update, such as clipping."""


@dataclass(frozen=True)
class Update:
    """An optimizer's step as data.

    Args:
        graph: Its inputs are of kind `param`, `grad`, `state` and `scalar`; its outputs are the
            new values of kind `param` and `state`.
        constants: Tensors that the step made of nothing, by the path of their input.
        state_meta: The state that the optimizer does not hold yet.
        scalars: The hyperparameters that are inputs, with their values now.
    """

    graph: Graph
    constants: Mapping[str, Tensor]
    state_meta: Mapping[str, StateMeta]
    scalars: Mapping[str, float]


@dataclass(frozen=True)
class Slot:
    """A parameter that gets a gradient: where the optimizer has it, and its global shape."""

    path: str
    group: int
    tensor: Tensor
    shape: tuple[int, ...]


def capture_update(
    optimizer: Optimizer,
    paths: Mapping[int, str],
    shapes: Mapping[str, tuple[int, ...]],
    adjust: Adjust | None = None,
) -> Update:
    """The ops of `optimizer.step()`; the optimizer and its state are not touched.

    Args:
        optimizer: Any optimizer of torch's form.
        paths: The path of each of the network's parameters by the `id` of its tensor.
        shapes: The global shapes of the parameters that get a gradient.
        adjust: Called with the parameters before the step.

    Raises:
        CaptureError: When the optimizer has parameters that are not the network's, hooks, state
            that is no tensor, or a first step unlike the others.
    """
    _refuse_hooks(optimizer)
    slots = list(_slots(optimizer, paths, shapes))
    state, meta = _state(optimizer, slots)
    scalars = dict(hyperparameters(optimizer))
    with _explained(optimizer), torch.no_grad(), compat.fake_mode(numbers=True) as mode:
        body = _Body(optimizer, slots, state, scalars=scalars, adjust=adjust)
        traced = trace.run_trace(body, body.fakes, body.recorder)
        _check_branches(optimizer, compat.number_guards(mode))
    sinks = [(*key, node) for key, node in zip(body.results, traced.outputs, strict=True)]
    graph, constants = to_graph(traced, body.inputs, sinks, prefix="optimizer.")
    return Update(graph, constants, meta, body.scalars)


@contextmanager
def _explained(optimizer: Optimizer) -> Iterator[None]:
    """A context in which errors of the step say what about the optimizer cannot be captured."""
    name = type(optimizer).__name__
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
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


def _check_branches(optimizer: Optimizer, guards: Sequence[str]) -> None:
    """Whether a number is 0 may decide what the step does, for it is part of what was captured."""
    if guards:
        raise CaptureError(
            f"{type(optimizer).__name__} decides by a hyperparameter what its step does",
            where=guards,
            hint=f"only whether one of {', '.join(SCALARS)} is 0 may decide that",
        )


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


def _refuse_hooks(optimizer: Optimizer) -> None:
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks"):
            raise CaptureError(
                f"{type(optimizer).__name__} has hooks on its step, which would not be called",
                hint="remove them, or train in a loop of your own",
            )


def _slots(
    optimizer: Optimizer, paths: Mapping[int, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Slot]:
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


def _state(
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
    with _explained(optimizer):
        fills = initial_fills(optimizer, slot.group, len(slot.shape), slot.tensor.dtype)
    with _explained(optimizer), torch.no_grad(), compat.fake_mode(numbers=True):
        fake = torch.empty(slot.shape, dtype=slot.tensor.dtype, device=_device(slot.tensor))
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


def _device(tensor: Tensor) -> torch.device:
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


class _Body:
    """The function that is traced, and what came of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        state: Mapping[str, Mapping[str, StateMeta]],
        *,
        scalars: Mapping[str, float],
        adjust: Adjust | None,
    ) -> None:
        self.optimizer, self.slots, self.state, self.adjust = optimizer, slots, state, adjust
        self.recorder = trace.Recorder("optimizer")
        self.inputs: list[tuple[str, str]] = []
        self.fakes: list[Tensor] = []
        self.scalars = scalars
        self.results: list[tuple[str, str]] = []
        for slot in slots:
            for kind in ("param", "grad"):
                self._add(kind, slot.path, slot.shape, slot.tensor.dtype, _device(slot.tensor))
            for name, item in state[slot.path].items():
                self._add("state", f"{slot.path}/{name}", item.shape, item.dtype, item.device)

    def _add(self, kind: str, path: str, *like: Any) -> None:
        shape, dtype, device = like
        self.fakes.append(torch.empty(shape, dtype=dtype, device=device))
        self.inputs.append((kind, path))

    def __call__(self, *fakes: Tensor) -> list[Any]:
        """Runs the step; what it returns is described by `results`."""
        with compat.Functional() as functional, self.recorder:
            given = [functional.wrap(fake) for fake in fakes]
            wrapped = dict(zip(self.inputs, given, strict=True))
            params: dict[int, list[Tensor]] = {}
            state: dict[Tensor, dict[str, Any]] = {}
            for slot in self.slots:
                parameter = wrapped["param", slot.path]
                parameter.grad = wrapped["grad", slot.path]
                params.setdefault(slot.group, []).append(parameter)
                names = self.state[slot.path]
                state[parameter] = {n: wrapped["state", f"{slot.path}/{n}"] for n in names}
            shadow = shadow_of(self.optimizer, params, state, dict(self._numbers()))
            self._run(shadow, [wrapped["param", slot.path] for slot in self.slots])
            new: list[Any] = []
            originals = dict(zip(self.inputs, fakes, strict=True))
            for key, item in self._final(shadow, wrapped):
                plain = functional.unwrap(item)
                if plain is not originals[key]:
                    self.results.append(key)
                    new.append(plain)
            return new

    def _run(self, shadow: Optimizer, parameters: list[Tensor]) -> None:
        before = _settings(shadow)
        if self.adjust is not None:
            self.adjust(parameters)
        step(self.optimizer, shadow)
        changed = [name for name, item in _settings(shadow).items() if before.get(name) != item]
        if changed:
            raise CaptureError(
                f"the step of {type(shadow).__name__} changes its `{changed[0]}`",
                where=["a captured step would not do that again"],
                hint="keep it as a tensor in the optimizer's state",
            )

    def _numbers(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """The hyperparameters, with inputs of the graph in the place of those that are inputs."""
        for number, group in enumerate(self.optimizer.param_groups):
            for name in SCALARS:
                if name not in group:
                    continue
                item, path = group[name], f"group{number}.{name}"
                if isinstance(item, tuple):
                    parts = (self._number(f"{path}.{i}", part) for i, part in enumerate(item))
                    yield (number, name), tuple(parts)
                else:
                    yield (number, name), self._number(path, item)

    def _number(self, path: str, item: Any) -> Any:
        if path not in self.scalars:
            return item
        number, node = compat.traced_number(self.scalars[path], path.replace(".", "_"))
        self.recorder.marks[node] = ("scalar", path)
        return number

    def _final(
        self, shadow: Optimizer, wrapped: Mapping[tuple[str, str], Tensor]
    ) -> Iterator[tuple[tuple[str, str], Any]]:
        """Parameters and state as they are after the step."""
        for slot in self.slots:
            parameter = wrapped["param", slot.path]
            yield ("param", slot.path), parameter
            after = shadow.state[parameter]
            if after.keys() != self.state[slot.path].keys():
                names = sorted(after.keys() ^ self.state[slot.path].keys())
                raise CaptureError(
                    f"the step of {type(shadow).__name__} adds or drops the state `{names[0]}`",
                    hint="make all state in the first step",
                )
            for name, item in after.items():
                yield ("state", f"{slot.path}/{name}"), item


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own scalars, those of its groups among them."""
    found = {name: scalar(item) for name, item in optimizer.__dict__.items()}
    for number, group in enumerate(optimizer.param_groups):
        for name, item in group.items():
            if name != "params":
                found[f"param_groups[{number}]['{name}']"] = item
    return {name: item for name, item in found.items() if item is not None}
