"""Ops that cut tensors into pieces or join them: slices, splits, concatenations, padding.

A dim that is cut into equal pieces is a product `(s! c)` of the number of pieces and their size, so
that each rank may hold its share of every piece: a fused projection to query, key and value is cut
without communication when its heads are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import Ref
from distcell.rules.families.common import assemble, define, names, wrap, wrap_all
from distcell.rules.notation import Builder, Call, LocalArg, OpRule

Lengths = Sequence[int]


def _equal(lengths: Lengths) -> bool:
    return len(lengths) > 1 and len(set(lengths)) == 1


def _pieces(call: Call, dim: int, lengths: Lengths, *, join: bool) -> OpRule:
    """The rule of a cut, or of its reverse, along one dim."""
    local: list[LocalArg] = []
    count = len((call.results if join else call.operands)[0].shape)
    base = names(count)
    if _equal(lengths):
        whole = [*base[:dim], ("s", "c"), *base[dim + 1 :]]
        pieces = [[*base[:dim], "c", *base[dim + 1 :]]] * len(lengths)
        kinds = {"s": "whole"}
        if not join and isinstance(call.arg(1), tuple):
            local = [LocalArg(1, "extents", ", ".join(["c"] * len(lengths)))]
        elif not join:
            local = [LocalArg(1, "extent", "c")]
    else:
        whole = [*base[:dim], "u", *base[dim + 1 :]]
        pieces = [[*base[:dim], f"p{i}", *base[dim + 1 :]] for i in range(len(lengths))]
        kinds = {"u": "whole"} | {f"p{i}": "whole" for i in range(len(lengths))}
    together = [set(range(len(lengths)))] if join else [{0}]
    tensors = (*pieces, whole) if join else (whole, *pieces)
    sizes = {"s": len(lengths), "c": lengths[0]}
    return assemble(
        call,
        tensors,
        kinds,
        sizes=sizes,
        linear=together,
        monotone=not join,
        local=local,
        priority=0,
    )


def _cat(call: Call) -> OpRule:
    """Empty tensors of one dim, which torch skips, have no dims to split."""
    shape = call.results[0].shape
    dim = wrap(call.arg(1, "dim", 0), len(shape))
    if any(len(value.shape) != len(shape) for value in call.operands):
        dims = [
            names(len(v.shape), f"x{i}_") for i, v in enumerate((*call.operands, call.results[0]))
        ]
        return assemble(call, tuple(dims), {name: "whole" for entry in dims for name in entry})
    return _pieces(call, dim, [value.shape[dim] for value in call.operands], join=True)


def _split(call: Call) -> OpRule:
    dim = wrap(call.arg(2, "dim", 0), len(call.shape(0)))
    return _pieces(call, dim, [value.shape[dim] for value in call.results], join=False)


define("cat", _cat)
define("split.Tensor split_with_sizes", _split)


def _stack(call: Call) -> OpRule:
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1, "dim", 0), len(dims) + 1)
    result = [*dims[:at], "s", *dims[at:]]
    sets = [set(range(len(call.operands)))]
    return assemble(
        call, (*[dims] * len(call.operands), result), {"s": "whole"}, linear=sets, priority=0
    )


def _unbind(call: Call) -> OpRule:
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1, "dim", 0), len(dims))
    result = [*dims[:at], *dims[at + 1 :]]
    return assemble(
        call,
        (dims, *[result] * len(call.results)),
        {dims[at]: "whole"},
        linear=[{0}],
        monotone=True,
        priority=0,
    )


define("stack", _stack)
define("unbind.int", _unbind)


def _glu(call: Call) -> OpRule:
    """A gated unit works on two halves of a dim."""
    backward = call.op.target == "aten.glu_backward.default"
    shape = call.shape(1 if backward else 0)
    dims: list[Any] = names(len(shape))
    dim = wrap(call.arg(2) if backward else call.arg(1, "dim", -1), len(shape))
    whole, half = [*dims], [*dims]
    whole[dim], half[dim] = ("s", "c"), "c"
    tensors = (half, whole, whole) if backward else (whole, half)
    sizes = {"s": 2, "c": shape[dim] // 2}
    linear = [{0}] if backward else []
    return assemble(call, tensors, {"s": "whole"}, sizes=sizes, linear=linear, priority=0)


define("glu glu_backward", _glu)


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Where a slice begins and ends, counted from the front and within the dim."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _cut(call: Call, dim: int, size: int, span: tuple[int | None, int | None, int]) -> OpRule:
    """The rule of a slice (of operand 0) or of its gradient (of which `sizes` is argument 1)."""
    backward = call.op.target.startswith("aten.slice_backward")
    first = 3 if backward else 2
    start, end = _bounds(span[0], span[1], size)
    length, step = end - start, span[2]
    base = names(len(call.shape(0)))
    local = [LocalArg(1, "shape", 0)] if backward else []
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    whole: list[Any]
    piece: list[Any]
    if step == 1 and length == size:
        whole, piece = [base, base]
        local += [LocalArg(first + 1, "extent", base[dim])]
    elif step == 1 and length and size % length == 0 and start % length == 0:
        whole, piece = [*base[:dim], ("s", "c"), *base[dim + 1 :]], [*base]
        piece[dim] = "c"
        kinds, sizes = {"s": "whole"}, {"s": size // length}
        if start:
            local += [LocalArg(first, "extent", "c", times=start // length)]
        local += [LocalArg(first + 1, "extent", "c", times=start // length + 1)]
    else:
        whole, piece = [*base], [*base]
        whole[dim], piece[dim] = "u", "t"
        kinds = {"u": "whole", "t": "whole"}
    tensors = (piece, whole) if backward else (whole, piece)
    return assemble(
        call,
        tensors,
        kinds,
        sizes=sizes,
        linear=[{0}],
        monotone=not backward,
        local=local,
        priority=0,
    )


def _slice(call: Call) -> OpRule:
    shape = call.shape(0)
    dim = wrap(call.arg(1, "dim", 0), len(shape))
    span = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    return _cut(call, dim, shape[dim], span)


def _slice_backward(call: Call) -> OpRule:
    shape = call.results[0].shape
    dim = wrap(call.arg(2), len(shape))
    return _cut(call, dim, shape[dim], (call.arg(3), call.arg(4), call.arg(5)))


define("slice.Tensor", _slice)
define("slice_backward", _slice_backward)


def _scatter_into(call: Call) -> OpRule:
    """`slice_scatter` and `select_scatter`: the dim that is written is whole in both."""
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(2, "dim", 0), len(dims))
    source = [*dims[:at], *dims[at + 1 :]]
    kinds = {dims[at]: "whole"}
    if len(call.shape(1)) == len(dims):
        source.insert(at, "t")
        kinds["t"] = "whole"
    return assemble(call, (dims, source, dims), kinds, linear=[{0, 1}], priority=0)


define("slice_scatter select_scatter", _scatter_into)


def _select(call: Call) -> OpRule:
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1), len(dims))
    result = [*dims[:at], *dims[at + 1 :]]
    return assemble(
        call, (dims, result), {dims[at]: "lower"}, linear=[{0}], monotone=True, priority=0
    )


def _select_owner(b: Builder, call: Call) -> Sequence[Ref]:
    """The rank that holds the index contributes it, the others zeros."""
    dim = wrap(call.arg(1), len(call.shape(0)))
    index = wrap(call.arg(2), call.shape(0)[dim])
    return (b("distcell.select.default", call.op.args[0], dim, index),)


def _select_backward(call: Call) -> OpRule:
    shape = call.results[0].shape
    dims = names(len(shape))
    at = wrap(call.arg(2), len(dims))
    operand = [*dims[:at], *dims[at + 1 :]]
    return assemble(
        call,
        (operand, dims),
        {dims[at]: "lower"},
        linear=[{0}],
        local=[LocalArg(1, "shape", 0)],
        priority=0,
    )


def _unselect(b: Builder, call: Call) -> Sequence[Ref]:
    shape = call.results[0].shape
    dim = wrap(call.arg(2), len(shape))
    index = wrap(call.arg(3), shape[dim])
    return (b("distcell.unselect.default", call.op.args[0], dim, index, shape[dim]),)


define("select.int", _select, lower=_select_owner)
define("select_backward", _select_backward, lower=_unselect)


def _diagonal(call: Call) -> OpRule:
    """Both dims are whole, and so is the diagonal, which comes last."""
    backward = call.op.target.startswith("aten.diagonal_backward")
    full = (call.results if backward else call.operands)[0].shape
    first = 3 if backward else 2
    dims = names(len(full))
    whole = wrap_all((call.arg(first, "dim1", 0), call.arg(first + 1, "dim2", 1)), len(dims))
    piece = [*[name for i, name in enumerate(dims) if i not in whole], "t"]
    kinds = {"t": "whole"} | {dims[i]: "whole" for i in whole}
    local = [LocalArg(1, "shape", 0)] if backward else []
    return assemble(
        call,
        (piece, dims) if backward else (dims, piece),
        kinds,
        linear=[{0}],
        local=local,
        priority=0,
    )


define("diagonal diagonal_copy diagonal_backward", _diagonal)


def _pad(call: Call) -> OpRule:
    """Dims that grow or shrink are whole; padding with zeros is linear."""
    left, right = names(len(call.shape(0))), names(len(call.shape(0)))
    kinds: dict[str, str] = {}
    pads = call.arg(1)
    for index in range(len(pads) // 2):
        at = len(left) - 1 - index
        if pads[2 * index] or pads[2 * index + 1]:
            left[at], right[at] = f"x{at}", f"y{at}"
            kinds |= {left[at]: "whole", right[at]: "whole"}
    linear = [{0}] if call.arg(2, "value", 0) == 0 else []
    return assemble(call, (left, right), kinds, linear=linear, priority=0)


define("constant_pad_nd", _pad)


def _pad_by_window(call: Call) -> OpRule:
    """Padding with the tensor's own values: as many last dims as the padding names."""
    count = len(call.op.args[-1]) // 2 if isinstance(call.op.args[-1], tuple) else 0
    dims = names(len(call.shape(0)))
    keep = len(dims) - count
    left = [*dims[:keep], *[f"x{i}" for i in range(count)]]
    right = [*dims[:keep], *[f"y{i}" for i in range(count)]]
    kinds = {name: "whole" for name in (*left[keep:], *right[keep:])}
    tensors = (left, right) if len(call.operands) == 1 else (right, left, left)
    return assemble(call, tensors, kinds, linear=[{0}], priority=0)


define("reflection_pad1d reflection_pad2d reflection_pad3d", _pad_by_window)
define("replication_pad1d replication_pad2d replication_pad3d", _pad_by_window)
define("reflection_pad1d_backward reflection_pad2d_backward", _pad_by_window)
define("replication_pad1d_backward replication_pad2d_backward", _pad_by_window)


def _unfold(call: Call) -> OpRule:
    """Windows along one dim; their elements come last."""
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1), len(dims))
    result = [*dims, "w"]
    result[at] = "t"
    kinds = {dims[at]: "whole", "t": "whole", "w": "whole"}
    return assemble(call, (dims, result), kinds, linear=[{0}], priority=0)


define("unfold", _unfold)
