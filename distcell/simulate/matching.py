"""Whether the collectives of all ranks fit together: found before anything runs, or hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from distcell.errors import RankMismatchError, StallError
from distcell.graph import Op
from distcell.mesh import Mesh
from distcell.program import COLLECTIVES, Program
from distcell.runtime.generator import label_of
from distcell.runtime.local_ops import place

Shape = tuple[int, ...]


def match_collectives(programs: Sequence[Program]) -> None:
    """Checks that the ranks' collectives meet: the same ones, in an order in which all proceed.

    Args:
        programs: The program of each rank, in their order. They may differ.

    Raises:
        RankMismatchError: When members of a group come to it with different collectives.
        StallError: When no rank can go on.

    Example:
        >>> from distcell.graph import Graph, Input, Output, Ref, Value
        >>> from distcell.layout import Layout
        >>> op = Op("distcell.all_reduce", (Ref("x"), ("dp",), "sum"), outputs=("y",))
        >>> values = {name: Value(name, (2,), "f32") for name in "xy"}
        >>> inputs, outputs = (Input("x", "input", "x"),), (Output("y", "output", "0"),)
        >>> layouts = {"x": Layout.of((2,), partial=("dp",)), "y": Layout.of((2,))}
        >>> mesh = Mesh.parse("dp=2")
        >>> program = Program(mesh, Graph(inputs, (op,), outputs, values), layouts)
        >>> match_collectives([program, program])
    """
    seats = [_Seat(rank, program, iter(_issued(program))) for rank, program in enumerate(programs)]
    for seat in seats:
        seat.advance()
    while any(seat.op is not None for seat in seats):
        ready = [seat for seat in seats if _is_complete(seat, seats)]
        if not ready:
            raise _stall(seats)
        for seat in ready:
            if seat.rank == min(seat.group):
                _check_group([seats[rank] for rank in seat.group])
        for seat in ready:
            seat.advance()


@dataclass
class _Seat:
    """How far one rank has come."""

    rank: int
    program: Program
    rest: Iterator[Op]
    op: Op | None = None
    group: tuple[int, ...] = ()
    number: int = field(default=0)

    def advance(self) -> None:
        """Goes on to the next collective."""
        self.op = next(self.rest, None)
        self.number += 1
        self.group = _group(self.program.mesh, self.rank, self.op.args[1]) if self.op else ()

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the collective on this rank."""
        assert self.op is not None
        return place(self.op, self.program.mesh, self.rank, torch.device("cpu"))[0]

    @property
    def tensors(self) -> list[tuple[Shape, str]]:
        """Local shape and dtype of what the rank gives."""
        assert self.op is not None
        values = self.program.graph.tensors(self.op)
        return [(self.program.local_shape(v.name, self.rank), v.dtype) for v in values]

    def __str__(self) -> str:
        if self.op is None:
            return f"rank {self.rank}: has finished"
        tensors = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.tensors)
        kind = self.op.target.removeprefix("distcell.")
        where = f"  {label_of(self.op)}" if label_of(self.op) else ""
        axes = ",".join(self.op.args[1])
        return f"rank {self.rank}: #{self.number} {kind} of {tensors} over {axes}{where}"


def _issued(program: Program) -> tuple[Op, ...]:
    return tuple(op for op in program.graph.ops if op.target in COLLECTIVES)


@lru_cache(maxsize=65536)
def _group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    return mesh.group_of(rank, axes)


def _is_complete(seat: _Seat, seats: Sequence[_Seat]) -> bool:
    """Whether all members of the group that a rank waits for have come to it."""
    if seat.op is None:
        return False
    members = set(seat.group)
    return all(set(seats[rank].group) == members for rank in seat.group)


def _stall(seats: Sequence[_Seat]) -> StallError:
    return StallError(
        "the ranks would wait for each other for ever",
        where=[str(seat) for seat in seats],
        hint="all ranks must issue the same collectives in the same order",
    )


def _check_group(members: Sequence[_Seat]) -> None:
    problem = _difference(members)
    if problem:
        raise RankMismatchError(
            f"ranks come to one collective with different {problem}",
            where=[str(seat) for seat in members],
            hint="all members of a group must run the same program",
        )


def _difference(members: Sequence[_Seat]) -> str:
    """What the members disagree on; empty when they fit together."""
    first, ops = members[0], [seat.op for seat in members]
    if len({op.target for op in ops if op}) > 1:
        return "collectives"
    if any(seat.group != first.group for seat in members):
        return "orders of the members"
    if len({tuple(dtype for _, dtype in seat.tensors) for seat in members}) > 1:
        return "dtypes"
    assert first.op is not None
    return _CHECKS.get(first.op.target, _same_everything)(members)


def _same_everything(members: Sequence[_Seat]) -> str:
    if len({seat.args[2:] for seat in members}) > 1:
        return "arguments"
    return "shapes" if len({tuple(seat.tensors) for seat in members}) > 1 else ""


def _gathered(members: Sequence[_Seat]) -> str:
    if len({seat.args[2:] for seat in members}) > 1:
        return "arguments"
    dim, sizes = members[0].args[2:4]
    shapes = [seat.tensors[0][0] for seat in members]
    if [shape[dim] for shape in shapes] != list(sizes):
        return f"extents of dim {dim} than the expected {sizes}"
    return "shapes" if len({_without(shape, dim) for shape in shapes}) > 1 else ""


def _scattered(members: Sequence[_Seat]) -> str:
    problem = _same_everything(members)
    dim, sizes = members[0].args[2:4]
    if not problem and members[0].tensors[0][0][dim] != sum(sizes):
        return f"extents of dim {dim} than the expected {sum(sizes)}"
    return problem


def _exchanged(members: Sequence[_Seat]) -> str:
    """Compares what each member cuts off for another with what that one expects."""
    if len({seat.args[2:4] for seat in members}) > 1:
        return "dims"
    split_dim, concat_dim = members[0].args[2:4]
    for source in members:
        shape, sizes = source.tensors[0][0], source.args[4]
        if shape[split_dim] != sum(sizes):
            return f"extents of dim {split_dim} than the expected {sum(sizes)}"
        number = members.index(source)
        if any(target.args[5][number] != shape[concat_dim] for target in members):
            return f"extents of dim {concat_dim} than those expected of them"
    columns = list(zip(*(seat.args[4] for seat in members), strict=True))
    return "sizes of slices" if any(len(set(column)) > 1 for column in columns) else ""


def _without(shape: Shape, dim: int) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], *shape[dim + 1 :])


_CHECKS: Mapping[str, Callable[[Sequence[_Seat]], str]] = {
    "distcell.all_gather": _gathered,
    "distcell.reduce_scatter": _scattered,
    "distcell.all_to_all": _exchanged,
}
