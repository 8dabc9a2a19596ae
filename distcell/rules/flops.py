"""How many floating-point operations an op takes: products of matrices, convolutions, attention.

A multiplication and an addition count as two. What else there is (element-wise ops, reductions) is
bound by memory and counts as nothing, as in torch's own counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distcell.graph import Op

Shape = Sequence[int]
Count = Callable[[Op, Sequence[Shape], Sequence[Shape]], int]


def flops(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    """The operations of a call.

    Args:
        op: The op.
        operands: The shapes of its tensor operands as the rank holds them.
        results: The shapes of its results.

    Example:
        >>> flops(Op("aten.mm.default"), [(4, 8), (8, 2)], [(4, 2)])
        128
    """
    count = _TABLE.get(op.target)
    return count(op, operands, results) if count else 0


def is_counted(target: str) -> bool:
    """Whether calls of an op count as anything.

    Example:
        >>> is_counted("aten.mm.default"), is_counted("aten.add.Tensor")
        (True, False)
    """
    return target in _TABLE


def _product(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    """The left operand's last dim is contracted; a bias may stand before the two."""
    left = operands[-2]
    return 2 * math.prod(results[0]) * left[-1]


def _per_output(weight: Shape) -> int:
    """The products that go into one element of a convolution's result."""
    return math.prod(weight[1:])


def _convolution(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    # a transposed one is the gradient of a plain one: its input is that one's result
    is_transposed = bool(op.args[6])
    return 2 * math.prod(operands[0] if is_transposed else results[0]) * _per_output(operands[1])


def _convolution_backward(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    gradient, entered, weight = operands[:3]
    is_transposed = bool(op.args[7])
    each = 2 * math.prod(entered if is_transposed else gradient) * _per_output(weight)
    return each * sum(map(bool, op.args[10][:2]))


def _attention(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    return _scores(operands) * (operands[0][-1] + operands[2][-1])


def _attention_backward(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    # the scores once more, then the gradients of query and key; those of scores and value
    query_key_value = operands[1:4]
    return _scores(query_key_value) * (3 * operands[1][-1] + 2 * operands[3][-1])


def _scores(query_key_value: Sequence[Shape]) -> int:
    """Twice the number of scores: the operations for each element of a row that is multiplied."""
    query, key = query_key_value[:2]
    return 2 * math.prod(query[:-1]) * key[-2]


_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)

_TABLE: dict[str, Count] = {
    **{f"aten.{name}.default": _product for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")},
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    **{f"aten._scaled_dot_product_{name}.default": _attention for name in _ATTENTION},
    **{
        f"aten._scaled_dot_product_{name}_backward.default": _attention_backward
        for name in _ATTENTION
    },
}
