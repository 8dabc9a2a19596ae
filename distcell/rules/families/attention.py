"""Fused scaled dot product attention, forward and backward.

Batch and heads pass. Queries pass when the attention is not causal: a causal kernel counts the
positions of its own queries from zero. Keys and values are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distcell.graph import Ref
from distcell.rules.families.common import assemble, define
from distcell.rules.notation import Call, OpRule

_QUERY, _KEY, _VALUE = "b h q e".split(), "b h s e".split(), "b h s d".split()
_OUT, _LSE = "b h q d".split(), "b h q".split()


def _kinds(causal: bool, *, backward: bool = False) -> dict[str, str]:
    queries = "whole" if causal else ("sum" if backward else "pass")
    return {"q": queries, "s": "whole", "e": "whole", "d": "whole"}


def _mask(call: Call, mask: object) -> list[list[Sequence[str]]]:
    """The dims of an attention mask, which is broadcast to batch, heads, queries and keys."""
    if not isinstance(mask, Ref):
        return []
    shape = next(v.shape for v in call.operands if v.name == mask.name)
    letters = "b h q s".split()[4 - len(shape) :]
    return [[() if size == 1 else (name,) for name, size in zip(letters, shape, strict=True)]]


def _forward(call: Call) -> OpRule:
    options: Mapping[str, object] = dict(call.op.kwargs)
    causal = bool(call.arg(4, "is_causal", False))
    tensors = (_QUERY, _KEY, _VALUE, *_mask(call, options.get("attn_mask")), _OUT, _LSE)
    return assemble(call, tensors, _kinds(causal))


def _backward(call: Call) -> OpRule:
    options: Mapping[str, object] = dict(call.op.kwargs)
    causal = bool(call.arg(7, "is_causal", False))
    operands = (_OUT, _QUERY, _KEY, _VALUE, _OUT, _LSE)
    tensors = (*operands, *_mask(call, options.get("attn_mask")), _QUERY, _KEY, _VALUE)
    return assemble(call, tensors, _kinds(causal, backward=True), linear=[{0}])


define("_scaled_dot_product_flash_attention_for_cpu", _forward)
define("_scaled_dot_product_flash_attention_for_cpu_backward", _backward)


def _cuda(causal_at: int, backward: bool, mask_at: int | None):  # type: ignore[no-untyped-def]
    """The fused kernels of CUDA; what else they return (seeds, counts) is whole."""

    def of(call: Call) -> OpRule:
        causal = bool(call.arg(causal_at, "is_causal", False))
        core = [_OUT, _QUERY, _KEY, _VALUE] if backward else [_QUERY, _KEY, _VALUE]
        mask = _mask(call, call.arg(mask_at)) if mask_at is not None else []
        rest = [_OUT, _LSE] if backward else []
        results = [_QUERY, _KEY, _VALUE] if backward else [_OUT, _LSE]
        operands = [*core, *mask, *rest]
        operands += [_whole(v.shape, i) for i, v in enumerate(call.operands) if i >= len(operands)]
        results += [
            _whole(v.shape, 50 + i) for i, v in enumerate(call.results) if i >= len(results)
        ]
        kinds = _kinds(causal, backward=backward)
        tensors = (*operands, *results)
        kinds |= {n: "whole" for dims in tensors for n in dims if str(n).startswith("z")}
        return assemble(call, tensors, kinds, linear=[{0}] if backward else [])

    return of


def _whole(shape: Sequence[int], index: int) -> list[str]:
    return [f"z{index}_{dim}" for dim in range(len(shape))]


define("_scaled_dot_product_flash_attention", _cuda(4, False, None))
define("_scaled_dot_product_flash_attention_backward", _cuda(11, True, None))
define("_scaled_dot_product_efficient_attention", _cuda(6, False, 3))
define("_scaled_dot_product_efficient_attention_backward", _cuda(11, True, 4))
