"""A Cell's own backward: `bprop`, as in MindSpore."""

from __future__ import annotations

from typing import Any

import torch

from distcell.errors import UserTypeError, UserValueError


def call_with_bprop(cell: Any, inputs: tuple[Any, ...]) -> Any:
    """Returns `construct` of the inputs, whose backward is `bprop(*inputs, out, dout)`.

    `bprop` returns a gradient for each input. The cell's own parameters get none, as it says
    nothing of them.

    Args:
        cell: the cell.
        inputs: tensors of any shape, and other things that get no gradient.

    Raises:
        UserValueError: in backward: the number of gradients is not that of the inputs, or with
            `bprop_debug` one has another shape or dtype than its input.
        UserTypeError: a tensor lies inside an input.

    >>> class Double:
    ...     bprop_debug = True
    ...     def construct(self, x):
    ...         return 2 * x
    ...     def bprop(self, x, out, dout):
    ...         return (2 * dout,)
    >>> x = torch.ones(1, requires_grad=True)
    >>> torch.autograd.grad(call_with_bprop(Double(), (x,)), x)
    (tensor([2.]),)
    """
    for place, item in enumerate(inputs):
        if isinstance(item, tuple | list | dict) and _has_tensor(item):
            kind = type(item).__name__
            message = f"input {place} of a cell with `bprop` is a {kind} of tensors"
            raise UserTypeError(message, hint="pass each tensor by itself")
    return _Bprop.apply(cell, *inputs)  # type: ignore[no-untyped-call]


class _Bprop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: Any, *inputs: Any) -> Any:
        out = cell.construct(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        ctx.cell, ctx.is_tuple, ctx.num_inputs = cell, isinstance(out, tuple), len(inputs)
        kept = (*inputs, *outs)
        ctx.others = [None if isinstance(item, torch.Tensor) else item for item in kept]
        ctx.save_for_backward(*[item if isinstance(item, torch.Tensor) else None for item in kept])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        kept = [other if tensor is None else tensor for tensor, other in saved]
        inputs, outs = kept[: ctx.num_inputs], tuple(kept[ctx.num_inputs :])
        out, grad = (outs, grads) if ctx.is_tuple else (outs[0], grads[0])
        found = ctx.cell.bprop(*inputs, out, grad)
        found = found if isinstance(found, tuple) else (found,)
        _check(ctx.cell, inputs, found)
        return None, *found


def _check(cell: Any, inputs: list[Any], found: tuple[Any, ...]) -> None:
    kind = type(cell).__name__
    if len(found) != len(inputs):
        raise UserValueError(
            f"`bprop` of {kind} returns {len(found)} gradients for {len(inputs)} inputs",
            hint="return a tuple with one for each input, None for what has none",
        )
    if not cell.bprop_debug:
        return
    for place, (given, grad) in enumerate(zip(inputs, found, strict=True)):
        if isinstance(grad, torch.Tensor) and isinstance(given, torch.Tensor):
            wanted, got = (list(given.shape), given.dtype), (list(grad.shape), grad.dtype)
            if wanted != got:
                raise UserValueError(
                    f"gradient {place} of `bprop` of {kind} is {got[0]} of {got[1]}",
                    where=[f"its input is {wanted[0]} of {wanted[1]}"],
                )


def _has_tensor(item: Any) -> bool:
    if isinstance(item, dict):
        return any(map(_has_tensor, item.values()))
    if isinstance(item, tuple | list):
        return any(map(_has_tensor, item))
    return isinstance(item, torch.Tensor)
