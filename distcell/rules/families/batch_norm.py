"""Batch normalisation: in training over the whole batch, however it is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import Arg, Ref
from distcell.rules.families.common import assemble, define, names, numel
from distcell.rules.families.reductions import average, downcast, moments, share_of, total, upcast
from distcell.rules.notation import Builder, Call, OpRule


def _tensors(call: Call) -> tuple[list[list[str]], list[str]]:
    """The factors of all tensors, and those that are summed over: all but the channels."""
    count = len(call.shape(0))
    full = ["b", "c", *names(count - 2)]
    tensors = []
    for index, value in enumerate((*call.operands, *call.results)):
        if len(value.shape) == count:
            tensors.append(full)
        else:
            tensors.append(["c"] if value.shape[0] == call.shape(0)[1] else [f"z{index}"])
    return tensors, [name for name in full if name != "c"]


def _rule(call: Call, *, training: bool, backward: bool) -> OpRule:
    tensors, over = _tensors(call)
    kinds = {name: "whole" for dims in tensors for name in dims if name.startswith("z")}
    if training:
        kinds |= dict.fromkeys(over, "lower")
    elif backward:
        kinds |= dict.fromkeys(over, "sum")
    return assemble(call, tuple(tensors), kinds, linear=[{0}] if backward else [])


def _spread(b: Builder, ref: Arg, call: Call) -> Any:
    """A value for each channel, in the shape in which it is broadcast."""
    if ref is None:
        return None
    shape = call.shape(0)
    return b("aten.view.default", ref, (1, shape[1], *(1,) * (len(shape) - 2)))


def _forward(b: Builder, call: Call) -> Sequence[Ref]:
    x, weight, bias, running_mean, running_var, _, momentum, eps = call.op.args
    shape, dtype = call.shape(0), call.operands[0].dtype
    dims = (0, *range(2, len(shape)))
    count = numel(shape) // shape[1]
    mean, apart, squares = moments(b, upcast(b, x, dtype), dims, count)
    variance = b("aten.mul.Scalar", squares, share_of(count))
    rstd = b("aten.rsqrt.default", b("aten.add.Scalar", variance, eps))
    made = b("aten.mul.Tensor", apart, rstd)
    if weight is not None:
        made = b("aten.mul.Tensor", made, _spread(b, weight, call))
    if bias is not None:
        made = b("aten.add.Tensor", made, _spread(b, bias, call))
    flat = [b("aten.view.default", ref, (shape[1],)) for ref in (mean, rstd)]
    results = [made, *flat]
    if len(call.results) == 5:
        unbiased = b("aten.mul.Scalar", squares, share_of(count - 1))
        now = flat[0], b("aten.view.default", unbiased, (shape[1],))
        pairs = zip((running_mean, running_var), now, strict=True)
        results += [b("aten.lerp.Scalar", old, new, momentum) for old, new in pairs]
    pairs = zip(results, call.results, strict=True)
    return [downcast(b, ref, value.dtype) for ref, value in pairs]


def _backward(b: Builder, call: Call) -> Sequence[Ref]:
    grad, x, weight, _, _, mean, rstd, _, _, mask = call.op.args
    shape = call.shape(0)
    dims = (0, *range(2, len(shape)))
    rstd = _spread(b, rstd, call)
    apart = b("aten.sub.Tensor", x, _spread(b, mean, call))
    normed = b("aten.mul.Tensor", apart, rstd)
    product = b("aten.mul.Tensor", grad, normed)
    made = []
    if mask[0]:
        count = numel(shape) // shape[1]
        inner = b("aten.mul.Tensor", normed, average(b, product, dims, count))
        apart = b("aten.sub.Tensor", grad, average(b, grad, dims, count))
        scale = rstd if weight is None else b("aten.mul.Tensor", rstd, _spread(b, weight, call))
        made.append(b("aten.mul.Tensor", b("aten.sub.Tensor", apart, inner), scale))
    if mask[1]:
        made.append(total(b, product, dims, keep=False))
    if mask[2]:
        made.append(total(b, grad, dims, keep=False))
    pairs = zip(made, call.results, strict=True)
    return [downcast(b, ref, value.dtype) for ref, value in pairs]


define(
    "native_batch_norm _native_batch_norm_legit_functional",
    lambda call: _rule(call, training=call.arg(5), backward=False),
    lower=_forward,
)
define(
    "native_batch_norm_backward",
    lambda call: _rule(call, training=call.arg(7), backward=True),
    lower=_backward,
)
