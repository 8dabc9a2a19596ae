"""Matrix products, with and without a term that is added."""

from __future__ import annotations

from distcell.graph import Ref
from distcell.rules.families.common import Lower, assemble, broadcast, define
from distcell.rules.notation import Builder, Call, OpRule, Rule, rule

define("mm", rule("m k+, k+ n -> m n", linear=[{0}, {1}]), into=True)
define("bmm", rule("b m k+, b k+ n -> b m n", linear=[{0}, {1}]))
define("mv", rule("m k+, k+ -> m", linear=[{0}, {1}]))
define("dot vdot", rule("k+, k+ -> .", linear=[{0}, {1}]))


def _with_bias(left: str, right: str, result: str) -> Rule:
    """A product plus a term that is broadcast.

    When the contracted dim is split, each rank would add the term once: it is lowered then.
    """

    def of(call: Call) -> OpRule:
        letters = result.split()
        bias = [
            () if not dim else letters[int(dim[0])]
            for dim in broadcast(call.shape(0), call.results[0].shape, "")
        ]
        tensors = (bias, left.split(), right.split(), letters)
        return assemble(call, tensors, {"k": "lower"}, linear=[{0, 1}, {0, 2}])

    return of


def _add_after(product: str) -> Lower:
    """Lowers to the bare product, to which the term is added once."""

    def lower(b: Builder, call: Call) -> tuple[Ref, ...]:
        options = dict(call.op.kwargs)
        bias, left, right = call.op.args[:3]
        beta, alpha = options.get("beta", 1), options.get("alpha", 1)
        made = b(product, left, right)
        if alpha != 1:
            made = b("aten.mul.Scalar", made, alpha)
        if beta == 1:
            return (b("aten.add.Tensor", made, bias),)
        return (b("aten.add.Tensor", made, bias, alpha=beta),)

    return lower


define("addmm", _with_bias("m k", "k n", "m n"), lower=_add_after("aten.mm.default"))
define("baddbmm", _with_bias("b m k", "b k n", "b m n"), lower=_add_after("aten.bmm.default"))
define("addmv", _with_bias("m k", "k", "m"), lower=_add_after("aten.mv.default"))
