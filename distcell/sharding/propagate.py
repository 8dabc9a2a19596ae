"""Propagation: from a few annotated values to a layout on every value.

The model is Shardy's: axes flow along the factors of ops in both directions on a worklist, first
along element-wise ops and data movement, then through any op, at last along reductions; where two
axes collide they are left alone until a final round decides in favour of the weightier tensors.
Partial sums never flow: they arise at partitioning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distcell.graph import Graph, Op, Value
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.rules.notation import OpRule
from distcell.rules.table import find, rules_of
from distcell.sharding.flow import Mode, Tensor, flow
from distcell.sharding.plan import Note, Reason

MODES = (Mode(0), Mode(1), Mode(2), Mode(2, aggressive=True))

PARAMETER_WEIGHT = 64
"""How much more a parameter counts than another tensor of its size when axes collide: how a
parameter is split is what users mean most."""


@dataclass(frozen=True)
class Seed:
    """An annotation of one value.

    Args:
        layout: The layout asked for.
        closed: For each dim whether propagation may not add axes.
        source: Where it was said: `file:line:column`.
    """

    layout: Layout
    closed: tuple[bool, ...]
    source: str


@dataclass
class Propagation:
    """The state of one run: layouts grow, nothing is ever taken back."""

    graph: Graph
    mesh: Mesh
    layouts: dict[str, Layout]
    closed: dict[str, tuple[bool, ...]]
    reasons: dict[str, list[Reason]]
    ties: Mapping[str, tuple[str, ...]]
    params: frozenset[str]
    rules: Mapping[int, OpRule] = field(default_factory=dict)

    def run(self) -> None:
        for mode in MODES:
            self._to_fixed_point(mode)

    def _to_fixed_point(self, mode: Mode) -> None:
        queue: deque[Op] = deque(self.graph.ops)
        waiting = set(map(id, queue))
        for names in list(self.ties.values()):
            self._tie(names, queue, waiting)
        while queue:
            op = queue.popleft()
            waiting.discard(id(op))
            for name in self._visit(op, mode):
                self._enqueue(name, queue, waiting)

    def _enqueue(self, name: str, queue: deque[Op], waiting: set[int]) -> None:
        producer = self.graph.producers.get(name)
        for op in (*((producer,) if producer else ()), *self.graph.users[name]):
            if id(op) not in waiting:
                waiting.add(id(op))
                queue.append(op)
        if name in self.ties:
            self._tie(self.ties[name], queue, waiting)

    def _visit(self, op: Op, mode: Mode) -> list[str]:
        rule = self.rules[id(op)]
        values = (*self.graph.tensors(op), *self.graph.results(op))
        values = tuple(v for v in values if v.is_tensor)
        if not any(self.layouts[v.name].axes for v in values):
            return []
        changes = flow(rule, tuple(self._tensor(v) for v in values), self.mesh, mode)
        changed = []
        for change in changes:
            target, source = values[change.tensor].name, values[change.source].name
            if self._grow(target, change.layout, f"{op.target} in {op.cell or 'the net'}", source):
                changed.append(target)
        return changed

    def _tensor(self, value: Value) -> Tensor:
        boost = PARAMETER_WEIGHT if value.name in self.params else 1
        return Tensor(self.layouts[value.name], self.closed[value.name], value.nbytes * boost)

    def _tie(self, names: tuple[str, ...], queue: deque[Op], waiting: set[int]) -> None:
        """Values that must live alike (a parameter, its gradient, its new value) share axes."""
        for source in names:
            for target in names:
                grown = _filled(self.layouts[target], self.layouts[source], self.closed[target])
                if self._grow(target, grown, "lives like", source):
                    self._enqueue(target, queue, waiting)

    def _grow(self, name: str, layout: Layout, source: str, via: str) -> bool:
        before = self.layouts[name]
        if layout == before:
            return False
        new = layout.axes - before.axes
        self.layouts[name] = layout
        for dim, parts in enumerate(layout.dims):
            for axis in (a for part in parts for a in part.axes if a in new):
                self.reasons[name].append(Reason(dim, axis, "op", source, via))
        return True


def _filled(mine: Layout, other: Layout, closed: tuple[bool, ...]) -> Layout:
    """My layout with the other's split on those of my open dims that are not split at all."""
    grown = mine
    for dim, parts in enumerate(other.dims):
        axes = {axis for part in parts for axis in part.axes}
        unsplit = not any(part.axes for part in grown.dims[dim])
        if axes and unsplit and not closed[dim] and not axes & grown.axes:
            grown = grown.with_dim(dim, parts)
    return grown


@dataclass(frozen=True)
class Sharding:
    """What propagation found."""

    layouts: Mapping[str, Layout]
    reasons: Mapping[str, tuple[Reason, ...]]
    notes: tuple[Note, ...]


def propagate(graph: Graph, mesh: Mesh, seeds: Mapping[str, Seed]) -> Sharding:
    """A layout for every tensor of a graph, from the annotations of some.

    Args:
        graph: The captured graph.
        mesh: The mesh; every axis in the seeds is one of its axes.
        seeds: The annotated values by name.
    """
    tensors = [value for value in graph.values.values() if value.is_tensor]
    layouts = {v.name: Layout.of(v.shape) for v in tensors}
    closed = {v.name: (False,) * len(v.shape) for v in tensors}
    reasons: dict[str, list[Reason]] = {v.name: [] for v in tensors}
    for name, seed in seeds.items():
        layouts[name], closed[name] = seed.layout, seed.closed
        for dim, parts in enumerate(seed.layout.dims):
            for axis in (a for part in parts for a in part.axes):
                reasons[name].append(Reason(dim, axis, "annotation", seed.source))
    params = frozenset(i.value for i in graph.inputs if i.kind == "param")
    state = Propagation(graph, mesh, layouts, closed, reasons, ties_of(graph), params)
    state.rules = {id(op): r for op, r in zip(graph.ops, rules_of(graph), strict=True)}
    state.run()
    return Sharding(
        state.layouts,
        {name: tuple(found) for name, found in state.reasons.items() if found},
        tuple(_unknown_ops(graph)),
    )


def ties_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For each value the values that must live like it: parameter, gradient, new value, state."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in graph.inputs:
        if item.kind in ("param", "state", "buffer"):
            groups.setdefault((item.kind, item.path), []).append(item.value)
    for output in graph.outputs:
        kind = "param" if output.kind == "grad" else output.kind
        if (kind, output.path) in groups:
            groups[kind, output.path].append(output.value)
    ties: dict[str, tuple[str, ...]] = {}
    for names in groups.values():
        distinct = tuple(dict.fromkeys(names))
        shapes = {graph.values[name].shape for name in distinct}
        if len(distinct) > 1 and len(shapes) == 1:
            ties.update(dict.fromkeys(distinct, distinct))
    return ties


def _unknown_ops(graph: Graph) -> Iterable[Note]:
    for op in graph.ops:
        if find(op.target) is None and any(v.is_tensor for v in graph.tensors(op)):
            size = sum(v.nbytes for v in (*graph.tensors(op), *graph.results(op)))
            where = op.cell or "the net"
            yield Note(
                "no rule",
                op.target,
                f"{op.target} in {where} ({op.source}) has no rule: "
                f"it runs replicated, {size} bytes",
            )
