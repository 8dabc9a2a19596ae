"""The collectives of a process group that combine tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from distcell.errors import BackendError
from distcell.runtime.mpi.arguments import by_dtype, expect, listed, single, single_list, unpack
from distcell.runtime.mpi.rank_group import RankGroup
from distcell.runtime.mpi.reduction import Reduce, reduce_of
from distcell.runtime.mpi.sparse import all_reduce_sparse
from distcell.runtime.mpi.staging import Staging
from distcell.runtime.mpi.work import Work


class Reductions(RankGroup):
    """A group of ranks that combine tensors."""

    def allreduce(self, tensors: Tensor | list[Tensor], opts: Any = None) -> Work:
        """Reduces each tensor in place over the ranks."""
        xs = listed(tensors)
        if any(x.layout == torch.sparse_coo for x in xs):
            return self._all_reduce_sparse(xs, opts)
        staging = Staging()
        hosts = [(staging.both(x), self._reduce(opts, x)) for x in xs]

        def run() -> None:
            for host, reduce in hosts:
                self._transport.all_reduce(host, reduce)

        return self._issue(staging.around(run), xs, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """The same; tensors of one dtype travel as one message."""
        if len(tensors) < 2 or any(x.layout != torch.strided for x in tensors):
            return self.allreduce(tensors, opts)
        staging = Staging()
        batches = [
            ([staging.both(x) for x in xs], self._reduce(opts, xs[0])) for xs in by_dtype(tensors)
        ]

        def run() -> None:
            for hosts, reduce in batches:
                flat = self._packed(0, hosts)
                self._transport.all_reduce(flat, reduce)
                unpack(flat, hosts)

        return self._issue(staging.around(run), tensors, opts)

    def reduce(self, tensors: Tensor | list[Tensor], opts: Any = None) -> Work:
        """Reduces into the root's tensor; the others' values are lost."""
        (x,) = listed(tensors)
        staging = Staging()
        host, reduce = staging.both(x), self._reduce(opts, x)
        root = self._root(opts)
        return self._issue(
            staging.around(lambda: self._transport.reduce(host, reduce, root)), [x], opts
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Work:
        """Fills the output with this rank's part of the reduced inputs, which may be uneven."""
        out, parts = single(outputs), single_list(inputs)
        self._count("reduce_scatter", "inputs", parts)
        expect("reduce_scatter", out.numel(), parts[self._rank].numel())
        staging = Staging()
        hosts, target = [staging.source(part) for part in parts], staging.target(out)
        reduce, counts = self._reduce(opts, out), [part.numel() for part in parts]

        def run() -> None:
            self._transport.reduce_scatter(self._packed(0, hosts), target, counts, reduce)

        return self._issue(staging.around(run), [out], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """The same; the input is one tensor of equal parts."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """The same for several tensors."""
        staging = Staging()
        pairs = []
        for out, x in zip(outputs, inputs, strict=True):
            expect("reduce_scatter", x.numel(), out.numel() * self._size)
            source, target = staging.source(x), staging.target(out)
            pairs.append((source, target, self._reduce(opts, x)))

        def run() -> None:
            for source, target, reduce in pairs:
                counts = [target.numel()] * self._size
                self._transport.reduce_scatter(source, target, counts, reduce)

        return self._issue(staging.around(run), outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_reduce_sparse(self, xs: list[Tensor], opts: Any) -> Work:
        (x,) = xs
        if x.device.type != "cpu":
            raise BackendError("sparse tensors are reduced on cpu only", hint="x.cpu() first")
        reduce = self._reduce(opts, x)
        return self._issue(lambda: all_reduce_sparse(self._transport, x, reduce), xs, opts)

    def _reduce(self, opts: Any, x: Tensor) -> Reduce:
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return reduce_of(op, x.dtype, self._size)
