"""How layouts flow through one op: the step that propagation repeats.

After Shardy's factor propagation (prior work: openxla/shardy, "basic" and "aggressive" factor
propagation): a factor that is split on one tensor becomes split alike on all tensors that have it,
as long as the axis is free there and the dim is open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from distcell.layout import Dim, Layout, merge_parts
from distcell.mesh import Mesh
from distcell.rules.factors import project
from distcell.rules.notation import OpRule


@dataclass(frozen=True)
class Mode:
    """Which factors may carry an axis, and whether conflicts are resolved.

    Args:
        level: 0: pass factors of element-wise ops and data movement; 1: pass factors of any op;
            2: any factor that may be split.
        aggressive: Whether of two factors that want an axis the weightier gets it; otherwise none.
    """

    level: int
    aggressive: bool = False

    def admits(self, rule: OpRule, factor: str) -> bool:
        kind = rule.kind(factor)
        if kind == "whole" or rule.factors[factor].size == 1:
            return False
        return self.level == 2 or (kind == "pass" and (self.level == 1 or rule.priority == 0))


@dataclass(frozen=True)
class Tensor:
    """One tensor of an op: its layout, which dims may not change, and how much it counts."""

    layout: Layout
    closed: tuple[bool, ...]
    weight: int


@dataclass(frozen=True)
class Change:
    """A tensor of the op that got axes: its new layout, and which tensor they came from."""

    tensor: int
    layout: Layout
    source: int


class _Flow:
    """The splits of all factors on all tensors of one op."""

    def __init__(self, rule: OpRule, tensors: tuple[Tensor, ...], mesh: Mesh) -> None:
        self.rule, self.tensors, self.mesh = rule, tensors, mesh
        self.layouts = [t.layout for t in tensors]
        self.splits: list[dict[str, Dim]] = [
            splits_of(rule, i, t.layout, mesh) for i, t in enumerate(tensors)
        ]

    def claims(self) -> dict[str, set[str]]:
        """For each axis the factors that it splits, on whichever tensor."""
        claims: dict[str, set[str]] = {}
        for split in self.splits:
            for factor, dim in split.items():
                for axis in axes_of(dim):
                    claims.setdefault(axis, set()).add(factor)
        return claims

    def weight(self, factor: str) -> int:
        return sum(t.weight for t, s in zip(self.tensors, self.splits, strict=True) if factor in s)

    def best(self, factor: str) -> tuple[Dim, int] | None:
        """The split of a factor that all others of its splits are a beginning of."""
        found = [(s[factor], i) for i, s in enumerate(self.splits) if factor in s]
        for dim, source in found:
            if all(extends(dim, other, self.mesh) for other, _ in found):
                return dim, source
        return None

    def heaviest(self, factor: str) -> tuple[Dim, int]:
        found = [(s[factor], i) for i, s in enumerate(self.splits) if factor in s]
        return max(found, key=lambda item: (self.tensors[item[1]].weight, -item[1]))

    def expand(self, factor: str, dim: Dim, source: int) -> Iterable[Change]:
        """Gives the split to every tensor that has the factor and can take it."""
        for index, dims in enumerate(self.rule.tensors):
            place = next((d for d, names in enumerate(dims) if factor in names), None)
            if place is None or self.tensors[index].closed[place]:
                continue
            mine = self.splits[index].get(factor, ())
            new = self._fitting(index, dim, mine)
            if new == mine or not extends(new, mine, self.mesh):
                continue
            layout = self._with_split(index, place, factor, new)
            if layout is not None:
                yield Change(index, layout, source)

    def _fitting(self, index: int, dim: Dim, mine: Dim) -> Dim:
        """The split without the axes that the tensor uses elsewhere."""
        taken = self.layouts[index].axes - axes_of(mine)
        return without_axes(dim, taken)

    def _with_split(self, index: int, place: int, factor: str, new: Dim) -> Layout | None:
        layout, names = self.layouts[index], self.rule.tensors[index][place]
        sizes = [self.rule.factors[name].size for name in names]
        cut = project(layout.dims[place], sizes, self.mesh)
        if cut is None:
            return None
        cut[names.index(factor)] = new
        parts = merge_parts([part for piece in cut for part in piece], self.mesh)
        changed = layout.with_dim(place, parts)
        self.layouts[index] = changed
        self.splits[index] = splits_of(self.rule, index, changed, self.mesh)
        return changed


@lru_cache(maxsize=65536)
def flow(rule: OpRule, tensors: tuple[Tensor, ...], mesh: Mesh, mode: Mode) -> tuple[Change, ...]:
    """The tensors of an op (operands, then results) whose layouts grow, in order."""
    state = _Flow(rule, tensors, mesh)
    claims = state.claims()
    factors = [name for name in rule.factors if mode.admits(rule, name)]
    changes: list[Change] = []
    if mode.aggressive:
        factors.sort(key=state.weight, reverse=True)
    for factor in factors:
        if not any(factor in split for split in state.splits):
            continue
        best = state.heaviest(factor) if mode.aggressive else state.best(factor)
        if best is None:
            continue
        dim, source = best
        if not mode.aggressive:
            contested = {axis for axis, names in claims.items() if len(names) > 1}
            dim = without_axes(dim, contested)
        if axes_of(dim):
            changes.extend(state.expand(factor, dim, source))
    return tuple(changes)


def splits_of(rule: OpRule, index: int, layout: Layout, mesh: Mesh) -> dict[str, Dim]:
    """How a layout splits the factors of tensor `index` (operands, then results).

    Dims that cannot be cut at the borders of their factors give nothing: they would have to be
    gathered.
    """
    found: dict[str, Dim] = {}
    for names, dim in zip(rule.tensors[index], layout.dims, strict=True):
        if not axes_of(dim) or not names:
            continue
        cut = project(dim, [rule.factors[name].size for name in names], mesh)
        for name, piece in zip(names, cut or (), strict=False):
            if axes_of(piece):
                found[name] = piece
    return found


def axes_of(dim: Dim) -> frozenset[str]:
    """All axes that split a dim."""
    return frozenset(axis for part in dim for axis in part.axes)


def without_axes(dim: Dim, axes: Iterable[str]) -> Dim:
    """The dim with some axes taken off."""
    gone = set(axes)
    if not gone & axes_of(dim):
        return dim
    return merge_parts([replace(p, axes=tuple(a for a in p.axes if a not in gone)) for p in dim])


@lru_cache(maxsize=65536)
def extends(longer: Dim, shorter: Dim, mesh: Mesh) -> bool:
    """Whether a split is another one, or that with further axes."""
    if not axes_of(shorter):
        return True
    rest = without_axes(longer, axes_of(longer) - axes_of(shorter))
    return merge_parts(rest, mesh) == merge_parts(shorter, mesh)
