"""Where a tensor lives: which axes split each of its dims, and over which it is a partial result.

Note: parts. A dim is a product of *parts*, outer to inner, each split on its own. A plain dim has
one part: `8@dp`. Merging the dims of `f32[8@dp, 16@tp]` into one gives the dim `8@dp*16@tp`: a rank
then holds a strided choice of its 128 rows, which a single split could not say. Parts are what
keeps a reshape free of communication, and an uneven split in step with the dim it came from
(5 rows of 8 tokens over 4 ranks are `5@dp*8`: 16, 8, 8 and 8 elements).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from distcell.errors import LayoutError
from distcell.mesh import Mesh

REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True)
class Part:
    """One factor of a dim with the axes that split it, major to minor."""

    size: int
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.axes:
            return str(self.size)
        axes = self.axes[0] if len(self.axes) == 1 else f"({','.join(self.axes)})"
        return f"{self.size}@{axes}"


Dim = tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """The layout of one tensor, its global shape included.

    Args:
        dims: For each dim its parts, outer to inner.
        partial: The axes over which the ranks hold terms that are yet to be combined.
        reduction: How they are combined: sum, max or min.

    Raises:
        LayoutError: When an axis is used twice, or the reduction is unknown.

    Example:
        >>> layout = Layout.of((8, 6), ("dp", None), partial=("tp",))
        >>> str(layout), layout.local_shape(Mesh.parse("dp=2 tp=2"), 0)
        ('[8@dp, 6]{+tp}', (4, 6))
    """

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    reduction: str = "sum"

    def __post_init__(self) -> None:
        used = [*self.split_axes, *self.partial]
        for axis in used:
            if used.count(axis) > 1:
                raise LayoutError(f"axis {axis} is used twice in {self}")
        if self.reduction not in REDUCTIONS:
            raise LayoutError(f"unknown reduction `{self.reduction}`", hint=", ".join(REDUCTIONS))

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        axes: Sequence[str | Sequence[str] | None] = (),
        *,
        partial: Sequence[str] = (),
        reduction: str = "sum",
    ) -> Layout:
        """The layout of a shape: for each dim no axis, one, or several (major to minor).

        Dims left out are not split.
        """
        if len(axes) > len(shape):
            raise LayoutError(f"{len(axes)} entries for a tensor of {len(shape)} dims {shape}")
        entries = [*axes, *[None] * (len(shape) - len(axes))]
        dims = tuple((Part(size, _axes(e)),) for size, e in zip(shape, entries, strict=True))
        return cls(dims, tuple(partial), reduction)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that `str(layout)` printed.

        Raises:
            LayoutError: When the text is not of the form `[8@dp, 4*6@(tp,cp)]{+ep}`.

        Example:
            >>> str(Layout.parse("[8@(dp,tp), 3*2@ep]{max cp}"))
            '[8@(dp,tp), 3*2@ep]{max cp}'
        """
        return _parse(text)

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, dim)) for dim in self.dims)
        if not self.partial:
            return f"[{dims}]"
        sign = "+" if self.reduction == "sum" else f"{self.reduction} "
        return f"[{dims}]{{{sign}{','.join(self.partial)}}}"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        # the hash that is kept is not that of another process
        return Layout, (self.dims, self.partial, self.reduction)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial, self.reduction))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(part.size for part in dim) for dim in self.dims)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """All axes that split a dim, in the order in which they stand."""
        return tuple(axis for dim in self.dims for part in dim for axis in part.axes)

    @cached_property
    def axes(self) -> frozenset[str]:
        """All axes on which two ranks may hold different values."""
        return frozenset(self.split_axes) | frozenset(self.partial)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.parts)

    @property
    def parts(self) -> Iterator[Part]:
        """All parts of all dims, in order."""
        return (part for dim in self.dims for part in dim)

    def without_partial(self) -> Layout:
        """This layout after the reduction: the same split, nothing partial."""
        return Layout(self.dims) if self.partial else self

    def with_dim(self, dim: int, parts: Dim) -> Layout:
        """This layout with other parts for one dim."""
        return replace(self, dims=(*self.dims[:dim], merge_parts(parts), *self.dims[dim + 1 :]))

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of the piece that a rank holds."""
        coords = mesh.coords(rank)
        return tuple(
            math.prod(interval(part, mesh, coords)[1] for part in dim) for dim in self.dims
        )

    def is_even(self, mesh: Mesh) -> bool:
        """Whether all ranks hold pieces of the same shape."""
        return all(part.size % mesh.extent(part.axes) == 0 for part in self.parts)

    def shard(self, tensor: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """The contiguous piece of a global tensor that a rank holds.

        Over partial axes the first rank holds the value and the others the reduction's neutral
        element, so that gathering gives the tensor back.

        Raises:
            LayoutError: When the tensor's shape is not the layout's.
        """
        return self.cut(tensor, share_of(self, mesh, rank))

    def cut(self, tensor: torch.Tensor, share: Share) -> torch.Tensor:
        """The contiguous piece of a global tensor that the ranks of a share hold; see `shard`.

        Raises:
            LayoutError: When the tensor's shape is not the layout's.
        """
        if tuple(tensor.shape) != self.shape:
            raise LayoutError(f"a tensor of shape {tuple(tensor.shape)} has not the layout {self}")
        piece = share.narrow(tensor.reshape(self._sizes))
        piece = piece.reshape(share.shape).contiguous()
        if not share.first:
            return torch.full_like(piece, neutral_element(self.reduction, piece.dtype))
        return piece

    def gather(
        self,
        pieces: Sequence[torch.Tensor],
        mesh: Mesh,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The global tensor, from the pieces of all ranks in the order of the ranks.

        Args:
            pieces: What each rank holds.
            mesh: The mesh.
            into: A contiguous tensor that is filled; pieces that lie in it stay where they are. A
                new one by default.
        """
        if into is None:
            whole = torch.empty(self._sizes, dtype=pieces[0].dtype, device=pieces[0].device)
        else:
            whole = into.view(self._sizes)
        if self.partial:
            whole.fill_(neutral_element(self.reduction, whole.dtype))
        for share in shares(self, mesh):
            target = share.narrow(whole)
            piece = pieces[share.ranks[0]].reshape(target.shape)
            if self.partial:
                target.copy_(_combine(target, piece, self.reduction))
            elif not _is_same(target, piece):
                target.copy_(piece)
        return whole.reshape(self.shape)


@dataclass(frozen=True)
class Share:
    """One distinct piece of a tensor.

    Args:
        ranks: The ranks that hold it, ascending.
        shape: Its shape.
        cuts: The number of each part of the dims that is split, with offset and size.
        first: Whether it holds the value, not the neutral element, where the layout is partial.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]
    first: bool

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a global tensor that has a dim for each part, as a view."""
        for part, offset, size in self.cuts:
            tensor = tensor.narrow(part, offset, size)
        return tensor


@lru_cache(maxsize=65536)
def shares(layout: Layout, mesh: Mesh) -> tuple[Share, ...]:
    """The distinct pieces of a tensor, in order of their first ranks.

    Example:
        >>> for share in shares(Layout.of((6, 2), ("dp", None)), Mesh.parse("dp=2 tp=2")):
        ...     print(share.ranks, share.shape, share.cuts)
        (0, 1) (3, 2) ((0, 0, 3),)
        (2, 3) (3, 2) ((0, 3, 3),)
    """
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        key = tuple(coords[axis] for axis in sorted(layout.axes))
        holders.setdefault(key, []).append(rank)
    found = []
    for ranks in holders.values():
        coords = mesh.coords(ranks[0])
        split_parts = [(number, part) for number, part in enumerate(layout.parts) if part.axes]
        cuts = tuple((number, *interval(part, mesh, coords)) for number, part in split_parts)
        first = not any(coords[axis] for axis in layout.partial)
        found.append(Share(tuple(ranks), layout.local_shape(mesh, ranks[0]), cuts, first))
    return tuple(found)


@lru_cache(maxsize=65536)
def share_of(layout: Layout, mesh: Mesh, rank: int) -> Share:
    """The piece that a rank holds."""
    return next(share for share in shares(layout, mesh) if rank in share.ranks)


def _is_same(target: torch.Tensor, piece: torch.Tensor) -> bool:
    """Whether two tensors of one shape are the same memory."""
    lies_there = target.data_ptr() == piece.data_ptr()
    return lies_there and target.is_contiguous() and piece.is_contiguous()


def interval(part: Part, mesh: Mesh, coords: Mapping[str, int]) -> tuple[int, int]:
    """Offset and size of the share of a part that the rank at `coords` holds."""
    offset, size = 0, part.size
    for axis in part.axes:
        start, size = split(size, mesh.axis_size(axis), coords[axis])
        offset += start
    return offset, size


def split(size: int, ways: int, index: int) -> tuple[int, int]:
    """Offset and size of piece `index` when `size` elements are split as evenly as can be.

    The first pieces take one more where it does not divide; pieces may be empty. Every split in
    distcell is made here. Several axes on a part split one after the other, major first, so that
    the pieces of the minor axis together are a piece of the major one.

    Example:
        >>> [split(5, 4, i) for i in range(4)]
        [(0, 2), (2, 1), (3, 1), (4, 1)]
    """
    base, more = divmod(size, ways)
    return index * base + min(index, more), base + (index < more)


def merge_parts(parts: Sequence[Part], mesh: Mesh | None = None) -> Dim:
    """The same split with as few parts as possible: the form in which layouts are compared.

    Unsplit neighbours merge. With a mesh, axes of one rank go, `8@dp*16` becomes `128@dp` where dp
    divides 8, and `8@dp*16@tp` becomes `128@(dp,tp)` where dp splits all of 8: both say the same.
    """
    if mesh is not None:
        parts = [Part(p.size, tuple(a for a in p.axes if mesh.axis_size(a) > 1)) for p in parts]
    merged: list[Part] = []
    for part in parts:
        if part == Part(1) and merged:
            continue
        if merged and _mergeable(merged[-1], part, mesh):
            merged[-1] = Part(merged[-1].size * part.size, merged[-1].axes + part.axes)
        else:
            merged.append(part)
    if len(merged) > 1 and merged[0] == Part(1):
        merged = merged[1:]
    return tuple(merged)


def _mergeable(outer: Part, inner: Part, mesh: Mesh | None) -> bool:
    if not outer.axes:
        return not inner.axes or outer.size == 1
    if mesh is None:
        return False
    ways = mesh.extent(outer.axes)
    return outer.size == ways or (not inner.axes and outer.size % ways == 0)


@lru_cache(maxsize=65536)
def canonical(layout: Layout, mesh: Mesh) -> Layout:
    """The layout in its shortest form on a mesh; equal layouts have equal forms."""
    dims = tuple(merge_parts(dim, mesh) for dim in layout.dims)
    return layout if dims == layout.dims else replace(layout, dims=dims)


def neutral_element(reduction: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when it is combined by a reduction."""
    if reduction == "sum":
        return 0
    if dtype == torch.bool:
        return reduction == "min"
    if dtype.is_floating_point:
        return -math.inf if reduction == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if reduction == "max" else info.max


def _combine(a: torch.Tensor, b: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "sum":
        return a + b
    return torch.maximum(a, b) if reduction == "max" else torch.minimum(a, b)


def _axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


_LAYOUT = re.compile(r"\[(?P<dims>.*)\](\{(?P<partial>.*)\})?")
_PART = re.compile(r"(?P<size>\d+)(@(?P<axes>[a-z][\w.]*|\([\w.,\s]+\)))?")


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise LayoutError(f"`{text}` is not a layout", hint="like [8@dp, 8@(tp,cp)]{+ep}")
    dims = tuple(
        tuple(_parse_part(item, text) for item in dim.split("*"))
        for dim in re.split(r",\s*(?![^()]*\))", match["dims"])
        if dim.strip()
    )
    partial, reduction = (match["partial"] or "").strip(), "sum"
    if partial.startswith("+"):
        partial = partial[1:]
    elif partial:
        reduction, _, partial = partial.partition(" ")
    return Layout(dims, tuple(a.strip() for a in partial.split(",") if a.strip()), reduction)


def _parse_part(item: str, text: str) -> Part:
    match = _PART.fullmatch(item.strip())
    if match is None:
        raise LayoutError(f"`{item.strip()}` is not a dim of a layout, in `{text}`")
    axes = (match["axes"] or "").strip("()")
    return Part(int(match["size"]), tuple(a.strip() for a in axes.split(",") if a.strip()))
