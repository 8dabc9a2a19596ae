"""Small functions of our own that ops are lowered to: lookups and writes by global index.

Each holds a share of a dim whose first element has the global index `offset`. An index outside the
share reads zeros and writes nowhere, so that over all ranks a lookup is a sum and a write is split.
All work on empty shares.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _within(index: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    """The index counted from the share's first element, and where it lies in the share."""
    local = index - offset
    inside = (local >= 0) & (local < size)
    return local.clamp(0, max(size - 1, 0)), inside


def _along(mask: Tensor, dim: int, like: Tensor) -> Tensor:
    """A mask over the dims from `dim` on, spread over the dims behind them."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - dim - mask.dim()))


def take(table: Tensor, dim: int, index: Tensor, offset: int = 0) -> Tensor:
    """The slices of a table along a dim at the indices, which may have any number of dims.

    Example:
        >>> take(torch.tensor([5.0, 6.0]), 0, torch.tensor([[2, 3], [0, 9]]), 2)
        tensor([[5., 6.],
                [0., 0.]])
    """
    shape = (*table.shape[:dim], *index.shape, *table.shape[dim + 1 :])
    if table.shape[dim] == 0:
        return table.new_zeros(shape)
    local, inside = _within(index, offset, table.shape[dim])
    found = table.index_select(dim, local.reshape(-1)).reshape(shape)
    return torch.where(_along(inside, dim, found), found, found.new_zeros(()))


def add_take(values: Tensor, dim: int, index: Tensor, size: int, offset: int = 0) -> Tensor:
    """The gradient of `take`: zeros with `size` slices to which the values are added.

    Example:
        >>> add_take(torch.tensor([1.0, 2.0, 4.0]), 0, torch.tensor([1, 1, 5]), 3)
        tensor([0., 3., 0.])
    """
    rest = values.shape[dim + index.dim() :]
    whole = values.new_zeros((*values.shape[:dim], size, *rest))
    if size == 0 or values.numel() == 0:
        return whole
    local, inside = _within(index, offset, size)
    kept = torch.where(_along(inside, dim, values), values, values.new_zeros(()))
    flat = kept.reshape(*values.shape[:dim], index.numel(), *rest)
    return whole.index_add(dim, local.reshape(-1), flat)


def pick(x: Tensor, dim: int, index: Tensor, offset: int = 0) -> Tensor:
    """One element along a dim for each index: `torch.gather`, zero outside the share.

    Example:
        >>> pick(torch.tensor([[5.0, 6.0]]), 1, torch.tensor([[2, 0, 3]]), 2)
        tensor([[5., 0., 6.]])
    """
    if x.shape[dim] == 0:
        return x.new_zeros(index.shape)
    local, inside = _within(index, offset, x.shape[dim])
    found = x.gather(dim, local)
    return torch.where(inside, found, found.new_zeros(()))


def add_pick(values: Tensor, dim: int, index: Tensor, size: int, offset: int = 0) -> Tensor:
    """The gradient of `pick`: zeros to which the values are added at the indices.

    Example:
        >>> add_pick(torch.tensor([[1.0, 2.0]]), 1, torch.tensor([[2, 7]]), 3)
        tensor([[0., 0., 1.]])
    """
    shape = list(values.shape)
    shape[dim] = size
    whole = values.new_zeros(shape)
    if size == 0:
        return whole
    local, inside = _within(index, offset, size)
    kept = torch.where(inside, values, values.new_zeros(()))
    return whole.scatter_add(dim, local, kept)


def select(x: Tensor, dim: int, index: int, offset: int = 0) -> Tensor:
    """The slice at one index along a dim, or zeros when another rank holds it."""
    if 0 <= index - offset < x.shape[dim]:
        return x.select(dim, index - offset).clone()
    return x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]))


def unselect(grad: Tensor, dim: int, index: int, size: int, offset: int = 0) -> Tensor:
    """The gradient of `select`: zeros with the slice written at its index."""
    whole = grad.new_zeros((*grad.shape[:dim], size, *grad.shape[dim:]))
    if 0 <= index - offset < size:
        whole.select(dim, index - offset).copy_(grad)
    return whole


def arange(
    size: int,
    start: float,
    step: float,
    offset: int,
    *,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Tensor:
    """A share of start, start + step, start + 2 * step, ..."""
    index = torch.arange(offset, offset + size, device=device)
    return (index * step + start).to(dtype)


def tril(x: Tensor, diagonal: int, row: int, column: int) -> Tensor:
    """The lower triangle of a matrix of which `x` begins at the given row and column."""
    return x.tril(diagonal + row - column)


def triu(x: Tensor, diagonal: int, row: int, column: int) -> Tensor:
    """The upper triangle of a matrix of which `x` begins at the given row and column."""
    return x.triu(diagonal + row - column)
