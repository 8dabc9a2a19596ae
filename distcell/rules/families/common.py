"""What the tables of the op families are written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distcell.graph import Ref
from distcell.rules.notation import Builder, Call, Dims, Factor, LocalArg, OpDef, OpRule, Rule, rule
from distcell.rules.table import register

Lower = Callable[[Builder, Call], Sequence[Ref]]
Linear = Iterable[Iterable[int]] | Callable[[Call], Iterable[Iterable[int]]]
"""Sets of operands in which an op is jointly linear; a function when they depend on the call."""


def define(
    targets: str,
    of: Rule,
    *,
    lower: Lower | None = None,
    run: Callable[..., Any] | None = None,
    inplace: bool = False,
    into: bool = False,
) -> None:
    """Puts ops of one rule into the table.

    Args:
        targets: Their names with blanks between: `exp` is `aten.exp.default`, `add.Tensor` is
            `aten.add.Tensor`; a name with two dots stands for itself.
        of: The rule.
        lower: As in `OpDef`.
        run: As in `OpDef`.
        inplace: Whether there are ops `exp_`, `add_.Tensor` that write into operand 0.
        into: Whether there is an op `mm.out` that computes into a tensor given as `out`.
    """
    for name in targets.split():
        target = full_name(name)
        space, base, overload = target.split(".")
        written = f"{space}.{base}_.{overload}" if inplace else None
        out = f"{space}.{base}.out" if into else None
        register(OpDef(target, of, lower, run, inplace=written, into=out))


def full_name(name: str) -> str:
    """The target that a short name in a table stands for."""
    dots = name.count(".")
    return name if dots == 2 else f"aten.{name}" if dots == 1 else f"aten.{name}.default"


def text(write: Callable[[Call], str], **attributes: Any) -> Rule:
    """A rule of which the text depends on the call."""
    return lambda call: rule(write(call), **attributes)(call)


def assemble(
    call: Call,
    tensors: Sequence[Any],
    kinds: Mapping[str, str],
    *,
    sizes: Mapping[str, int] | None = None,
    linear: Linear = (),
    monotone: bool = False,
    local: Iterable[LocalArg] = (),
    priority: int = 1,
) -> OpRule:
    """A rule from the names of the factors.

    Args:
        call: The call; it says how many of the tensors are operands.
        tensors: For each operand and result, for each dim, its factors: a name, or a sequence.
        kinds: The factors that do not just pass.
        sizes: Of factors that never stand alone in a dim.
        linear: As in `OpRule`.
        monotone: As in `OpRule`.
        local: As in `OpRule`.
        priority: As in `OpRule`.
    """
    known = dict(sizes or {})
    dims: list[Dims] = []
    for names, value in zip(tensors, (*call.operands, *call.results), strict=True):
        entry = tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in names)
        for dim, size in zip(entry, value.shape, strict=True):
            if len(dim) == 1:
                known[dim[0]] = size
        dims.append(entry)
    used = dict.fromkeys(name for entry in dims for dim in entry for name in dim)
    sets = linear(call) if callable(linear) else linear
    count = len(call.operands)
    return OpRule(
        tuple(dims[:count]),
        tuple(dims[count:]),
        {name: Factor(name, known[name], kinds.get(name, "pass")) for name in used},
        linear=tuple(frozenset(group) for group in sets),
        monotone=monotone,
        local_args=tuple(local),
        priority=priority,
    )


def names(count: int, prefix: str = "d") -> list[str]:
    """Names for the dims of a tensor."""
    return [f"{prefix}{index}" for index in range(count)]


def wrap(dim: int, count: int) -> int:
    """A dim counted from the front."""
    return dim % max(count, 1)


def wrap_all(dims: Any, count: int) -> tuple[int, ...]:
    """Dims counted from the front; all of them for None, a number or an empty list."""
    if dims is None or (isinstance(dims, tuple) and not dims):
        return tuple(range(count))
    return tuple(wrap(dim, count) for dim in (dims if isinstance(dims, tuple) else (dims,)))


def broadcast(
    shape: Sequence[int], result: Sequence[int], prefix: str = "d"
) -> list[Sequence[str]]:
    """The factors of an operand that is broadcast to a result: none where its size is one."""
    first = len(result) - len(shape)
    return [() if size == 1 else (f"{prefix}{first + index}",) for index, size in enumerate(shape)]


def numel(shape: Sequence[int]) -> int:
    """The number of elements."""
    return math.prod(shape)
