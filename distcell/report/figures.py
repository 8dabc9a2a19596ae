"""What a program holds, sends and computes on each rank: from its layouts alone, nothing runs.

Figures of all ranks are vectors, one number for each. Where a layout is even, which is nearly
everywhere, the ranks have one number in common, so that 64 ranks cost what a few do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distcell.dtype import itemsize
from distcell.graph import Graph, Op
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.program import COLLECTIVES, Program
from distcell.rules.flops import flops, is_counted
from distcell.runtime.collectives import payload_bytes

Vector = NDArray[np.int64]
"""A number for each rank."""


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks.

    Args:
        least: The smallest number that a rank has.
        most: The largest.
        worst: The first rank that has the largest.
        one_device: The same figure of the network on one device, where that has a meaning.
    """

    least: int
    most: int
    worst: int
    one_device: int | None = None

    @classmethod
    def of(cls, figures: Vector, one_device: int | None = None) -> Spread:
        """The spread of a number for each rank.

        Example:
            >>> Spread.of(np.array([3, 5, 5]))
            Spread(least=3, most=5, worst=1, one_device=None)
        """
        return cls(int(figures.min()), int(figures.max()), int(figures.argmax()), one_device)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number."""
        return self.least == self.most


@dataclass(frozen=True)
class Collective:
    """One exchange of data in a program.

    Args:
        kind: `all_reduce`, `all_gather`, ...
        axes: The axes of the mesh that it goes over.
        phase: `forward`, `backward` or `optimizer`.
        bytes: For each rank the bytes that it puts in.
        values: The values that go in.
        cell: The cell path that wanted it.
        source: The user's line.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    bytes: tuple[int, ...]
    values: tuple[str, ...]
    cell: str = ""
    source: str = ""

    def __str__(self) -> str:
        size = f"{max(self.bytes)} bytes"
        return f"{self.phase} {self.kind} over {','.join(self.axes)}, {size}  {self.cell}".rstrip()


@dataclass
class RankFigures:
    """Figures of each rank of one program.

    Args:
        program: The program.
    """

    program: Program
    _shapes: dict[Layout, list[tuple[int, ...]]] = field(default_factory=dict)
    _counts: dict[Layout, Vector] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.program.mesh.size

    def zeros(self) -> Vector:
        """Nothing on every rank."""
        return np.zeros(self.size, dtype=np.int64)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """The local shapes of a value: one where all ranks have the same, else one for each."""
        layout, mesh = self.program.layouts[name], self.program.mesh
        if layout not in self._shapes:
            ranks = range(1) if layout.is_even(mesh) else range(mesh.size)
            self._shapes[layout] = [layout.local_shape(mesh, rank) for rank in ranks]
        return self._shapes[layout]

    def nbytes(self, name: str) -> Vector:
        """The bytes that each rank holds of a value; nothing for numbers of the host."""
        value = self.program.graph.values[name]
        if not value.is_tensor:
            return self.zeros()
        layout = self.program.layouts[name]
        if layout not in self._counts:
            counts = [payload_bytes(shape, 1) for shape in self.shapes(name)]
            self._counts[layout] = self.zeros() + np.array(counts, dtype=np.int64)
        return self._counts[layout] * itemsize(value.dtype)

    def numel(self, name: str) -> Vector:
        """The elements that each rank holds of a value."""
        self.nbytes(name)
        return self._counts[self.program.layouts[name]]

    def collectives(self) -> tuple[Collective, ...]:
        """All exchanges of data, in the order in which they are issued."""
        graph = self.program.graph
        found = []
        for op in graph.ops:
            if op.target in COLLECTIVES:
                names = [value.name for value in graph.tensors(op)]
                total = sum((self.nbytes(name) for name in names), self.zeros())
                kind = op.target.removeprefix("distcell.").removesuffix("_many")
                found.append(
                    Collective(
                        kind,
                        tuple(op.args[1]),
                        op.phase,
                        tuple(total.tolist()),
                        tuple(names),
                        op.cell,
                        op.source,
                    )
                )
        return tuple(found)

    def flops(self) -> Vector:
        """The floating-point operations of each rank."""
        total = self.zeros()
        graph = self.program.graph
        for op in (op for op in graph.ops if is_counted(op.target)):
            names = [v.name for v in (*graph.tensors(op), *graph.results(op)) if v.is_tensor]
            if any(len(self.shapes(name)) > 1 for name in names):
                total += [self._flops_on(op, rank) for rank in range(self.size)]
            else:
                total += self._flops_on(op, 0)
        return total

    def _flops_on(self, op: Op, rank: int) -> int:
        graph = self.program.graph
        operands = [self._shape_on(value.name, rank) for value in graph.tensors(op)]
        results = [self._shape_on(v.name, rank) for v in graph.results(op) if v.is_tensor]
        return flops(op, operands, results)

    def _shape_on(self, name: str, rank: int) -> tuple[int, ...]:
        shapes = self.shapes(name)
        return shapes[rank] if len(shapes) > 1 else shapes[0]


def on_one_device(graph: Graph) -> Program:
    """A captured graph as the program of a single rank: what one device would do."""
    values = graph.values.values()
    return Program(Mesh(), graph, {v.name: Layout.of(v.shape) for v in values if v.is_tensor})


@dataclass(frozen=True)
class CollectiveGroup:
    """The exchanges of one kind over the same axes in one phase."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: Spread


def group_collectives(collectives: Sequence[Collective], size: int) -> tuple[CollectiveGroup, ...]:
    """The exchanges by phase, kind and axes, in the order in which each comes first.

    Args:
        collectives: The exchanges.
        size: The number of ranks.
    """
    found: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for one in collectives:
        found.setdefault((one.phase, one.kind, one.axes), []).append(one)
    return tuple(
        CollectiveGroup(*key, len(members), Spread.of(_total(members, size)))
        for key, members in found.items()
    )


def bytes_by_axes(collectives: Sequence[Collective], size: int) -> dict[str, Spread]:
    """What each rank puts into exchanges over the same axes, by their names with commas."""
    found: dict[str, list[Collective]] = {}
    for one in collectives:
        found.setdefault(",".join(one.axes), []).append(one)
    return {axes: Spread.of(_total(members, size)) for axes, members in found.items()}


def _total(collectives: Sequence[Collective], size: int) -> Vector:
    start = np.zeros(size, dtype=np.int64)
    return sum((np.array(one.bytes, dtype=np.int64) for one in collectives), start)


def human(number: int) -> str:
    """Bytes as they are printed in tables.

    Example:
        >>> human(512), human(1536), human(3 << 20)
        ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if number < 1024:
        return f"{number} B"
    step = min(4, int(math.log(number, 1024)))
    return f"{number / 1024**step:.1f} {' KMGT'[step]}iB"
