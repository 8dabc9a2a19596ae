"""Ops that work on the last dims of each entry of a batch: the batch may be split, they may not."""

from __future__ import annotations

from distcell.rules.families.common import assemble, define, names
from distcell.rules.notation import Call, OpRule, Rule, rule


def batch(whole: int) -> Rule:
    """The rule of an op on the last `whole` dims of its first operand.

    All operands and results carry the same leading dims.
    """

    def of(call: Call) -> OpRule:
        leading = names(len(call.shape(0)) - whole)
        tensors = []
        for index, value in enumerate((*call.operands, *call.results)):
            count = len(value.shape) - len(leading)
            tensors.append([*leading, *names(count, f"x{index}_")])
        kinds = {name: "whole" for dims in tensors for name in dims if name[0] == "x"}
        return assemble(call, tensors, kinds)

    return of


define("linalg_inv_ex linalg_cholesky_ex linalg_qr linalg_matrix_exp _linalg_det", batch(2))
define("_linalg_eigh linalg_lu_factor_ex", batch(2))
define("pixel_shuffle pixel_unshuffle", batch(3))
define("im2col", rule("b c! h! w! -> b k! l!", linear=[{0}]))
define("col2im", rule("b k! l! -> b c! h! w!", linear=[{0}]))
define("grid_sampler_2d", rule("b c h! w!, b p! q! z! -> b c p! q!", linear=[{0}]))
define("_cdist_forward", rule("* p d!, * r d! -> * p r"))
