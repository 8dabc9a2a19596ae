"""The collectives of a process group that move tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distcell.errors import BackendError
from distcell.runtime.mpi.arguments import expect, listed, single, single_list, unpack
from distcell.runtime.mpi.rank_group import RankGroup
from distcell.runtime.mpi.staging import Staging
from distcell.runtime.mpi.work import Together, Work


class Exchanges(RankGroup):
    """A group of ranks that gather, scatter and exchange tensors."""

    def broadcast(self, tensors: Tensor | list[Tensor], opts: Any = None) -> Work:
        """Fills the tensor with the root's."""
        xs, staging, root = listed(tensors), Staging(), self._root(opts)
        hosts = [staging.both(x) for x in xs]

        def run() -> None:
            for host in hosts:
                self._transport.broadcast(host, root)

        return self._issue(staging.around(run), xs, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Fills the outputs with the ranks' inputs, which may be uneven."""
        x, outs = single(inputs), single_list(outputs)
        self._count("all_gather", "outputs", outs)
        expect("all_gather", x.numel(), outs[self._rank].numel())
        staging = Staging()
        source, targets = staging.source(x), [staging.target(out) for out in outs]
        counts = [target.numel() for target in targets]

        def run() -> None:
            flat = self._scratch.take(1, sum(counts), source)
            self._transport.all_gather(source, flat, counts)
            unpack(flat, targets)

        return self._issue(staging.around(run), outs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """The same for several inputs: `outputs[rank][i]` gets input i of that rank."""
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return Together([self.allgather([list(outs)], [x], opts) for outs, x in pairs])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """The same; the output is one tensor of equal parts."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """The same for several tensors."""
        staging = Staging()
        pairs = []
        for out, x in zip(outputs, inputs, strict=True):
            expect("all_gather_into_tensor", out.numel(), x.numel() * self._size)
            pairs.append((staging.source(x), staging.target(out)))

        def run() -> None:
            for source, target in pairs:
                self._transport.all_gather(source, target, [source.numel()] * self._size)

        return self._issue(staging.around(run), outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Fills the root's outputs with the ranks' inputs."""
        x, root, staging = single(inputs), self._root(opts), Staging()
        outs = single_list(outputs) if self._rank == root else []
        if self._rank == root:
            self._count("gather", "outputs", outs)
        source, targets = staging.source(x), [staging.target(out) for out in outs]
        run = staging.around(lambda: self._transport.gather(source, targets, root))
        return self._issue(run, outs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Fills the output with the root's input for this rank."""
        out, root, staging = single(outputs), self._root(opts), Staging()
        parts = single_list(inputs) if self._rank == root else []
        if self._rank == root:
            self._count("scatter", "inputs", parts)
        target, sources = staging.target(out), [staging.source(part) for part in parts]
        run = staging.around(lambda: self._transport.scatter(target, sources, root))
        return self._issue(run, [out], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Sends part i of the input to rank i; the output gets the parts in the ranks' order."""
        received = self._parts("output", output, output_splits)
        sent = self._parts("input", input, input_splits)
        staging = Staging()
        source, target = staging.source(input), staging.target(output)
        run = staging.around(lambda: self._transport.all_to_all(source, target, sent, received))
        return self._issue(run, [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Sends input i to rank i; output i gets what comes from there."""
        self._count("all_to_all", "outputs", outputs)
        self._count("all_to_all", "inputs", inputs)
        staging = Staging()
        sources = [staging.source(x) for x in inputs]
        targets = [staging.target(x) for x in outputs]
        run = staging.around(lambda: self._transport.exchange(sources, targets))
        return self._issue(run, outputs, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Ends when all ranks have called it."""
        return self._issue(self._transport.barrier, [], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def _parts(self, which: str, x: Tensor, splits: Sequence[int]) -> list[int]:
        """The elements of x that belong to each rank, from splits of its first dim."""
        rows = x.shape[0] if x.dim() else 1
        if not splits:
            if rows % self._size:
                raise BackendError(
                    f"all_to_all: {rows} rows of the {which} do not divide by {self._size} ranks",
                    hint=f"pass {which}_split_sizes",
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise BackendError(
                f"all_to_all: {which}_split_sizes {list(splits)} for {rows} rows and {self._size} "
                "ranks",
                hint="one size for each rank, together the first dim",
            )
        each = x.numel() // rows if rows else 0
        return [split * each for split in splits]
