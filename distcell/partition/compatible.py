"""Which split of its factors an op runs with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from distcell.layout import Dim, Layout
from distcell.mesh import Mesh
from distcell.rules.notation import OpRule
from distcell.sharding.flow import axes_of, extends, splits_of, without_axes

RESULT_DISCOUNT = 0.5
"""A result counts half: to change it moves its bytes once, to gather an operand leaves every rank
with work that it would have shared."""


@lru_cache(maxsize=65536)
def choose_split(
    rule: OpRule, layouts: tuple[Layout | None, ...], weights: tuple[int, ...], mesh: Mesh
) -> tuple[tuple[str, Dim], ...]:
    """The split of an op's factors that moves few bytes.

    The candidates are the splits that its tensors have already. Each counts the bytes of the
    tensors that it leaves in place; the weightiest go first, and an axis is given once.

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
    for factor, dim in votes:
        votes[factor, dim] += sum(
            votes[f, d] for f, d in votes if f == factor and d != dim and extends(dim, d, mesh)
        )
    ranked = sorted(votes, key=lambda c: (-votes[c], rule.kind(c[0]) != "pass", str(c)))
    return tuple(_assign(ranked).items())


def _assign(ranked: Sequence[tuple[str, Dim]]) -> dict[str, Dim]:
    split: dict[str, Dim] = {}
    taken: set[str] = set()
    for factor, dim in ranked:
        if factor in split:
            continue
        free = without_axes(dim, taken)
        if axes_of(free):
            split[factor] = free
            taken |= axes_of(free)
    return split
