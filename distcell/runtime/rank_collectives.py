"""The collectives of one rank: from tensors with dims and axes to flat messages of a group."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from distcell.errors import InternalError
from distcell.mesh import Mesh
from distcell.runtime.collectives import Axes, CollectiveLog, ReduceKind, payload_bytes
from distcell.runtime.groups import Group, Members, Scratch

_ALIGNMENT = 64  # bytes: kernels load whole vectors from every view of a flat buffer

ManyKey = tuple[Axes, str, str, torch.dtype, tuple[torch.Size, ...]]


class RankCollectives:
    """`Collectives` over groups that a backend makes.

    Args:
        mesh: The ranks.
        rank: The place of this rank in the mesh.
        group_of: Makes the group of some ranks; called once for each group, by its members alone.
        control_of: The same for groups that move bytes in main memory: objects and barriers.
        log: Where the collectives are noted.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        group_of: Callable[[Members], Group],
        *,
        control_of: Callable[[Members], Group] | None = None,
        log: CollectiveLog | None = None,
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.log = CollectiveLog() if log is None else log
        self._group_of = group_of
        self._control_of = control_of or group_of
        self._groups: dict[Axes, Group] = {}
        self._scratch = Scratch()
        self._many: dict[ManyKey, tuple[Tensor, list[Tensor]]] = {}

    def all_reduce(
        self,
        x: Tensor,
        axes: Axes,
        op: ReduceKind = "sum",
        *,
        inplace: bool = False,
        label: str = "",
    ) -> Tensor:
        """The sum (max, min) of the members' tensors; see `Collectives`."""
        group = self._group(axes)
        self.log.begin("all_reduce", axes, payload_bytes(x.shape, x.element_size()), label)
        if not inplace and x.is_contiguous():
            result = group.all_reduce(x, op)
        else:
            result = x.contiguous()
            group.all_reduce_in_place(result, op)
            if inplace and result is not x:
                result = x.copy_(result)
        self.log.end()
        return result

    def all_gather(
        self, x: Tensor, axes: Axes, dim: int, sizes: Sequence[int], *, label: str = ""
    ) -> Tensor:
        """The members' tensors, joined along a dim; see `Collectives`."""
        group = self._group(axes)
        dim = dim % x.dim()
        _check_extent("all_gather", x, dim, want=sizes[group.index])
        shape = list(x.shape)
        shape[dim] = sum(sizes)
        counts, shapes = _blocks(shape, dim, sizes)
        self.log.begin("all_gather", axes, payload_bytes(x.shape, x.element_size()), label)
        if _leads(x.shape, dim):
            result = x.new_empty(shape)
            group.all_gather(x.contiguous(), result, counts)
        else:
            flat = self._scratch.take(1, sum(counts), x)
            group.all_gather(x.contiguous(), flat, counts)
            result = _join(flat, counts, shapes, dim=dim)
        self.log.end()
        return result

    def reduce_scatter(
        self,
        x: Tensor,
        axes: Axes,
        dim: int,
        sizes: Sequence[int],
        op: ReduceKind = "sum",
        *,
        label: str = "",
    ) -> Tensor:
        """This member's slice of the sum (max, min); see `Collectives`."""
        group = self._group(axes)
        dim = dim % x.dim()
        _check_extent("reduce_scatter", x, dim, want=sum(sizes))
        counts, shapes = _blocks(x.shape, dim, sizes)
        self.log.begin("reduce_scatter", axes, payload_bytes(x.shape, x.element_size()), label)
        result = x.new_empty(shapes[group.index])
        group.reduce_scatter(self._packed(x, dim, sizes), result, counts, op)
        self.log.end()
        return result

    def all_to_all(  # noqa: PLR0917
        self,
        x: Tensor,
        axes: Axes,
        split_dim: int,
        concat_dim: int,
        split_sizes: Sequence[int],
        concat_sizes: Sequence[int],
        *,
        label: str = "",
    ) -> Tensor:
        """Slice i goes to member i, the received ones are joined; see `Collectives`."""
        group = self._group(axes)
        split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
        _check_extent("all_to_all", x, split_dim, want=sum(split_sizes))
        shape = list(x.shape)
        shape[split_dim] = split_sizes[group.index]
        shape[concat_dim] = sum(concat_sizes)
        sent, _ = _blocks(x.shape, split_dim, split_sizes)
        received, shapes = _blocks(shape, concat_dim, concat_sizes)
        self.log.begin("all_to_all", axes, payload_bytes(x.shape, x.element_size()), label)
        packed = self._packed(x, split_dim, split_sizes)
        if _leads(shape, concat_dim):
            result = x.new_empty(shape)
            group.all_to_all(packed, result, sent, received)
        else:
            flat = self._scratch.take(1, sum(received), x)
            group.all_to_all(packed, flat, sent, received)
            result = _join(flat, received, shapes, dim=concat_dim)
        self.log.end()
        return result

    def permute(
        self,
        x: Tensor,
        axes: Axes,
        source: int | None,
        target: int | None,
        shape: Sequence[int],
        *,
        label: str = "",
    ) -> Tensor:
        """The tensor of member `source`; see `Collectives`."""
        group = self._group(axes)
        self.log.begin("permute", axes, payload_bytes(x.shape, x.element_size()), label)
        result = x.new_zeros(shape) if source is None else x.new_empty(shape)
        group.exchange(x.contiguous(), result, source, target)
        self.log.end()
        return result

    def broadcast(self, x: Tensor, axes: Axes, root: int, *, label: str = "") -> Tensor:
        """The tensor of member `root`; see `Collectives`."""
        group = self._group(axes)
        self.log.begin("broadcast", axes, payload_bytes(x.shape, x.element_size()), label)
        result = x.clone(memory_format=torch.contiguous_format)
        group.broadcast(result, root)
        self.log.end()
        return result

    def all_reduce_many(
        self, xs: Sequence[Tensor], axes: Axes, op: ReduceKind = "sum", *, label: str = ""
    ) -> list[Tensor]:
        """The reduced tensors, exchanged as one message; see `Collectives`."""
        if not xs:
            return []
        group = self._group(axes)
        nbytes = sum(payload_bytes(x.shape, x.element_size()) for x in xs)
        self.log.begin("all_reduce", axes, nbytes, label)
        flat, views = self._views(group, xs, (axes, op, label))
        for view, x in zip(views, xs, strict=True):
            if view.data_ptr() != x.data_ptr():  # a program may compute into the buffer at once
                view.copy_(x)
        group.all_reduce_in_place(flat, op)
        self.log.end()
        return list(views)

    def lend_many(
        self, xs: Sequence[Tensor], axes: Axes, op: ReduceKind = "sum", *, label: str = ""
    ) -> list[Tensor]:
        """The views that `all_reduce_many` reduces in; see `Collectives`."""
        self.log.begin("lend_many", axes, 0, label, counted=False)
        _, views = self._views(self._group(axes), xs, (axes, op, label))
        self.log.end()
        return list(views)

    def barrier(self) -> None:
        """Returns when every rank of the mesh has called it."""
        group = self._control
        self.log.begin("barrier", self.mesh.names, 0, counted=False)
        group.barrier()
        self.log.end()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The JSON values of all ranks of the mesh, in their order."""
        axes, group = self.mesh.names, self._control
        text = json.dumps(obj).encode()
        self.log.begin("all_gather_object", axes, len(text), counted=False)
        frame = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        group.barrier()  # one may plan for seconds: it needs the cores that waiting messages burn
        lengths = torch.empty(len(group.members), dtype=torch.int64)
        group.all_gather(torch.tensor([len(text)]), lengths, [1] * len(group.members))
        counts = [int(n) for n in lengths]
        frames = torch.empty(sum(counts), dtype=torch.uint8)
        group.all_gather(frame, frames, counts)
        self.log.end()
        return [json.loads(piece.numpy().tobytes()) for piece in torch.split(frames, counts)]

    @cached_property
    def _control(self) -> Group:
        return self._control_of(self.mesh.group_of(self.rank, self.mesh.names))

    def _group(self, axes: Axes) -> Group:
        group = self._groups.get(axes)
        if group is None:
            self.log.begin("connect", axes, 0, counted=False)  # it waits for the other members
            group = self._group_of(self.mesh.group_of(self.rank, axes))
            self._groups[axes] = group
            self.log.end()
        return group

    def _packed(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The slices of a tensor one after the other, each contiguous."""
        if _leads(x.shape, dim):
            return x.contiguous()
        flat = self._scratch.take(0, x.numel(), x)
        offset = 0
        for piece in torch.split(x, list(sizes), dim):
            flat[offset : offset + piece.numel()].view(piece.shape).copy_(piece)
            offset += piece.numel()
        return flat

    def _views(
        self, group: Group, xs: Sequence[Tensor], name: tuple[Axes, ReduceKind, str]
    ) -> tuple[Tensor, list[Tensor]]:
        key = (*name, xs[0].dtype, tuple(x.shape for x in xs))
        found = self._many.get(key)
        if found is not None:
            return found
        if any(x.dtype != xs[0].dtype for x in xs):
            raise InternalError("all_reduce_many got tensors of several dtypes in one message")
        step = max(1, _ALIGNMENT // xs[0].element_size())
        starts = [0]
        for x in xs:
            starts.append(starts[-1] + -(-x.numel() // step) * step)
        flat = group.buffer(starts[-1], xs[0])
        pieces = zip(starts, xs, strict=False)
        views = [flat[start : start + x.numel()].view(x.shape) for start, x in pieces]
        self._many[key] = (flat, views)
        return flat, views


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether slices along `dim` lie one after the other in a contiguous tensor."""
    return dim == 0 or math.prod(shape[:dim]) == 1


def _blocks(
    shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The element counts and shapes of the slices of a tensor."""
    before, after = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    rest = math.prod(before) * math.prod(after)
    return [size * rest for size in sizes], [(*before, size, *after) for size in sizes]


def _join(
    flat: Tensor, counts: Sequence[int], shapes: Sequence[tuple[int, ...]], *, dim: int
) -> Tensor:
    """A new tensor of blocks that lie one after the other, joined along a dim."""
    blocks = torch.split(flat, list(counts))
    return torch.cat([b.view(shape) for b, shape in zip(blocks, shapes, strict=True)], dim)


def _check_extent(kind: str, x: Tensor, dim: int, *, want: int) -> None:
    if x.shape[dim] != want:
        raise InternalError(
            f"{kind} got a tensor of shape {list(x.shape)}, dim {dim} should have extent {want}"
        )
