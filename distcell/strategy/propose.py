"""Lines of a strategy for a model that no pattern knows, from how its graph uses its weights.

A weight whose product reaches nothing but the products of further weights, through ops that look at
one feature at a time, is split by columns, and those that it reaches by rows: what lies between
stays split, and one sum follows. Where a sum with what is not split, a norm, or the loss comes
first, a weight stays whole, as do norms and tables of embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distcell.strategy.glob import matches

if TYPE_CHECKING:  # at run time it would load torch, which a strategy file needs none of
    from distcell.graph import Graph, Op

_VIEWS = frozenset(
    """
    aten.t.default aten.transpose.int aten.permute.default aten.view.default aten.clone.default
    aten._to_copy.default aten.alias.default aten.detach.default aten._unsafe_view.default
    """.split()
)
_SWAPS = frozenset({"aten.t.default", "aten.transpose.int"})

_ENDS = frozenset(
    """
    native_layer_norm native_group_norm _fused_rms_norm sum amax max amin var var_mean std prod
    norm linalg_vector_norm _log_softmax nll_loss_forward nll_loss2d_forward mse_loss stack
    embedding cumsum sort topk roll gru lstm index index_select gather
    """.split()
)
"""Ops, without `aten.` and the overload, that look at more than one feature."""

_PRODUCTS = frozenset({"bmm", "baddbmm"})


@dataclass
class _Use:
    """How one weight is used.

    Args:
        columns: The dim of the weight that makes the features of the product.
        rows: The dim that is summed over.
    """

    columns: int
    rows: int


@dataclass
class _Uses:
    """How the weights of a graph are used, and what their products reach."""

    found: dict[str, _Use] = field(default_factory=dict)
    reached: dict[str, set[str]] = field(default_factory=dict)
    """By weight, the weights whose products it reads."""
    reads_whole: set[str] = field(default_factory=set)
    """Weights that also read what no weight of these has made."""
    ends: set[str] = field(default_factory=set)
    """Weights whose product reaches something that needs it whole."""


@dataclass(frozen=True)
class Line:
    """One line of a proposal.

    Args:
        pattern: On cell paths.
        params: By the name of a parameter in the cell, its dims as a strategy file writes them.

    >>> print(Line("mlp.up", {"weight": "[tp, _]", "bias": "[tp]"}))
    "mlp.up": {params: {weight: [tp, _], bias: [tp]}}
    """

    pattern: str
    params: Mapping[str, str]

    def __str__(self) -> str:
        fields = ", ".join(f"{name}: {dims}" for name, dims in self.params.items())
        return f'"{self.pattern}": {{params: {{{fields}}}}}'


def propose(graph: Graph, axis: str, cells: Sequence[str], params: Sequence[str]) -> list[Line]:
    """Returns lines that split weights of a model over an axis; empty when nothing can be.

    Args:
        graph: what the model does.
        axis: the axis to split over.
        cells: the paths of all cells.
        params: the paths of all parameters.

    >>> from distcell.graph import Graph
    >>> propose(Graph((), (), (), {}), "tp", [""], [])
    []
    """
    uses = _uses_of(graph)
    roles = _roles(uses) or dict.fromkeys(uses.found, "columns")
    shapes = {i.path: graph.values[i.value].shape for i in graph.inputs if i.kind == "param"}
    wanted: dict[str, dict[str, str]] = {}
    for path, role in roles.items():
        cell, _, name = path.rpartition(".")
        use, rank = uses.found[path], len(shapes[path])
        dim = use.columns if role == "columns" else use.rows
        fields = wanted.setdefault(cell, {})
        fields[name] = _dims(axis if at == dim else "_" for at in range(rank))
        bias = path[: len(path) - len(name)] + name.replace("weight", "bias")
        if bias != path and len(shapes.get(bias, ())) == 1:
            fields[bias.rpartition(".")[2]] = f"[{axis}]" if role == "columns" else "[_]"
    return _lines(wanted, cells, params)


def _dims(dims: Iterable[str]) -> str:
    return f"[{', '.join(dims)}]"


# - How weights are used


def _uses_of(graph: Graph) -> _Uses:
    uses = _Uses()
    # by value: the parameter that it is, and whether its last two dims are swapped
    weights = {i.value: (i.path, False) for i in graph.inputs if i.kind == "param"}
    # by value: the weights whose products it holds, feature by feature
    held: dict[str, frozenset[str]] = {}
    streams = {i.value for i in graph.inputs if i.kind == "input" and _is_float(graph, i.value)}
    products: set[str] = set()
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if op.target in _VIEWS and op.inputs[0] in weights:
            path, swapped = weights[op.inputs[0]]
            weights[op.outputs[0]] = path, swapped ^ (op.target in _SWAPS)
            continue
        given = _weight_of(op, weights, graph)
        if given is not None:
            path, use, operand = given
            _note(uses, path, use, held.get(operand))
            held[op.outputs[0]] = frozenset({path})
            continue
        carried = frozenset[str]().union(*(held.get(name, frozenset()) for name in op.inputs))
        floats = [name for name in op.inputs if name in streams and name not in held]
        made = [name for name in op.outputs if _is_float(graph, name)]
        name = op.target.split(".")[1]
        if name in _PRODUCTS:
            products.update(op.outputs)
        if carried and (floats or _looks_at_features(op, name, graph, products)):
            uses.ends |= carried
            streams.update(made)
        elif carried:
            held.update(dict.fromkeys(made, carried))
            products.update(op.outputs if products & set(op.inputs) else ())
        elif floats or name == "embedding":
            streams.update(made)
    uses.ends |= {p for o in graph.outputs if o.kind == "output" for p in held.get(o.value, ())}
    for op in graph.ops:  # a head that is tied to a table
        if op.target == "aten.embedding.default" and op.inputs[0] in weights:
            uses.found.pop(weights[op.inputs[0]][0], None)
    return uses


def _is_float(graph: Graph, name: str) -> bool:
    return graph.values[name].dtype.startswith(("f", "bf"))


def _weight_of(
    op: Op, weights: Mapping[str, tuple[str, bool]], graph: Graph
) -> tuple[str, _Use, str] | None:
    """The weight in a product with an activation, how it is used, and the activation."""
    name = op.target.split(".")[1]
    places = {"mm": (0, 1), "addmm": (1, 2), "convolution": (0, 1)}
    if name not in places:
        return None
    left, right = (op.args[at] for at in places[name])
    operand, weight = str(getattr(left, "name", left)), str(getattr(right, "name", right))
    if weight not in weights or operand in weights:
        return None
    path, swapped = weights[weight]
    if name == "convolution":
        transposed, groups = op.args[6], op.args[8]
        if groups != 1:
            return None
        return path, _Use(1, 0) if transposed else _Use(0, 1), operand
    return path, _Use(0, 1) if swapped else _Use(1, 0), operand


def _note(uses: _Uses, path: str, use: _Use, sources: frozenset[str] | None) -> None:
    if uses.found.setdefault(path, use) != use:  # one weight, used both ways round
        uses.ends.add(path)
        uses.reads_whole.add(path)
    if sources:
        uses.reached.setdefault(path, set()).update(sources)
    else:
        uses.reads_whole.add(path)


def _looks_at_features(op: Op, name: str, graph: Graph, products: set[str]) -> bool:
    if name == "_softmax":  # that of scores looks at positions, not at heads
        return not products & set(op.inputs)
    if name == "mean" and op.inputs:
        shape = graph.values[op.inputs[0]].shape
        dims = op.args[1] if len(op.args) > 1 and isinstance(op.args[1], tuple) else ()
        over = {int(str(dim)) % len(shape) for dim in dims} if shape else set()
        return len(shape) != 4 or not over or 1 in over
    if name == "cat":  # halves of each head, as rotary embeddings are made
        shape = graph.values[op.outputs[0]].shape
        dim = op.args[1] if len(op.args) > 1 else 0
        return len(shape) != 4 or dim not in (-1, 3)
    return name in _ENDS or name == "convolution"


def _roles(uses: _Uses) -> dict[str, str]:
    """By weight `columns` or `rows`; weights that are best left whole are absent."""
    refused = set(uses.ends)
    while True:
        roles: dict[str, str] = {}
        for path in uses.found:
            sources = uses.reached.get(path, set())
            is_fed = bool(sources) and path not in uses.reads_whole
            if is_fed and all(roles.get(source) == "columns" for source in sources):
                roles[path] = "rows"
            elif path not in refused:
                roles[path] = "columns"
        reaches = {
            path: [other for other, sources in uses.reached.items() if path in sources]
            for path, role in roles.items()
            if role == "columns"
        }
        broken = {
            path
            for path, others in reaches.items()
            if not others or any(roles.get(other) != "rows" for other in others)
        }
        if not broken:
            return {path: role for path, role in roles.items() if path in uses.found}
        refused |= broken


# - Patterns


def _lines(
    wanted: Mapping[str, Mapping[str, str]], cells: Sequence[str], params: Sequence[str]
) -> list[Line]:
    """The wanted dims by patterns that match no cell of which something else is wanted."""
    known = set(params)
    lines: dict[str, Line] = {}
    for cell, fields in wanted.items():
        if any(matches(pattern, cell) for pattern in lines):
            continue
        for pattern in (starred(cell), _starred_but_the_last(cell), cell):
            others = [c for c in cells if matches(pattern, c) and _has(known, c, fields)]
            if all(wanted.get(other) == fields for other in others):
                lines[pattern] = Line(pattern, fields)
                break
    return list(lines.values())


def _has(params: set[str], cell: str, names: Iterable[str]) -> bool:
    start = f"{cell}." if cell else ""
    return any(start + name in params for name in names)


def starred(path: str) -> str:
    """Returns the path with its numbers as `*`: one line stands for all blocks.

    >>> starred("blocks.3.mlp.0")
    'blocks.*.mlp.*'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _starred_but_the_last(path: str) -> str:
    numbers = [at for at, part in enumerate(path.split(".")) if part.isdigit()]
    parts = path.split(".")
    return ".".join("*" if at in numbers[:-1] else part for at, part in enumerate(parts))
