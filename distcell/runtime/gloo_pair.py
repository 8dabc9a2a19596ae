"""Two ranks over gloo: what they exchange goes straight from one to the other.

gloo hands its collectives to threads of its own, and each message waits for these to be woken: of
small messages that is nine tenths of the time. Sending and receiving does without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcell.runtime.collectives import ReduceKind
from distcell.runtime.groups import combine
from distcell.runtime.torch_group import TorchGroup, flat_bytes

_TAG = 7
_DIRECT = 4 << 20  # bytes: above, gloo's pieces overlap sending with adding


class GlooPair(TorchGroup):
    """A group of two ranks on gloo. Sums are in member order, so both get the same bits."""

    def all_reduce(self, x: Tensor, op: ReduceKind) -> Tensor:
        """Returns the reduced tensor, a new one."""
        out = torch.empty_like(x)
        if self._is_direct(x):
            self._reduce_directly(x.view(-1), out.view(-1), op)
            return out
        return super().all_reduce(x, op)

    def all_reduce_in_place(self, x: Tensor, op: ReduceKind) -> None:
        """Reduces into `x`."""
        if self._is_direct(x):
            self._reduce_directly(x.view(-1), x.view(-1), op)
        else:
            super().all_reduce_in_place(x, op)

    def all_gather(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Fills `out` with the members' blocks, one after the other."""
        parts = torch.split(out.view(-1), list(counts))
        self._swap(x.view(-1), parts[1 - self.index])
        parts[self.index].copy_(x.view(-1))

    def reduce_scatter(self, x: Tensor, out: Tensor, counts: Sequence[int], op: ReduceKind) -> None:
        """Fills `out` with this member's part of the reduced `x`, summed in member order."""
        parts = torch.split(x.view(-1), list(counts))
        self._swap_and_combine(parts[1 - self.index], parts[self.index], out.view(-1), op)

    def _is_direct(self, x: Tensor) -> bool:
        return x.nbytes <= _DIRECT and x.device.type == "cpu"

    def _reduce_directly(self, x: Tensor, out: Tensor, op: ReduceKind) -> None:
        self._swap_and_combine(x, x, out, op)

    def _swap_and_combine(self, sent: Tensor, mine: Tensor, out: Tensor, op: ReduceKind) -> None:
        theirs = self._scratch.take(0, mine.numel(), mine)
        self._swap(sent, theirs)
        terms = (mine, theirs) if self.index == 0 else (theirs, mine)
        combine(*terms, op, out=out)

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        """Sends a flat tensor to the other rank and fills one with what it sends."""
        other = 1 - self.index
        work = []
        if sent.numel():
            work.append(self._backend.send([flat_bytes(sent)], other, _TAG))
        if received.numel():
            work.append(self._backend.recv([flat_bytes(received)], other, _TAG))
        for each in work:
            each.wait()
