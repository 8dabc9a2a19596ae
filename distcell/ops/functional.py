"""Where MindSpore's name or argument is torch's, torch's function; else a thin one of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

add, sub, mul, div, pow = torch.add, torch.sub, torch.mul, torch.div, torch.pow
maximum, minimum, where, equal = torch.maximum, torch.minimum, torch.where, torch.eq
matmul, bmm = torch.matmul, torch.bmm
exp, log, tanh, sigmoid, erf = torch.exp, torch.log, torch.tanh, torch.sigmoid, torch.erf
sqrt, rsqrt, square, abs, neg = torch.sqrt, torch.rsqrt, torch.square, torch.abs, torch.neg
zeros_like, ones_like = torch.zeros_like, torch.ones_like
relu, silu = F.relu, F.silu
leaky_relu, elu = F.leaky_relu, F.elu
reshape, squeeze, tile, broadcast_to = torch.reshape, torch.squeeze, torch.tile, torch.broadcast_to
conv2d, max_pool2d, avg_pool2d = F.conv2d, F.max_pool2d, F.avg_pool2d
scaled_dot_product_attention = F.scaled_dot_product_attention
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


def cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor with another type of elements.

    Args:
        input: any shape.
        dtype: the type.

    >>> cast(torch.ones(1), torch.int64)
    tensor([1])
    """
    return input.to(dtype)


def expand_dims(input: Tensor, axis: int) -> Tensor:
    """Returns the tensor with a new dim of size 1.

    Args:
        input: any shape.
        axis: where it stands.

    >>> expand_dims(torch.zeros(2), 0).shape
    torch.Size([1, 2])
    """
    return input.unsqueeze(axis)


def one_hot(indices: Tensor, depth: int, on_value: float = 1.0, off_value: float = 0.0) -> Tensor:
    """Returns numbers as rows with one element on, in a new last dim.

    Args:
        indices: whole numbers from 0, any shape.
        depth: size of a row.
        on_value: the element of the number.
        off_value: the others.

    >>> one_hot(torch.tensor([1]), 3)
    tensor([[0., 1., 0.]])
    """
    return F.one_hot(indices, depth) * (on_value - off_value) + off_value


def gather(input: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Returns slices along one dim, by number.

    Args:
        input: any shape.
        indices: whole numbers from 0, any shape, which takes the dim's place.
        axis: the dim.

    >>> gather(torch.tensor([1.0, 2.0]), torch.tensor([[1, 0]]), 0)
    tensor([[2., 1.]])
    """
    found = torch.index_select(input, axis, indices.reshape(-1))
    dim = axis % input.dim()
    return found.reshape(*input.shape[:dim], *indices.shape, *input.shape[dim + 1 :])


def argmax(input: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Returns where the largest elements stand along one dim.

    Args:
        input: any shape.
        axis: the dim; all as one row when left out.
        keepdims: whether it stays, with size 1.

    >>> argmax(torch.tensor([1.0, 3.0, 2.0]))
    tensor(1)
    """
    return torch.argmax(input, dim=axis, keepdim=keepdims)


def clip_by_value(x: Tensor, clip_value_min: float, clip_value_max: float) -> Tensor:
    """Returns elements between two numbers.

    Args:
        x: any shape.
        clip_value_min: the least.
        clip_value_max: the largest.

    >>> clip_by_value(torch.tensor([-2.0, 2.0]), -1.0, 1.0)
    tensor([-1.,  1.])
    """
    return torch.clamp(x, clip_value_min, clip_value_max)


def split(tensor: Tensor, split_size: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Returns a tensor cut along one dim.

    Args:
        tensor: any shape.
        split_size: the size of each piece (the last may be smaller), or of all.
        axis: the dim.

    >>> [piece.tolist() for piece in split(torch.arange(3), 2)]
    [[0, 1], [2]]
    """
    sizes = split_size if isinstance(split_size, int) else list(split_size)
    return tuple(torch.split(tensor, sizes, dim=axis))


def _dims(axis: int | Sequence[int] | None) -> list[int] | None:
    if axis is None:
        return None
    return [axis] if isinstance(axis, int) else list(axis)
