"""How flat tensors travel within one group of ranks: what a backend has to provide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from distcell.runtime.collectives import ReduceKind

Members = tuple[int, ...]

Reduction = ReduceKind | Literal["product", "band", "bor", "bxor"]

COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

_SCRATCH_LIMIT = 64 << 20


class Group(Protocol):
    """The transport of one group. All tensors are contiguous, all counts are elements.

    `members` are world ranks; `index` is the place of this rank among them.
    """

    members: Members
    index: int

    def all_reduce(self, x: Tensor, op: ReduceKind) -> Tensor:
        """Returns the reduced tensor, a new one."""
        ...

    def all_reduce_in_place(self, x: Tensor, op: ReduceKind) -> None:
        """Reduces into `x`."""
        ...

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fills `out` with the members' blocks, one after the other."""
        ...

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int], op: ReduceKind) -> None:
        """Fills `out` with this member's part of the reduced `x`."""
        ...

    def all_to_all(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """Sends part i of `x` to member i; fills `out` with what arrives, in member order."""
        ...

    def exchange(self, x: Tensor, out: Tensor, source: int | None, target: int | None) -> None:
        """Sends `x` to member `target` and fills `out` from member `source`."""
        ...

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fills `x` with the root's."""
        ...

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Returns flat memory that is fit to be reduced in place again and again. Collective."""
        ...

    def barrier(self) -> None:
        """Returns when all members have called it."""
        ...


class SoloGroup:
    """A group of one rank: what it sends, it has."""

    def __init__(self, member: int) -> None:
        self.members: Members = (member,)
        self.index = 0

    def all_reduce(self, x: Tensor, op: ReduceKind) -> Tensor:
        """Returns a copy."""
        return x.clone()

    def all_reduce_in_place(self, x: Tensor, op: ReduceKind) -> None:
        """Leaves `x` as it is."""

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Copies `x`."""
        out.view(-1).copy_(x.view(-1))

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        counts: Sequence[int],
        op: ReduceKind,
    ) -> None:
        """Copies `x`."""
        out.view(-1).copy_(x.view(-1))

    def all_to_all(
        self,
        x: Tensor,
        out: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> None:
        """Copies `x`."""
        out.view(-1).copy_(x.view(-1))

    def exchange(self, x: Tensor, out: Tensor, source: int | None, target: int | None) -> None:
        """Copies `x`, when it is sent to itself."""
        if source == target == 0:
            out.view(-1).copy_(x.view(-1))

    def broadcast(self, x: Tensor, root: int) -> None:
        """Leaves `x` as it is."""

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Returns ordinary memory."""
        return like.new_zeros(numel)

    def barrier(self) -> None:
        """Returns at once."""


class Scratch:
    """Memory that is used again from call to call: fresh pages cost more than the copy into them.

    Args:
        count: How many independent pieces are kept.
    """

    def __init__(self, count: int = 2) -> None:
        self._pieces: list[Tensor | None] = [None] * count

    def take(self, slot: int, numel: int, like: Tensor) -> Tensor:
        """Returns `numel` elements of the dtype of `like`, with any content.

        Args:
            slot: Which piece; its earlier content is lost.
            numel: The number of elements.
            like: A tensor of the dtype and on the device that are wanted.
        """
        nbytes = numel * like.element_size()
        if nbytes > _SCRATCH_LIMIT:
            return like.new_empty(numel)
        piece = self._pieces[slot]
        if piece is None or piece.numel() < nbytes or piece.device != like.device:
            size = 1 << max(nbytes - 1, 4095).bit_length()
            piece = torch.empty(size, dtype=torch.uint8, device=like.device)
            self._pieces[slot] = piece
        return piece[:nbytes].view(like.dtype)


def combine(one: Tensor, other: Tensor, op: Reduction, *, out: Tensor) -> None:
    """Reduces two tensors into `out`, as every backend does where it computes by itself."""
    COMBINE[op](one, other, out=out)


def reduce_into(total: Tensor, term: Tensor, op: Reduction) -> None:
    """Combines `term` into `total`."""
    combine(total, term, op, out=total)
