"""One group of ranks over a backend of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from distcell.runtime.collectives import ReduceKind
from distcell.runtime.groups import Members, Scratch, reduce_into

_OPS: dict[ReduceKind, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class TorchGroup:
    """One group of ranks over a backend of torch.distributed.

    Args:
        backend: A ProcessGroupGloo or ProcessGroupNCCL of exactly these ranks.
        members: Their world ranks, in the order of the backend.
        index: The place of this rank among them.
    """

    def __init__(self, backend: Any, members: Members, index: int) -> None:
        self.members = members
        self.index = index
        self._backend = backend
        self._size = len(members)
        self._scratch = Scratch(2)
        self._options: dict[ReduceKind, dist.AllreduceOptions] = {}
        for op, torch_op in _OPS.items():
            options = dist.AllreduceOptions()
            options.reduceOp = torch_op
            self._options[op] = options

    def all_reduce(self, x: Tensor, op: ReduceKind) -> Tensor:
        """Returns the reduced tensor, a new one."""
        out = x.clone()
        self.all_reduce_in_place(out, op)
        return out

    def all_reduce_in_place(self, x: Tensor, op: ReduceKind) -> None:
        """Reduces into `x`."""
        if not x.numel():
            return
        if x.dtype == torch.bool:
            flags = x.view(torch.uint8)
            self._reduce(flags, "min" if op == "min" else "max")
        elif (op != "sum" and x.is_floating_point()) or x.dtype == torch.int16:
            self._gather_and_reduce(x, op)  # gloo's max loses NaN, and it has no int16
        else:
            self._reduce(x, op)

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fills `out` with the members' blocks, one after the other."""
        if max(counts) == 0:
            return
        if min(counts) == max(counts):
            self._backend._allgather_base(flat_bytes(out), flat_bytes(x)).wait()
            return
        block = max(counts)  # the backends gather even blocks only
        sent = self._scratch.take(0, block, x)
        sent[: x.numel()].copy_(x.view(-1))
        received = self._scratch.take(1, block * self._size, x)
        self._backend._allgather_base(flat_bytes(received), flat_bytes(sent)).wait()
        parts = torch.split(out.view(-1), list(counts))
        for part, padded in zip(parts, torch.split(received, block), strict=True):
            part.copy_(padded[: part.numel()])

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int], op: ReduceKind) -> None:
        """Fills `out` with this member's part of the reduced `x`, summed in member order."""
        mine = counts[self.index]
        terms = self._scratch.take(1, mine * self._size, x)
        self.all_to_all(x, terms, counts, [mine] * self._size)
        first, *others = terms.view(self._size, mine).unbind() if mine else (terms,)
        total = out.view(-1)
        total.copy_(first)
        for term in others:
            reduce_into(total, term, op)

    def all_to_all(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        """Sends part i of `x` to member i; fills `out` with what arrives, in member order."""
        size = x.element_size()
        work = self._backend.alltoall_base(
            flat_bytes(out), flat_bytes(x), [n * size for n in received], [n * size for n in sent]
        )
        work.wait()

    def exchange(self, x: Tensor, out: Tensor, source: int | None, target: int | None) -> None:
        """Sends `x` to member `target` and fills `out` from member `source`."""
        if source == target == self.index:
            out.view(-1).copy_(x.view(-1))
            return
        sent, received = [0] * self._size, [0] * self._size
        if target is not None:
            sent[target] = x.numel()
        if source is not None:
            received[source] = out.numel()
        self.all_to_all(
            x if target is not None else x.new_empty(0),
            out if source is not None else out.new_empty(0),
            sent,
            received,
        )

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fills `x` with the root's."""
        if x.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._backend.broadcast([flat_bytes(x)], options).wait()

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Returns ordinary memory."""
        return like.new_zeros(numel)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._backend.barrier().wait()

    def _reduce(self, x: Tensor, op: ReduceKind) -> None:
        self._backend.allreduce([x], self._options[op]).wait()

    def _gather_and_reduce(self, x: Tensor, op: ReduceKind) -> None:
        terms = self._scratch.take(1, x.numel() * self._size, x)
        self.all_gather(x, terms, [x.numel()] * self._size)
        total = x.view(-1)
        first, *others = terms.view(self._size, -1).unbind()
        total.copy_(first)
        for term in others:
            reduce_into(total, term, op)


def flat_bytes(x: Tensor) -> Tensor:
    """The flat bytes of a contiguous tensor: the backends then need not know its dtype."""
    return x.view(-1).view(torch.uint8)
