"""The captured step as data: values, ops and what goes in and out.

One type serves from capture to execution. A captured graph speaks of global shapes alone. A program
(`distcell.program`) is the same graph after partitioning: its ops include collectives, and some of
their arguments are `RankArg`s, which have another value on each rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from distcell.dtype import itemsize
from distcell.layout import Dim, Layout, Part, interval
from distcell.mesh import Mesh

GRADIENTS = {"grad": "param", "grad_input": "input"}
"""The kinds of outputs that are gradients, and the kind of input that each is the gradient of."""

HOST_TYPES = ("int", "float", "bool_", "none")
"""Dtypes of values that are plain Python numbers, not tensors."""


@dataclass(frozen=True)
class Value:
    """A tensor at its global shape, or a number of the host (dtype `int`, `float`, `bool_`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in HOST_TYPES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.is_tensor else self.dtype


@dataclass(frozen=True)
class Ref:
    """The use of a value as an argument."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class DtypeArg:
    """A dtype as an argument, by its short name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class DeviceArg:
    """The device on which the rank computes, as an argument."""

    def __str__(self) -> str:
        return "device"


class RankArg:
    """An argument that has another value on each rank: base of the classes below."""

    def at(self, mesh: Mesh, coords: Mapping[str, int]) -> Any:
        """The value on the rank that stands at `coords`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Extent(RankArg):
    """The local size of a dim."""

    dim: Dim

    def at(self, mesh: Mesh, coords: Mapping[str, int]) -> int:
        return math.prod(interval(part, mesh, coords)[1] for part in self.dim)

    def __str__(self) -> str:
        return f"extent({'*'.join(map(str, self.dim))})"


@dataclass(frozen=True)
class Offset(RankArg):
    """The index of the first element that the rank holds.

    Args:
        part: The part of a dim.
        base: Count from the piece that the first `base` axes of the part leave; omitted: from the
            whole part.
        times: The elements that one element of the part stands for.
    """

    part: Part
    base: int = 0
    times: int = 1

    def at(self, mesh: Mesh, coords: Mapping[str, int]) -> int:
        outer = Part(self.part.size, self.part.axes[: self.base])
        apart = interval(self.part, mesh, coords)[0] - interval(outer, mesh, coords)[0]
        return apart * self.times

    def __str__(self) -> str:
        base = f" from {self.base}" if self.base else ""
        times = f" times {self.times}" if self.times > 1 else ""
        return f"offset({self.part}{base}{times})"


@dataclass(frozen=True)
class MemberExtents(RankArg):
    """The local sizes of a part on the members of the rank's group along some axes."""

    part: Part
    axes: tuple[str, ...]

    def at(self, mesh: Mesh, coords: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(
            interval(self.part, mesh, {**coords, **mesh.unravel(i, self.axes)})[1]
            for i in range(mesh.extent(self.axes))
        )

    def __str__(self) -> str:
        return f"extents({self.part} over {','.join(self.axes)})"


@dataclass(frozen=True)
class Box(RankArg):
    """Which elements of a global tensor the rank holds: (*sizes, *strides, offset), flat.

    There is a size and a stride for each part of each dim, outer to inner. The element
    (i0, i1, ...) over the parts has the global index offset + sum(i * stride).
    """

    layout: Layout

    def at(self, mesh: Mesh, coords: Mapping[str, int]) -> tuple[int, ...]:
        sizes, strides, offset, stride = [], [], 0, 1
        for part in reversed(list(self.layout.parts)):
            start, size = interval(part, mesh, coords)
            sizes.append(size)
            strides.append(stride)
            offset += start * stride
            stride *= part.size
        return (*reversed(sizes), *reversed(strides), offset)

    def __str__(self) -> str:
        return f"box{self.layout}"


Arg = Any
"""Ref | DtypeArg | DeviceArg | RankArg | int | float | bool | str | None | tuple of Args."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Args:
        target: What is called: `aten.mm.default`, `py.mul`, `distcell.all_reduce`.
        args: Positional arguments.
        kwargs: Keyword arguments as pairs.
        outputs: Names of the values that it makes.
        many: Whether the target returns a sequence, of which `outputs` names the elements.
        cell: The cell path that it belongs to.
        source: The user's line, `file:line`.
        phase: `forward`, `backward` or `optimizer`.
    """

    target: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str, ...] = ()
    many: bool = False
    cell: str = ""
    source: str = ""
    phase: str = "forward"

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the values used, in order of the arguments, repeats kept."""
        return tuple(refs(self.args)) + tuple(refs(tuple(v for _, v in self.kwargs)))

    def map_refs(self, rename: Callable[[str], Arg]) -> Op:
        """This op with every use of a value replaced."""
        args = map_arg(self.args, rename)
        kwargs = tuple((key, map_arg(arg, rename)) for key, arg in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    def __str__(self) -> str:
        args = [format_arg(a) for a in self.args]
        args += [f"{key}={format_arg(a)}" for key, a in self.kwargs]
        outputs = ", ".join(f"%{name}" for name in self.outputs)
        return f"{outputs} = {self.target}({', '.join(args)})"


@dataclass(frozen=True)
class Input:
    """What enters a graph.

    Args:
        value: The value's name.
        kind: `param`, `buffer`, `input` (a tensor argument), `tangent` (the gradient of an
            output), `state` (of an optimizer), `scalar` (a number such as lr), `random` (the key
            of random numbers), `constant` (a tensor that the code made).
        path: The parameter's path, the argument's name, ...
    """

    value: str
    kind: str
    path: str


@dataclass(frozen=True)
class Output:
    """What leaves a graph.

    Args:
        value: The value's name. One value may leave several times.
        kind: `output` (what the Cell returns), `grad` (of the parameter `path`), `grad_input` (of
            the input `path`), `param`, `buffer`, `state` (the new value of the input of the same
            kind and path).
        path: As in `Input`.
    """

    value: str
    kind: str
    path: str


@dataclass(frozen=True)
class Border:
    """The values that enter and leave one call of a Cell; those that are dead are no values."""

    cell: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Values and ops in an order in which they can be run.

    Example:
        >>> x, y = Value("x", (2, 3), "f32"), Value("y", (2, 3), "f32")
        >>> op = Op("aten.relu.default", (Ref("x"),), outputs=("y",))
        >>> print(Graph((Input("x", "input", "x"),), (op,), (Output("y", "output", "0"),),
        ...             {"x": x, "y": y}))
        input %x: f32[2, 3] = input x
        %y = aten.relu.default(%x)  # f32[2, 3]
        output %y = output 0
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, Value]
    borders: tuple[Border, ...] = ()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return format_graph(self, lambda name: str(self.values[name]))

    @cached_property
    def digest(self) -> str:
        """A hash of everything that the graph says."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    @cached_property
    def producers(self) -> Mapping[str, Op]:
        """For each value that an op makes, the op."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def users(self) -> Mapping[str, tuple[Op, ...]]:
        """For each value, the ops that use it, each once."""
        users: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                users[name].append(op)
        return {name: tuple(ops) for name, ops in users.items()}

    def tensors(self, op: Op) -> tuple[Value, ...]:
        """The tensor operands of an op, in order of the arguments, repeats kept."""
        found = (self.values[name] for name in op.inputs)
        return tuple(value for value in found if value.is_tensor)

    def results(self, op: Op) -> tuple[Value, ...]:
        """The values that an op makes."""
        return tuple(self.values[name] for name in op.outputs)


def format_graph(graph: Graph, describe: Callable[[str], str]) -> str:
    """The text of a graph, one line each for inputs, ops and outputs."""
    lines = [f"input %{i.value}: {describe(i.value)} = {i.kind} {i.path}" for i in graph.inputs]
    for op in graph.ops:
        notes = [", ".join(describe(name) for name in op.outputs), op.cell, op.source]
        lines.append(f"{op}  # {'  '.join(note for note in notes if note)}")
    lines += [f"output %{o.value} = {o.kind} {o.path}" for o in graph.outputs]
    return "\n".join(lines)


def refs(arg: Arg) -> Iterator[str]:
    """The names of all values in an argument."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def map_arg(arg: Arg, rename: Callable[[str], Arg]) -> Arg:
    """An argument with each `Ref` replaced by what `rename` gives for its name."""
    if isinstance(arg, Ref):
        return rename(arg.name)
    if isinstance(arg, tuple):
        return tuple(map_arg(item, rename) for item in arg)
    return arg


def format_arg(arg: Arg) -> str:
    """An argument as it is printed."""
    if isinstance(arg, tuple):
        return f"({', '.join(map(format_arg, arg))}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, (Ref, DtypeArg, DeviceArg, RankArg)):
        return str(arg)
    return repr(arg)


def verify(graph: Graph) -> None:
    """Checks that every value is made once, before it is used, and that nothing is unknown.

    Raises:
        ValueError: When that does not hold: a fault of the pass that made the graph.
    """
    known: set[str] = set()
    made = [i.value for i in graph.inputs] + [n for op in graph.ops for n in op.outputs]
    if len(made) != len(set(made)):
        twice = sorted({name for name in made if made.count(name) > 1})
        raise ValueError(f"values made twice: {twice}")
    if missing := [name for name in made if name not in graph.values]:
        raise ValueError(f"values without shape: {missing}")
    known.update(i.value for i in graph.inputs)
    for op in graph.ops:
        if unknown := [name for name in op.inputs if name not in known]:
            raise ValueError(f"{op} uses {unknown} before they are made")
        known.update(op.outputs)
    if unknown := [o.value for o in graph.outputs if o.value not in known]:
        raise ValueError(f"outputs that nothing makes: {unknown}")


def without_dead_ops(graph: Graph) -> Graph:
    """The graph without ops whose results nothing uses.

    A collective goes like any other op: all ranks run one text, and so leave it out together.
    """
    needed = {o.value for o in graph.outputs}
    ops = []
    for op in reversed(graph.ops):
        if any(name in needed for name in op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    names = {i.value for i in graph.inputs} | {name for op in ops for name in op.outputs}
    values = {name: value for name, value in graph.values.items() if name in names}
    # values of a border that nothing uses stay in it by name, so that the others keep their places
    borders = tuple(
        border
        for border in graph.borders
        if any(name in names for name in (*border.inputs, *border.outputs))
    )
    return replace(graph, ops=tuple(reversed(ops)), values=values, borders=borders)


def to_json(item: Any) -> Any:
    """Frozen data as JSON values; `from_json` reads them back.

    Example:
        >>> from_json(to_json(Ref("x")))
        Ref(name='x')
    """
    if item is None or type(item) in _PLAIN:
        return item
    if isinstance(item, tuple):
        return [to_json(element) for element in item]
    if (names := _names_of(type(item))) is not None:
        content = {name: to_json(getattr(item, name)) for name in names}
        return {"type": type(item).__name__, **content}
    if isinstance(item, Mapping):
        return {"type": "map", "items": {key: to_json(value) for key, value in item.items()}}
    if isinstance(item, float) and not math.isfinite(item):
        return {"type": "float", "value": str(item)}
    return item


_PLAIN = (str, int, bool)
_field_names: dict[type, tuple[str, ...] | None] = {}


def _names_of(kind: type) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; of any other type None. `fields` itself is slow."""
    if kind not in _field_names:
        names = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
        _field_names[kind] = names
    return _field_names[kind]


def from_json(item: Any) -> Any:
    """The data that `to_json` wrote."""
    if isinstance(item, list):
        return tuple(from_json(element) for element in item)
    if not isinstance(item, dict):
        return item
    content = dict(item)
    kind = content.pop("type")
    if kind == "float":
        return float(content["value"])
    if kind == "map":
        return {key: from_json(value) for key, value in content["items"].items()}
    return _TYPES[kind](**{key: from_json(value) for key, value in content.items()})


_TYPES: dict[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (Value, Ref, DtypeArg, DeviceArg, Extent, Offset, MemberExtents, Box)
} | {cls.__name__: cls for cls in (Op, Input, Output, Border, Graph, Layout, Part, Mesh)}
