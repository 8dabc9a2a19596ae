"""What a step holds on each rank: by liveness of the program that the rank runs.

A reshape counts as a view. Where the strides make it copy, the figures are a little off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from distcell.graph import GRADIENTS, Op
from distcell.passes.aliases import is_view
from distcell.passes.split import split_forward_backward
from distcell.program import Program
from distcell.report.figures import RankFigures, Vector
from distcell.rules.constrain import CONSTRAIN
from distcell.runtime.storage import FOREVER, plan_storage

_FUSED = "distcell.all_reduce_many"


@dataclass(frozen=True)
class Memory:
    """The bytes of a training step, for each rank.

    Args:
        parameters: What the rank holds of the parameters.
        buffers: The same of buffers and constants.
        inputs: The same of what the network is called with.
        gradients: The same of the parameters' gradients.
        optimizer: The same of the optimizer's state.
        saved: Activations that forward leaves for backward.
        activations: The most that is held at one time of everything else that the program makes.
        peak: The most that is held at one time, all together.
    """

    parameters: Vector
    buffers: Vector
    inputs: Vector
    gradients: Vector
    optimizer: Vector
    saved: Vector
    activations: Vector
    peak: Vector


def memory_of(program: Program, state_bytes: Mapping[str, int]) -> Memory:
    """The bytes that a step holds.

    Args:
        program: Forward and backward of a call, or a whole step.
        state_bytes: For each parameter's path the bytes of optimizer state for each element.
    """
    figures = RankFigures(program)
    inputs = {kind: figures.zeros() for kind in ("param", "buffer", "input", "state")}
    optimizer = figures.zeros()
    for item in program.graph.inputs:
        kind = "buffer" if item.kind == "constant" else item.kind
        if kind in inputs:
            inputs[kind] = inputs[kind] + figures.nbytes(item.value)
        if item.kind == "param":
            optimizer += figures.numel(item.value) * state_bytes.get(item.path, 0)
    walk = _Walk(figures)
    walk.run(program)
    held = inputs["param"] + inputs["buffer"] + inputs["input"] + optimizer
    return Memory(
        parameters=inputs["param"],
        buffers=inputs["buffer"],
        inputs=inputs["input"],
        gradients=walk.gradient_bytes(program),
        optimizer=optimizer,
        saved=walk.saved,
        activations=walk.peak_activations,
        peak=held + walk.peak,
    )


class _Walk:
    """Goes through the ops in their order; what they make lives until it was used last."""

    def __init__(self, figures: RankFigures) -> None:
        self.figures = figures
        # results of fused reductions lie in a buffer that stays from step to step
        fused = [op for op in figures.program.graph.ops if op.target == _FUSED]
        self.lent = {name for op in fused for name in op.outputs}
        self.root: dict[str, str] = {}
        self.held: dict[str, Vector] = {}
        self.gradients: set[str] = set()
        self.live, self.live_gradients = figures.zeros(), figures.zeros()
        self.peak, self.peak_activations = figures.zeros(), figures.zeros()
        self.saved = figures.zeros()

    def run(self, program: Program) -> None:
        """Walks forward, then backward; or a step that is one program."""
        if not any(item.kind == "tangent" for item in program.graph.inputs):
            self._segment(program, donated=_replaced(program))
            return
        joint = split_forward_backward(program)
        self._segment(joint.forward)
        kept = {self.root.get(item.value) for item in joint.backward.graph.inputs}
        self.saved = sum((self.held[r] for r in kept if r in self.held), self.figures.zeros())
        self._segment(joint.backward)

    def gradient_bytes(self, program: Program) -> Vector:
        """The bytes of the parameters' gradients: those that leave, or live in the step."""
        params = {i.path: i.value for i in program.graph.inputs if i.kind == "param"}
        outputs = [o.value for o in program.graph.outputs if o.kind == "grad"]
        if outputs:
            return sum((self.figures.nbytes(name) for name in outputs), self.figures.zeros())
        trained = [params[o.path] for o in program.graph.outputs if o.kind == "param"]
        return sum((self.figures.nbytes(name) for name in trained), self.figures.zeros())

    def _segment(self, program: Program, donated: Iterable[str] = ()) -> None:
        storage = plan_storage(program, donated)
        graph = program.graph
        self.gradients |= {o.value for o in graph.outputs if o.kind in GRADIENTS}
        for item in graph.inputs:
            self.root.setdefault(item.value, item.value)
        for index, op in enumerate(graph.ops):
            self._set_roots(op, in_place=index in storage.inplace)
        last = self._last_uses(storage.last_use)
        boundary = next((i for i, op in enumerate(graph.ops) if op.phase != "forward"), None)
        for index, op in enumerate(graph.ops):
            if index == boundary and donated:
                self.saved = self.live.copy()
            self._make(op)
            self._drop([r for r in self._touched(op) if last.get(r, FOREVER) <= index])
        for index in storage.cloned:
            name = graph.outputs[index].value
            self._hold(f"{name} cloned", name)

    def _set_roots(self, op: Op, *, in_place: bool) -> None:
        for name in op.outputs:
            if in_place or op.target == CONSTRAIN or is_view(op):
                self.root[name] = self.root[op.inputs[0]]
            else:
                self.root[name] = name

    def _last_uses(self, by_name: Mapping[str, int]) -> dict[str, int]:
        last: dict[str, int] = {}
        for name, index in by_name.items():
            root = self.root[name]
            last[root] = max(last.get(root, -1), index)
        lent = [self.root[name] for name in self.lent.intersection(by_name)]
        last.update(dict.fromkeys(lent, FOREVER))
        return last

    def _touched(self, op: Op) -> set[str]:
        return {self.root[name] for name in (*op.inputs, *op.outputs)}

    def _make(self, op: Op) -> None:
        for name in op.outputs:
            if self.root[name] == name and name not in self.held:
                self._hold(name, name)

    def _hold(self, root: str, name: str) -> None:
        size = self.held[root] = self.figures.nbytes(name)
        self.live = self.live + size
        if name in self.gradients:
            self.live_gradients = self.live_gradients + size
        self.peak = np.maximum(self.peak, self.live)
        self.peak_activations = np.maximum(self.peak_activations, self.live - self.live_gradients)

    def _drop(self, roots: Iterable[str]) -> None:
        for root in roots:
            size = self.held.pop(root, None)
            if size is not None:
                self.live = self.live - size


def _replaced(program: Program) -> list[str]:
    """The inputs of a step that it overwrites: their new values leave under the same path."""
    new = {(output.kind, output.path) for output in program.graph.outputs}
    kinds = ("param", "state")
    graph = program.graph
    return [i.value for i in graph.inputs if i.kind in kinds and (i.kind, i.path) in new]
