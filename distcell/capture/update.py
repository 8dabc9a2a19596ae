"""Captures what a torch optimizer does in one step: new parameters and new state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcell import compat
from distcell.capture import trace
from distcell.capture.convert import to_graph
from distcell.capture.optimizer import (
    SCALARS,
    Slot,
    device_of,
    explained,
    hyperparameters,
    refuse_hooks,
    shadow_of,
    slots_of,
    state_of,
    step,
)
from distcell.capture.probe import StateMeta
from distcell.capture.twins import repeat
from distcell.capture.watch import scalar
from distcell.errors import CaptureError
from distcell.graph import Graph

Adjust = Callable[[list[Tensor]], object]
"""What is done with the parameters' gradients before the update, such as clipping."""


@dataclass(frozen=True)
class Update:
    """An optimizer's step as data.

    Args:
        adjustment: What is done with the gradients before: inputs of kind `param` and `grad`,
            outputs of kind `grad`. None for nothing.
        graph: The step: inputs of kind `param`, `grad`, `state` and `scalar`; outputs of kind
            `param` and `state`.
        constants: Tensors that these made of nothing, by the path of their input.
        state_meta: The state that the optimizer does not hold yet.
        scalars: The hyperparameters that are inputs, with their values now.
    """

    adjustment: Graph | None
    graph: Graph
    constants: Mapping[str, Tensor]
    state_meta: Mapping[str, StateMeta]
    scalars: Mapping[str, float]


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
    refuse_hooks(optimizer)
    slots = list(slots_of(optimizer, paths, shapes))
    state, meta = state_of(optimizer, slots)
    scalars = dict(hyperparameters(optimizer))
    graph, constants = _steps(optimizer, slots, state, scalars)
    adjustment = None
    if adjust is not None:
        body = _Adjustment(slots, adjust)
        adjustment, more = _traced(optimizer, body, prefix="adjustment.")
        constants = {**constants, **more}
    return Update(adjustment, graph, constants, meta, scalars)


State = Mapping[str, Mapping[str, StateMeta]]
"""The optimizer's state by parameter and name."""


def _steps(
    optimizer: Optimizer, slots: Sequence[Slot], state: State, scalars: Mapping[str, float]
) -> tuple[Graph, dict[str, Tensor]]:
    """The step of all parameters; those that are alike are traced once where that is the same."""
    if _updates_each_alone(optimizer):
        alike: dict[Any, list[Slot]] = {}
        for slot in slots:
            names = tuple(state[slot.path].items())
            alike.setdefault((slot.group, slot.shape, slot.tensor.dtype, names), []).append(slot)
        first = [slots[0] for slots in alike.values()]
        graph, constants = _traced(optimizer, _Step(optimizer, first, state, scalars))
        twins = {slots[0].path: [slot.path for slot in slots[1:]] for slots in alike.values()}
        repeated = repeat(graph, twins)
        if repeated is not None:
            return repeated, constants
    return _traced(optimizer, _Step(optimizer, slots, state, scalars))


def _updates_each_alone(optimizer: Optimizer) -> bool:
    """Whether the step treats parameters of a group alike: torch's do, others may do anything."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _traced(
    optimizer: Optimizer, body: _Body, *, prefix: str = "optimizer."
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a body, and its constants."""
    with explained(optimizer), torch.no_grad(), compat.fake_mode(numbers=True) as mode:
        body.prepare()
        traced = trace.run_trace(body, body.fakes, body.recorder)
        _check_branches(optimizer, compat.number_guards(mode))
    sinks = [(*key, node) for key, node in zip(body.results, traced.outputs, strict=True)]
    return to_graph(traced, body.inputs, sinks, prefix=prefix)


def _check_branches(optimizer: Optimizer, guards: Sequence[str]) -> None:
    """Whether a number is 0 may decide what the step does, for it is part of what was captured."""
    if guards:
        raise CaptureError(
            f"{type(optimizer).__name__} decides by a hyperparameter what its step does",
            where=guards,
            hint=f"only whether one of {', '.join(SCALARS)} is 0 may decide that",
        )


class _Body:
    """A function that is traced, and what came of it."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.recorder = trace.Recorder("optimizer")
        self.inputs: list[tuple[str, str]] = []
        self.fakes: list[Tensor] = []
        self.results: list[tuple[str, str]] = []

    def prepare(self) -> None:
        """Makes the inputs, under the mode in which tensors have no values."""
        for slot in self.slots:
            for kind in ("param", "grad"):
                self.add(kind, slot.path, slot.shape, slot.tensor.dtype, device_of(slot.tensor))

    def add(self, kind: str, path: str, *like: Any) -> None:
        """Makes an input of a shape, dtype and device."""
        shape, dtype, device = like
        self.fakes.append(torch.empty(shape, dtype=dtype, device=device))
        self.inputs.append((kind, path))

    def __call__(self, *fakes: Tensor) -> list[Any]:
        """Runs the function; what it returns is described by `results`."""
        with compat.Functional() as functional, self.recorder:
            given = [functional.wrap(fake) for fake in fakes]
            wrapped = dict(zip(self.inputs, given, strict=True))
            for slot in self.slots:
                wrapped["param", slot.path].grad = wrapped["grad", slot.path]
            new: list[Any] = []
            originals = dict(zip(self.inputs, fakes, strict=True))
            for key, item in self.run(wrapped):
                plain = functional.unwrap(item)
                if plain is not originals[key]:
                    self.results.append(key)
                    new.append(plain)
            return new

    def run(self, wrapped: Mapping[tuple[str, str], Tensor]) -> Iterator[Changed]:
        """What the inputs have become, by kind and path."""
        raise NotImplementedError


Changed = tuple[tuple[str, str], Any]


class _Adjustment(_Body):
    def __init__(self, slots: Sequence[Slot], adjust: Adjust) -> None:
        super().__init__(slots)
        self.adjust = adjust

    def run(self, wrapped: Mapping[tuple[str, str], Tensor]) -> Iterator[Changed]:
        parameters = [wrapped["param", slot.path] for slot in self.slots]
        self.adjust(parameters)
        for slot, parameter in zip(self.slots, parameters, strict=True):
            yield ("grad", slot.path), parameter.grad


class _Step(_Body):
    def __init__(
        self,
        optimizer: Optimizer,
        slots: Sequence[Slot],
        state: State,
        scalars: Mapping[str, float],
    ) -> None:
        super().__init__(slots)
        self.optimizer, self.state, self.scalars = optimizer, state, scalars

    def prepare(self) -> None:
        super().prepare()
        for slot in self.slots:
            for name, item in self.state[slot.path].items():
                self.add("state", f"{slot.path}/{name}", item.shape, item.dtype, item.device)

    def run(self, wrapped: Mapping[tuple[str, str], Tensor]) -> Iterator[Changed]:
        params: dict[int, list[Tensor]] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        for slot in self.slots:
            parameter = wrapped["param", slot.path]
            params.setdefault(slot.group, []).append(parameter)
            names = self.state[slot.path]
            state[parameter] = {n: wrapped["state", f"{slot.path}/{n}"] for n in names}
        shadow = shadow_of(self.optimizer, params, state, dict(self._numbers()))
        before = _settings(shadow)
        step(self.optimizer, shadow)
        changed = [name for name, item in _settings(shadow).items() if before.get(name) != item]
        if changed:
            raise CaptureError(
                f"the step of {type(shadow).__name__} changes its `{changed[0]}`",
                where=["a captured step would not do that again"],
                hint="keep it as a tensor in the optimizer's state",
            )
        yield from self._final(shadow, wrapped)

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
