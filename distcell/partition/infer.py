"""Shapes and dtypes of the results of an op, by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from distcell.dtype import DTYPES, name_of
from distcell.graph import Arg, DeviceArg, DtypeArg, Op, Ref, Value
from distcell.rules.table import asked_for, implementation, output_mask, spelling


def infer_results(op: Op, operands: Sequence[Value]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and dtype of each result of an op.

    Args:
        op: The op; `operands` are the values that it uses, in order of the arguments.
    """
    blank = Op(op.target, op.args, op.kwargs).map_refs(lambda name: Ref(""))
    run = implementation(op.target)
    found: tuple[tuple[tuple[int, ...], str], ...] = _infer(
        blank, spelling(blank), run, tuple((v.shape, v.dtype) for v in operands)
    )
    return found


@lru_cache(maxsize=4096)
def _infer(
    op: Op,
    spelt: str,
    run: Callable[..., Any],
    operands: tuple[tuple[tuple[int, ...], str], ...],
) -> Any:
    """As `infer_results`. `spelt` tells apart what `op` alone would not."""
    tensors = iter(
        [torch.empty(shape, dtype=DTYPES[dtype], device="meta") for shape, dtype in operands]
    )
    args = [_concrete(arg, tensors) for arg in op.args]
    kwargs = {key: _concrete(arg, tensors) for key, arg in op.kwargs}
    with torch.no_grad():
        made = run(*args, **kwargs)
    results = made if isinstance(made, (tuple, list)) else (made,)
    return tuple((tuple(t.shape), name_of(t.dtype)) for t in asked_for(results, output_mask(op)))


def _concrete(arg: Arg, tensors: Any) -> Any:
    if isinstance(arg, Ref):
        return next(tensors)
    if isinstance(arg, DtypeArg):
        return DTYPES[arg.name]
    if isinstance(arg, DeviceArg):
        return torch.device("meta")
    if isinstance(arg, tuple):
        return [_concrete(item, tensors) for item in arg]
    return arg
