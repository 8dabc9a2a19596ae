"""Where MindSpore's name or argument is torch's, torch's function; else a thin one of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

add, sub, mul = torch.add, torch.sub, torch.mul
matmul, bmm = torch.matmul, torch.bmm
exp, tanh, sigmoid = torch.exp, torch.tanh, torch.sigmoid
relu, silu = F.relu, F.silu
reshape = torch.reshape
cross_entropy, mse_loss, layer_norm, dropout = F.cross_entropy, F.mse_loss, F.layer_norm, F.dropout


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `input @ weight.T + bias`.

    Args:
        input: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    >>> dense(torch.ones(1, 2), torch.ones(3, 2))
    tensor([[2., 2., 2.]])
    """
    return F.linear(input, weight, bias)


def softmax(input: Tensor, axis: int = -1) -> Tensor:
    """Returns exp(input), scaled to sum 1 along one dim.

    Args:
        input: any shape.
        axis: the dim.

    >>> softmax(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    return F.softmax(input, dim=axis)


def log_softmax(input: Tensor, axis: int = -1) -> Tensor:
    """Returns the logarithm of softmax.

    Args:
        input: any shape.
        axis: the dim.

    >>> log_softmax(torch.zeros(2))
    tensor([-0.6931, -0.6931])
    """
    return F.log_softmax(input, dim=axis)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Returns the Gaussian error linear unit.

    Args:
        input: any shape.
        approximate: `none` or `tanh`.

    >>> gelu(torch.zeros(1))
    tensor([0.])
    """
    return F.gelu(input, approximate=approximate)


def sum(input: Tensor, axis: int | Sequence[int] | None = None, keep_dims: bool = False) -> Tensor:
    """Returns the sum along dims.

    Args:
        input: any shape.
        axis: the dims; all when left out.
        keep_dims: whether they stay, with size 1.

    >>> sum(torch.ones(2, 3), axis=0)
    tensor([2., 2., 2.])
    """
    return torch.sum(input, dim=_dims(axis), keepdim=keep_dims)


def mean(input: Tensor, axis: int | Sequence[int] | None = None, keep_dims: bool = False) -> Tensor:
    """Returns the mean along dims.

    Args:
        input: any shape.
        axis: the dims; all when left out.
        keep_dims: whether they stay, with size 1.

    >>> mean(torch.ones(2, 3), axis=0)
    tensor([1., 1., 1.])
    """
    return torch.mean(input, dim=_dims(axis), keepdim=keep_dims)


def transpose(input: Tensor, input_perm: Sequence[int]) -> Tensor:
    """Returns the tensor with its dims in another order.

    Args:
        input: any shape.
        input_perm: for each dim of the result, which dim it was.

    >>> transpose(torch.zeros(2, 3, 4), (2, 0, 1)).shape
    torch.Size([4, 2, 3])
    """
    return input.permute(*input_perm)


def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Returns tensors joined along a dim that they have.

    Args:
        tensors: equal in all other dims.
        axis: the dim.

    >>> cat([torch.zeros(2), torch.zeros(3)]).shape
    torch.Size([5])
    """
    return torch.cat(list(tensors), dim=axis)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Returns tensors joined along a new dim.

    Args:
        tensors: of equal shape.
        axis: where the new dim stands.

    >>> stack([torch.zeros(2), torch.zeros(2)]).shape
    torch.Size([2, 2])
    """
    return torch.stack(list(tensors), dim=axis)


def _dims(axis: int | Sequence[int] | None) -> list[int] | None:
    if axis is None:
        return None
    return [axis] if isinstance(axis, int) else list(axis)
