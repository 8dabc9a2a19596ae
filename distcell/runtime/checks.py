"""What generated code calls beside ops: it looks at results, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcell.errors import InternalError


def report_misfit(label: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    """Says that local tensors are not what their layout says.

    Raises:
        InternalError: Always.
    """
    wrong = [
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, not {list(shape)}"
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    raise InternalError(f"a rank does not hold what the layout says: {label}", where=wrong)


def check_replicas(label: str, tensors: Sequence[Tensor]) -> None:
    """Checks that tensors which a layout calls replicas are equal, bit for bit or both NaN.

    Raises:
        InternalError: When they are not: the program's layouts are wrong.
    """
    first = tensors[0]
    for other in tensors[1:]:
        if other.shape != first.shape or not torch.equal(other, first):
            equal = other.shape == first.shape and torch.equal(
                torch.nan_to_num(other), torch.nan_to_num(first)
            )
            if not equal or not torch.equal(other.isnan(), first.isnan()):
                raise InternalError(f"ranks differ where the layout says that they agree: {label}")
