"""Layer and RMS normalisation (statistics over the last dims) and group normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distcell.dtype import DTYPES
from distcell.graph import Arg, Ref
from distcell.rules.families.common import assemble, define, names, numel
from distcell.rules.families.reductions import average, downcast, moments, share_of, total, upcast
from distcell.rules.notation import Builder, Call, LocalArg, OpRule


def _dims(call: Call, place: int) -> tuple[list[str], list[str], list[Sequence[str]]]:
    """The factors of x, those of the normalised dims, and those of the statistics."""
    count = len(call.arg(place))
    dims = names(len(call.shape(0)))
    kept = len(dims) - count
    return dims, dims[kept:], [*dims[:kept], *[()] * count]


def _forward(call: Call) -> OpRule:
    """Operands: x and, where they are, weight and bias."""
    dims, last, stats = _dims(call, 1)
    tensors = (dims, *[last] * (len(call.operands) - 1), dims, *[stats] * (len(call.results) - 1))
    return assemble(call, tensors, dict.fromkeys(last, "lower"))


def _backward(call: Call) -> OpRule:
    """Operands: gradient, x, statistics and, where they are, weight and bias.

    The gradients of weights are sums over all rows: partial when the rows are split.
    """
    dims, last, stats = _dims(call, 2)
    count = 2 if call.op.target.startswith("aten.native_layer_norm") else 1
    operands: list[Any] = [dims, dims, *[stats] * count, *[last] * (len(call.operands) - 2 - count)]
    results = [dims if index == 0 else last for index, made in enumerate(call.op.args[-1]) if made]
    kinds = dict.fromkeys(dims, "sum") | dict.fromkeys(last, "lower")
    return assemble(call, (*operands, *results), kinds, linear=[{0}])


def _scale(b: Builder, x: Any, weight: Arg, bias: Arg = None) -> Any:
    """X * weight + bias, for those that are given."""
    made = x if weight is None else b("aten.mul.Tensor", x, weight)
    return made if bias is None else b("aten.add.Tensor", made, bias)


def _layer_norm(b: Builder, call: Call) -> Sequence[Ref]:
    x, _, weight, bias, eps = call.op.args
    dtype = call.operands[0].dtype
    _, last, _ = _dims(call, 1)
    dims = tuple(range(len(call.shape(0)) - len(last), len(call.shape(0))))
    count = numel([call.shape(0)[dim] for dim in dims])
    mean, apart, squares = moments(b, upcast(b, x, dtype), dims, count)
    variance = b("aten.mul.Scalar", squares, share_of(count))
    rstd = b("aten.rsqrt.default", b("aten.add.Scalar", variance, eps))
    made = _scale(b, b("aten.mul.Tensor", apart, rstd), weight, bias)
    kept = call.results[1].dtype
    return downcast(b, made, dtype), downcast(b, mean, kept), downcast(b, rstd, kept)


def _rms_norm(b: Builder, call: Call) -> Sequence[Ref]:
    x, _, weight, eps = call.op.args
    dtype = call.operands[0].dtype
    _, last, _ = _dims(call, 1)
    dims = tuple(range(len(call.shape(0)) - len(last), len(call.shape(0))))
    eps = torch.finfo(DTYPES[dtype]).eps if eps is None else eps
    x = upcast(b, x, dtype)
    squares = average(b, b("aten.mul.Tensor", x, x), dims, numel(call.arg(1)))
    rstd = b("aten.rsqrt.default", b("aten.add.Scalar", squares, eps))
    made = _scale(b, b("aten.mul.Tensor", x, rstd), weight)
    return downcast(b, made, dtype), downcast(b, rstd, call.results[1].dtype)


def _upcast_all(b: Builder, call: Call) -> list[Any]:
    """The arguments with the tensors in half precision made single."""
    dtypes = iter(value.dtype for value in call.operands)
    return [upcast(b, arg, next(dtypes)) if isinstance(arg, Ref) else arg for arg in call.op.args]


def _layer_norm_backward(b: Builder, call: Call) -> Sequence[Ref]:
    grad, x, _, mean, rstd, weight, _, mask = _upcast_all(b, call)
    dims, last, _ = _dims(call, 2)
    kept = len(dims) - len(last)
    normed = b("aten.mul.Tensor", b("aten.sub.Tensor", x, mean), rstd)
    return _norm_gradients(b, call, (grad, normed, rstd, weight), kept=kept, mask=mask, mean=True)


def _rms_norm_backward(b: Builder, call: Call) -> Sequence[Ref]:
    grad, x, _, rstd, weight, mask = _upcast_all(b, call)
    dims, last, _ = _dims(call, 2)
    kept = len(dims) - len(last)
    normed = b("aten.mul.Tensor", x, rstd)
    return _norm_gradients(b, call, (grad, normed, rstd, weight), kept=kept, mask=mask, mean=False)


def _norm_gradients(
    b: Builder, call: Call, given: tuple[Any, ...], *, kept: int, mask: Sequence[bool], mean: bool
) -> Sequence[Ref]:
    """The gradients from the normalised values; without `mean` none was subtracted."""
    grad, normed, rstd, weight = given
    shape = call.shape(0)
    rows, last = tuple(range(kept)), tuple(range(kept, len(shape)))
    count = numel(shape[kept:])
    weighted = _scale(b, grad, weight)
    inner = average(b, b("aten.mul.Tensor", weighted, normed), last, count)
    made = b("aten.sub.Tensor", weighted, b("aten.mul.Tensor", normed, inner))
    if mean:
        made = b("aten.sub.Tensor", made, average(b, weighted, last, count))
    grads = [b("aten.mul.Tensor", made, rstd)]
    if mask[1]:
        grads.append(total(b, b("aten.mul.Tensor", grad, normed), rows, keep=False))
    if len(mask) > 2 and mask[2]:
        grads.append(total(b, grad, rows, keep=False))
    if not mask[0]:
        grads = grads[1:]
    pairs = zip(grads, call.results, strict=True)
    return [downcast(b, ref, value.dtype) for ref, value in pairs]


define("native_layer_norm", _forward, lower=_layer_norm)
define("_fused_rms_norm", _forward, lower=_rms_norm)
define("native_layer_norm_backward", _backward, lower=_layer_norm_backward)
define("_fused_rms_norm_backward", _backward, lower=_rms_norm_backward)

# --- group norm: channels are a product of groups and what a group holds --------------------------


def _group_rule(call: Call, *, backward: bool) -> OpRule:
    batch, channels, _, groups = call.op.args[5:9] if backward else call.op.args[3:7]
    count = len(call.shape(0))
    spatial = names(count - 2)
    x: list[Any] = ["b", ("g", "c"), *spatial]
    weight: list[Any] = [("g", "c")]
    stats: list[Any] = ["b", "g"]
    kinds = dict.fromkeys(["c", *spatial], "lower")
    first = 5 if backward else 3
    local = [
        LocalArg(first, "extent", "b"),
        LocalArg(first + 1, "extent", "g c"),
        LocalArg(first + 3, "extent", "g"),
    ]
    if backward:
        kinds["b"] = "sum"
        rest = [weight] * (len(call.operands) - 4)
        results = [x if i == 0 else weight for i, made in enumerate(call.op.args[9]) if made]
        tensors = [x, x, stats, stats, *rest, *results]
    else:
        tensors = [x, *[weight] * (len(call.operands) - 1), x, stats, stats]
    sizes = {"b": batch, "g": groups, "c": channels // groups}
    return assemble(
        call, tuple(tensors), kinds, sizes=sizes, local=local, linear=[{0}] if backward else []
    )


class _Grouped:
    """The shapes in which the channels are two dims."""

    def __init__(self, b: Builder, call: Call, groups: int) -> None:
        self._b = b
        self.shape = call.shape(0)
        batch, channels, *spatial = self.shape
        self.full = (batch, groups, channels // groups, *spatial)
        self.inner = tuple(range(2, len(self.full)))
        self.rest = (0, *self.inner[1:])
        self.count = numel(self.full[2:])

    def x(self, ref: Arg) -> Any:
        return self._b("aten.view.default", ref, self.full)

    def weight(self, ref: Arg) -> Any:
        if ref is None:
            return None
        ones = (1,) * (len(self.full) - 3)
        return self._b("aten.view.default", ref, (1, *self.full[1:3], *ones))

    def stats(self, ref: Arg) -> Any:
        return self._b("aten.view.default", ref, (*self.full[:2], *(1,) * len(self.inner)))

    def back(self, ref: Any, shape: Sequence[int]) -> Any:
        return self._b("aten.view.default", ref, tuple(shape))


def _group_norm(b: Builder, call: Call) -> Sequence[Ref]:
    x, weight, bias, _, _, _, groups, eps = call.op.args
    as_groups = _Grouped(b, call, groups)
    dtype = call.operands[0].dtype
    split = as_groups.x(upcast(b, x, dtype))
    mean, apart, squares = moments(b, split, as_groups.inner, as_groups.count)
    variance = b("aten.mul.Scalar", squares, share_of(as_groups.count))
    rstd = b("aten.rsqrt.default", b("aten.add.Scalar", variance, eps))
    normed = b("aten.mul.Tensor", apart, rstd)
    made = _scale(b, normed, as_groups.weight(weight), as_groups.weight(bias))
    results = zip((made, mean, rstd), call.results, strict=True)
    return [downcast(b, as_groups.back(ref, v.shape), v.dtype) for ref, v in results]


def _group_norm_backward(b: Builder, call: Call) -> Sequence[Ref]:
    grad, x, mean, rstd, weight, _, _, _, groups, mask = _upcast_all(b, call)
    as_groups = _Grouped(b, call, groups)
    apart = b("aten.sub.Tensor", as_groups.x(x), as_groups.stats(mean))
    rstd = as_groups.stats(rstd)
    normed, grad = b("aten.mul.Tensor", apart, rstd), as_groups.x(grad)
    made = []
    if mask[0]:
        weighted = _scale(b, grad, as_groups.weight(weight))
        product = b("aten.mul.Tensor", weighted, normed)
        inner = average(b, product, as_groups.inner, as_groups.count)
        mean = average(b, weighted, as_groups.inner, as_groups.count)
        apart = b("aten.sub.Tensor", weighted, b("aten.mul.Tensor", normed, inner))
        made.append(b("aten.mul.Tensor", b("aten.sub.Tensor", apart, mean), rstd))
    if mask[1]:
        made.append(total(b, b("aten.mul.Tensor", grad, normed), as_groups.rest))
    if mask[2]:
        made.append(total(b, grad, as_groups.rest))
    results = zip(made, call.results, strict=True)
    return [downcast(b, as_groups.back(ref, v.shape), v.dtype) for ref, v in results]


define("native_group_norm", lambda call: _group_rule(call, backward=False), lower=_group_norm)
define(
    "native_group_norm_backward",
    lambda call: _group_rule(call, backward=True),
    lower=_group_norm_backward,
)
