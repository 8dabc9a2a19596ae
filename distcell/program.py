"""What each rank executes: the graph after partitioning, with a layout on every value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from distcell.graph import Graph, Op, format_graph, from_json, to_json
from distcell.layout import Layout
from distcell.mesh import Mesh

COLLECTIVES = (
    "distcell.all_reduce",
    "distcell.all_gather",
    "distcell.reduce_scatter",
    "distcell.all_to_all",
    "distcell.permute",
    "distcell.all_reduce_many",
)
"""Targets that exchange data. Their second argument is the tuple of axes."""


def operands_of(op: Op) -> dict[str, tuple[str, ...]]:
    """For each result of an op the values that it depends on.

    Collectives that carry several tensors in one message do not mix them.

    Example:
        >>> from distcell.graph import Ref
        >>> op = Op("distcell.all_reduce_many", ((Ref("a"), Ref("b")), ("dp",)), (), ("x", "y"))
        >>> operands_of(op)
        {'x': ('a',), 'y': ('b',)}
    """
    if op.target in COLLECTIVES and len(op.inputs) == len(op.outputs):
        return {name: (used,) for name, used in zip(op.outputs, op.inputs, strict=True)}
    return dict.fromkeys(op.outputs, op.inputs)


@dataclass(frozen=True)
class Program:
    """One text for all ranks.

    The graph's values keep their global shapes; what a rank holds follows from the layouts.
    Arguments that differ from rank to rank are `RankArg`s. Collectives name axes of the mesh, never
    groups of processes.

    Args:
        mesh: The ranks.
        graph: Ops on local tensors, collectives among them.
        layouts: The layout of every tensor.
    """

    mesh: Mesh
    graph: Graph
    layouts: Mapping[str, Layout]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"mesh {self.mesh}\n" + format_graph(self.graph, self.describe)

    def describe(self, name: str) -> str:
        """A value as it is printed everywhere: `f32[8@dp, 8]{+tp}`."""
        value = self.graph.values[name]
        return f"{value.dtype}{self.layouts[name]}" if value.is_tensor else value.dtype

    @cached_property
    def digest(self) -> str:
        """A hash of everything that the program says."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        """The program as JSON values."""
        parts = {"mesh": self.mesh, "graph": self.graph, "layouts": self.layouts}
        return {key: to_json(part) for key, part in parts.items()}

    @classmethod
    def from_json(cls, content: dict[str, object]) -> Program:
        """The program that `to_json` wrote."""
        return cls(**{key: from_json(content[key]) for key in ("mesh", "graph", "layouts")})

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of the piece of a value that a rank holds."""
        return self.layouts[name].local_shape(self.mesh, rank)
