"""The values of all ranks: the program that they would run, run for all of them in lock-step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from distcell import compat
from distcell.dtype import itemsize
from distcell.errors import InternalError
from distcell.graph import Op
from distcell.layout import shares
from distcell.program import COLLECTIVES, Program
from distcell.runtime.checks import check_replicas
from distcell.runtime.collectives import Axes, CollectiveLog, payload_bytes
from distcell.runtime.generator import Generator, label_of, note
from distcell.runtime.local_ops import place
from distcell.runtime.source import call
from distcell.runtime.storage import WRITTEN_KINDS
from distcell.simulate import reductions
from distcell.simulate.matching import match_collectives
from distcell.simulate.reductions import REDUCTIONS, ReductionOrder

PerRank = list[Any]
"""For each rank what it holds of a value: a tensor or a number. Replicas share one object."""


class SimulatedRanks:
    """All ranks of a program's mesh, simulated in this process.

    The program is the one that real ranks run, from the same generator. What is replicated is
    computed once. At two ranks the results are bitwise those of the real run, at more when the
    order of reductions is that of the backend.

    Args:
        program: The program.
        order: The order in which reductions combine the members: `rank`, `ring` or `tree`.
        donated: As in `distcell.runtime.codegen.load`.
        device: The device on which tensors are made.
        logs: Where each rank's collectives are noted; of its own by default.

    Example:
        >>> from distcell.graph import Graph, Input, Output, Ref, Value
        >>> from distcell.layout import Layout
        >>> from distcell.mesh import Mesh
        >>> values = {name: Value(name, (4,), "f32") for name in "xy"}
        >>> ops = (Op("aten.neg.default", (Ref("x"),), outputs=("y",)),)
        >>> graph = Graph((Input("x", "input", "x"),), ops, (Output("y", "output", "0"),), values)
        >>> layouts = {name: Layout.of((4,), ("dp",)) for name in "xy"}
        >>> program = Program(Mesh.parse("dp=2"), graph, layouts)
        >>> outputs = SimulatedRanks(program).run(scatter_inputs(program, [torch.arange(4.0)]))
        >>> gather_outputs(program, outputs)
        [tensor([-0., -1., -2., -3.])]
    """

    def __init__(
        self,
        program: Program,
        *,
        order: ReductionOrder = "rank",
        donated: Iterable[str] = (),
        device: torch.device | str = "cpu",
        logs: Sequence[CollectiveLog] | None = None,
    ) -> None:
        if order not in REDUCTIONS:
            raise InternalError(f"unknown order of reduction `{order}`", hint=", ".join(REDUCTIONS))
        self.program = program
        ranks = range(program.mesh.size)
        match_collectives([program] * len(ranks))
        exchange = _SimulatedExchange(order)
        generator = Generator(
            program, ranks, exchange, donated=donated, device=device, checked=True
        )
        self._function = generator.run(f"distcell program {program.digest[:8]} all ranks")
        self.source = generator.source.text("program", "boxed")
        self._first = [_first_of_class(generator.classes[i.value]) for i in program.graph.inputs]
        self._output_classes = generator.output_classes
        self._written = generator.storage.targets
        self._traffic = [traffic(program, rank) for rank in ranks]
        self.logs = [CollectiveLog() for _ in ranks] if logs is None else list(logs)

    def run(self, inputs: list[PerRank]) -> list[PerRank]:
        """The outputs, for each output of the program the pieces of all ranks.

        Args:
            inputs: For each input of the program what each rank holds. The list is emptied. Of
                replicas the first rank's is used. New values of parameters, buffers and states are
                written into the inputs, of all replicas.

        Raises:
            InternalError: When the inputs are not those of the program, or replicas disagree.
        """
        self._check_count(inputs)
        copies = self._copies(inputs)
        pairs = zip(inputs, self._first, strict=True)
        boxed = [pieces[rank] for pieces, first in pairs for rank in first]
        inputs.clear()
        with torch.no_grad(), compat.below_autograd():
            left = iter(self._function(boxed))
            outputs = []
            for classes in self._output_classes:
                found = [next(left) for _ in range(max(classes) + 1)]
                outputs.append([found[number] for number in classes])
            for one, others in copies:
                for other in others:
                    other.copy_(one)
        self._count_traffic()
        return outputs

    def _check_count(self, inputs: Sequence[PerRank]) -> None:
        names = [i.value for i in self.program.graph.inputs]
        if len(inputs) != len(names):
            raise InternalError(f"the program has {len(names)} inputs, {len(inputs)} were given")
        size = self.program.mesh.size
        for name, pieces in zip(names, inputs, strict=True):
            if len(pieces) != size:
                raise InternalError(f"{name} has {len(pieces)} pieces for {size} ranks")

    def _copies(self, inputs: Sequence[PerRank]) -> list[tuple[Tensor, list[Tensor]]]:
        """Replicas of written inputs that are tensors of their own: they are written as well."""
        written, copies = set(self._written.values()), []
        for item, pieces in zip(self.program.graph.inputs, inputs, strict=True):
            if item.value not in written:
                continue
            for share in shares(self.program.layouts[item.value], self.program.mesh):
                one = pieces[share.ranks[0]]
                distinct = {id(pieces[rank]): pieces[rank] for rank in share.ranks}
                if others := [piece for piece in distinct.values() if piece is not one]:
                    copies.append((one, others))
        return copies

    def _count_traffic(self) -> None:
        for log, entries in zip(self.logs, self._traffic, strict=True):
            for kind, axes, nbytes, label in entries:
                log.begin(kind, axes, nbytes, label)
            log.end()


def traffic(program: Program, rank: int) -> list[tuple[str, Axes, int, str]]:
    """The collectives that a rank issues, in order: kind, axes, bytes and label.

    They are what the log of a real rank holds after one run of the program.
    """
    found = []
    for op in program.graph.ops:
        if op.target not in COLLECTIVES:
            continue
        nbytes = sum(
            payload_bytes(program.local_shape(value.name, rank), itemsize(value.dtype))
            for value in program.graph.tensors(op)
        )
        kind = op.target.removeprefix("distcell.").removesuffix("_many")
        found.append((kind, op.args[1], nbytes, label_of(op)))
    return found


def scatter_inputs(program: Program, tensors: Sequence[Any]) -> list[PerRank]:
    """The pieces of global inputs that the ranks hold; replicas share one tensor.

    Args:
        program: The program.
        tensors: For each input of the program its global value.
    """
    pairs = zip(program.graph.inputs, tensors, strict=True)
    return [scatter(program, item.value, tensor) for item, tensor in pairs]


def scatter(program: Program, name: str, tensor: Any, *, shared: bool = False) -> PerRank:
    """The pieces of the global value of a name that the ranks hold.

    A piece shares storage with the global tensor where it can, but for an input that the program
    writes a new value into.

    Args:
        program: The program.
        name: The name of the value.
        tensor: The global value.
        shared: Whether the pieces of an input that is written may share storage too: the global
            tensor is then overwritten.
    """
    size = program.mesh.size
    if not program.graph.values[name].is_tensor:
        return [tensor] * size
    layout = program.layouts[name]
    kept = not shared and name in written_inputs(program)
    pieces: PerRank = [None] * size
    for share in shares(layout, program.mesh):
        piece = layout.cut(tensor, share)
        if kept and piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            piece = piece.clone()
        for rank in share.ranks:
            pieces[rank] = piece
    return pieces


@lru_cache(maxsize=256)
def written_inputs(program: Program) -> frozenset[str]:
    """The inputs that a program writes new values into."""
    outputs = {(o.kind, o.path) for o in program.graph.outputs if o.kind in WRITTEN_KINDS}
    return frozenset(i.value for i in program.graph.inputs if (i.kind, i.path) in outputs)


def gather_outputs(program: Program, outputs: Sequence[PerRank]) -> list[Any]:
    """The global values of a program's outputs.

    Raises:
        InternalError: When ranks that hold replicas of an output disagree.
    """
    pairs = zip(program.graph.outputs, outputs, strict=True)
    return [gather(program, item.value, pieces) for item, pieces in pairs]


def gather(program: Program, name: str, pieces: PerRank, *, into: Tensor | None = None) -> Any:
    """The global value of a name from the pieces of all ranks.

    Args:
        program: The program.
        name: The name of the value.
        pieces: What each rank holds.
        into: As in `Layout.gather`.

    Raises:
        InternalError: When ranks that hold replicas disagree, or a piece has not its shape.
    """
    value, mesh = program.graph.values[name], program.mesh
    if not value.is_tensor:
        if any(piece != pieces[0] for piece in pieces):
            raise InternalError(f"ranks disagree on the number {name}: {pieces}")
        return pieces[0]
    layout, label = program.layouts[name], f"{name}: {program.describe(name)}"
    for share in shares(layout, mesh):
        distinct = list({id(pieces[rank]): pieces[rank] for rank in share.ranks}.values())
        if any(tuple(piece.shape) != share.shape for piece in distinct):
            shapes = ", ".join(str(list(piece.shape)) for piece in distinct)
            want = f"not {list(share.shape)}, of {label}"
            raise InternalError(f"rank {share.ranks[0]} holds {shapes}, {want}")
        check_replicas(label, distinct)
    return layout.gather(pieces, mesh, into=into)


def _first_of_class(classes: Sequence[int]) -> list[int]:
    first: dict[int, int] = {}
    for rank, number in enumerate(classes):
        first.setdefault(number, rank)
    return [first[number] for number in sorted(first)]


class _SimulatedExchange:
    """Writes collectives as functions of the members' variables."""

    def __init__(self, order: ReductionOrder) -> None:
        self._reduce = REDUCTIONS[order]

    def lent(self, generator: Generator, op: Op) -> list[Tensor]:
        """Nothing: reductions make new tensors here."""
        return []

    def write(self, generator: Generator, op: Op, inplace: bool) -> None:
        """Adds a line for each distinct result among the ranks."""
        write = _WRITERS.get(op.target)
        if write is None:
            raise InternalError(f"the simulator does not know {op.target}")
        mesh, axes = generator.program.mesh, op.args[1]
        groups = [mesh.group_of(rank, axes) for rank in generator.ranks]
        write(_Site(generator, op, groups, self._reduce, inplace))


class _Site:
    """One collective with the groups of all ranks."""

    def __init__(
        self,
        generator: Generator,
        op: Op,
        groups: Sequence[tuple[int, ...]],
        reduce: reductions.Reduce,
        inplace: bool,
    ) -> None:
        self.generator, self.op, self.groups, self.reduce = generator, op, groups, reduce
        self.inplace = inplace and reduce is reductions.reduce_by_rank
        mesh, device = generator.program.mesh, generator.device
        self.args = [place(op, mesh, rank, device)[0] for rank in generator.ranks]
        self.op_arg = {"distcell.reduce_scatter": 4}.get(op.target, 2)

    def classes(self, name: str, rank: int) -> tuple[int, ...]:
        """The classes of the members' tensors, in the order of the group."""
        return tuple(self.generator.classes[name][member] for member in self.groups[rank])

    def members(self, name: str, rank: int) -> str:
        """The text of the tuple of the members' tensors."""
        names = [self.generator.variable_of(name, member) for member in self.groups[rank]]
        return f"({', '.join(names)},)"

    def index(self, rank: int) -> int:
        """The place of a rank in its group."""
        return self.groups[rank].index(rank)

    def reduction(self, rank: int) -> Any:
        """The reduction that the collective makes."""
        args = self.args[rank]
        return args[self.op_arg] if len(args) > self.op_arg else "sum"

    def assign(self, rank: int, name: str, function: Any, args: Sequence[str]) -> None:
        """Adds the line that makes the result of a rank."""
        text = self.generator.source.constant(function, function.__name__)
        left = self.generator.variable_of(name, rank)
        self.generator.source.add(f"{left} = {call(text, tuple(args), {})}", note(self.op))

    def literal(self, value: Any) -> str:
        return self.generator.source.literal(value)

    def firsts(self, keys: Sequence[Any]) -> list[int]:
        """The first rank of each distinct key."""
        return [rank for rank, key in enumerate(keys) if key not in keys[:rank]]


def _all_reduce(site: _Site) -> None:
    _reduce_each(site, [site.op.args[0].name])


def _all_reduce_many(site: _Site) -> None:
    _reduce_each(site, [ref.name for ref in site.op.args[0]])


def _reduce_each(site: _Site, operands: Sequence[str]) -> None:
    for operand, result in zip(operands, site.op.outputs, strict=True):
        keys = [site.classes(operand, rank) for rank in site.generator.ranks]
        site.generator.declare(site.op, keys, [result])
        uses = Counter(number for key in dict.fromkeys(keys) for number in key)
        for rank in site.firsts(keys):
            op = site.literal(site.reduction(rank))
            own = site.inplace and uses[keys[rank][0]] == 1  # no other term is the same tensor
            reduce = reductions.reduce_into_first if own else site.reduce
            site.assign(rank, result, reduce, [site.members(operand, rank), op])


def _all_gather(site: _Site) -> None:
    operand, result = site.op.args[0].name, site.op.outputs[0]
    keys = [(site.classes(operand, r), site.args[r][2:]) for r in site.generator.ranks]
    site.generator.declare(site.op, keys)
    for rank in site.firsts(keys):
        args = [site.members(operand, rank), site.literal(site.args[rank][2])]
        site.assign(rank, result, reductions.gather, args)


def _reduce_scatter(site: _Site) -> None:
    operand, result = site.op.args[0].name, site.op.outputs[0]
    keys = [
        (site.classes(operand, r), site.index(r), site.args[r][2:]) for r in site.generator.ranks
    ]
    site.generator.declare(site.op, keys)
    for rank in site.firsts(keys):
        dim, sizes, index = site.args[rank][2], site.args[rank][3], site.index(rank)
        numbers = [site.literal(n) for n in (dim, (sum(sizes[:index]), sizes[index]))]
        reduce = site.generator.source.constant(site.reduce, site.reduce.__name__)
        reduction = site.literal(site.reduction(rank))
        args = [site.members(operand, rank), *numbers, f"op={reduction}", f"reduce={reduce}"]
        site.assign(rank, result, reductions.reduce_slice, args)


def _all_to_all(site: _Site) -> None:
    operand, result = site.op.args[0].name, site.op.outputs[0]
    sizes = [args[4] for args in site.args]
    keys = [
        (
            site.classes(operand, r),
            site.index(r),
            tuple(sizes[member] for member in site.groups[r]),
            site.args[r][2:4],
        )
        for r in site.generator.ranks
    ]
    site.generator.declare(site.op, keys)
    for rank in site.firsts(keys):
        split_dim, concat_dim = site.args[rank][2:4]
        split_sizes = tuple(sizes[member] for member in site.groups[rank])
        dims = (split_dim, concat_dim)
        numbers = [site.literal(n) for n in (site.index(rank), dims, split_sizes)]
        site.assign(rank, result, reductions.exchange, [site.members(operand, rank), *numbers])


_WRITERS = {
    "distcell.all_reduce": _all_reduce,
    "distcell.all_reduce_many": _all_reduce_many,
    "distcell.all_gather": _all_gather,
    "distcell.reduce_scatter": _reduce_scatter,
    "distcell.all_to_all": _all_to_all,
}
