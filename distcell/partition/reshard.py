"""From one layout to another: which collectives, in which order.

First partial results are reduced (scattered at once where the target splits a dim by the same
axes), then axes that are free are sliced, then axes move between dims (all-to-all), and what is
left is gathered: shrink first, grow last, so that little data moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from distcell.layout import Dim, Layout, Part
from distcell.mesh import Mesh
from distcell.rules.factors import project


@dataclass(frozen=True)
class Step:
    """One move.

    Args:
        kind: `all_reduce`, `reduce_scatter`, `slice`, `all_to_all`, `all_gather`, `reshape`.
        axes: The axes of the group.
        dim: The dim that is scattered, sliced, or gathered. For all_to_all the dim that is split.
        other: For all_to_all the dim that is joined.
        before: The layout before the step.
        after: The layout after it.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int
    other: int
    before: Layout
    after: Layout


@lru_cache(maxsize=65536)
def reshard_steps(source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...]:
    """The steps from one layout to another of the same global shape.

    Example:
        >>> mesh = Mesh.parse("dp=2 tp=2")
        >>> steps = reshard_steps(Layout.parse("[8, 4]{+tp}"), Layout.parse("[8@tp, 4]"), mesh)
        >>> [(s.kind, s.axes, s.dim) for s in steps]
        [('reduce_scatter', ('tp',), 0)]
    """
    if source == target:
        return ()
    if source.shape != target.shape:
        raise ValueError(f"{source} and {target} are layouts of different tensors")
    cut = _common_parts(source, target, mesh)
    if cut is None:
        return _through_gathered_dims(source, target, mesh)
    return _reshaped(source, target, *cut, mesh)


def _reshaped(
    source: Layout, target: Layout, inner: Layout, goal: Layout, mesh: Mesh
) -> tuple[Step, ...]:
    steps = _moves(inner, goal, mesh)
    if inner.dims != source.dims and steps:
        steps.insert(0, Step("reshape", (), 0, 0, source, inner))
    last = steps[-1].after if steps else source
    if last != target:
        steps.append(Step("reshape", (), 0, 0, last, target))
    return tuple(steps)


def _through_gathered_dims(source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...]:
    """Where the parts of a dim do not fall together, that dim is gathered first."""
    pairs = zip(source.dims, target.dims, strict=True)
    dims = tuple(a if _cut_pair(a, b, mesh) is not None else (Part(_size(a)),) for a, b in pairs)
    # what stays a partial sum must not be reduced on the way, for nothing makes it partial again
    kept = tuple(axis for axis in source.partial if axis in target.partial)
    base = replace(source, partial=kept) if kept else source.without_partial()
    between = replace(base, dims=dims)
    return (
        *reshard_steps(source, between, mesh),
        *reshard_steps(between, target, mesh),
    )


def _size(dim: Dim) -> int:
    return math.prod(part.size for part in dim)


def _common_parts(source: Layout, target: Layout, mesh: Mesh) -> tuple[Layout, Layout] | None:
    """Both layouts with one dim for each part that they have in common."""
    left: list[Dim] = []
    right: list[Dim] = []
    for a, b in zip(source.dims, target.dims, strict=True):
        pair = _cut_pair(a, b, mesh)
        if pair is None:
            return None
        left.extend((part,) for part in pair[0])
        right.extend((part,) for part in pair[1])
    return (
        Layout(tuple(left), source.partial, source.reduction),
        Layout(tuple(right), target.partial, target.reduction),
    )


def _cut_pair(a: Dim, b: Dim, mesh: Mesh) -> tuple[Dim, Dim] | None:
    """The parts of two splits of one dim, cut so that they have the same sizes."""
    if a == b:
        return a, b
    if _size(a) == 0:  # no elements: how the parts nest makes no difference
        return _one_part(a), _one_part(b)
    sizes = _border_sizes(a, b)
    if sizes is None:
        return None
    left, right = project(a, sizes, mesh), project(b, sizes, mesh)
    if left is None or right is None or any(len(d) != 1 for d in (*left, *right)):
        return None
    return tuple(d[0] for d in left), tuple(d[0] for d in right)


def _one_part(dim: Dim) -> Dim:
    return (Part(0, tuple(axis for part in dim for axis in part.axes)),)


def _border_sizes(a: Dim, b: Dim) -> list[int] | None:
    """The sizes between the borders of the parts of both; None where they do not nest."""
    size = _size(a)
    borders = {1}
    for dim in (a, b):
        inner = size
        for part in dim:
            inner //= max(part.size, 1)
            borders.add(max(inner, 1))
    ordered = sorted(borders | {size}, reverse=True)
    sizes = []
    for outer, inner in itertools.pairwise(ordered):
        if outer % inner:
            return None
        sizes.append(outer // inner)
    is_led_by_one = any(dim[0] == Part(1, dim[0].axes) for dim in (a, b))
    return [1, *sizes] if is_led_by_one else sizes


def _moves(source: Layout, target: Layout, mesh: Mesh) -> list[Step]:
    steps: list[Step] = []
    current = source
    while True:
        step = (
            _reduce(current, target)
            or _slice(current, target)
            or _exchange(current, target)
            or _gather(current, target)
        )
        if step is None:
            break
        steps.append(step)
        current = step.after
    if current != target:
        raise ValueError(f"no way from {source} to {target}: stuck at {current}")
    return steps


def _part(layout: Layout, dim: int) -> Part:
    return layout.dims[dim][0]


def _with(layout: Layout, dim: int, axes: Sequence[str]) -> Layout:
    dims = list(layout.dims)
    dims[dim] = (Part(_part(layout, dim).size, tuple(axes)),)
    return replace(layout, dims=tuple(dims))


def _missing(current: Layout, target: Layout, dim: int) -> tuple[str, ...]:
    """The axes that a dim still needs at its end; none when it must lose some first."""
    have, want = _part(current, dim).axes, _part(target, dim).axes
    return want[len(have) :] if want[: len(have)] == have else ()


def _surplus(current: Layout, target: Layout, dim: int) -> tuple[str, ...]:
    """The axes that a dim must lose, from the first that differs."""
    have, want = _part(current, dim).axes, _part(target, dim).axes
    same = 0
    while same < min(len(have), len(want)) and have[same] == want[same]:
        same += 1
    return have[same:]


def _reduce(current: Layout, target: Layout) -> Step | None:
    due = tuple(axis for axis in current.partial if axis not in target.partial)
    if not due:
        return None
    for dim in range(len(current.dims)):
        axes: list[str] = []
        for axis in _missing(current, target, dim):
            if axis not in due:
                break
            axes.append(axis)
        if axes:
            rest = tuple(axis for axis in current.partial if axis not in axes)
            after = _with(replace(current, partial=()), dim, _part(current, dim).axes + tuple(axes))
            after = replace(after, partial=rest) if rest else replace(after, reduction="sum")
            return Step("reduce_scatter", tuple(axes), dim, 0, current, after)
    rest = tuple(axis for axis in current.partial if axis not in due)
    after = replace(current, partial=rest) if rest else Layout(current.dims)
    return Step("all_reduce", due, 0, 0, current, after)


def _slice(current: Layout, target: Layout) -> Step | None:
    for dim in range(len(current.dims)):
        axes: list[str] = []
        for axis in _missing(current, target, dim):
            if axis in current.axes:
                break
            axes.append(axis)
        if axes:
            after = _with(current, dim, _part(current, dim).axes + tuple(axes))
            return Step("slice", tuple(axes), dim, 0, current, after)
    return None


def _exchange(current: Layout, target: Layout) -> Step | None:
    for joined in range(len(current.dims)):
        surplus = _surplus(current, target, joined)
        for count in range(len(surplus)):
            axes = surplus[count:]
            for dim in range(len(current.dims)):
                if dim != joined and _missing(current, target, dim)[: len(axes)] == axes:
                    have = _part(current, joined).axes
                    between = replace(current, dims=_with(current, joined, have[: -len(axes)]).dims)
                    after = _with(between, dim, _part(current, dim).axes + axes)
                    return Step("all_to_all", axes, dim, joined, current, after)
    return None


def _gather(current: Layout, target: Layout) -> Step | None:
    for dim in range(len(current.dims)):
        surplus = _surplus(current, target, dim)
        if surplus:
            have = _part(current, dim).axes
            after = _with(current, dim, have[: len(have) - len(surplus)])
            return Step("all_gather", surplus, dim, 0, current, after)
    return None
