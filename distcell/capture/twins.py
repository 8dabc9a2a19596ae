"""Repeats the update of one parameter for all others like it, instead of tracing each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distcell.capture.convert import Namer
from distcell.graph import Graph, Input, Op, Output, Ref, Value


@dataclass
class _Growing:
    """A graph that is being made."""

    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


def repeat(graph: Graph, twins: Mapping[str, Sequence[str]]) -> Graph | None:
    """The graph with the ops of a parameter once more for each of its twins.

    None when some op depends on several parameters: then their updates are not independent.

    Args:
        graph: An update whose inputs and outputs have paths `parameter` or `parameter/state`.
        twins: For each parameter of the graph the parameters to repeat it for.
    """
    owners = {i.value: {_owner(i)} - {""} for i in graph.inputs}
    for op in graph.ops:
        found = set().union(*(owners[name] for name in op.inputs))
        if len(found) > 1:
            return None
        owners |= dict.fromkeys(op.outputs, found)
    if any(owners[out.value] != {_owner(out)} for out in graph.outputs):
        return None
    made = _Growing()
    namer = Namer(graph.values)
    _add(made, graph, [n for n, o in owners.items() if not o], "", names={})
    for path, others in twins.items():
        own = [name for name, owner in owners.items() if owner == {path}]
        _add(made, graph, own, path, names={name: name for name in own})
        for other in others:
            names = {name: namer(wanted) for name, wanted in _wanted(graph, own, path, other)}
            _add(made, graph, own, other, names=names)
    return Graph(tuple(made.inputs), tuple(made.ops), tuple(made.outputs), made.values)


def _owner(item: Input | Output) -> str:
    """The parameter that an input or output belongs to."""
    return item.path.rpartition("/")[0] or item.path if item.kind in _OWNED else ""


_OWNED = ("param", "grad", "state")


def _wanted(graph: Graph, own: Sequence[str], path: str, other: str) -> Iterator[tuple[str, str]]:
    """For each value of a parameter the name that it would like to have for another one."""
    inputs = {i.value: i for i in graph.inputs}
    for name in own:
        if name in inputs:
            item = inputs[name]
            yield name, f"{item.kind}_{other}{item.path.removeprefix(path)}"
        else:
            yield name, re.sub(r"_\d+$", "", name)


def _add(
    made: _Growing, graph: Graph, own: Sequence[str], path: str, *, names: Mapping[str, str]
) -> None:
    """Adds the inputs, ops and outputs of some values, renamed, for the parameter `path`."""
    wanted = set(own)

    def name_of(name: str) -> str:
        return names.get(name, name)

    def path_of(item: Input | Output) -> str:
        owner = _owner(item)
        return path + item.path.removeprefix(owner) if owner else item.path

    for item in graph.inputs:
        if item.value in wanted:
            made.inputs.append(Input(name_of(item.value), item.kind, path_of(item)))
    for op in graph.ops:
        if op.outputs and op.outputs[0] in wanted:
            changed = op.map_refs(lambda name: Ref(name_of(name)))
            made.ops.append(replace(changed, outputs=tuple(map(name_of, op.outputs))))
    for out in graph.outputs:
        if out.value in wanted:
            made.outputs.append(Output(name_of(out.value), out.kind, path_of(out)))
    for name in own:
        made.values[name_of(name)] = replace(graph.values[name], name=name_of(name))
