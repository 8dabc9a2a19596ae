"""Which ops may return tensors that share storage with what they take."""

from __future__ import annotations

from functools import cache

from distcell import compat
from distcell.graph import Op
from distcell.program import COLLECTIVES
from distcell.rules import table

RESHAPES = ("distcell.reshape", "aten.view.default", "aten._unsafe_view.default")
"""Targets that run as `torch.reshape`: a view where the strides allow it, else a copy."""

_PARTITIONING = ("distcell.narrow", "distcell.neutral_unless_first")


@cache
def may_alias(target: str) -> bool:
    """Whether a result of an op may share storage with an operand; yes when it is not known.

    Example:
        >>> may_alias("aten.t.default"), may_alias("aten.mm.default")
        (True, False)
    """
    if target in COLLECTIVES or target.startswith("py."):
        return False
    if target in RESHAPES or target in _PARTITIONING:
        return True
    definition = table.find(target)
    if definition is not None and definition.run is not None:
        return True
    return compat.may_alias(table.torch_operator(target))


def is_view(op: Op) -> bool:
    """Whether an op does nothing but look at one tensor in another way, at no cost.

    A reshape counts as one, though it copies where the strides do not allow a view.
    """
    if len(op.inputs) != 1:
        return False
    if op.target in RESHAPES:
        return True
    definition = table.find(op.target)
    own = definition is not None and definition.run is not None
    return not own and op.target not in _PARTITIONING and may_alias(op.target)
