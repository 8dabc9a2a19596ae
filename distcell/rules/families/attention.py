"""Fused scaled dot product attention, forward and backward.

Batch and heads pass; where several heads of queries share one of keys (grouped-query attention)
the groups pass and the heads in them stay together. Queries pass when the attention is not causal:
a causal kernel counts the positions of its own queries from zero. Keys and values are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcell.graph import Ref
from distcell.rules.families.common import assemble, define
from distcell.rules.notation import Call, OpRule, Rule

_QUERY, _KEY, _VALUE = "b h q e".split(), "b h s e".split(), "b h s d".split()
_OUT, _LSE = "b h q d".split(), "b h q".split()


def _kinds(causal: bool, *, backward: bool = False) -> dict[str, str]:
    queries = "whole" if causal else ("sum" if backward else "pass")
    return {"q": queries, "s": "whole", "e": "whole", "d": "whole", "g": "whole"}


def _grouped(call: Call, query: int, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """The dims where heads of queries share heads of keys, and the sizes of the new factors.

    Args:
        call: The call.
        query: The place of the queries among the operands; the keys come next.
        tensors: The dims when each head of queries has its own.
    """
    heads, shared = call.shape(query)[1], call.shape(query + 1)[1]
    if heads == shared:
        return list(tensors), {}
    # the letter `h` on a tensor of queries is the pair (h g), on keys and values it is `h` alone
    alone = (_KEY, _VALUE)
    grouped = [
        dims if dims in alone else [("h", "g") if dim in ("h", ("h",)) else dim for dim in dims]
        for dims in tensors
    ]
    return grouped, {"h": shared, "g": heads // shared}


def _mask(call: Call, index: int) -> list[list[Sequence[str]]]:
    """The dims of an attention mask, which is broadcast to batch, heads, queries and keys."""
    shape = call.shape(index)
    letters = "b h q s".split()[4 - len(shape) :]
    return [[() if size == 1 else (name,) for name, size in zip(letters, shape, strict=True)]]


def _forward(call: Call) -> OpRule:
    causal = bool(call.arg(4, "is_causal", False))
    mask = _mask(call, 3) if len(call.operands) > 3 else []
    tensors, sizes = _grouped(call, 0, (_QUERY, _KEY, _VALUE, *mask, _OUT, _LSE))
    return assemble(call, tensors, _kinds(causal), sizes=sizes)


def _backward(call: Call) -> OpRule:
    causal = bool(call.arg(7, "is_causal", False))
    operands = (_OUT, _QUERY, _KEY, _VALUE, _OUT, _LSE)
    mask = _mask(call, 6) if len(call.operands) > 6 else []
    tensors, sizes = _grouped(call, 1, (*operands, *mask, _QUERY, _KEY, _VALUE))
    return assemble(call, tensors, _kinds(causal, backward=True), sizes=sizes, linear=[{0}])


define("_scaled_dot_product_flash_attention_for_cpu", _forward)
define("_scaled_dot_product_flash_attention_for_cpu_backward", _backward)


def _fused(*, backward: bool, mask_at: int | None = None) -> Rule:
    """The rule of a kernel of CUDA; what else it takes and returns (seeds, counts) is whole.

    Queries are whole: the sums of exponentials that it returns are padded. The gradient of a mask
    sums over what the mask is broadcast to.

    Args:
        backward: Whether it is the gradient.
        mask_at: The place of the attention mask.
    """

    def of(call: Call) -> OpRule:
        core = [_OUT, _QUERY, _KEY, _VALUE] if backward else [_QUERY, _KEY, _VALUE]
        masked = mask_at is not None and isinstance(call.arg(mask_at), Ref)
        mask = _mask(call, len(core)) if masked else []
        sums = ["b", "h", "y"]
        operands = [*core, *mask, *([_OUT, sums] if backward else [])]
        results = [_QUERY, _KEY, _VALUE, *mask] if backward else [_OUT, sums]
        operands += [_rest(v.shape, f"x{i}") for i, v in enumerate(call.operands)][len(operands) :]
        results = results[: len(call.results)]
        results += [_rest(v.shape, f"y{i}") for i, v in enumerate(call.results)][len(results) :]
        tensors, sizes = _grouped(call, 1 if backward else 0, (*operands, *results))
        kinds = {name: "whole" for dims in tensors for name in dims if str(name)[:1] in "xy"}
        kinds |= dict.fromkeys("bh", "sum" if backward else "pass")
        kinds |= dict.fromkeys("qsedg", "whole")
        return assemble(call, tensors, kinds, sizes=sizes, linear=[{0}] if backward else [])

    return of


def _rest(shape: Sequence[int], prefix: str) -> list[str]:
    return [f"{prefix}_{dim}" for dim in range(len(shape))]


define("_scaled_dot_product_flash_attention", _fused(backward=False))
define("_scaled_dot_product_flash_attention_backward", _fused(backward=True))
define("_scaled_dot_product_efficient_attention", _fused(backward=False, mask_at=3))
define("_scaled_dot_product_efficient_attention_backward", _fused(backward=True, mask_at=4))
define("_scaled_dot_product_cudnn_attention", _fused(backward=False, mask_at=3))
