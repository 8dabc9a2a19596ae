"""From the plan to the program: each op on local tensors, with the collectives that it needs.

Note: pending. The result of an op over a split reduction is a partial sum. It stays *pending* until
a use needs it; then it becomes the layout that the plan gives the value, by a reduce-scatter where
the plan splits a dim by the same axes. A pending value that is used once, by data movement or by a
sum with another pending value, is not reduced before but after that: gradients that are added up
are reduced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distcell.graph import (
    GRADIENTS,
    Graph,
    Input,
    Op,
    Output,
    Ref,
    Value,
    verify,
    without_dead_ops,
)
from distcell.layout import Dim, Layout, canonical
from distcell.partition.compatible import choose_split
from distcell.partition.emit import Emitter, Reshard
from distcell.partition.infer import infer_results
from distcell.program import Program
from distcell.rules.constrain import CONSTRAIN
from distcell.rules.factors import layout_of, local_op, partial_of
from distcell.rules.notation import Builder, Call, OpRule
from distcell.rules.table import find, rule_of, rules_of
from distcell.sharding.flow import axes_of, splits_of, without_axes
from distcell.sharding.plan import Plan


@dataclass(frozen=True)
class Partitioned:
    """The program of a plan, and the reshards in it for the report."""

    program: Program
    reshards: tuple[Reshard, ...]


def partition(plan: Plan) -> Partitioned:
    """The program that does what the plan's graph does, on all ranks together."""
    worker = _Partitioner(plan)
    program = worker.run()
    verify(program.graph)
    return Partitioned(program, tuple(worker.emitter.reshards))


class _Partitioner:
    def __init__(self, plan: Plan) -> None:
        self.graph, self.mesh = plan.graph, plan.mesh
        self.plan = plan
        self.emitter = Emitter(plan.mesh)
        self.goals: dict[str, Layout] = {
            name: canonical(layout, plan.mesh) for name, layout in plan.layouts.items()
        }
        self.values: dict[str, Value] = dict(plan.graph.values)
        # where a value of the graph is found in the program, as it was made
        self.homes: dict[str, str] = {}
        # the ops that only move data, by the value that they make
        self.moves: dict[str, tuple[Call, OpRule]] = {}
        self.exported = {output.value for output in plan.graph.outputs}

    def run(self) -> Program:
        self._tie_tangents()
        for item in self.graph.inputs:
            value = self.values[item.value]
            self.emitter.add_value(value, self.goals.get(item.value))
            self.homes[item.value] = item.value
        for op, rule in zip(self.graph.ops, rules_of(self.graph), strict=True):
            self.place(op, rule)
        outputs = tuple(self._output(output) for output in self.graph.outputs)
        emitter = self.emitter
        graph = Graph(self.graph.inputs, tuple(emitter.ops), outputs, emitter.values)
        graph = without_dead_ops(graph)
        layouts = {n: emitter.layouts[n] for n, v in graph.values.items() if v.is_tensor}
        return Program(self.mesh, graph, layouts)

    def _tie_tangents(self) -> None:
        """Under `data: local` the gradient of an output comes in as the part that went out."""
        if self.plan.data != "local":
            return
        outputs = {o.path: o.value for o in self.graph.outputs if o.kind == "output"}
        for item in self.graph.inputs:
            if item.kind == "tangent":
                self.goals[item.value] = self._local_output(self.goals[outputs[item.path]])

    def place(self, op: Op, rule: OpRule) -> None:
        """Adds one op of the graph to the program."""
        if op.target == CONSTRAIN:
            (result,) = op.outputs
            self.homes[result] = self.fetch(op.inputs[0], self.goals[result], op)
            return
        tensors = tuple(v for v in (self.values[n] for n in op.inputs) if v.is_tensor)
        results = tuple(v for v in (self.values[n] for n in op.outputs) if v.is_tensor)
        call = Call(op, tensors, results)
        kept = self._kept_pending(op, rule, tensors)
        split = self._choose(rule, tensors, results, kept)
        if any(rule.kind(name) == "lower" for name in split):
            self._lower(call, rule, split)
        else:
            self._emit(call, rule, split, kept)

    def _kept_pending(self, op: Op, rule: OpRule, tensors: Sequence[Value]) -> tuple[str, ...]:
        """The axes over which the op may work on partial sums; see the note on pending values."""
        if rule.priority != 0:
            return ()
        held = [self.emitter.layouts[self.homes[value.name]] for value in tensors]
        pending = frozenset(i for i, layout in enumerate(held) if layout.partial)
        if not pending or pending not in rule.linear:
            return ()
        axes = {frozenset(held[i].partial) for i in pending}
        reductions = {held[i].reduction for i in pending}
        if len(axes) != 1 or reductions != {"sum"}:
            return ()
        if any(self._num_uses(tensors[i].name) > 1 for i in pending):
            return ()
        kept = next(iter(axes))
        if any(kept & set(layout.split_axes) for layout in held):
            return ()
        return tuple(sorted(kept, key=self.mesh.names.index))

    def _num_uses(self, name: str) -> int:
        return len(self.graph.users.get(name, ())) + (name in self.exported)

    def _choose(
        self,
        rule: OpRule,
        tensors: Sequence[Value],
        results: Sequence[Value],
        kept: tuple[str, ...],
    ) -> dict[str, Dim]:
        layouts: list[Layout | None] = []
        for value in tensors:
            held = self.emitter.layouts[self.homes[value.name]]
            if kept and held.partial:
                layouts.append(held.without_partial())
            else:
                layouts.append(self._goal(value.name))
        layouts += [self.goals.get(value.name) for value in results]
        if kept:
            layouts = [
                layout if layout is None or not set(kept) & layout.axes else None
                for layout in layouts
            ]
        weights = tuple(value.nbytes for value in (*tensors, *results))
        return dict(choose_split(rule, tuple(layouts), weights, self.mesh))

    def _goal(self, name: str) -> Layout:
        """The layout in which a value is used unless an op needs another."""
        held = self.emitter.layouts[self.homes[name]]
        return self.goals.get(name, canonical(held.without_partial(), self.mesh))

    def fetch(self, name: str, layout: Layout, op: Op) -> str:
        """The name in the program of a value of the graph, in a layout."""
        home = self.homes[name]
        held = self.emitter.layouts[home]
        if held == layout:
            return home
        if held.partial and not layout.partial:
            home = self.emitter.reshard(home, self._goal(name), op)
        return self._moved_copy(name, layout) or self.emitter.reshard(home, layout, op)

    def _moved_copy(self, name: str, layout: Layout) -> str | None:
        """The value in a layout made from a copy of what it was moved from, without communication.

        Where a tensor was gathered already, its transpose need not be gathered as well.
        """
        found = self.emitter.copy_of(self._settled_home(name), layout)
        if found is not None or name not in self.moves:
            return found
        call, rule = self.moves[name]
        split = splits_of(rule, len(rule.operands), layout, self.mesh)
        if canonical(layout_of(rule.results[0], rule, split), self.mesh) != layout:
            return None
        wanted = canonical(layout_of(rule.operands[0], rule, split), self.mesh)
        operand = self._moved_copy(call.operands[0].name, wanted)
        if operand is None:
            return None
        local = local_op(call, rule, split).map_refs(lambda _: Ref(operand))
        result = replace(call.results[0], name=self.emitter.fresh(name))
        self.emitter.add_value(result, layout)
        self.emitter.add(replace(local, outputs=(result.name,)))
        self.emitter.note_copy(self._settled_home(name), layout, result.name)
        return result.name

    def _settled_home(self, name: str) -> str:
        """The name in the program under which copies of a value in other layouts are kept."""
        home = self.homes[name]
        return self.emitter.copy_of(home, self._goal(name)) or home

    def _emit(
        self, call: Call, rule: OpRule, split: Mapping[str, Dim], kept: tuple[str, ...]
    ) -> None:
        names = self._fetch_operands(call, rule, split, kept)
        local = local_op(call, rule, split)
        uses = iter(names)
        tensor_names = {v.name for v in call.operands}
        local = local.map_refs(lambda n: Ref(next(uses) if n in tensor_names else self.homes[n]))
        for value, dims in zip(call.results, rule.results, strict=True):
            layout = canonical(layout_of(dims, rule, split), self.mesh)
            axes, reduction = partial_of(dims, rule, split)
            partial = tuple(sorted({*axes, *kept}, key=self.mesh.names.index))
            self.emitter.add_value(value, replace(layout, partial=partial, reduction=reduction))
        if _is_move(call, rule):
            self.moves[call.op.outputs[0]] = (call, rule)
        for name in call.op.outputs:
            self.homes[name] = name
            if not self.values[name].is_tensor:
                self.emitter.add_value(self.values[name], None)
        self.emitter.add(local)

    def _fetch_operands(
        self, call: Call, rule: OpRule, split: Mapping[str, Dim], kept: tuple[str, ...] = ()
    ) -> list[str]:
        names = []
        for value, dims in zip(call.operands, rule.operands, strict=True):
            layout = canonical(layout_of(dims, rule, split), self.mesh)
            held = self.emitter.layouts[self.homes[value.name]]
            if kept and held.partial:
                layout = replace(layout, partial=held.partial)
            names.append(self.fetch(value.name, layout, call.op))
        return names

    def _lower(self, call: Call, rule: OpRule, split: Mapping[str, Dim]) -> None:
        definition = find(call.op.target)
        if definition is None or definition.lower is None:
            raise ValueError(f"{call.op.target} has factors to lower, and no lowering: {rule}")
        fetched = iter(self._fetch_operands(call, rule, split))
        aliases = iter([self._alias(value, next(fetched)) for value in call.operands])
        tensor_names = {v.name for v in call.operands}
        op = call.op.map_refs(lambda n: Ref(next(aliases) if n in tensor_names else n))
        lowered = Call(
            op, tuple(self.values[n] for n in _tensor_names(op, self.values)), call.results
        )
        refs = definition.lower(Builder(lambda sub: self._place_sub_op(sub, op)), lowered)
        for value, ref in zip(call.results, refs, strict=True):
            self.homes[value.name] = self.homes[ref.name]

    def _alias(self, value: Value, home: str) -> str:
        """A name for an operand of a lowering: the value in the layout that was fetched."""
        alias = replace(value, name=self.emitter.fresh(value.name))
        self.values[alias.name] = alias
        self.homes[alias.name] = home
        return alias.name

    def _place_sub_op(self, sub: Op, parent: Op) -> tuple[Value, ...]:
        operands = [self.values[name] for name in sub.inputs]
        inferred = infer_results(sub, [v for v in operands if v.is_tensor])
        base = parent.outputs[0]
        values = tuple(Value(self.emitter.fresh(base), *found) for found in inferred)
        self.values.update((value.name, value) for value in values)
        op = replace(
            parent,
            target=sub.target,
            args=sub.args,
            kwargs=sub.kwargs,
            outputs=tuple(value.name for value in values),
            many=len(values) > 1,
        )
        self.place(op, rule_of(Call(op, tuple(operands), values)))
        return values

    def _output(self, output: Output) -> Output:
        value = self.values[output.value]
        if not value.is_tensor:
            return replace(output, value=self.homes[output.value])
        op = Op(f"{output.kind} {output.path}", phase="output")
        producer = self.graph.producers.get(output.value)
        if producer is not None:
            op = replace(producer, target=op.target)
        layout = self._output_layout(output, value)
        return replace(output, value=self.fetch(output.value, layout, op))

    def _output_layout(self, output: Output, value: Value) -> Layout:
        kind = GRADIENTS.get(output.kind, output.kind)
        for item in self.graph.inputs:
            if item.kind == kind and item.path == output.path:
                return self._input_layout(item)
        if output.kind == "output" and self.plan.data == "local":
            return self._local_output(self._goal(output.value))
        return Layout.of(value.shape)

    def _local_output(self, goal: Layout) -> Layout:
        """Under `data: local` a rank gets its part: split by the axes that split the inputs."""
        axes = {
            axis
            for item in self.graph.inputs
            if item.kind == "input"
            for axis in self.goals[item.value].split_axes
        }
        dims = tuple(without_axes(dim, axes_of(dim) - axes) for dim in goal.dims)
        return canonical(Layout(dims), self.mesh)

    def _input_layout(self, item: Input) -> Layout:
        if item.kind == "input" and self.plan.data == "full":
            return Layout.of(self.values[item.value].shape)
        return self.goals[item.value]


def _is_move(call: Call, rule: OpRule) -> bool:
    """Whether an op makes one tensor with the elements of its only operand."""
    if rule.priority or len(call.operands) != 1 or len(call.results) != 1:
        return False
    same_size = math.prod(call.operands[0].shape) == math.prod(call.results[0].shape)
    factors = [{name for dim in dims for name in dim} for dims in rule.tensors]
    return same_size and factors[0] == factors[1] and frozenset({0}) in rule.linear


def _tensor_names(op: Op, values: Mapping[str, Value]) -> list[str]:
    return [name for name in op.inputs if values[name].is_tensor]
