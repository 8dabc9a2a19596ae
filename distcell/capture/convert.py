"""Makes a graph of a trace: values with readable names, ops with their place in the network."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from distcell import compat
from distcell.capture.rewrites import INVOLUTIONS, rewrite
from distcell.capture.trace import Call, Note, Traced
from distcell.dtype import NAMES
from distcell.errors import CaptureError
from distcell.graph import (
    Arg,
    Border,
    DeviceArg,
    DtypeArg,
    Graph,
    Input,
    Op,
    Output,
    Ref,
    Value,
    verify,
    without_dead_ops,
)

Sink = tuple[str, str, Any]
"""An output: its kind, its path and the node."""


def to_graph(
    traced: Traced,
    inputs: Sequence[tuple[str, str]],
    sinks: Iterable[Sink],
    tensors: Sequence[tuple[str, Tensor]] = (),
    *,
    prefix: str = "",
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a trace, and the tensors that are constants in it by path.

    Args:
        traced: Ops that write into no tensor.
        inputs: Kind and path of each placeholder.
        sinks: What leaves the graph.
        tensors: Tensors that have a name, for constants that are one of them.
        prefix: What the paths of other constants begin with.
    """
    names = {id(tensor): name for name, tensor in tensors}
    builder = _Builder(traced, inputs, names, prefix=prefix)
    for node in traced.module.graph.nodes:
        builder.add(node)
    outputs = tuple(Output(builder.name_of(node), kind, path) for kind, path, node in sinks)
    borders = tuple(border for call in traced.calls if (border := builder.border(call)))
    graph = Graph(tuple(builder.inputs), tuple(builder.ops), outputs, builder.values, borders)
    return _tidy(graph, builder.constants)


def _tidy(graph: Graph, constants: dict[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """The graph without dead ops and without constants and keys that nothing uses."""
    graph = without_dead_ops(graph)
    used = {name for op in graph.ops for name in op.inputs} | {o.value for o in graph.outputs}
    optional = ("constant", "random")
    kept = tuple(i for i in graph.inputs if i.kind not in optional or i.value in used)
    gone = {i.value for i in graph.inputs} - {i.value for i in kept}
    values = {name: value for name, value in graph.values.items() if name not in gone}
    borders = tuple(b for b in graph.borders if any(n in values for n in b.inputs + b.outputs))
    graph = Graph(kept, graph.ops, graph.outputs, values, borders)
    verify(graph)
    paths = {i.path for i in kept if i.kind == "constant"}
    for path in paths:
        if constants[path].requires_grad:
            raise CaptureError(
                f"the call uses the tensor `{path}`, which requires a gradient and is no parameter",
                hint="make it a parameter of the module, or an argument; or detach it",
            )
    return graph, {path: tensor for path, tensor in constants.items() if path in paths}


class Namer:
    """Gives out names that are valid in Python and each used once.

    Example:
        >>> namer = Namer()
        >>> namer("mm"), namer("mm"), namer("blocks.0.weight"), namer("sum")
        ('mm', 'mm_1', 'blocks_0_weight', 'sum_1')
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken) | set(keyword.kwlist) | set(dir(builtins))
        self._next: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        base = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        base = f"v{base}" if base[0].isdigit() else base
        name, number = base, self._next.get(base, 0)
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._next[base] = number
        self._taken.add(name)
        return name


class _Builder:
    def __init__(
        self,
        traced: Traced,
        inputs: Sequence[tuple[str, str]],
        names: dict[int, str],
        *,
        prefix: str,
    ) -> None:
        self.traced = traced
        self.placeholders = iter(inputs)
        self.tensor_names = names
        self.prefix = prefix
        self.namer = Namer()
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Tensor] = {}
        self.results: dict[fx.Node, Any] = {}  # the value's name; a list of names or None
        self._constant_names: dict[int, str] = {}
        self._numbers: dict[tuple[str, str], str] = {}  # computed once each
        self._undone: dict[str, tuple[str, Ref]] = {}

    def add(self, node: fx.Node) -> None:
        """Adds what one FX node says."""
        if node.op == "placeholder":
            kind, path = self.traced.marks.get(node) or next(self.placeholders)
            self.results[node] = self._input(kind, path, node.meta["val"])
        elif node in self.traced.marks:
            self.results[node] = self._input(*self.traced.marks[node], node.meta["val"])
        elif node.op == "get_attr":
            self.results[node] = self._constant(getattr(self.traced.module, str(node.target)))
        elif node.target is operator.getitem and isinstance(self._result(node.args[0]), list):
            self.results[node] = self._result(node.args[0])[node.args[1]]
        elif node.op == "call_function":
            self._call(node)

    def name_of(self, item: Any) -> str:
        """The value of a node, or of a tensor that nothing traced."""
        name = self._result(item) if isinstance(item, fx.Node) else self._constant(item)
        assert isinstance(name, str)
        return name

    def border(self, call: Call) -> Border | None:
        """A cell's border, None where no value of it came to be part of the graph.

        Values that did not (nothing traced or used them) have names that are no values: the others
        keep their places.
        """
        sides = [[self._known(item) for item in side] for side in (call.inputs, call.outputs)]
        if not any(name for side in sides for name in side):
            return None
        inputs, outputs = (
            tuple(name or f"dead.{place}" for place, name in enumerate(side)) for side in sides
        )
        return Border(call.cell, inputs, outputs)

    def _known(self, item: Any) -> str | None:
        if isinstance(item, fx.Node):
            name = self.results.get(item)
            return name if isinstance(name, str) else None
        return self._constant_names.get(id(item))

    def _result(self, node: Any) -> Any:
        return self.results[node]

    def _input(self, kind: str, path: str, made: Any) -> str:
        prefix = "" if kind in ("param", "buffer", "input", "constant") else f"{kind}_"
        name = self._value(f"{prefix}{path}", made)
        self.inputs.append(Input(name, kind, path))
        return name

    def _constant(self, tensor: Tensor) -> str:
        name = self._constant_names.get(id(tensor))
        if name is None:
            path = self.tensor_names.get(id(tensor), f"{self.prefix}constant{len(self.constants)}")
            name = self._input("constant", path, tensor)
            self.constants[path] = tensor
            self._constant_names[id(tensor)] = name
        return name

    def _value(self, wanted: str, made: Any) -> str:
        name = self.namer(wanted)
        self.values[name] = describe(name, made)
        return name

    def _call(self, node: fx.Node) -> None:
        target, made = target_name(node), node.meta.get("val")
        note = self.traced.notes.get(node, Note())
        try:
            args = tuple(self._arg(arg) for arg in node.args)
            kwargs = {key: self._arg(arg) for key, arg in node.kwargs.items()}
        except _UnwritableError as error:
            raise _unwritable(error.args[0], target, note) from error
        base = target.split(".")[1].strip("_")
        many = isinstance(made, (list, tuple))
        result = None if many or made is None else describe(base, made)
        call = self._twice(target, args) or rewrite((target, args, kwargs), result, self.values)
        if isinstance(call, Ref):
            self.results[node] = call.name
            return
        spelt = target, repr(args)  # 1 == 1.0 == True, and they differ
        if target.startswith("py.") and (known := self._numbers.get(spelt)):
            self.results[node] = known
            return
        parts = _asked_for(node, made) if isinstance(made, (list, tuple)) else [made]
        names = [None if part is None else self._value(base, part) for part in parts]
        self.results[node] = names if many else names[0]
        if target in INVOLUTIONS and names[0] is not None:
            self._undone[names[0]] = (target, args[0])
        if target.startswith("py.") and names[0] is not None:
            self._numbers[spelt] = names[0]
        self.ops.append(
            Op(
                call[0],
                call[1],
                tuple(call[2].items()),
                tuple(name for name in names if name is not None),
                many,
                note.cell,
                note.source,
                note.phase,
            )
        )

    def _twice(self, target: str, args: tuple[Arg, ...]) -> Ref | None:
        """The operand of an op that is done a second time and so undone."""
        if target not in INVOLUTIONS:
            return None
        first = self._undone.get(args[0].name)
        return first[1] if first is not None and first[0] == target else None

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return Ref(self.name_of(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return DtypeArg(_dtype_name(arg))
        if isinstance(arg, torch.device):
            return DeviceArg()
        if isinstance(arg, (torch.layout, torch.memory_format, torch.Generator)):
            return None
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise _UnwritableError(arg)


class _UnwritableError(Exception):
    """An argument of an op is nothing that a graph can hold."""


def _unwritable(arg: Any, target: str, note: Note) -> CaptureError:
    who = f"cell `{note.cell}`" if note.cell else "the network"
    if isinstance(arg, complex):
        what, hint = f"the complex number {arg!r}", f"make it a tensor: `torch.tensor({arg!r})`"
    else:
        what, hint = f"a {type(arg).__name__}", "compute with tensors and numbers alone"
    return CaptureError(
        f"{who} computes with {what}, which a captured step cannot hold",
        where=[f"{note.source or 'unknown line'}  calls {target}"],
        hint=hint,
    )


def describe(name: str, made: Any) -> Value:
    """The value for a traced tensor or number."""
    if isinstance(made, Tensor):
        return Value(name, tuple(int(size) for size in made.shape), _dtype_name(made.dtype))
    if isinstance(made, (bool, torch.SymBool)):
        return Value(name, (), "bool_")
    return Value(name, (), "int" if isinstance(made, (int, torch.SymInt)) else "float")


def _asked_for(node: fx.Node, made: Sequence[Any]) -> Sequence[Any]:
    """The results of an op, None for those that its mask leaves out.

    Tensors without data have some of them all the same, such as the gradient of a batch norm's
    input: what runs has not.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return made
    mask = compat.output_mask(node.target, node.args, node.kwargs)
    if mask is None:
        return made
    return [part if wanted else None for part, wanted in zip(made, mask, strict=True)]


def target_name(node: fx.Node) -> str:
    """The name of what a node calls: `aten.mm.default`, `py.mul`.

    Raises:
        CaptureError: When it is neither an operator of torch nor one on numbers.
    """
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    if hasattr(operator, name) or name.lstrip("_").startswith("sym_"):
        return "py." + name.lstrip("_").removeprefix("sym_")
    raise CaptureError(
        f"the call of `{target}` cannot be captured",
        hint="distcell captures operators of torch; this one runs functions of its own",
    )


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise CaptureError(f"tensors of type {dtype} are not supported")
    return NAMES[dtype]
