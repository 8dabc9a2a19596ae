"""Refuses code that reads a tensor's storage where that is another one on the ranks.

Graphs speak of values: inputs are captured, and their pieces run, contiguous. Code that goes by
strides gives the same only where its operand lies in memory as it does in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from distcell.capture.trace import Note, Traced
from distcell.errors import CaptureError

_AS_STRIDED = frozenset(
    f"aten.{name}.default" for name in ("as_strided", "as_strided_", "as_strided_copy")
)


def check_strides(traced: Traced, given: Iterable[Tensor]) -> None:
    """Checks that forward reads no storage that is not as in the graph.

    Args:
        traced: The trace, with ops as the code called them.
        given: The tensors that go in, as the caller has them.

    Raises:
        CaptureError: Forward makes a view by strides, of a tensor that is not contiguous or at a
            place in the storage of an input; or while any input is not contiguous, for then what
            is computed from it may not be either.
    """
    found = [node for node in traced.module.graph.nodes if str(node.target) in _AS_STRIDED]
    found = [node for node in found if traced.notes.get(node, Note()).phase == "forward"]
    if not found:
        return
    all_contiguous = all(tensor.is_contiguous() for tensor in given)
    for node in found:
        operand: Any = node.args[0]
        placed = _argument(node, 3, "storage_offset") is not None
        if not all_contiguous or not operand.meta["val"].is_contiguous():
            reason = "it gives what lies in memory, and not all tensors that go in are contiguous"
        elif placed and _is_view_of_input(operand):
            reason = "its offset counts from the start of a storage that the ranks do not have"
        else:
            continue
        note = traced.notes.get(node, Note())
        raise CaptureError(
            f"{f'cell `{note.cell}`' if note.cell else 'the network'} makes a view by strides",
            where=[f"{note.source or 'unknown line'}  calls {node.target}", reason],
            hint="pass contiguous tensors (`x.contiguous()`) and leave the offset out, or use "
            "`unfold`, `narrow` or an index",
        )


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_view_of_input(node: Any) -> bool:
    """Whether a node is an input, or shares the storage of one."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        if not arguments or arguments[0].alias_info is None or not node.args:
            return False
        node = node.args[0]
    return bool(node.op == "placeholder")
