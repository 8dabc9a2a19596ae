"""Ops on lists of tensors: what optimizers and gradient clipping are written with.

The element `i` of every list forms a group with one rule; tensors beyond the lists are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import Ref
from distcell.rules.families.common import assemble, broadcast, define
from distcell.rules.notation import Builder, Call, OpRule, Rule


def in_lists(reduce: str = "") -> Rule:
    """The rule of an op on lists: element-wise, or for each element a reduction to a number."""

    def of(call: Call) -> OpRule:
        length = len(call.op.args[0])
        shapes = [v.shape for v in call.operands[:length]]
        tensors: list[Any] = []
        kinds: dict[str, str] = {}
        for index, value in enumerate(call.operands):
            group = index % length
            dims = broadcast(value.shape, shapes[group], f"g{group}_")
            tensors.append(dims)
        for index, value in enumerate(call.results):
            tensors.append(broadcast(value.shape, shapes[index % length], f"g{index % length}_"))
        if reduce:
            kinds = {name: reduce for dims in tensors[:length] for dim in dims for name in dim}
        return assemble(call, tuple(tensors), kinds, priority=0)

    return of


define("_foreach_add.List _foreach_sub.List _foreach_mul.List _foreach_div.List", in_lists())
define(
    "_foreach_add.Scalar _foreach_sub.Scalar _foreach_mul.Scalar _foreach_div.Scalar", in_lists()
)
define("_foreach_add.Tensor _foreach_mul.Tensor _foreach_div.Tensor", in_lists())
define("_foreach_add.ScalarList _foreach_mul.ScalarList _foreach_div.ScalarList", in_lists())
define("_foreach_addcmul.Scalar _foreach_addcdiv.Scalar", in_lists())
define("_foreach_addcmul.ScalarList _foreach_addcdiv.ScalarList", in_lists())
define("_foreach_lerp.Scalar _foreach_lerp.List _foreach_maximum.List", in_lists())
define("_foreach_sqrt _foreach_neg _foreach_reciprocal _foreach_exp _foreach_abs", in_lists())
define("_foreach_sign _foreach_zero _foreach_pow.Scalar", in_lists())
define("_fused_adam _fused_adamw _fused_sgd", in_lists())
define("_fused_adam.tensor_lr _fused_adamw.tensor_lr _fused_sgd.tensor_lr", in_lists())


def _norms(b: Builder, call: Call) -> Sequence[Ref]:
    """Each tensor's norm on its own."""
    order, dtype = call.arg(1, "ord", 2), call.arg(2, "dtype")
    options = {} if dtype is None else {"dtype": dtype}
    return [b("aten.linalg_vector_norm.default", ref, order, **options) for ref in call.op.args[0]]


define("_foreach_norm.Scalar", in_lists("lower"), lower=_norms)
