"""Collectives as functions of the members' tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from distcell.layout import split
from distcell.runtime.collectives import ReduceKind
from distcell.runtime.groups import COMBINE, reduce_into

ReductionOrder = Literal["rank", "ring", "tree"]

Reduce = Callable[[Sequence[Tensor], ReduceKind], Tensor]


def reduce_by_rank(tensors: Sequence[Tensor], op: ReduceKind) -> Tensor:
    """A new tensor, the members' tensors combined one after the other in their order.

    Example:
        >>> reduce_by_rank([torch.tensor([1.0]), torch.tensor([2.0])], "sum")
        tensor([3.])
    """
    if len(tensors) == 1:
        return tensors[0].clone(memory_format=torch.contiguous_format)
    total = COMBINE[op](tensors[0], tensors[1])
    for term in tensors[2:]:
        reduce_into(total, term, op)
    return total


def reduce_into_first(tensors: Sequence[Tensor], op: ReduceKind) -> Tensor:
    """The same in the tensor of the first member, which is overwritten where others follow it.

    Example:
        >>> one = torch.tensor([1.0])
        >>> reduce_into_first([one, torch.tensor([2.0])], "sum") is one
        True
    """
    total = tensors[0].contiguous()
    for term in tensors[1:]:
        reduce_into(total, term, op)
    return total


def reduce_by_ring(tensors: Sequence[Tensor], op: ReduceKind) -> Tensor:
    """As a ring does it: chunk i of the elements starts at member i + 1 and goes round."""
    count, flat = len(tensors), [tensor.reshape(-1) for tensor in tensors]
    total = torch.empty_like(flat[0])
    for chunk in range(count):
        offset, size = split(total.numel(), count, chunk)
        order = [flat[(chunk + 1 + step) % count] for step in range(count)]
        total.narrow(0, offset, size).copy_(
            reduce_by_rank([term.narrow(0, offset, size) for term in order], op)
        )
    return total.reshape(tensors[0].shape)


def reduce_by_tree(tensors: Sequence[Tensor], op: ReduceKind) -> Tensor:
    """Neighbours first, then pairs of pairs, as recursive doubling does it."""
    level = list(tensors)
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [reduce_by_rank(pair, op) if len(pair) > 1 else pair[0] for pair in pairs]
    return level[0] if len(tensors) > 1 else reduce_by_rank(level, op)


REDUCTIONS: Mapping[ReductionOrder, Reduce] = {
    "rank": reduce_by_rank,
    "ring": reduce_by_ring,
    "tree": reduce_by_tree,
}


def reduce_slice(
    tensors: Sequence[Tensor], dim: int, part: tuple[int, int], *, op: ReduceKind, reduce: Reduce
) -> Tensor:
    """The members' tensors combined, of which one slice is kept; contiguous.

    Args:
        tensors: The members' tensors.
        dim: The dim that is sliced.
        part: Offset and size of the slice.
        op: `sum`, `max` or `min`.
        reduce: What combines them.
    """
    if reduce is reduce_by_ring:  # its chunks are those of the whole tensor
        return reduce(tensors, op).narrow(dim, *part).contiguous()
    return reduce([tensor.narrow(dim, *part).contiguous() for tensor in tensors], op)


def gather(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The members' tensors, joined along a dim; a new contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].clone(memory_format=torch.contiguous_format)
    return torch.cat([tensor.contiguous() for tensor in tensors], dim)


def exchange(
    tensors: Sequence[Tensor],
    index: int,
    dims: tuple[int, int],
    split_sizes: Sequence[Sequence[int]],
) -> Tensor:
    """What member `index` gets: its slice of each member's tensor, joined along a dim.

    Args:
        tensors: The members' tensors.
        index: The member.
        dims: The dim that is cut, and the one along which the slices are joined.
        split_sizes: For each member the extents of its slices.
    """
    pieces = [
        tensor.narrow(dims[0], sum(sizes[:index]), sizes[index])
        for tensor, sizes in zip(tensors, split_sizes, strict=True)
    ]
    return gather(pieces, dims[1])
