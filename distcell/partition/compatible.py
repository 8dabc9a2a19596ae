"""Which split of its factors an op runs with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from distcell.layout import Dim, Layout
from distcell.mesh import Mesh
from distcell.rules.notation import OpRule
from distcell.sharding.flow import axes_of, splits_of, without_axes

RESULT_DISCOUNT = 0.5
"""A result counts half: to change it moves its bytes once, to gather an operand leaves every rank
with work that it would have shared."""


@lru_cache(maxsize=65536)
def choose_split(
    rule: OpRule, layouts: tuple[Layout | None, ...], weights: tuple[int, ...], mesh: Mesh
) -> tuple[tuple[str, Dim], ...]:
    """The split of an op's factors that moves few bytes.

    Each axis is given to one factor: the one that it splits on the tensors with the most bytes, for
    these stay where they are. A factor then takes the heaviest of the splits that have its axes.

    Args:
        rule: The rule of the op.
        layouts: The layouts of operands and results as the plan has them; None where it has none.
        weights: The bytes of each tensor.
        mesh: The mesh.
    """
    votes: dict[tuple[str, Dim], float] = {}
    for index, layout in enumerate(layouts):
        if layout is None:
            continue
        share = 1.0 if index < len(rule.operands) else RESULT_DISCOUNT
        for factor, dim in splits_of(rule, index, layout, mesh).items():
            if rule.kind(factor) != "whole":
                votes[factor, dim] = votes.get((factor, dim), 0.0) + share * weights[index]
    owners = _owners(rule, votes)
    split: dict[str, Dim] = {}
    for factor in sorted({factor for factor, _ in votes}):
        mine = {axis for axis, owner in owners.items() if owner == factor}
        choices = [(dim, vote) for (name, dim), vote in votes.items() if name == factor]
        dim, _ = max(choices, key=lambda c: (len(mine & axes_of(c[0])), c[1], str(c[0])))
        kept = without_axes(dim, axes_of(dim) - mine)
        if axes_of(kept):
            split[factor] = kept
    return tuple(split.items())


def _owners(rule: OpRule, votes: Mapping[tuple[str, Dim], float]) -> dict[str, str]:
    """The factor that each axis is given to."""
    totals: dict[str, dict[str, float]] = {}
    for (factor, dim), vote in votes.items():
        for axis in axes_of(dim):
            counted = totals.setdefault(axis, {})
            counted[factor] = counted.get(factor, 0.0) + vote
    return {
        axis: max(counted, key=lambda f: (counted[f], rule.kind(f) == "pass", f))
        for axis, counted in totals.items()
    }
