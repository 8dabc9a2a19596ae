"""The table of all ops, and where users add their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from distcell import compat
from distcell.graph import Graph, Op, Ref, Value
from distcell.rules.notation import Call, Factor, LocalArg, OpDef, OpRule

_TABLE: dict[str, OpDef] = {}


def register(definition: OpDef) -> OpDef:
    """Adds an op to the table, or replaces what is known of it; returns it.

    Example:
        >>> from distcell.rules.notation import rule
        >>> _ = register(OpDef("mylib.scale.default", rule("*, . -> *", linear=[{0}, {1}])))
    """
    _TABLE[definition.target] = definition
    _rule_of.cache_clear()
    return definition


def find(target: str) -> OpDef | None:
    """What is known of an op, or None."""
    _load_families()
    return _TABLE.get(target)


def targets() -> tuple[str, ...]:
    """The names of all ops in the table."""
    _load_families()
    return tuple(_TABLE)


def call_of(graph: Graph, op: Op) -> Call:
    """An op with the shapes of its tensors."""
    results = tuple(value for value in graph.results(op) if value.is_tensor)
    return Call(op, graph.tensors(op), results)


def rule_of(call: Call) -> OpRule:
    """The rule of a call. An op that is not in the table must be whole: `unknown_rule`."""
    return _rule_of(call, spelling(call.op))


@lru_cache(maxsize=65536)
def _rule_of(call: Call, spelt: str) -> OpRule:
    definition = find(call.op.target)
    return definition.rule(call) if definition else unknown_rule(call)


def spelling(op: Op) -> str:
    """The arguments of an op as text, for the keys of caches.

    Ops whose arguments are 1, 1.0 and True, or 0.0 and -0.0, are equal and do not mean the same.

    Example:
        >>> one, another = (Op("aten.add.Scalar", (Ref("x"), number)) for number in (1, 1.0))
        >>> one == another, spelling(one) == spelling(another)
        (True, False)
    """
    return repr((op.args, op.kwargs))


def rules_of(graph: Graph) -> list[OpRule]:
    """The rules of all ops of a graph, in order. Calls that look alike share one rule."""
    return [rule_of(_anonymous(call_of(graph, op))) for op in graph.ops]


def _anonymous(call: Call) -> Call:
    """The call with the names of values, the cell and the line taken out: what rules depend on."""
    op = call.op
    blank = Op(op.target, op.args, op.kwargs, ("",) * len(op.outputs), op.many)
    operands = tuple(Value("", v.shape, v.dtype) for v in call.operands)
    results = tuple(Value("", v.shape, v.dtype) for v in call.results)
    return Call(blank.map_refs(lambda name: Ref("")), operands, results)


def unknown_rule(call: Call) -> OpRule:
    """The rule that lets nothing be split: it is always right."""
    factors: dict[str, Factor] = {}
    tensors = []
    for index, value in enumerate((*call.operands, *call.results)):
        names = tuple((f"x{index}_{dim}",) for dim in range(len(value.shape)))
        for (name,), size in zip(names, value.shape, strict=True):
            factors[name] = Factor(name, size, "whole")
        tensors.append(names)
    count = len(call.operands)
    return OpRule(tuple(tensors[:count]), tuple(tensors[count:]), factors)


def implementation(target: str) -> Callable[..., Any]:
    """What executes an op: `OpDef.run`, or the torch operator.

    Raises:
        KeyError: When there is neither.
    """
    definition = find(target)
    if definition is not None and definition.run is not None:
        return definition.run
    return torch_operator(target)


@cache
def torch_operator(target: str) -> Callable[..., Any]:
    """The torch operator of a name such as `aten.mm.default`.

    Raises:
        KeyError: When torch has no operator of that name.
    """
    item: Any = torch.ops
    for name in target.split("."):
        item = getattr(item, name, None)
        if item is None:
            raise KeyError(f"torch has no operator {target}")
    operator: Callable[..., Any] = item
    return operator


def output_mask(op: Op) -> tuple[bool, ...] | None:
    """Which of its results an op is asked for; None for one that has no say in it.

    Example:
        >>> output_mask(Op("aten.neg.default", (Ref("x"),)))
    """
    definition = find(op.target)
    if not op.target.startswith("aten.") or (definition and definition.run):
        return None
    return compat.output_mask(torch_operator(op.target), op.args, dict(op.kwargs))


def asked_for(results: Iterable[Any], mask: Sequence[bool] | None) -> list[Any]:
    """The results that an op was asked for.

    Some kernels leave out the others, some make them all the same (`grid_sampler_2d_backward` the
    gradient of the grid), and some do one on the CPU and the other on tensors without data.

    Example:
        >>> asked_for(("grad", "unasked"), (True, False)), asked_for(("grad", None), None)
        (['grad'], ['grad'])
    """
    if mask is not None:
        results = [result for result, wanted in zip(results, mask, strict=True) if wanted]
    return [result for result in results if result is not None]


@lru_cache(maxsize=1)
def _load_families() -> None:
    """Imports the op families, each of which fills the table."""
    from distcell.rules import families  # noqa: F401


__all__ = [
    "LocalArg",
    "asked_for",
    "call_of",
    "find",
    "implementation",
    "output_mask",
    "register",
    "rule_of",
    "rules_of",
    "spelling",
    "targets",
]
