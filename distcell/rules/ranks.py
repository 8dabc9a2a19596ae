"""All ranks of a mesh in one process, each op run on one rank after the other.

The check of rules runs on it: no program is made, partial results are reduced at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distcell.dtype import DTYPES, name_of
from distcell.errors import RuleError
from distcell.graph import Arg, DeviceArg, DtypeArg, Op, RankArg, Ref, Value
from distcell.layout import Dim, Layout, canonical, neutral_element
from distcell.mesh import Mesh
from distcell.rules.factors import Split, layout_of, local_op, partial_of, project
from distcell.rules.notation import Builder, Call, OpRule
from distcell.rules.table import asked_for, find, implementation, output_mask, unknown_rule


@dataclass
class Held:
    """A value with its layout and the pieces of all ranks."""

    layout: Layout
    pieces: list[torch.Tensor]


@dataclass
class Ranks:
    """All ranks of a mesh, each op run on one after the other."""

    mesh: Mesh
    held: dict[str, Held] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, name: str, like: Any, layout: Layout, pieces: list[torch.Tensor]) -> str:
        self.held[name] = Held(canonical(layout, self.mesh), pieces)
        self.values[name] = Value(name, layout.shape, name_of(like.dtype))
        return name

    def make(self, op: Op) -> tuple[Value, ...]:
        """Runs an op of a lowering where its operands lie; partial results are reduced at once."""
        operands = tuple(self.values[name] for name in op.inputs)
        results = _infer(op, operands)
        call = Call(op, operands, results)
        definition = find(op.target)
        rule = definition.rule(call) if definition else unknown_rule(call)
        split = self._greedy(rule, operands)
        if any(rule.kind(name) == "lower" for name in split):
            return self._lower(call, rule, split)
        pieces = [
            self.fetch(value.name, layout_of(dims, rule, split))
            for value, dims in zip(operands, rule.operands, strict=True)
        ]
        made = self.run_local(call, rule, split, pieces)
        values = []
        for held, value in zip(made, results, strict=True):
            name = f"t{len(self.values)}"
            whole = held.layout.gather(held.pieces, self.mesh)
            layout = held.layout.without_partial()
            shards = [layout.shard(whole, self.mesh, rank) for rank in range(self.mesh.size)]
            self.add(name, whole, layout, shards)
            values.append(Value(name, value.shape, value.dtype))
        return tuple(values)

    def _lower(self, call: Call, rule: OpRule, split: Split) -> tuple[Value, ...]:
        definition = find(call.op.target)
        if definition is None or definition.lower is None:
            raise RuleError(f"{call.op.target} in a lowering has no lowering of its own")
        refs = definition.lower(Builder(self.make), call)
        return tuple(self.values[ref.name] for ref in refs)

    def _greedy(self, rule: OpRule, operands: Sequence[Value]) -> dict[str, Dim]:
        """The split that the operands have; of two that do not agree the first."""
        split: dict[str, Dim] = {}
        taken: set[str] = set()
        for value, dims in zip(operands, rule.operands, strict=True):
            for names, dim in zip(dims, self.held[value.name].layout.dims, strict=True):
                sizes = [rule.factors[name].size for name in names]
                for name, parts in zip(names, project(dim, sizes, self.mesh) or (), strict=False):
                    axes = {axis for part in parts for axis in part.axes}
                    if not axes or name in split or axes & taken or rule.kind(name) == "whole":
                        continue
                    split[name] = parts
                    taken |= axes
        return split

    def fetch(self, name: str, layout: Layout) -> list[torch.Tensor]:
        """The pieces of a value in another layout."""
        held = self.held[name]
        if held.layout == layout:
            return held.pieces
        whole = held.layout.gather(held.pieces, self.mesh)
        return [layout.shard(whole, self.mesh, rank) for rank in range(self.mesh.size)]

    def run_local(
        self, call: Call, rule: OpRule, split: Split, pieces: Sequence[list[torch.Tensor]]
    ) -> list[Held]:
        """The local op on every rank."""
        op = local_op(call, rule, split)
        made: list[Held] = []
        for dims in rule.results:
            axes, reduction = partial_of(dims, rule, split)
            base = layout_of(dims, rule, split)
            made.append(Held(Layout(base.dims, axes, reduction), []))
        for rank in range(self.mesh.size):
            given = [held[rank] for held in pieces]
            if _is_skipped(call, given, made, mesh=self.mesh, rank=rank):
                outcome = [
                    _neutral(held.layout, value, self.mesh, rank)
                    for held, value in zip(made, call.results, strict=True)
                ]
            else:
                outcome = execute(op, given, self.mesh, rank)
            for held, tensor in zip(made, outcome, strict=True):
                held.pieces.append(tensor)
        return made


def _is_skipped(
    call: Call, given: Sequence[torch.Tensor], made: Sequence[Held], *, mesh: Mesh, rank: int
) -> bool:
    """Whether the op is skipped on a rank, as a program does: its share of an operand is empty.

    Nothing must hang on it: all results are empty, or partial with nothing to add.
    """
    pairs = zip(given, call.operands, strict=True)
    if not any(piece.numel() == 0 and 0 not in value.shape for piece, value in pairs):
        return False
    return all(
        bool(held.layout.partial) or 0 in held.layout.local_shape(mesh, rank) for held in made
    )


def _neutral(layout: Layout, value: Value, mesh: Mesh, rank: int) -> torch.Tensor:
    dtype = DTYPES[value.dtype]
    shape = layout.local_shape(mesh, rank)
    return torch.full(shape, neutral_element(layout.reduction, dtype), dtype=dtype)


@dataclass(frozen=True)
class _Place:
    """Where an op runs: what its arguments depend on."""

    mesh: Mesh
    coords: Mapping[str, int]
    device: str = "cpu"

    def value(self, arg: Arg, given: Iterator[torch.Tensor]) -> Any:
        """An argument as torch takes it; uses of values come from `given`, in order."""
        if isinstance(arg, Ref):
            return next(given)
        if isinstance(arg, tuple):
            return [self.value(item, given) for item in arg]
        if isinstance(arg, DtypeArg):
            return DTYPES[arg.name]
        if isinstance(arg, DeviceArg):
            return torch.device(self.device)
        return arg.at(self.mesh, self.coords) if isinstance(arg, RankArg) else arg

    def run(self, op: Op, operands: Sequence[torch.Tensor]) -> list[Any]:
        """The results of an op; lists are flattened, absent results left out."""
        given = iter(operands)
        args = [self.value(arg, given) for arg in op.args]
        kwargs = {key: self.value(arg, given) for key, arg in op.kwargs}
        with torch.no_grad():
            made = implementation(op.target)(*args, **kwargs)
        mask = output_mask(op)
        return list(_flatten(made if mask is None else asked_for(made, mask)))


def execute(op: Op, operands: Sequence[torch.Tensor], mesh: Mesh, rank: int) -> list[Any]:
    """The results of an op on one rank."""
    return _Place(mesh, mesh.coords(rank)).run(op, [t.detach().contiguous() for t in operands])


def _flatten(made: Any) -> Iterator[Any]:
    if isinstance(made, (tuple, list)):
        for item in made:
            yield from _flatten(item)
    elif made is not None:
        yield made


def _infer(op: Op, operands: Sequence[Value]) -> tuple[Value, ...]:
    """The shapes of the results of an op, from tensors without data."""
    blank = [torch.empty(v.shape, dtype=DTYPES[v.dtype], device="meta") for v in operands]
    made = _Place(Mesh(), {}, "meta").run(op, blank)
    return tuple(Value("", tuple(t.shape), name_of(t.dtype)) for t in made)
