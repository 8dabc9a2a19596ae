"""Ops that make tensors from nothing: constants, ranges, random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from distcell.graph import DeviceArg, DtypeArg, Ref
from distcell.random import ops as _  # noqa: F401  defines the operators of random numbers
from distcell.rules import kernels
from distcell.rules.families.common import assemble, define, names
from distcell.rules.notation import Builder, Call, LocalArg, OpRule, Rule, rule


def made(place: int, *, operand: str = "whole") -> Rule:
    """The rule of a factory: any dim of the result may be split, and argument `place` is its shape.

    Args:
        place: The position of the shape among the arguments.
        operand: What happens when a dim of an operand is split.
    """

    def of(call: Call) -> OpRule:
        operands = [names(len(v.shape), f"x{i}_") for i, v in enumerate(call.operands)]
        result = names(len(call.results[0].shape))
        kinds = {name: operand for dims in operands for name in dims}
        local = [LocalArg(place, "shape", 0)]
        return assemble(call, (*operands, result), kinds, local=local, priority=0)

    return of


define("full zeros ones empty.memory_format", made(0))
define("scalar_tensor", rule("-> .", priority=0))


def _without_operand(b: Builder, call: Call) -> Sequence[Ref]:
    """Of the operand only the dtype matters, so no rank may skip the op for holding none of it."""
    value = call.results[0]
    kind = call.op.target.split(".")[1]
    number = {"new_zeros": 0, "new_empty": 0, "new_ones": 1}.get(kind, call.arg(2, "fill_value"))
    return (
        b(
            "aten.full.default",
            value.shape,
            number,
            dtype=DtypeArg(value.dtype),
            device=DeviceArg(),
        ),
    )


define("new_zeros new_ones new_full new_empty", made(1, operand="lower"), lower=_without_operand)

# --- ranges ---------------------------------------------------------------------------------------


def _range(b: Builder, call: Call) -> Sequence[Ref]:
    value, args = call.results[0], call.op.args
    start = 0 if call.op.target == "aten.arange.default" else args[0]
    step = call.arg(2, "step", 1) if call.op.target == "aten.arange.start_step" else 1
    return (
        b(
            "distcell.arange.default",
            value.shape[0],
            start,
            step,
            0,
            dtype=DtypeArg(value.dtype),
            device=DeviceArg(),
        ),
    )


define("arange arange.start arange.start_step", rule("-> t%", priority=0), lower=_range)
_RANGE_PLACE = (LocalArg(0, "extent", "t"), LocalArg(3, "offset", "t"))
define("distcell.arange.default", rule("-> t", local=_RANGE_PLACE, priority=0), run=kernels.arange)
define("linspace", rule("-> t!", priority=0))
define("eye eye.m", rule("-> m! n!", priority=0))

# --- random numbers: the value of an element depends on its place in the whole tensor alone -------


def _random(place: int) -> Rule:
    """The rule of random numbers: argument `place` is the shape, the next one the box."""

    def of(call: Call) -> OpRule:
        operands = [names(len(v.shape), f"x{i}_") for i, v in enumerate(call.operands)]
        result = names(len(call.results[0].shape))
        kinds = {name: "whole" for dims in operands for name in dims}
        local = [LocalArg(place, "shape", 0), LocalArg(place + 1, "box", 0)]
        return assemble(call, (*operands, result), kinds, local=local, priority=0)

    return of


define("distcell.uniform.default", _random(2))
define("distcell.keep_mask.default", _random(3))
