"""One program of forward and backward as two, with the values that go from one to the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distcell.graph import GRADIENTS, Graph, Input, Op, Output, verify, without_dead_ops
from distcell.passes.aliases import RESHAPES, is_view
from distcell.program import Program


@dataclass(frozen=True)
class Joint:
    """The two halves of a program.

    Args:
        forward: Everything that depends on no incoming gradient. Its inputs are those of the
            whole but for the incoming gradients. Its outputs are those of the whole but for the
            gradients, and then the saved values (kind `saved`, path the name).
        backward: The rest. Its inputs are those of the whole that it uses, gradients among them,
            and then the saved values.
        saved: The names of the saved values.
    """

    forward: Program
    backward: Program
    saved: tuple[str, ...]


def split_forward_backward(program: Program) -> Joint:
    """The halves of a program before and after the gradients come in.

    What forward computes is never computed again in backward, but for views. Of a value and its
    views, which share their storage, only the value is saved.

    Args:
        program: A program with inputs of kind `tangent`.

    Example:
        >>> from distcell.graph import Ref, Value
        >>> from distcell.layout import Layout
        >>> from distcell.mesh import Mesh
        >>> names = ("x", "dy", "y", "dx")
        >>> ops = (Op("aten.exp.default", (Ref("x"),), outputs=("y",)),
        ...        Op("aten.mul.Tensor", (Ref("dy"), Ref("y")), outputs=("dx",)))
        >>> graph = Graph((Input("x", "input", "x"), Input("dy", "tangent", "0")), ops,
        ...               (Output("y", "output", "0"), Output("dx", "grad_input", "x")),
        ...               {name: Value(name, (2,), "f32") for name in names})
        >>> layouts = {name: Layout.of((2,)) for name in names}
        >>> joint = split_forward_backward(Program(Mesh(), graph, layouts))
        >>> joint.saved, [op.target for op in joint.backward.graph.ops]
        (('y',), ['aten.mul.Tensor'])
    """
    graph = program.graph
    late = _dependent(graph)
    forward_ops = [op for op in graph.ops if not late.intersection(op.inputs)]
    backward_ops = [op for op in graph.ops if late.intersection(op.inputs)]
    early_outputs = [o for o in graph.outputs if o.kind not in GRADIENTS and o.value not in late]
    late_outputs = [o for o in graph.outputs if o.kind in GRADIENTS or o.value in late]
    views = _Views(graph, forward_ops, _written(early_outputs, graph))
    for name in _used(backward_ops, late_outputs):
        views.need(name)
    views.settle()
    again = [op for op in forward_ops if views.again.issuperset(op.outputs)]
    backward_ops = again + backward_ops
    late_inputs = _late_inputs(graph, backward_ops, late_outputs, views.saved)
    backward = _half(program, late_inputs, backward_ops, late_outputs)
    saved = tuple(i.value for i in late_inputs if i.kind == "saved")
    outputs = [*early_outputs, *(Output(name, "saved", name) for name in saved)]
    inputs = [item for item in graph.inputs if item.kind != "tangent"]
    return Joint(_half(program, inputs, forward_ops, outputs), backward, saved)


def _dependent(graph: Graph) -> set[str]:
    """The values that depend on an incoming gradient."""
    late = {item.value for item in graph.inputs if item.kind == "tangent"}
    for op in graph.ops:
        if late.intersection(op.inputs):
            late.update(op.outputs)
    return late


def _used(ops: Iterable[Op], outputs: Iterable[Output]) -> list[str]:
    names = [name for op in ops for name in op.inputs] + [o.value for o in outputs]
    return list(dict.fromkeys(names))


def _written(outputs: Iterable[Output], graph: Graph) -> set[str]:
    """The inputs that forward overwrites: backward must see them as they were."""
    new = {(o.kind, o.path): o.value for o in outputs}
    found = {item.value: new.get((item.kind, item.path)) for item in graph.inputs}
    return {old for old, value in found.items() if value is not None and value != old}


@dataclass
class _Views:
    """Chooses between saving a view and making it again from what it looks at."""

    graph: Graph
    forward: list[Op]
    written: set[str]
    needed: dict[str, None] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    saved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._producers: Mapping[str, Op] = {n: op for op in self.forward for n in op.outputs}
        self._inputs = {item.value for item in self.graph.inputs}

    def need(self, name: str) -> None:
        """Notes that backward uses a value of forward."""
        if name in self._producers or name in self.written:
            self.needed[name] = None

    def settle(self) -> None:
        """Finds what is saved and which views are made again."""
        chains = {name: self._chain(name) for name in self.needed}
        roots = [root for root, _ in chains.values()]
        saved: set[str] = set()
        for name, (root, ops) in chains.items():
            free = not any(op.target in RESHAPES for op in ops)  # a reshape may have to copy
            shared = root in self._inputs or root in self.needed or roots.count(root) > 1
            if ops and (free or shared):
                self.again.update(name for op in ops for name in op.outputs)
                saved.add(root)
            else:
                saved.add(name)
        made = [name for op in self.forward for name in op.outputs if name in saved]
        kept = sorted(name for name in self.written if name in saved)
        self.saved = (*kept, *made)

    def _chain(self, name: str) -> tuple[str, list[Op]]:
        """What a value looks at in the end, and the views in between."""
        ops: list[Op] = []
        while (op := self._producers.get(name)) is not None and is_view(op):
            ops.insert(0, op)
            name = op.inputs[0]
        return name, ops


def _late_inputs(
    graph: Graph, ops: Iterable[Op], outputs: Sequence[Output], saved: Iterable[str]
) -> list[Input]:
    """What enters backward: inputs of the whole that it uses or writes, and saved values."""
    used, stored = set(_used(ops, outputs)), dict.fromkeys(saved)
    targets = {(output.kind, output.path) for output in outputs}
    inputs = [
        item
        for item in graph.inputs
        if item.value not in stored
        and (item.kind == "tangent" or item.value in used or (item.kind, item.path) in targets)
    ]
    return inputs + [Input(name, "saved", name) for name in stored if name in used]


def _half(
    program: Program, inputs: Sequence[Input], ops: Sequence[Op], outputs: Sequence[Output]
) -> Program:
    graph = program.graph
    names = {item.value for item in inputs} | {name for op in ops for name in op.outputs}
    borders = tuple(b for b in graph.borders if names.issuperset((*b.inputs, *b.outputs)))
    values = {name: value for name, value in graph.values.items() if name in names}
    half = without_dead_ops(Graph(tuple(inputs), tuple(ops), tuple(outputs), values, borders))
    verify(half)
    layouts = {n: layout for n, layout in program.layouts.items() if n in half.values}
    return Program(program.mesh, half, layouts)
