"""Ops that combine the elements along dims: sums, means, extrema, norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distcell.graph import DtypeArg, Ref
from distcell.rules.families.common import Linear, assemble, define, names, numel, wrap, wrap_all
from distcell.rules.notation import Builder, Call, OpRule, Rule


def _kept(call: Call, reduced: Sequence[int]) -> list[list[tuple[str, ...]]]:
    """For each result the factors that are left: absent dims, or dims of size one."""
    shape = call.shape(0)
    tensors = []
    for value in call.results:
        full = len(value.shape) == len(shape)
        dims: list[tuple[str, ...]] = [
            () if i in reduced else (f"d{i}",) for i in range(len(shape))
        ]
        tensors.append(dims if full else [d for i, d in enumerate(dims) if i not in reduced])
    return tensors


def reduce(kind: str, place: int | None = 1, *, linear: Linear = ()) -> Rule:
    """The rule of a reduction: the dims that an argument names are of a kind, the others pass.

    Args:
        kind: What happens when a reduced dim is split: `sum`, `max`, `min`, `whole` or `lower`.
        place: Which argument names the dims; None when all are reduced.
        linear: As in `OpRule`.
    """

    def of(call: Call) -> OpRule:
        count = len(call.shape(0))
        reduced = wrap_all(None if place is None else call.arg(place, "dim"), count)
        kinds = {f"d{index}": kind for index in reduced}
        tensors = (names(count), *_kept(call, reduced))
        return assemble(call, tensors, kinds, linear=linear)

    return of


define("sum.dim_IntList", reduce("sum", linear=[{0}]))
define("sum", reduce("sum", None, linear=[{0}]))
define("amax", reduce("max"))
define("amin", reduce("min"))
define("max", reduce("max", None))
define("min", reduce("min", None))
define("max.dim min.dim median.dim mode nanmedian.dim", reduce("whole"))
define("argmax argmin", reduce("whole"))
define("prod.dim_int any.dim all.dim any.dims all.dims", reduce("whole"))
define("prod any all median", reduce("whole", None))


def along(place: int, default: int | None, *, linear: Linear = ()) -> Rule:
    """The rule of an op that runs along one dim, which is whole: scans, sorts."""

    def of(call: Call) -> OpRule:
        count = len(call.shape(0))
        dims = names(count)
        kinds: dict[str, str] = {}
        if count:
            kinds[dims[wrap(call.arg(place, "dim", default), count)]] = "whole"
        tensors = [dims if len(v.shape) == count else [] for v in (*call.operands, *call.results)]
        return assemble(call, tuple(tensors), kinds, linear=linear)

    return of


define("cumsum", along(1, None, linear=[{0}]))
define("cumprod logcumsumexp cummax cummin", along(1, None))
define("sort argsort", along(1, -1))
define("sort.stable", along(99, -1))


def _topk(call: Call) -> OpRule:
    """`topk` and `kthvalue`: the dim is whole, and another one in the results."""
    shape = call.shape(0)
    dims = names(len(shape))
    at = wrap(call.arg(2, "dim", -1), len(shape))
    result = [*dims[:at], "t", *dims[at + 1 :]]
    if len(call.results[0].shape) < len(shape):
        result.pop(at)
    tensors = (dims, *[result] * len(call.results))
    return assemble(call, tensors, {dims[at]: "whole", "t": "whole"})


define("topk kthvalue", _topk)


# --- lowered: a mean over all elements of a split dim is their sum over the global count ---------


def _dims(call: Call, place: int | None) -> tuple[int, ...]:
    return wrap_all(None if place is None else call.arg(place, "dim"), len(call.shape(0)))


def _keeps(call: Call) -> bool:
    return len(call.results[0].shape) == len(call.shape(0))


def count_of(call: Call, dims: Sequence[int]) -> int:
    """The global number of elements that are reduced into one."""
    return numel([call.shape(0)[dim] for dim in dims])


def total(b: Builder, x: Any, dims: Sequence[int], keep: bool = True) -> Ref:
    """The sum over dims; over none it is the tensor itself."""
    made = b("aten.sum.dim_IntList", x, tuple(dims), keep) if dims else x
    assert isinstance(made, Ref)
    return made


def share_of(count: float) -> float:
    """What a sum is multiplied by to be divided by a count.

    Infinite when none are left: the sum is zero, and zero by zero no number; where some are taken
    off the count (`correction` of a variance) the sum may be more, and the quotient is infinite.
    """
    return 1 / count if count > 0 else float("inf")


def average(b: Builder, x: Any, dims: Sequence[int], count: float, *, keep: bool = True) -> Ref:
    """The sum over dims divided by a count that is known beforehand."""
    made = b("aten.mul.Scalar", total(b, x, dims, keep), share_of(count))
    assert isinstance(made, Ref)
    return made


def upcast(b: Builder, x: Any, dtype: str) -> Any:
    """The tensor in single precision when it is in half, as torch's own kernels compute."""
    return b("aten._to_copy.default", x, dtype=DtypeArg("f32")) if dtype in ("f16", "bf16") else x


def downcast(b: Builder, x: Any, dtype: str) -> Any:
    """The reverse of `upcast`."""
    return b("aten._to_copy.default", x, dtype=DtypeArg(dtype)) if dtype in ("f16", "bf16") else x


def _mean(place: int | None) -> Callable[[Builder, Call], Sequence[Ref]]:
    def lower(b: Builder, call: Call) -> Sequence[Ref]:
        dims, dtype = _dims(call, place), call.results[0].dtype
        x = call.op.args[0]
        if call.operands[0].dtype != dtype:
            x = b("aten._to_copy.default", x, dtype=DtypeArg(dtype))
        x = upcast(b, x, dtype)
        made = average(b, x, dims, count_of(call, dims), keep=_keeps(call))
        return (downcast(b, made, dtype),)

    return lower


define("mean.dim", reduce("lower", linear=[{0}]), lower=_mean(1))
define("mean", reduce("lower", None, linear=[{0}]), lower=_mean(None))


def moments(b: Builder, x: Any, dims: Sequence[int], count: int) -> tuple[Ref, Ref, Ref]:
    """Mean, deviations from it and the sum of their squares.

    Two passes: the difference of two large sums would lose the digits.
    """
    mean = average(b, x, dims, count)
    apart = b("aten.sub.Tensor", x, mean)
    return mean, apart, total(b, b("aten.mul.Tensor", apart, apart), dims)


def _variance(b: Builder, call: Call) -> Sequence[Ref]:
    """`var`, `std` and `var_mean`, of all of which the first result is the spread."""
    dims, dtype = _dims(call, 1), call.results[0].dtype
    options = dict(call.op.kwargs)
    correction = options.get("correction")
    count = count_of(call, dims)
    mean, _, squares = moments(b, upcast(b, call.op.args[0], dtype), dims, count)
    free = count - (1 if correction is None else correction)
    spread = b("aten.mul.Scalar", squares, share_of(free))
    if call.op.target.startswith("aten.std"):
        spread = b("aten.sqrt.default", spread)
    made = [downcast(b, ref, dtype) for ref in (spread, mean)[: len(call.results)]]
    if _keeps(call):
        return made
    return [b("aten.view.default", ref, call.results[0].shape) for ref in made]


def _of_reals(call: Call) -> OpRule:
    """As `lower`; complex numbers are whole."""
    return reduce("whole" if call.operands[0].dtype.startswith("c") else "lower")(call)


define("var.correction std.correction", _of_reals, lower=_variance)
define("var_mean.correction std_mean.correction", _of_reals, lower=_variance)


def _logsumexp(b: Builder, call: Call) -> Sequence[Ref]:
    dims, dtype = _dims(call, 1), call.results[0].dtype
    x = call.op.args[0]
    if call.operands[0].dtype != dtype:  # of whole numbers
        x = b("aten._to_copy.default", x, dtype=DtypeArg(dtype))
    x = upcast(b, x, dtype)
    largest = b("aten.amax.default", x, dims, True)
    # an infinite maximum would make inf - inf
    known = b("aten.eq.Scalar", b("aten.abs.default", largest), float("inf"))
    largest = b("aten.masked_fill.Scalar", largest, known, 0.0)
    summed = total(b, b("aten.exp.default", b("aten.sub.Tensor", x, largest)), dims)
    made = downcast(b, b("aten.add.Tensor", b("aten.log.default", summed), largest), dtype)
    if not _keeps(call):
        made = b("aten.view.default", made, call.results[0].shape)
    return (made,)


define("logsumexp", _of_reals, lower=_logsumexp)


def _vector_norm(b: Builder, call: Call) -> Sequence[Ref]:
    dims, keep, dtype = _dims(call, 2), _keeps(call), call.results[0].dtype
    order = call.arg(1, "ord", 2)
    size = _sizes(b, call)
    if order in (float("inf"), float("-inf")):
        largest = "aten.amax.default" if order > 0 else "aten.amin.default"
        return (downcast(b, b(largest, size, dims, keep), dtype),)
    if order == 0:
        return (total(b, _one_unless_zero(b, size, dtype), dims, keep),)
    if order == 1:
        return (downcast(b, total(b, size, dims, keep), dtype),)
    square = order == 2
    powers = b("aten.mul.Tensor", size, size) if square else _power(b, size, order)
    summed = total(b, powers, dims, keep)
    made = b("aten.sqrt.default", summed) if square else _power(b, summed, 1 / order)
    return (downcast(b, made, dtype),)


def _sizes(b: Builder, call: Call) -> Any:
    """The absolute values, in the dtype in which the norm is to be computed."""
    x, dtype = call.op.args[0], dict(call.op.kwargs).get("dtype")
    if dtype is not None:
        x = b("aten._to_copy.default", x, dtype=dtype)
    return upcast(b, b("aten.abs.default", x), call.results[0].dtype)


def _power(b: Builder, x: Any, exponent: float) -> Any:
    return b("aten.pow.Tensor_Scalar", x, exponent)


def _one_unless_zero(b: Builder, x: Any, dtype: str) -> Any:
    return b("aten._to_copy.default", b("aten.ne.Scalar", x, 0), dtype=DtypeArg(dtype))


define("linalg_vector_norm", reduce("lower", 2), lower=_vector_norm)
define("norm.ScalarOpt_dim", reduce("lower", 2), lower=_vector_norm)
