"""The sum of sparse tensors: their entries are gathered, not their zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from distcell.errors import BackendError
from distcell.runtime.mpi.reduction import Reduce
from distcell.runtime.mpi.transport import Transport


def all_reduce_sparse(transport: Transport, x: Tensor, reduce: Reduce) -> None:
    """Makes of a sparse tensor the sum of those of all members, in place.

    Args:
        transport: The group.
        x: A COO tensor in main memory.
        reduce: A sum, average or scaled sum.

    Raises:
        BackendError: Another reduction: the zeros would count.
    """
    if reduce.kind != "sum":
        raise BackendError(
            f"sparse tensors are summed, not reduced by {reduce.kind}",
            hint="x.to_dense() first",
        )
    mine = x.detach().coalesce()
    size = transport.size
    counts = torch.empty(size, dtype=torch.int64)
    transport.all_gather(torch.tensor([mine._nnz()]), counts, [1] * size)
    entries = [int(n) for n in counts]
    indices = _gathered(transport, mine.indices().t().contiguous(), entries)
    values = mine.values().contiguous().clone()
    reduce.before(values)
    summed = _gathered(transport, values, entries)
    total = torch.sparse_coo_tensor(indices.t(), summed, x.shape, check_invariants=False).coalesce()
    reduce.after(total.values())
    with torch.no_grad():
        x.copy_(total)


def _gathered(transport: Transport, rows: Tensor, counts: list[int]) -> Tensor:
    out = rows.new_empty((sum(counts), *rows.shape[1:]))
    each = rows[0].numel() if rows.shape[0] else rows.new_empty((1, *rows.shape[1:])).numel()
    transport.all_gather(rows, out, [n * each for n in counts])
    return out
