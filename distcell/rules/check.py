"""The check of rules: an op split in every way that its rule allows, against the whole op.

Small tensors of real numbers are cut as the rule says, the op runs on each rank's pieces, and the
pieces of the results are put together again. Where a factor is lowered, the ops of the lowering
run, each placed where its operands lie. Whoever adds an op of their own calls the same check.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from distcell.dtype import name_of
from distcell.errors import RuleError
from distcell.graph import Arg, DeviceArg, DtypeArg, Op, Ref, Value
from distcell.layout import Dim, Part
from distcell.mesh import Mesh
from distcell.rules.factors import Split, layout_of
from distcell.rules.notation import Builder, Call, OpRule
from distcell.rules.ranks import Held, Ranks, execute
from distcell.rules.table import find

_TOLERANCES = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
}
TOLERANCE = 1e-9
"""Of float64; the largest of the dtypes of the results holds."""


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
        made = execute(op, operands, Mesh(), 0)
        results = [t for t in made if isinstance(t, torch.Tensor)]
        values = [Value("", tuple(t.shape), name_of(t.dtype)) for t in (*operands, *results)]
        count = len(operands)
        call = Call(op, tuple(values[:count]), tuple(values[count:]))
        rule = definition.rule(call)
        _verify_sizes(rule, call)
        return cls(call, rule, operands, results)

    @cached_property
    def tolerance(self) -> float:
        return _tolerance(self.results)

    def run_split(self, mesh: Mesh, split: Split) -> str | None:
        """The op on each rank's pieces against the whole: what differs, or None."""
        layouts = [layout_of(dims, self.rule, split) for dims in self.rule.operands]
        pieces = [
            [layout.shard(t, mesh, rank) for rank in range(mesh.size)]
            for layout, t in zip(layouts, self.operands, strict=True)
        ]
        runner = Ranks(mesh)
        made = runner.run_local(self.call, self.rule, split, pieces)
        return self._compare(made, mesh)

    def run_lowered(self, mesh: Mesh, split: Split) -> str | None:
        """The ops of the lowering against the whole: what differs, or None."""
        definition = find(self.call.op.target)
        if definition is None or definition.lower is None:
            return "a factor is to be lowered, and there is no lowering"
        runner = Ranks(mesh)
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

    def _compare(self, made: Sequence[Held], mesh: Mesh) -> str | None:
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

    def _replicas(self, held: Held, mesh: Mesh) -> str | None:
        """Ranks that hold the same share must hold the same numbers."""
        first: dict[tuple[int, ...], torch.Tensor] = {}
        for rank, piece in enumerate(held.pieces):
            coords = mesh.coords(rank)
            key = tuple(coords[axis] for axis in sorted(held.layout.axes))
            if fault := self._differs(piece, first.setdefault(key, piece)):
                return f"replicas differ: {fault}"
        return None

    def _differs(
        self, made: torch.Tensor, whole: torch.Tensor, tolerance: float | None = None
    ) -> str | None:
        if made.shape != whole.shape:
            return f"shape {tuple(made.shape)}, not {tuple(whole.shape)}"
        if torch.equal(made, whole):
            return None
        a, b = made.to(torch.complex128), whole.to(torch.complex128)
        scale = b[torch.isfinite(b)].abs().max().item() if torch.isfinite(b).any() else 1.0
        limit = (self.tolerance if tolerance is None else tolerance) * max(scale, 1.0)
        if torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
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
            expected = execute(self.call.op, [combine(one, two), *rest], Mesh(), 0)
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
        tolerance = _tolerance((*self.operands, *self.results))  # the terms are rounded too
        parts = [execute(self.call.op, given, Mesh(), 0) for given in (first, second)]
        for index, (one, two, whole) in enumerate(zip(*parts, wholes, strict=True)):
            if fault := self._differs(combine(one, two), whole, tolerance):
                return f"result {index} {fault}"
        return None


def _tolerance(tensors: Sequence[torch.Tensor]) -> float:
    return max((_TOLERANCES.get(t.dtype, TOLERANCE) for t in tensors), default=TOLERANCE)


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
