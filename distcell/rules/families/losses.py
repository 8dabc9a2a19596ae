"""Losses. A mean is the sum over the global count, or over the global weight of what counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import DeviceArg, DtypeArg, Ref
from distcell.rules.families.common import Lower, assemble, broadcast, define, names, numel
from distcell.rules.families.reductions import share_of, total
from distcell.rules.notation import Builder, Call, OpRule, Rule

NONE, MEAN, SUM = 0, 1, 2

# --- losses of two tensors of one shape -----------------------------------------------------------


def _compares(place: int, *, backward: bool = False) -> Rule:
    """The rule of a loss that compares element by element; argument `place` is the reduction."""

    def of(call: Call) -> OpRule:
        reduction = call.arg(place, "reduction", MEAN)
        shape = call.results[0].shape if backward else call.shape(0)
        tensors = [broadcast(v.shape, shape) for v in (*call.operands, *call.results)]
        kinds = dict.fromkeys(names(len(shape)), "pass")
        if reduction == MEAN:
            kinds = dict.fromkeys(kinds, "lower")
        elif reduction == SUM and not backward:
            kinds = dict.fromkeys(kinds, "sum")
        return assemble(
            call,
            tuple(tensors),
            kinds,
            linear=[{0}] if backward else [],
            priority=0 if backward else 1,
        )

    return of


def _summed(call: Call, place: int, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with the reduction set to a sum."""
    found = [*args, *[None] * (place - len(args))]
    return (*found[:place], SUM, *found[place + 1 :])


def _mean_of_sum(place: int) -> Lower:
    def lower(b: Builder, call: Call) -> Sequence[Ref]:
        args = _summed(call, place, call.op.args)
        made = b(call.op.target, *args, **_kept(call))
        return (b("aten.mul.Scalar", made, share_of(numel(call.shape(0)))),)

    return lower


def _gradient_of_sum(place: int) -> Lower:
    """The kernel divides by the number of elements it sees: the gradient is divided before it."""

    def lower(b: Builder, call: Call) -> Sequence[Ref]:
        grad = b("aten.mul.Scalar", call.op.args[0], share_of(numel(call.results[0].shape)))
        args = _summed(call, place, (grad, *call.op.args[1:]))
        return (b(call.op.target, *args, **_kept(call)),)

    return lower


def _kept(call: Call) -> dict[str, Any]:
    return {key: value for key, value in call.op.kwargs if key != "reduction"}


_PLACES = {
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
}

# its gradient is written out by torch
define("binary_cross_entropy_with_logits", _compares(4), lower=_mean_of_sum(4))

for _name, _place in _PLACES.items():
    define(_name, _compares(_place), lower=_mean_of_sum(_place))
    define(
        f"{_name}_backward",
        _compares(_place + 1, backward=True),
        lower=_gradient_of_sum(_place + 1),
    )

# --- the likelihood of classes --------------------------------------------------------------------


def _class_dims(call: Call, scores: Sequence[int]) -> tuple[list[str], list[str]]:
    """The factors of scores `[v]`, `[n, v]` or `[n, v, h, w]`, and of their targets."""
    rows = names(max(len(scores) - 1, 0), "n")
    return [*rows[:1], "v", *rows[1:]], rows


def _nll_forward(call: Call) -> OpRule:
    """Operands: scores, targets and, where there are any, the weights of the classes."""
    reduction = call.arg(3)
    scores, rows = _class_dims(call, call.shape(0))
    kind = {NONE: "pass", MEAN: "lower", SUM: "sum"}[reduction]
    kinds = {"v": "lower"} | dict.fromkeys(rows, kind)
    weights = [["v"]] * (len(call.operands) - 2)
    loss = rows if reduction == NONE else []
    empty = [f"z{i}" for i in range(len(call.results[1].shape))]
    kinds |= dict.fromkeys(empty, "whole")
    return assemble(
        call,
        (scores, rows, *weights, loss, empty),
        kinds,
        linear=[{0}] if reduction == NONE else [],
    )


def _nll_backward(call: Call) -> OpRule:
    """Operands: gradient, scores, targets, weights, and the total weight, which is global."""
    scores, rows = _class_dims(call, call.results[0].shape)
    weights = [["v"]] * (len(call.operands) - 4)
    grad = rows if call.arg(4) == NONE else []
    count = call.operands[-1].shape
    rest = [f"z{i}" for i in range(len(count))]
    kinds = {"v": "lower"} | dict.fromkeys(rest, "whole")
    return assemble(call, (grad, scores, rows, *weights, rest, scores), kinds, linear=[{0}])


def _weights_of(b: Builder, call: Call, rows: tuple[Any, Any], weight: Any) -> Any:
    """The weight of each row: zero where it is ignored."""
    target, valid = rows
    dtype = call.results[0].dtype
    if weight is None:
        return b("aten._to_copy.default", valid, dtype=DtypeArg(dtype))
    found = b("distcell.take.default", weight, 0, target)
    return b("aten.mul.Tensor", found, b("aten._to_copy.default", valid, dtype=DtypeArg(dtype)))


def _valid(b: Builder, target: Any, ignored: int) -> tuple[Any, Any]:
    """The targets with those that are ignored set to a class, and which are not ignored."""
    valid = b("aten.ne.Scalar", target, ignored)
    return b("aten.masked_fill.Scalar", target, b("aten.eq.Scalar", target, ignored), 0), valid


def _likelihood(b: Builder, call: Call) -> Sequence[Ref]:
    scores, target, weight, reduction, ignored = call.op.args
    at = min(1, len(call.shape(0)) - 1)
    target, valid = _valid(b, target, ignored)
    place = b("aten.unsqueeze.default", target, at)
    found = b("distcell.pick.default", scores, at, place)
    picked = b("aten.squeeze.dim", found, at)
    weights = _weights_of(b, call, (target, valid), weight)
    # an ignored row may hold an infinity, which no weight of zero would remove
    picked = b("aten.masked_fill.Scalar", picked, b("aten.logical_not.default", valid), 0.0)
    rows = b("aten.neg.default", b("aten.mul.Tensor", picked, weights))
    total_shape = call.results[1].shape
    if reduction == NONE:
        zero = b(
            "aten.full.default",
            total_shape,
            0.0,
            dtype=DtypeArg(call.results[1].dtype),
            device=DeviceArg(),
        )
        return rows, zero
    over = tuple(range(len(call.operands[1].shape)))
    loss, weight_sum = total(b, rows, over, keep=False), total(b, weights, over, keep=False)
    if reduction == MEAN:
        loss = b("aten.div.Tensor", loss, weight_sum)
    return loss, weight_sum


def _likelihood_backward(b: Builder, call: Call) -> Sequence[Ref]:
    grad, _, target, weight, reduction, ignored, total_weight = call.op.args
    shape = call.results[0].shape
    at = min(1, len(shape) - 1)
    target, valid = _valid(b, target, ignored)
    weights = b("aten.neg.default", _weights_of(b, call, (target, valid), weight))
    rows = b("aten.mul.Tensor", weights, grad)
    if reduction == MEAN:
        rows = b("aten.div.Tensor", rows, total_weight)
    # an ignored row has no gradient, also where the total weight is zero or what comes in is none
    rows = b("aten.masked_fill.Scalar", rows, b("aten.logical_not.default", valid), 0.0)
    rows, place = (b("aten.unsqueeze.default", ref, at) for ref in (rows, target))
    return (b("distcell.add_pick.default", rows, at, place, shape[at]),)


define("nll_loss_forward nll_loss2d_forward", _nll_forward, lower=_likelihood)
define("nll_loss_backward nll_loss2d_backward", _nll_backward, lower=_likelihood_backward)
