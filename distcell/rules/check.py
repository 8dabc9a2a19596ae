"""The check of rules: an op split in every way that its rule allows, against the whole op.

Small tensors of real numbers are cut as the rule says, the op runs on each rank's pieces, and the
pieces of the results are put together again. Where a factor is lowered, the ops of the lowering
run, each placed where its operands lie. Whoever adds an op of their own calls the same check.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from distcell.dtype import DTYPES, name_of
from distcell.errors import RuleError
from distcell.graph import Arg, DeviceArg, DtypeArg, Op, RankArg, Ref, Value
from distcell.layout import Dim, Layout, Part, canonical, neutral_element
from distcell.mesh import Mesh
from distcell.rules.factors import Split, layout_of, local_op, partial_of, project
from distcell.rules.notation import Builder, Call, OpRule
from distcell.rules.table import find, implementation, unknown_rule

_TOLERANCES = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}
TOLERANCE = 1e-9
"""Of float64; the largest of the dtypes that take part holds."""


@dataclass(frozen=True)
class Checked:
    """What a check did: how many splits, lowerings and linearity claims it tried."""

    splits: int
    lowerings: int
    claims: int


def check_rule(target: str, *args: Any, ways: Sequence[int] = (2, 3, 4), **kwargs: Any) -> Checked:
    """How much of an op's rule was checked on the given arguments; all of it held.

    Every factor that may be split is split by each number of ways (evenly, unevenly and into empty
    pieces, as its size happens to be), over two axes, and together with every other factor.

    Args:
        target: The op, such as `aten.mm.default`. Its rule must be in the table.
        *args: Arguments for it: tensors (float64, so that errors show), numbers, dtypes, tuples.
        ways: Over how many ranks.
        **kwargs: Its keyword arguments.

    Raises:
        RuleError: When a split, a lowering or a claim of linearity gives another result. All
            failures are listed.

    Example:
        A user's own op is registered with the same notation, and checked.

        >>> from distcell.rules.notation import OpDef, rule
        >>> from distcell.rules.table import register
        >>> def scaled_rows(x, scale):
        ...     return x * scale[:, None]
        >>> _ = register(OpDef("mylib.scaled_rows", rule("n d, n -> n d", linear=[{0}, {1}]),
        ...                    run=scaled_rows))
        >>> x, scale = torch.rand(4, 3).double(), torch.rand(4).double()
        >>> check_rule("mylib.scaled_rows", x, scale)
        Checked(splits=10, lowerings=0, claims=2)
    """
    example = _Example.of(target, args, kwargs)
    failures: list[str] = []
    counts = {"splits": 0, "lowerings": 0, "claims": 0}
    for mesh, split in _splits(example.rule, ways):
        lowered = any(example.rule.kind(name) == "lower" for name in split)
        counts["lowerings" if lowered else "splits"] += 1
        run = example.run_lowered if lowered else example.run_split
        _note(failures, partial(run, mesh, split), _print(mesh, split))
    for group in example.rule.linear:
        counts["claims"] += 1
        _note(failures, partial(example.check_linear, group), f"linear in {sorted(group)}")
    if example.rule.monotone:
        counts["claims"] += 1
        _note(failures, example.check_monotone, "monotone")
    if failures:
        raise RuleError(f"the rule `{example.rule}` of {target} does not hold", where=failures)
    return Checked(**counts)


def _note(failures: list[str], run: Callable[[], str | None], what: str) -> None:
    try:
        fault = run()
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        failures.append(f"{what}: {fault}")


def _splits(rule: OpRule, ways: Sequence[int]) -> Iterator[tuple[Mesh, dict[str, Dim]]]:
    """Each factor alone, over two axes, and every pair; sizes of one are not split."""
    free = [f for f in rule.factors.values() if f.kind != "whole" and f.size > 1]
    for factor in free:
        for count in ways:
            part = Part(factor.size, ("a",))
            yield Mesh((("a", count),)), {factor.name: (part,)}
        part = Part(factor.size, ("a", "b"))
        yield Mesh((("a", 2), ("b", 2))), {factor.name: (part,)}
    for one, two in itertools.permutations(free, 2):
        mesh = Mesh((("a", 2), ("b", 3)))
        split: dict[str, Dim] = {
            one.name: (Part(one.size, ("a",)),),
            two.name: (Part(two.size, ("b",)),),
        }
        yield mesh, split


def _print(mesh: Mesh, split: Split) -> str:
    parts = ", ".join(f"{n}={'*'.join(map(str, dim))}" for n, dim in split.items())
    return f"{parts} on {mesh}"


@dataclass
class _Example:
    """An op with real arguments, what it gives as a whole, and its rule."""

    call: Call
    rule: OpRule
    operands: list[torch.Tensor]
    results: list[torch.Tensor]

    @classmethod
    def of(cls, target: str, args: Any, kwargs: Any) -> _Example:
        definition = find(target)
        if definition is None:
            raise RuleError(f"there is no rule for {target}", hint="register it first")
        operands: list[torch.Tensor] = []
        placed = tuple(_as_arg(arg, operands) for arg in args)
        named = tuple((key, _as_arg(arg, operands)) for key, arg in kwargs.items())
        op = Op(target, placed, named)
        made = _execute(op, operands, Mesh(), 0)
        results = [t for t in made if isinstance(t, torch.Tensor)]
        values = [Value("", tuple(t.shape), name_of(t.dtype)) for t in (*operands, *results)]
        count = len(operands)
        call = Call(op, tuple(values[:count]), tuple(values[count:]))
        rule = definition.rule(call)
        _verify_sizes(rule, call)
        return cls(call, rule, operands, results)

    @cached_property
    def tolerance(self) -> float:
        tensors = (*self.operands, *self.results)
        return max(_TOLERANCES.get(t.dtype, TOLERANCE) for t in tensors)

    def run_split(self, mesh: Mesh, split: Split) -> str | None:
        """The op on each rank's pieces against the whole: what differs, or None."""
        layouts = [layout_of(dims, self.rule, split) for dims in self.rule.operands]
        pieces = [
            [layout.shard(t, mesh, rank) for rank in range(mesh.size)]
            for layout, t in zip(layouts, self.operands, strict=True)
        ]
        runner = _Ranks(mesh)
        made = runner.run_local(self.call, self.rule, split, pieces)
        return self._compare(made, mesh)

    def run_lowered(self, mesh: Mesh, split: Split) -> str | None:
        """The ops of the lowering against the whole: what differs, or None."""
        definition = find(self.call.op.target)
        if definition is None or definition.lower is None:
            return "a factor is to be lowered, and there is no lowering"
        runner = _Ranks(mesh)
        names = []
        for index, (dims, tensor) in enumerate(zip(self.rule.operands, self.operands, strict=True)):
            layout = layout_of(dims, self.rule, split)
            pieces = [layout.shard(tensor, mesh, rank) for rank in range(mesh.size)]
            names.append(runner.add(f"x{index}", tensor, layout, pieces))
        op = _with_names(self.call.op, names)
        operands = tuple(
            Value(name, v.shape, v.dtype) for name, v in zip(names, self.call.operands, strict=True)
        )
        refs = definition.lower(Builder(runner.make), Call(op, operands, self.call.results))
        if len(refs) != len(self.results):
            return f"the lowering gives {len(refs)} results, not {len(self.results)}"
        return self._compare([runner.held[ref.name] for ref in refs], mesh)

    def _compare(self, made: Sequence[_Held], mesh: Mesh) -> str | None:
        for index, (held, whole) in enumerate(zip(made, self.results, strict=True)):
            for rank, piece in enumerate(held.pieces):
                shape = held.layout.local_shape(mesh, rank)
                if tuple(piece.shape) != shape:
                    return (
                        f"result {index} on rank {rank} has shape {tuple(piece.shape)}, not {shape}"
                    )
                if piece.dtype != whole.dtype:
                    return f"result {index} has dtype {piece.dtype}, not {whole.dtype}"
            if fault := self._differs(held.layout.gather(held.pieces, mesh), whole):
                return f"result {index}: {fault}"
            if fault := self._replicas(held, mesh):
                return f"result {index}: {fault}"
        return None

    def _replicas(self, held: _Held, mesh: Mesh) -> str | None:
        """Ranks that hold the same share must hold the same numbers."""
        first: dict[tuple[int, ...], torch.Tensor] = {}
        for rank, piece in enumerate(held.pieces):
            coords = mesh.coords(rank)
            key = tuple(coords[axis] for axis in sorted(held.layout.axes))
            if fault := self._differs(piece, first.setdefault(key, piece)):
                return f"replicas differ: {fault}"
        return None

    def _differs(self, made: torch.Tensor, whole: torch.Tensor) -> str | None:
        if made.shape != whole.shape:
            return f"shape {tuple(made.shape)}, not {tuple(whole.shape)}"
        if torch.equal(made, whole):
            return None
        a, b = made.to(torch.complex128), whole.to(torch.complex128)
        scale = b[torch.isfinite(b)].abs().max().item() if torch.isfinite(b).any() else 1.0
        if torch.allclose(a, b, rtol=0, atol=self.tolerance * max(scale, 1.0), equal_nan=True):
            return None
        return f"differs by {(a - b).abs().max().item():.3g} of {scale:.3g}"

    def check_linear(self, group: frozenset[int]) -> str | None:
        """f(x1) + f(x2) == f(x1 + x2), the other operands being the same."""
        generator = torch.Generator().manual_seed(1)
        first, second = list(self.operands), list(self.operands)
        if any(self.operands[index].dtype == torch.bool for index in group):
            return None  # truth values are never partial sums
        for index in group:
            whole = self.operands[index]
            share = torch.rand(whole.shape, generator=generator)
            real = whole.is_floating_point() or whole.is_complex()
            first[index] = whole * share.to(whole.dtype) if real else whole // 2
            # infinities cannot be shared out: one term has them, the other none
            finite = torch.isfinite(whole)
            second[index] = torch.where(finite, whole - first[index], 0)
        return self._combined(first, second, (torch.add, self.results))

    def check_monotone(self) -> str | None:
        """max(f(x1), f(x2)) == f(max(x1, x2)), and the same for min."""
        generator = torch.Generator().manual_seed(1)
        whole = self.operands[0]
        lower = whole - torch.rand(whole.shape, generator=generator).to(whole.dtype)
        choice = torch.rand(whole.shape, generator=generator) < 0.5
        one, two = torch.where(choice, whole, lower), torch.where(choice, lower, whole)
        rest = self.operands[1:]
        for combine in (torch.maximum, torch.minimum):
            expected = _execute(self.call.op, [combine(one, two), *rest], Mesh(), 0)
            if fault := self._combined([one, *rest], [two, *rest], (combine, expected)):
                return fault
        return None

    def _combined(
        self,
        first: Sequence[torch.Tensor],
        second: Sequence[torch.Tensor],
        expected: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Sequence[Any]],
    ) -> str | None:
        combine, wholes = expected
        parts = [_execute(self.call.op, given, Mesh(), 0) for given in (first, second)]
        for index, (one, two, whole) in enumerate(zip(*parts, wholes, strict=True)):
            if fault := self._differs(combine(one, two), whole):
                return f"result {index} {fault}"
        return None


@dataclass
class _Held:
    """A value with its layout and the pieces of all ranks."""

    layout: Layout
    pieces: list[torch.Tensor]


@dataclass
class _Ranks:
    """All ranks of a mesh, each op run on one after the other."""

    mesh: Mesh
    held: dict[str, _Held] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, name: str, like: Any, layout: Layout, pieces: list[torch.Tensor]) -> str:
        self.held[name] = _Held(canonical(layout, self.mesh), pieces)
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
    ) -> list[_Held]:
        """The local op on every rank."""
        op = local_op(call, rule, split)
        made: list[_Held] = []
        for dims in rule.results:
            axes, reduction = partial_of(dims, rule, split)
            base = layout_of(dims, rule, split)
            made.append(_Held(Layout(base.dims, axes, reduction), []))
        for rank in range(self.mesh.size):
            given = [held[rank] for held in pieces]
            if _is_skipped(call, given, made, mesh=self.mesh, rank=rank):
                outcome = [
                    _neutral(held.layout, value, self.mesh, rank)
                    for held, value in zip(made, call.results, strict=True)
                ]
            else:
                outcome = _execute(op, given, self.mesh, rank)
            for held, tensor in zip(made, outcome, strict=True):
                held.pieces.append(tensor)
        return made


def _is_skipped(
    call: Call, given: Sequence[torch.Tensor], made: Sequence[_Held], *, mesh: Mesh, rank: int
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


def _execute(op: Op, operands: Sequence[torch.Tensor], mesh: Mesh, rank: int) -> list[Any]:
    """The results of an op on one rank; lists are flattened, absent results left out."""
    given = iter([t.detach().contiguous() for t in operands])
    coords = mesh.coords(rank)
    args = [_concrete(arg, given, coords, mesh) for arg in op.args]
    kwargs = {key: _concrete(arg, given, coords, mesh) for key, arg in op.kwargs}
    with torch.no_grad():
        return list(_flatten(implementation(op.target)(*args, **kwargs)))


def _flatten(made: Any) -> Iterator[Any]:
    if isinstance(made, (tuple, list)):
        for item in made:
            yield from _flatten(item)
    elif made is not None:
        yield made


def _infer(op: Op, operands: Sequence[Value]) -> tuple[Value, ...]:
    """The shapes of the results of an op, from tensors without data."""
    given = iter([torch.empty(v.shape, dtype=DTYPES[v.dtype], device="meta") for v in operands])
    mesh = Mesh()
    args = [_concrete(arg, given, {}, mesh, "meta") for arg in op.args]
    kwargs = {key: _concrete(arg, given, {}, mesh, "meta") for key, arg in op.kwargs}
    with torch.no_grad():
        made = _flatten(implementation(op.target)(*args, **kwargs))
        return tuple(Value("", tuple(t.shape), name_of(t.dtype)) for t in made)


def _concrete(
    arg: Arg, given: Any, coords: Mapping[str, int], mesh: Mesh, device: str = "cpu"
) -> Any:
    if isinstance(arg, Ref):
        return next(given)
    if isinstance(arg, tuple):
        return [_concrete(item, given, coords, mesh, device) for item in arg]
    if isinstance(arg, DtypeArg):
        return DTYPES[arg.name]
    if isinstance(arg, DeviceArg):
        return torch.device(device)
    return arg.at(mesh, coords) if isinstance(arg, RankArg) else arg


def _as_arg(item: Any, operands: list[torch.Tensor]) -> Arg:
    if isinstance(item, torch.Tensor):
        operands.append(item)
        return Ref("")
    if isinstance(item, (tuple, list)):
        return tuple(_as_arg(element, operands) for element in item)
    if isinstance(item, torch.dtype):
        return DtypeArg(name_of(item))
    return DeviceArg() if isinstance(item, torch.device) else item


def _with_names(op: Op, names: Sequence[str]) -> Op:
    """The op with its uses, in order, named."""
    rest = iter(names)
    return op.map_refs(lambda _: Ref(next(rest)))


def _verify_sizes(rule: OpRule, call: Call) -> None:
    """Whether the factors of each dim have its size as their product."""
    for dims, value in zip(rule.tensors, (*call.operands, *call.results), strict=True):
        layout = layout_of(dims, rule, {})
        if layout.shape != value.shape:
            raise RuleError(f"the rule `{rule}` of {call.op.target} does not fit {value.shape}")
