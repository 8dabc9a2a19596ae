"""Annotations of Cell borders, made part of the graph.

The captured graph only records which values cross a border. Where a border is annotated, an op is
put there that passes the value on, so that the uses on the two sides may see two layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from distcell.errors import StrategyError
from distcell.graph import Border, Graph, Op, Ref, Value
from distcell.rules.constrain import CONSTRAIN
from distcell.strategy.resolve import CellSpec
from distcell.strategy.spec import TensorSpec


def constrain_borders(
    graph: Graph, cells: Mapping[str, CellSpec]
) -> tuple[Graph, dict[str, TensorSpec]]:
    """The graph with an op at each annotated border, and the spec of each value that they make.

    Raises:
        StrategyError: When a cell is annotated with more inputs or outputs than it has tensors.
    """
    rewriter = _Rewriter(graph)
    for place, border in enumerate(graph.borders):
        spec = cells.get(border.cell)
        if spec is None:
            continue
        for index, one in enumerate(_checked(spec.inputs, border, border.inputs, "inputs")):
            if one is not None and border.inputs[index] in graph.values:
                rewriter.constrain_input(place, index, one)
        for index, one in enumerate(_checked(spec.outputs, border, border.outputs, "outputs")):
            if one is not None and border.outputs[index] in graph.values:
                rewriter.constrain_output(place, index, one)
    return rewriter.graph(), rewriter.specs


def _checked(
    specs: Sequence[TensorSpec | None] | None, border: Border, values: Sequence[str], word: str
) -> Sequence[TensorSpec | None]:
    if specs is not None and len(specs) > len(values):
        source = next((s.source for s in specs if s is not None and s.source), "")
        raise StrategyError(
            f"`{border.cell or 'the net'}` has {len(values)} tensor {word}, "
            f"its strategy names {len(specs)}",
            where=[source] if source else [],
            hint="give one entry for each tensor",
        )
    return specs or ()


class _Rewriter:
    def __init__(self, graph: Graph) -> None:
        self.base = graph
        self.ops = list(graph.ops)
        self.outputs = list(graph.outputs)
        self.borders = list(graph.borders)
        self.values = dict(graph.values)
        self.specs: dict[str, TensorSpec] = {}
        self.before: dict[int, list[Op]] = {}
        self.uses: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                self.uses.setdefault(name, []).append(index)

    def graph(self) -> Graph:
        ops: list[Op] = []
        for index, op in enumerate(self.ops):
            ops.extend(self.before.get(index, ()))
            ops.append(op)
        ops.extend(self.before.get(len(self.ops), ()))
        return Graph(
            self.base.inputs, tuple(ops), tuple(self.outputs), self.values, tuple(self.borders)
        )

    def constrain_input(self, place: int, index: int, spec: TensorSpec) -> None:
        border = self.borders[place]
        name, inside = border.inputs[index], _within(border.cell)
        uses = [i for i in self.uses.get(name, ()) if inside(self.ops[i].cell)]
        if not uses:
            return
        new = self._insert(name, uses[0], spec, border.cell)
        self._rename(name, new, uses)
        for other, inner in enumerate(self.borders):
            if inside(inner.cell):
                self.borders[other] = replace(inner, inputs=_swap(inner.inputs, name, new))

    def constrain_output(self, place: int, index: int, spec: TensorSpec) -> None:
        border = self.borders[place]
        name, inside = border.outputs[index], _within(border.cell)
        uses = [i for i in self.uses.get(name, ()) if not inside(self.ops[i].cell)]
        leaves = any(output.value == name for output in self.outputs)
        if not uses and not leaves:
            return
        new = self._insert(name, uses[0] if uses else len(self.ops), spec, border.cell)
        self._rename(name, new, uses)
        self.outputs = [replace(o, value=new) if o.value == name else o for o in self.outputs]
        for other, outer in enumerate(self.borders):
            if other != place and not inside(outer.cell):
                inputs, outputs = _swap(outer.inputs, name, new), _swap(outer.outputs, name, new)
                self.borders[other] = Border(outer.cell, inputs, outputs)

    def _insert(self, name: str, index: int, spec: TensorSpec, cell: str) -> str:
        value = self.values[name]
        new = f"{name}.in_{cell or 'net'}"
        while new in self.values:
            new += "_"
        self.values[new] = Value(new, value.shape, value.dtype)
        phase = self.ops[index].phase if index < len(self.ops) else "forward"
        op = Op(CONSTRAIN, (Ref(name),), outputs=(new,), cell=cell, source=spec.source, phase=phase)
        self.before.setdefault(index, []).append(op)
        self.specs[new] = spec
        return new

    def _rename(self, name: str, new: str, uses: Iterable[int]) -> None:
        moved = set(uses)
        for index in moved:
            self.ops[index] = self.ops[index].map_refs(lambda n: Ref(new if n == name else n))
        self.uses[new] = sorted(moved)
        self.uses[name] = [i for i in self.uses.get(name, ()) if i not in moved]


def _swap(names: Sequence[str], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in names)


def _within(cell: str) -> Callable[[str], bool]:
    if not cell:
        return lambda path: True
    return lambda path: path == cell or path.startswith(f"{cell}.")
