"""Softmax and its kin, also over a split dim."""

from __future__ import annotations

from collections.abc import Sequence

from distcell.graph import DtypeArg, Ref
from distcell.rules.families.common import assemble, define, names, wrap
from distcell.rules.families.reductions import downcast, total, upcast
from distcell.rules.notation import Builder, Call, OpRule, Rule


def _along(place: int, linear: Sequence[set[int]] = ()) -> Rule:
    """All tensors have one shape; the dim that an argument names is lowered when it is split."""

    def of(call: Call) -> OpRule:
        count = len(call.shape(0))
        dims = names(count)
        kinds = {dims[wrap(call.arg(place), count)]: "lower"} if count else {}
        tensors = [dims] * (len(call.operands) + len(call.results))
        return assemble(call, tuple(tensors), kinds, linear=linear)

    return of


def _softmax(b: Builder, call: Call) -> Sequence[Ref]:
    """exp(x - max) / Σ exp(x - max); the logarithm of it; or zeros where all is masked."""
    dtype = call.results[0].dtype
    dim = (wrap(call.arg(1), len(call.shape(0))),)
    x = call.op.args[0]
    if call.operands[0].dtype != dtype:
        x = b("aten._to_copy.default", x, dtype=DtypeArg(dtype))
    x = upcast(b, x, dtype)
    largest = b("aten.amax.default", x, dim, True)
    apart = b("aten.sub.Tensor", x, largest)
    powers = b("aten.exp.default", apart)
    summed = total(b, powers, dim)
    if call.op.target == "aten._log_softmax.default":
        made = b("aten.sub.Tensor", apart, b("aten.log.default", summed))
    else:
        made = b("aten.div.Tensor", powers, summed)
    if call.op.target == "aten._safe_softmax.default":
        masked = b("aten.eq.Scalar", largest, float("-inf"))
        made = b("aten.masked_fill.Scalar", made, masked, 0.0)
    return (downcast(b, made, dtype),)


define("_softmax _log_softmax _safe_softmax", _along(1), lower=_softmax)


def _softmax_backward(b: Builder, call: Call) -> Sequence[Ref]:
    dtype = call.operands[0].dtype
    dim = (wrap(call.arg(2), len(call.shape(0))),)
    grad, output = (
        upcast(b, ref, v.dtype) for ref, v in zip(call.op.args[:2], call.operands, strict=True)
    )
    if call.op.target == "aten._log_softmax_backward_data.default":
        powers = b("aten.exp.default", output)
        made = b("aten.sub.Tensor", grad, b("aten.mul.Tensor", powers, total(b, grad, dim)))
    else:
        weighted = b("aten.mul.Tensor", grad, output)
        made = b("aten.sub.Tensor", weighted, b("aten.mul.Tensor", output, total(b, weighted, dim)))
    if call.results[0].dtype != dtype:
        return (b("aten._to_copy.default", made, dtype=DtypeArg(call.results[0].dtype)),)
    return (downcast(b, made, dtype),)


define(
    "_softmax_backward_data _log_softmax_backward_data", _along(2, [{0}]), lower=_softmax_backward
)
