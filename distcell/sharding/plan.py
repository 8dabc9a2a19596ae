"""What the engine decided: the graph with a layout on every value, each with its reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from distcell.graph import Graph, format_graph, to_json
from distcell.layout import Layout
from distcell.mesh import Mesh


@dataclass(frozen=True)
class Reason:
    """Why an axis splits a dim of a value.

    Args:
        dim: The dim.
        axis: The axis.
        kind: `annotation` (the user said so) or `op` (it came along an op).
        source: `file:line:column` of the annotation, or the op that it came along.
        via: The value that it came from; empty for annotations.
    """

    dim: int
    axis: str
    kind: str
    source: str
    via: str = ""


@dataclass(frozen=True)
class Note:
    """Something that the plan reports: kind, what it is about, and the text."""

    kind: str
    subject: str
    text: str


@dataclass(frozen=True)
class Plan:
    """The result of propagation.

    Args:
        graph: The captured graph, annotations of cell borders made part of it.
        mesh: The mesh, axes cut into sub-axes where a number of slices needs it.
        layouts: The layout of every tensor; nothing is partial here.
        reasons: For each value why its axes are there.
        notes: Reports: how slices were read, ops without a rule, uneven dims, conflicts.
        strategy_digest: Of the strategy that was asked for.
        data: `full` when every rank passes the global inputs, `local` when each passes its part.
    """

    graph: Graph
    mesh: Mesh
    layouts: Mapping[str, Layout]
    reasons: Mapping[str, tuple[Reason, ...]]
    notes: tuple[Note, ...] = ()
    strategy_digest: str = ""
    data: str = "full"

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"mesh {self.mesh}\n" + format_graph(self.graph, self.describe)

    @cached_property
    def digest(self) -> str:
        """A hash of the graph, the mesh and the layouts."""
        content = [to_json(self.graph), to_json(self.mesh), to_json(self.layouts)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def describe(self, name: str) -> str:
        """A value as it is printed everywhere: `f32[8@dp, 8]`."""
        value = self.graph.values[name]
        return f"{value.dtype}{self.layouts[name]}" if value.is_tensor else value.dtype

    def value_of(self, path: str) -> str:
        """The name of the value of a parameter, buffer or input.

        Raises:
            KeyError: When the graph has no input of that path.
        """
        for item in self.graph.inputs:
            if item.path == path:
                return item.value
        raise KeyError(path)

    def chain(self, name: str, axis: str) -> Iterator[tuple[str, Reason]]:
        """Why an axis is on a value: each (value, reason) back to the annotation."""
        seen = set()
        while name not in seen:
            seen.add(name)
            reason = next((r for r in self.reasons.get(name, ()) if r.axis == axis), None)
            if reason is None:
                return
            yield name, reason
            name = reason.via
