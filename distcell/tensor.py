"""MindSpore's `Tensor`: makes torch tensors, and stands for shapes that are not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distcell.errors import UserTypeError, UserValueError


@dataclass(frozen=True)
class DynamicTensor:
    """A tensor of which the shape is known in part: for `Cell.set_inputs`.

    Args:
        shape: the sizes; None for one that calls may choose.
        dtype: the type of the elements.

    >>> DynamicTensor((3, None), torch.float32).shape
    (3, None)
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


class _TensorType(type):
    def __call__(
        cls,
        input_data: Any = None,
        dtype: torch.dtype | None = None,
        shape: Sequence[int | None] | None = None,
    ) -> Any:
        if input_data is not None:
            if shape is not None:
                raise UserTypeError("both data and a shape are given", hint="leave the shape out")
            if isinstance(input_data, torch.Tensor):
                return input_data.detach().clone().to(dtype or input_data.dtype)
            return torch.tensor(input_data, dtype=dtype)
        if shape is None or dtype is None:
            raise UserTypeError("a tensor is made of data", hint="or of `shape=` and `dtype=`")
        for size in shape:
            if size is not None and (type(size) is not int or size < 0):
                raise UserValueError(f"a size is {size!r}", hint="a number, or None")
        return DynamicTensor(tuple(shape), dtype)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class Tensor(metaclass=_TensorType):
    """Makes a `torch.Tensor` of data; of a shape with None, a `DynamicTensor`.

    Every torch tensor is an instance.

    Args:
        input_data: numbers, lists of them, an array of numpy, or a tensor; it is copied.
        dtype: the type of the elements; that of the data when left out.
        shape: in place of data: sizes, None for one that is not known.

    Raises:
        UserTypeError: both data and shape are given, or neither.
        UserValueError: a size is no number from 0.

    >>> Tensor([1.0, 2.0]), isinstance(torch.ones(1), Tensor)
    (tensor([1., 2.]), True)
    >>> Tensor(shape=[3, None], dtype=torch.float32)
    DynamicTensor(shape=(3, None), dtype=torch.float32)
    """
