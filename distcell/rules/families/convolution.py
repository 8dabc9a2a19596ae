"""Convolutions, pooling and resampling.

Batch and channels may be split. Places are whole, but for windows that do not overlap (of size one,
or as large as their stride, as in a patch embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import Ref
from distcell.rules.families.common import assemble, define, names
from distcell.rules.families.reductions import total
from distcell.rules.notation import Builder, Call, LocalArg, OpRule, Rule


def _entry(values: Sequence[int], index: int) -> int:
    return values[index] if len(values) > 1 else values[0]


def _places(
    call: Call, shapes: tuple[Sequence[int], ...], first: int
) -> tuple[list[Any], list[Any], list[Any], dict[str, int]]:
    """Factors of the spatial dims of input, weight and output, and their sizes."""
    x, w, y = shapes
    stride, padding, dilation, transposed = call.op.args[first : first + 4]
    left: list[Any] = []
    kernel: list[Any] = []
    right: list[Any] = []
    sizes: dict[str, int] = {}
    for index in range(len(x) - 2):
        size, window = x[index + 2], w[index + 2]
        apart = _entry(stride, index) == window and not _entry(padding, index)
        apart = apart and _entry(dilation, index) == 1 and not transposed
        if apart and size == window * y[index + 2]:
            name = f"p{index}"
            sizes[name], sizes[f"k{index}"] = y[index + 2], window
            left.append((name,) if window == 1 else (name, f"k{index}"))
            kernel.append(() if window == 1 else (f"k{index}",))
            right.append((name,))
        else:
            left.append((f"x{index}",))
            kernel.append((f"k{index}",))
            right.append((f"y{index}",))
    return left, kernel, right, sizes


def _channels(x: Sequence[int], w: Sequence[int], groups: int, transposed: bool) -> Any:
    """Factors of the channels of input and output, of the two channel dims of the weight."""
    if groups == 1:
        return ("i",), ("o",), [("i",), ("o",)] if transposed else [("o",), ("i",)], {}
    sizes = {"g": groups, "i": x[1] // groups, "o": w[1] if transposed else w[0] // groups}
    first, second = (("g", "i"), ("o",)) if transposed else (("g", "o"), ("i",))
    return ("g", "i"), ("g", "o"), [first, second], sizes


def _whole(names_: Sequence[Sequence[str]]) -> dict[str, str]:
    return {name: "whole" for dim in names_ for name in dim if name[0] in "xyk"}


def _convolution(call: Call) -> OpRule:
    x, w, y = call.shape(0), call.shape(1), call.results[0].shape
    transposed, groups = call.arg(6), call.arg(8)
    left, kernel, right, sizes = _places(call, (x, w, y), 3)
    ins, outs, weight, more = _channels(x, w, groups, transposed)
    bias = [[outs]] if len(call.operands) == 3 else []
    kinds = _whole([*left, *kernel, *right])
    kinds["i"] = "lower" if bias else "sum"
    if groups > 1:
        kinds |= {"i": "whole", "o": "whole"}
    tensors = (["b", ins, *left], [*weight, *kernel], *bias, ["b", outs, *right])
    linear = [{0, 2}, {1, 2}] if bias else [{0}, {1}]
    return assemble(
        call,
        tensors,
        kinds,
        sizes=sizes | more,
        linear=linear,
        local=[LocalArg(8, "extent", "g")] if groups > 1 else [],
    )


def _bias_once(b: Builder, call: Call) -> Sequence[Ref]:
    x, w, bias, *rest = call.op.args
    made = b("aten.convolution.default", x, w, None, *rest)
    shape = (1, call.shape(2)[0], *(1,) * (len(call.shape(0)) - 2))
    return (b("aten.add.Tensor", made, b("aten.view.default", bias, shape)),)


def _convolution_backward(call: Call) -> OpRule:
    """Operands: gradient, input, weight. Each result sums what it lacks.

    The bias's gradient does not depend on the input: a rank whose share of the input is empty
    could not run the kernel for it.
    """
    y, x, w = call.shape(0), call.shape(1), call.shape(2)
    transposed, groups, mask = call.arg(7), call.arg(9), call.arg(10)
    left, kernel, right, sizes = _places(call, (x, w, y), 4)
    ins, outs, weight, more = _channels(x, w, groups, transposed)
    full, weights = ["b", ins, *left], [*weight, *kernel]
    kinds = {"b": "sum", "o": "sum"} | {f"p{i}": "sum" for i in range(len(left))}
    kinds |= _whole([*left, *kernel, *right]) | ({"i": "lower"} if mask[2] else {})
    local = [LocalArg(3, "extents", " ".join(outs))] if isinstance(call.arg(3), tuple) else []
    if groups > 1:
        kinds |= {"i": "whole", "o": "whole"}
        local.append(LocalArg(9, "extent", "g"))
    results = [made for made, wanted in zip((full, weights, [outs]), mask, strict=True) if wanted]
    tensors = (["b", outs, *right], full, weights, *results)
    return assemble(call, tensors, kinds, sizes=sizes | more, linear=[{0}], local=local)


def _bias_apart(b: Builder, call: Call) -> Sequence[Ref]:
    """The gradient of the bias is the sum of the incoming one."""
    *args, mask = call.op.args
    made: Any = []
    if mask[0] or mask[1]:
        made = b("aten.convolution_backward.default", *args, (mask[0], mask[1], False))
    over = (0, *range(2, len(call.shape(0))))
    made = [made] if isinstance(made, Ref) else [*made]
    return [*made, total(b, args[0], over, keep=False)]


define("convolution", _convolution, lower=_bias_once)
define("convolution_backward", _convolution_backward, lower=_bias_apart)


def windows(spatial: int, *, forward: bool, linear: Sequence[set[int]] = ()) -> Rule:
    """The rule of pooling and resampling: the last dims are whole, the others pass.

    Args:
        spatial: How many last dims.
        forward: Whether the first operand has the size before the op.
        linear: As in `OpRule`.
    """

    def of(call: Call) -> OpRule:
        small = call.results[0].shape if forward else call.shape(0)
        big = call.shape(0) if forward else call.results[0].shape
        kept = len(big) - spatial
        before = [*names(kept), *[f"x{i}" for i in range(spatial)]]
        after = [*names(kept), *[f"y{i}" for i in range(spatial)]]
        first = before if forward else after
        tensors = [first]
        for value in (*call.operands[1:], *call.results):
            tensors.append(after if value.shape == small else before)
        kinds = {name: "whole" for name in (*before[kept:], *after[kept:])}
        return assemble(call, tuple(tensors), kinds, linear=linear)

    return of


for _count in (1, 2, 3):
    define(
        f"avg_pool{_count}d adaptive_avg_pool{_count}d _adaptive_avg_pool{_count}d"
        if _count > 1
        else "avg_pool1d adaptive_avg_pool1d",
        windows(_count, forward=True, linear=[{0}]),
    )
for _count in (2, 3):
    define(
        f"avg_pool{_count}d_backward _adaptive_avg_pool{_count}d_backward",
        windows(_count, forward=False, linear=[{0}]),
    )
    define(
        f"max_pool{_count}d_with_indices adaptive_max_pool{_count}d", windows(_count, forward=True)
    )
    define(
        f"max_pool{_count}d_with_indices_backward adaptive_max_pool{_count}d_backward",
        windows(_count, forward=False, linear=[{0}]),
    )


def _resample(spatial: int, *, backward: bool) -> Rule:
    """Resampling; the gradient's argument 2 is the whole shape of its result."""
    base = windows(spatial, forward=True, linear=[{0}])

    def of(call: Call) -> OpRule:
        made = base(call)
        if not backward:
            return made
        local = (LocalArg(2, "shape", 0),)
        return OpRule(made.operands, made.results, made.factors, made.linear, local_args=local)

    return of


for _name in (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_nearest3d",
):
    _spatial = int(_name[-2])
    define(_name, _resample(_spatial, backward=False))
    define(f"{_name}_backward", _resample(_spatial, backward=True))
