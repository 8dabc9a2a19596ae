"""Between the layouts of tensors and the splits of an op's factors, and the op on local tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from distcell.graph import Arg, Box, Extent, Offset, Op
from distcell.layout import Dim, Layout, Part, merge_parts
from distcell.mesh import Mesh
from distcell.rules.notation import REDUCING, Call, Dims, LocalArg, OpRule

Split = Mapping[str, Dim]
"""For each factor that is split, its parts. Factors left out are not split."""


def project(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> list[Dim] | None:
    """The parts of a dim cut at the borders of its factors; None where they do not fall together.

    Args:
        dim: The parts of one dim.
        sizes: The sizes of the factors in it, outer to inner.

    Example:
        >>> mesh = Mesh.parse("dp=2 tp=4")
        >>> [[str(p) for p in d] for d in project((Part(32, ("dp", "tp")),), (8, 4), mesh)]
        [['8@(dp,tp)'], ['4']]
    """
    rest = list(dim)
    found: list[Dim] = []
    for size in sizes:
        taken: list[Part] = []
        if size == 1 and rest and rest[0].size == 1:
            taken.append(rest.pop(0))  # one element may be split too: all ranks but one hold none
        while size > 1:
            if not rest:
                return None
            part = rest.pop(0)
            if size % part.size == 0:
                taken.append(part)
                size //= part.size
                continue
            cut = _cut(part, size, mesh)
            if cut is None:
                return None
            taken.append(cut[0])
            rest.insert(0, cut[1])
            size = 1
        found.append(merge_parts(taken or [Part(1)], mesh))
    while rest and rest[0].size == 1 and not rest[0].axes:
        rest.pop(0)
    return None if rest else found


def _cut(part: Part, size: int, mesh: Mesh) -> tuple[Part, Part] | None:
    """A part as two, the outer one of the given size, without moving any element."""
    if part.size % size:
        return None
    inner = part.size // size
    ways = 1
    for count, axis in enumerate(part.axes):
        if ways == size:
            return Part(size, part.axes[:count]), Part(inner, part.axes[count:])
        ways *= mesh.axis_size(axis)
    if size % ways == 0:
        return Part(size, part.axes), Part(inner)
    return None


def layout_of(dims: Dims, rule: OpRule, split: Split) -> Layout:
    """The layout of a tensor of the op when its factors are split as given; nothing partial."""
    return _layout_of(dims, rule, tuple(split.items()))


@lru_cache(maxsize=65536)
def _layout_of(dims: Dims, rule: OpRule, split: tuple[tuple[str, Dim], ...]) -> Layout:
    named = dict(split)
    return Layout(tuple(_dim_of(names, rule, named) for names in dims))


def _dim_of(names: tuple[str, ...], rule: OpRule, split: Split) -> Dim:
    parts = [p for n in names for p in split.get(n, (Part(rule.factors[n].size),))]
    return merge_parts(parts or [Part(1)])


def partial_of(dims: Dims, rule: OpRule, split: Split) -> tuple[tuple[str, ...], str]:
    """The axes over which a result is partial, and the reduction: those of absent factors."""
    present = {name for names in dims for name in names}
    axes: list[str] = []
    reduction = "sum"
    for name, parts in split.items():
        if name not in present and rule.kind(name) in REDUCING:
            axes.extend(axis for part in parts for axis in part.axes)
            if any(part.axes for part in parts):
                reduction = rule.kind(name)
    return tuple(axes), reduction


def local_op(call: Call, rule: OpRule, split: Split) -> Op:
    """The op as each rank runs it: sizes, offsets and places in its arguments become local."""
    op = call.op
    args, kwargs = list(op.args), dict(op.kwargs)
    for local in rule.local_args:
        new = _local_arg(local, rule, split)
        if isinstance(local.arg, str):
            kwargs[local.arg] = new
        else:
            # an omitted trailing argument counts as the neutral one that the op is called with
            args.extend([None] * (local.arg + 1 - len(args)))
            args[local.arg] = new
    return replace(op, args=tuple(args), kwargs=tuple(kwargs.items()))


def _local_arg(local: LocalArg, rule: OpRule, split: Split) -> Arg:
    if local.kind == "shape":
        layout = layout_of(rule.results[int(local.of)], rule, split)
        return tuple(extent(dim) for dim in layout.dims)
    if local.kind == "box":
        return Box(layout_of(rule.results[int(local.of)], rule, split))
    name = str(local.of)
    if local.kind == "extent":
        return extent((Part(local.times), *_parts(name, rule, split)))
    if local.kind == "extents":
        return tuple(extent(_parts(names, rule, split)) for names in name.split(","))
    dim = _parts(name, rule, split)
    if not any(part.axes for part in dim):
        return 0
    if any(part.axes for part in dim[1:]):
        raise ValueError(f"factor {name} of {rule} has no single offset: {dim}")
    return Offset(dim[0], times=math.prod(part.size for part in dim[1:]))


def _parts(names: str, rule: OpRule, split: Split) -> Dim:
    """The parts of the factors named, outer to inner; a number stands for an unsplit part."""
    parts: list[Part] = []
    for name in names.split():
        size = int(name) if name.isdigit() else rule.factors[name].size
        parts += split.get(name, (Part(size),))
    return tuple(parts)


def extent(dim: Dim) -> Arg:
    """The local size of a dim as an argument: a number where it is not split."""
    if any(part.axes for part in dim):
        return Extent(merge_parts(dim))
    return math.prod(part.size for part in dim)
