"""torch's reduction operators: what is combined, and what is done before and after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from distcell.compat import premultiplier, reduction_kind
from distcell.errors import BackendError
from distcell.runtime.groups import COMBINE, Reduction

_Kind: Any = dist.ReduceOp.RedOpType

_KINDS: dict[Any, Reduction] = {
    _Kind.SUM: "sum",
    _Kind.AVG: "sum",
    _Kind.PREMUL_SUM: "sum",
    _Kind.PRODUCT: "product",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "band",
    _Kind.BOR: "bor",
    _Kind.BXOR: "bxor",
}


@dataclass(frozen=True)
class Reduce:
    """A reduction of tensors of some dtype.

    Args:
        kind: How two tensors are combined.
        divisor: What the result is divided by; 1 for all but the average.
        factor: What each operand is multiplied by first; None for all but the scaled sum.
    """

    kind: Reduction
    divisor: int = 1
    factor: float | Tensor | None = None

    def before(self, x: Tensor) -> None:
        """Makes of an operand what is combined, in place."""
        if self.factor is not None:
            x.mul_(self.factor)

    def after(self, x: Tensor) -> None:
        """Makes of what was combined the result, in place."""
        if self.divisor != 1:
            x = torch.view_as_real(x) if x.dtype.is_complex else x
            x.div_(self.divisor, rounding_mode=None if x.dtype.is_floating_point else "trunc")


def reduce_of(op: Any, dtype: torch.dtype, size: int) -> Reduce:
    """Returns what a `dist.ReduceOp` means for tensors of a dtype.

    Args:
        op: Such as `dist.ReduceOp.AVG`.
        dtype: Of the tensors.
        size: How many tensors are combined.

    Raises:
        BackendError: torch cannot combine tensors of this dtype so.

    >>> reduce_of(dist.ReduceOp.AVG, torch.float32, 4)
    Reduce(kind='sum', divisor=4, factor=None)
    """
    kind = reduction_kind(op)
    reason = _refused(_KINDS[kind], dtype)
    if kind == _Kind.AVG and dtype == torch.bool:
        reason = "there is no average of truth values"
    if reason is not None:
        raise BackendError(
            f"{kind.name} of {dtype} is not defined",
            where=[reason],
            hint="reduce in another dtype, such as float32 or int64",
        )
    if kind == _Kind.AVG:
        return Reduce("sum", divisor=size)
    return Reduce(_KINDS[kind], factor=premultiplier(op) if kind == _Kind.PREMUL_SUM else None)


@lru_cache(maxsize=256)
def _refused(kind: Reduction, dtype: torch.dtype) -> str | None:
    """Why torch cannot combine: asked before MPI calls back, where an error would end the job."""
    one = torch.ones(1).to(dtype)
    try:
        COMBINE[kind](one, one, out=one)
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    return None
