"""ATen ops that say something of storage, devices or aliases: what they become in a graph.

A graph speaks of values alone. An op that only makes another name for a value disappears, and one
that makes a new tensor needs no other tensor for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distcell.graph import Arg, DeviceArg, DtypeArg, Ref, Value

Call = tuple[str, tuple[Arg, ...], dict[str, Arg]]
"""A target with its arguments."""

_STORAGE = ("layout", "pin_memory", "memory_format", "non_blocking", "device", "generator")

_ALIASES = frozenset(
    f"aten.{name}.default" for name in ("alias", "detach", "lift", "lift_fresh", "lift_fresh_copy")
)

_MADE_LIKE = {  # target: (what it becomes, how many arguments after the tensor are kept)
    "aten.new_empty.default": ("aten.zeros.default", 1),
    "aten.new_empty_strided.default": ("aten.zeros.default", 1),
    "aten.new_zeros.default": ("aten.zeros.default", 1),
    "aten.new_ones.default": ("aten.ones.default", 1),
    "aten.new_full.default": ("aten.full.default", 2),
}

_MADE = {  # target: (what it becomes, how many arguments are kept)
    "aten.empty.memory_format": ("aten.zeros.default", 1),
    "aten.empty_strided.default": ("aten.zeros.default", 1),
    "aten.zeros.default": ("aten.zeros.default", 1),
    "aten.ones.default": ("aten.ones.default", 1),
    "aten.full.default": ("aten.full.default", 2),
    "aten.scalar_tensor.default": ("aten.scalar_tensor.default", 1),
    "aten.arange.default": ("aten.arange.default", 1),
    "aten.arange.start": ("aten.arange.start", 2),
    "aten.arange.start_step": ("aten.arange.start_step", 3),
    "aten.linspace.default": ("aten.linspace.default", 3),
    "aten.eye.default": ("aten.eye.default", 1),
    "aten.eye.m": ("aten.eye.m", 2),
}

INVOLUTIONS = frozenset({"aten.t.default", "aten.neg.default"})
"""Ops that, done twice, give the operand back."""

_VIEWS = {
    "aten._unsafe_view.default": "aten.view.default",
    "aten._reshape_alias.default": "aten.view.default",
    "aten.reshape.default": "aten.view.default",
}


def rewrite(call: Call, result: Value | None, values: Mapping[str, Value]) -> Ref | Call:
    """The value that a call is another name for, or else the call as it stands in a graph.

    Args:
        call: A call of an ATen operator.
        result: What it makes; None when it makes several values.
        values: All values so far.

    Example:
        >>> x = Value("x", (2, 3), "f32")
        >>> rewrite(("aten.detach.default", (Ref("x"),), {}), x, {"x": x})
        Ref(name='x')
        >>> rewrite(("aten.new_ones.default", (Ref("x"), (4,)), {}), Value("y", (4,), "f32"), {})
        ('aten.ones.default', ((4,),), {'dtype': DtypeArg(name='f32'), 'device': DeviceArg()})
    """
    target, args, kwargs = call
    if target in _ALIASES:
        return _first(args)
    kwargs = {key: arg for key, arg in kwargs.items() if key not in _STORAGE}
    if result is None:
        return target, args, kwargs
    if target in _MADE_LIKE:
        made, count = _MADE_LIKE[target]
        return _factory(made, args[1 : count + 1], result)
    if target in _MADE:
        made, count = _MADE[target]
        return _factory(made, args[:count], result)
    special = _SPECIAL.get(target)
    if special is not None:
        changed: Ref | Call = special(args, result, values)
        return changed
    if target in _VIEWS:
        return _VIEWS[target], args[:2], {}
    return target, args, kwargs


def _factory(target: str, args: tuple[Arg, ...], result: Value) -> Call:
    """A call that makes a tensor of the dtype of `result` where the rank computes."""
    return target, args, {"dtype": DtypeArg(result.dtype), "device": DeviceArg()}


def _like(target: str, count: int) -> _Special:
    """A tensor as large as the operand, of the dtype of the result."""

    def make(args: tuple[Arg, ...], result: Value, values: Mapping[str, Value]) -> Call:
        return target, args[:count], {"dtype": DtypeArg(result.dtype)}

    return make


def _converted(args: tuple[Arg, ...], result: Value, values: Mapping[str, Value]) -> Ref | Call:
    """The operand as another dtype, or the operand itself."""
    operand = _first(args)
    if values[operand.name].dtype == result.dtype:
        return operand
    return "aten._to_copy.default", (operand,), {"dtype": DtypeArg(result.dtype)}


def _copied(args: tuple[Arg, ...], result: Value, values: Mapping[str, Value]) -> Ref | Call:
    """The source of a copy into a tensor of the same shape; a copy that broadcasts stays."""
    source = values[args[1].name]
    if source.shape != result.shape:
        return "aten.copy.default", args[:2], {}
    return _converted(args[1:], result, values)


def _first(args: tuple[Arg, ...]) -> Ref:
    operand = args[0]
    assert isinstance(operand, Ref)
    return operand


_Special = Callable[[tuple[Arg, ...], Value, Mapping[str, Value]], Any]

_SPECIAL: dict[str, _Special] = {
    "aten._to_copy.default": _converted,
    "aten.copy.default": _copied,
    "aten.empty_like.default": _like("aten.zeros_like.default", 1),
    "aten.zeros_like.default": _like("aten.zeros_like.default", 1),
    "aten.ones_like.default": _like("aten.ones_like.default", 1),
    "aten.full_like.default": _like("aten.full_like.default", 2),
}


def batch_norm_writes(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call is a batch norm that writes its running statistics; no schema says so."""
    return target is torch.ops.aten.native_batch_norm.default and args[3] is not None and args[5]


def pure_batch_norm(args: Sequence[Any]) -> Any:
    """Calls a batch norm so that it makes new running statistics, which are then written."""
    results = torch.ops.aten._native_batch_norm_legit_functional.default(*args)
    for statistic, new in zip(args[3:5], results[3:], strict=True):
        statistic.copy_(new)
    return results[:3]


def writes(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call writes into one of its operands."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or batch_norm_writes(target, args)
    return False
