"""Operations as objects, as MindSpore's `ops.ReLU()`: settings first, tensors at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distcell.ops import functional


class Primitive:
    """A function on tensors with its settings.

    Args:
        function: what the call calls.
        settings: passed to it by name.

    >>> Primitive(torch.sum, dim=0)(torch.ones(2, 3))
    tensor([2., 2., 2.])
    """

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        self.function, self.settings = function, settings

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.settings)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({given})"


def _simple(name: str, function: Callable[..., Any]) -> type[Primitive]:
    def set_up(self: Primitive) -> None:
        Primitive.__init__(self, function)

    doc = f"`{getattr(function, '__name__', name)}` as an object."
    return type(name, (Primitive,), {"__init__": set_up, "__doc__": doc, "__module__": __name__})


ReLU = _simple("ReLU", functional.relu)
Sigmoid = _simple("Sigmoid", functional.sigmoid)
Tanh = _simple("Tanh", functional.tanh)
Add = _simple("Add", functional.add)
Sub = _simple("Sub", functional.sub)
Mul = _simple("Mul", functional.mul)
Div = _simple("Div", functional.div)
Exp = _simple("Exp", functional.exp)
Log = _simple("Log", functional.log)
Sqrt = _simple("Sqrt", functional.sqrt)
Square = _simple("Square", functional.square)
Reshape = _simple("Reshape", functional.reshape)
Transpose = _simple("Transpose", functional.transpose)
Cast = _simple("Cast", functional.cast)
ExpandDims = _simple("ExpandDims", functional.expand_dims)


class GeLU(Primitive):
    """The Gaussian error linear unit, by tanh.

    >>> GeLU()(torch.zeros(1))
    tensor([0.])
    """

    def __init__(self) -> None:
        super().__init__(functional.gelu, approximate="tanh")


class Softmax(Primitive):
    """exp(x), scaled to sum 1 along one dim.

    Args:
        axis: the dim.

    >>> Softmax()(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__(functional.softmax, axis=axis)


class ReduceSum(Primitive):
    """The sum along dims, which are given at the call.

    Args:
        keep_dims: whether they stay, with size 1.

    >>> ReduceSum()(torch.ones(2, 3), 0)
    tensor([2., 2., 2.])
    """

    def __init__(self, keep_dims: bool = False) -> None:
        super().__init__(functional.sum, keep_dims=keep_dims)


class ReduceMean(Primitive):
    """The mean along dims, which are given at the call.

    Args:
        keep_dims: whether they stay, with size 1.

    >>> ReduceMean()(torch.ones(2, 3), 0)
    tensor([1., 1., 1.])
    """

    def __init__(self, keep_dims: bool = False) -> None:
        super().__init__(functional.mean, keep_dims=keep_dims)


class Concat(Primitive):
    """Tensors joined along a dim that they have.

    Args:
        axis: the dim.

    >>> Concat()([torch.zeros(2), torch.zeros(3)]).shape
    torch.Size([5])
    """

    def __init__(self, axis: int = 0) -> None:
        super().__init__(functional.cat, axis=axis)


class Stack(Primitive):
    """Tensors joined along a new dim.

    Args:
        axis: where it stands.

    >>> Stack()([torch.zeros(2), torch.zeros(2)]).shape
    torch.Size([2, 2])
    """

    def __init__(self, axis: int = 0) -> None:
        super().__init__(functional.stack, axis=axis)


class MatMul(Primitive):
    """The product of two matrices.

    Args:
        transpose_a: whether the dims of the first change places.
        transpose_b: the same of the second.

    >>> MatMul(transpose_b=True)(torch.ones(1, 2), torch.ones(3, 2))
    tensor([[2., 2., 2.]])
    """

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        super().__init__(_matmul, transpose_a=transpose_a, transpose_b=transpose_b)


class OneHot(Primitive):
    """Numbers as rows with one element on: `(indices, depth, on_value, off_value)`.

    >>> OneHot()(torch.tensor([1]), 3, 1.0, 0.0)
    tensor([[0., 1., 0.]])
    """

    def __init__(self) -> None:
        super().__init__(functional.one_hot)


def _matmul(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    a = a.transpose(-2, -1) if transpose_a else a
    return torch.matmul(a, b.transpose(-2, -1) if transpose_b else b)
