"""Factor notation: how the dims of an op's operands and results hang together.

`m k+, k+ n -> m n` is a matrix product. Each letter is a *factor*: dims that carry the same letter
are split alike. The suffix says what happens when the factor is split:

=====  ========  ==============================================================================
none   `pass`    each rank works on its share
`+`    `sum`     as pass; results that lack the factor are partial sums
`^`    `max`     as pass; results that lack it are partial maxima
`_`    `min`     as pass; results that lack it are partial minima
`!`    `whole`   may not be split: gathered before the op
`%`    `lower`   may be split, and then the op is replaced by smaller ops (`OpDef.lower`)
=====  ========  ==============================================================================

`1` is a dim of size one without a factor, `.` a tensor without dims, `(b t)` a dim that is the
product of two factors (outer to inner), `*` the leading dims that all tensors share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from distcell.errors import RuleError
from distcell.graph import Op, Ref, Value

KINDS = {"": "pass", "+": "sum", "^": "max", "_": "min", "!": "whole", "%": "lower"}
REDUCING = ("sum", "max", "min")

Dims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the factors in it, outer to inner; none for a dim of size one."""


@dataclass(frozen=True)
class Factor:
    """One factor of an op: its global size and what happens when it is split."""

    name: str
    size: int
    kind: str = "pass"


@dataclass(frozen=True)
class LocalArg:
    """An argument that must be rewritten for the local op.

    Args:
        arg: Its place: an index into `Op.args` or the name of a keyword.
        kind: `shape`: a tuple of sizes, which becomes the local shape of result `of`.
            `extent`: the size of factor `of`, which becomes the local size. Several names, `g c`:
            of their product.
            `extents`: a tuple of sizes, with a comma between the factors: `b, 1, g c`. Digits
            stand for themselves.
            `offset`: 0, which becomes the index of the first element of factor `of`.
            `box`: None, which becomes the place of result `of` (see `distcell.graph.Box`).
        of: The index of a result, or the name of a factor.
        times: What an extent is multiplied by.
    """

    arg: int | str
    kind: str
    of: int | str
    times: int = 1


@dataclass(frozen=True, eq=False)
class OpRule:
    """The rule of one op at given shapes.

    Args:
        operands: For each tensor operand (in order of the arguments, repeats kept) its dims.
        results: For each result its dims.
        factors: All factors by name.
        linear: The sets of operands in which the op is jointly linear: when all operands of a set
            are partial sums over an axis and the others are replicated over it, the results are
            partial sums. `mm` has {0} and {1}, `add` has {0, 1}, `neg` has {0}.
        monotone: Whether op(max(a, b)) = max(op(a), op(b)) in operand 0, and the same for min. The
            check of rules tests the claim; the partitioner makes no use of it yet: it delays sums
            alone, and a partial max or min is reduced where it is made.
        local_args: Arguments that depend on the local shape.
        priority: 0 for element-wise ops and data movement, along which layouts flow first; 1 for
            the rest.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: Mapping[str, Factor]
    linear: tuple[frozenset[int], ...] = ()
    monotone: bool = False
    local_args: tuple[LocalArg, ...] = ()
    priority: int = 1

    @cached_property
    def tensors(self) -> tuple[Dims, ...]:
        """The dims of all operands, then of all results."""
        return self.operands + self.results

    def kind(self, factor: str) -> str:
        return self.factors[factor].kind

    def __str__(self) -> str:
        return f"{_print(self.operands, self)} -> {_print(self.results, self)}"


@dataclass(frozen=True)
class Call:
    """One op with the shapes of what it takes and makes: what a rule looks at."""

    op: Op
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """The argument at a position or of a name, or the default when it is omitted."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, default)

    def shape(self, index: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return self.operands[index].shape


Rule = Callable[[Call], OpRule]


@dataclass(frozen=True)
class OpDef:
    """Everything that distcell knows of one op.

    Args:
        target: Its name, `aten.mm.default`.
        rule: Gives the `OpRule` of a call.
        lower: For a call of which `%` factors are split, the smaller ops that do the same.
            It is given a `Builder` and returns the refs of the results.
        run: What executes the op; omitted: the torch operator of that name.
        inplace: The target that writes its result into operand 0, when there is one.
        into: The target that writes its result into a tensor given as `out`, when there is one
            that does so as it computes.
    """

    target: str
    rule: Rule
    lower: Callable[[Builder, Call], Sequence[Ref]] | None = None
    run: Callable[..., Any] | None = None
    inplace: str | None = None
    into: str | None = None


class Builder:
    """Makes the ops of a lowering, at global shapes. The partitioner supplies `make`."""

    def __init__(self, make: Callable[[Op], tuple[Value, ...]]) -> None:
        self._make = make

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """The ref of the result of a new op; a tuple of refs when there are several."""
        values = self._make(Op(target, tuple(args), tuple(kwargs.items())))
        made = tuple(Ref(value.name) for value in values)
        return made[0] if len(made) == 1 else made


def rule(
    text: str,
    *,
    linear: Iterable[Iterable[int]] = (),
    monotone: bool = False,
    local: Iterable[LocalArg] = (),
    priority: int = 1,
) -> Rule:
    """A rule from its text; sizes come from the call.

    Raises:
        RuleError: On calling the rule, when the text does not fit the shapes of a call.

    Example:
        >>> call = Call(Op("aten.mm.default"), (Value("a", (2, 3), "f32"),
        ...             Value("b", (3, 4), "f32")), (Value("c", (2, 4), "f32"),))
        >>> print(rule("m k+, k+ n -> m n", linear=[{0}, {1}])(call))
        m k+, k+ n -> m n
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"the rule `{text}` has no `->`")
    operands, results = _tensors(left), _tensors(right)
    sets = tuple(frozenset(group) for group in linear)
    local_args = tuple(local)

    def of_call(call: Call) -> OpRule:
        return fit(
            text,
            (operands, results),
            call,
            linear=sets,
            monotone=monotone,
            local_args=local_args,
            priority=priority,
        )

    return of_call


def fit(text: str, tensors: tuple[list[Tokens], list[Tokens]], call: Call, **kw: Any) -> OpRule:
    """The rule of a call from parsed text: `*` is spelt out and factors get their sizes."""
    operands, results = tensors
    if len(operands) != len(call.operands) or len(results) != len(call.results):
        raise RuleError(
            f"the rule `{text}` of {call.op.target} is for {len(operands)} operands and "
            f"{len(results)} results, not {len(call.operands)} and {len(call.results)}"
        )
    factors: dict[str, Factor] = {}
    pairs = [
        *zip(operands, call.operands, strict=True),
        *zip(results, call.results, strict=True),
    ]
    dims = [_fit_tensor(tokens, value, factors, text) for tokens, value in pairs]
    if unsized := [f.name for f in factors.values() if f.size < 0]:
        raise RuleError(f"the sizes of {unsized} do not follow from the shapes in `{text}`")
    count = len(operands)
    return OpRule(tuple(dims[:count]), tuple(dims[count:]), factors, **kw)


@dataclass
class Tokens:
    """The parsed dims of one tensor in a rule's text."""

    dims: list[list[tuple[str, str]]] = field(default_factory=list)
    leading: str | None = None


_TOKEN = re.compile(r"\(([^)]*)\)|\*([+^_!%]?)|([A-Za-z][A-Za-z0-9]*)([+^_!%]?)|1|\.")


def _tensors(text: str) -> list[Tokens]:
    return [_parse(item) for item in text.split(",")] if text.strip() else []


def _parse(text: str) -> Tokens:
    tokens, position = Tokens(), 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RuleError(f"`{text[position:]}` is not factor notation, in `{text}`")
        position = match.end()
        while position < len(text) and text[position] == " ":
            position += 1
        if match[1] is not None:
            names = [re.fullmatch(r"(\w+?)([+^_!%]?)", item) for item in match[1].split()]
            tokens.dims.append([(m[1], m[2]) for m in names if m])
        elif match[0].startswith("*"):
            tokens.leading = match[2] or ""
        elif match[0] == "1":
            tokens.dims.append([])
        elif match[0] != ".":
            tokens.dims.append([(match[3], match[4])])
    return tokens


def _fit_tensor(tokens: Tokens, value: Value, factors: dict[str, Factor], text: str) -> Dims:
    names = [list(dim) for dim in tokens.dims]
    if tokens.leading is not None:
        count = len(value.shape) - len(names)
        names = [[(f"l{i}", tokens.leading)] for i in range(count)] + names
    if len(names) != len(value.shape):
        raise RuleError(f"the rule `{text}` does not fit {value.name}: {value}")
    for dim, size in zip(names, value.shape, strict=True):
        for name, suffix in dim:
            known = factors.get(name)
            if len(dim) == 1 and known is not None and known.size not in (-1, size):
                raise RuleError(f"`{name}` has sizes {known.size} and {size} in `{text}`: {value}")
            now = size if len(dim) == 1 else (known.size if known else -1)
            kind = KINDS[suffix] if suffix else (known.kind if known else "pass")
            factors[name] = Factor(name, now, kind)
        unknown = [name for name, _ in dim if factors[name].size < 0]
        if len(unknown) == 1:
            rest = math.prod(factors[name].size for name, _ in dim if name != unknown[0])
            factors[unknown[0]] = replace(factors[unknown[0]], size=size // max(rest, 1))
    return tuple(tuple(name for name, _ in dim) for dim in names)


def _print(tensors: Sequence[Dims], op_rule: OpRule) -> str:
    suffix = {kind: text for text, kind in KINDS.items()}

    def one(dims: Dims) -> str:
        words = []
        for dim in dims:
            names = [f"{name}{suffix[op_rule.kind(name)]}" for name in dim]
            words.append("1" if not names else names[0] if len(names) == 1 else _group(names))
        return " ".join(words) or "."

    return ", ".join(map(one, tensors))


def _group(names: Sequence[str]) -> str:
    return f"({' '.join(names)})"
