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


def _simple(
    name: str, function: Callable[..., Any], what: str, call: str, result: str
) -> type[Primitive]:
    """A class for a function without settings; its docstring has a call and what it gives."""

    def set_up(self: Primitive) -> None:
        Primitive.__init__(self, function)

    doc = f"""{what}

    >>> {name}()({call})
    {result}
    """
    return type(name, (Primitive,), {"__init__": set_up, "__doc__": doc, "__module__": __name__})


_PAIR = "torch.ones(2), torch.ones(2)"

ReLU = _simple(
    "ReLU", functional.relu, "Zero below zero.", "torch.tensor([-1.0, 2.0])", "tensor([0., 2.])"
)
Sigmoid = _simple(
    "Sigmoid", functional.sigmoid, "1 / (1 + exp(-x)).", "torch.zeros(1)", "tensor([0.5000])"
)
Tanh = _simple("Tanh", functional.tanh, "The hyperbolic tangent.", "torch.zeros(1)", "tensor([0.])")
Add = _simple("Add", functional.add, "The sum of two tensors.", _PAIR, "tensor([2., 2.])")
Sub = _simple("Sub", functional.sub, "The first less the second.", _PAIR, "tensor([0., 0.])")
Mul = _simple("Mul", functional.mul, "The product, by element.", _PAIR, "tensor([1., 1.])")
Div = _simple("Div", functional.div, "The first by the second.", _PAIR, "tensor([1., 1.])")
Exp = _simple("Exp", functional.exp, "e to the power of x.", "torch.zeros(1)", "tensor([1.])")
Log = _simple("Log", functional.log, "The natural logarithm.", "torch.ones(1)", "tensor([0.])")
Sqrt = _simple("Sqrt", functional.sqrt, "The square root.", "torch.tensor([4.0])", "tensor([2.])")
Square = _simple("Square", functional.square, "x times x.", "torch.tensor([3.0])", "tensor([9.])")
Reshape = _simple(
    "Reshape",
    functional.reshape,
    "The same elements in another shape, which is given second.",
    "torch.zeros(4), (2, 2)",
    "tensor([[0., 0.],\n            [0., 0.]])",
)
Transpose = _simple(
    "Transpose",
    functional.transpose,
    "The dims in another order, which is given second.",
    "torch.tensor([[1, 2]]), (1, 0)",
    "tensor([[1],\n            [2]])",
)
Cast = _simple(
    "Cast",
    functional.cast,
    "The same values in another dtype, which is given second.",
    "torch.ones(1), torch.int64",
    "tensor([1])",
)
ExpandDims = _simple(
    "ExpandDims",
    functional.expand_dims,
    "A further dim of size 1 before the one that is given second.",
    "torch.ones(2), 0",
    "tensor([[1., 1.]])",
)


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
