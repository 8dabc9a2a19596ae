"""Ops that only rearrange elements: reshapes, permutations, expansions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from distcell.graph import Ref
from distcell.rules.families.common import assemble, define, names, wrap, wrap_all
from distcell.rules.notation import Builder, Call, LocalArg, OpRule, Rule, rule

_SHAPE_OF_RESULT = (LocalArg(1, "shape", 0),)


def _move(
    call: Call,
    tensors: Sequence[Any],
    kinds: Mapping[str, str] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    local: Iterable[LocalArg] = (),
) -> OpRule:
    """The rule of an op that moves elements: linear, and layouts flow along it first."""
    return assemble(
        call,
        tensors,
        kinds or {},
        sizes=sizes,
        linear=[{0}],
        monotone=True,
        local=local,
        priority=0,
    )


@dataclass
class _Reshape:
    """Two shapes with the same elements, walked from the outer dims to the inner ones."""

    left: Sequence[int]
    right: Sequence[int]
    sizes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def factors(self) -> tuple[list[list[str]], list[list[str]]]:
        """For each dim of both shapes its factors."""
        left: list[list[str]] = [[] for _ in self.left]
        right: list[list[str]] = [[] for _ in self.right]
        i = j = 0
        rest_i = rest_j = 1
        while True:
            while rest_i == 1 and i < len(left):
                rest_i, i = self.left[i], i + 1
            while rest_j == 1 and j < len(right):
                rest_j, j = self.right[j], j + 1
            if rest_i == 1 and rest_j == 1:
                return left, right
            common = gcd(rest_i, rest_j)
            if common > 1:
                name = self._new(common)
                left[i - 1].append(name)
                right[j - 1].append(name)
                rest_i, rest_j = rest_i // common, rest_j // common
                continue
            # The borders do not fall together any more: no dim can be split until they do again.
            i, j = self._whole(left, right, (i, j), (rest_i, rest_j))
            rest_i = rest_j = 1

    def _whole(
        self,
        left: list[list[str]],
        right: list[list[str]],
        at: tuple[int, int],
        rest: tuple[int, int],
    ) -> tuple[int, int]:
        (i, j), (rest_i, rest_j) = at, rest
        done_i, done_j = rest_i, rest_j
        if rest_i > 1:
            left[i - 1].append(self._new(rest_i, "whole"))
        if rest_j > 1:
            right[j - 1].append(self._new(rest_j, "whole"))
        while done_i != done_j:
            if done_i < done_j:
                left[i].append(self._new(self.left[i], "whole"))
                done_i, i = done_i * self.left[i], i + 1
            else:
                right[j].append(self._new(self.right[j], "whole"))
                done_j, j = done_j * self.right[j], j + 1
        return i, j

    def _new(self, size: int, kind: str = "pass") -> str:
        name = f"v{len(self.sizes)}"
        self.sizes[name], self.kinds[name] = size, kind
        return name


def _view(call: Call) -> OpRule:
    shapes = call.shape(0), call.results[0].shape
    if 0 in shapes[0]:
        nothing = names(len(shapes[0]), "x"), names(len(shapes[1]), "y")
        kinds = {name: "whole" for dims in nothing for name in dims}
        return _move(call, nothing, kinds, local=_SHAPE_OF_RESULT)
    reshape = _Reshape(*shapes)
    tensors = reshape.factors()
    return _move(call, tensors, reshape.kinds, sizes=reshape.sizes, local=_SHAPE_OF_RESULT)


define("view reshape _unsafe_view _reshape_copy", _view)


def _permutation(order: Sequence[int], call: Call) -> OpRule:
    dims = names(len(order))
    return _move(call, (dims, [dims[i] for i in order]))


def _permute(call: Call) -> OpRule:
    return _permutation([wrap(d, len(call.shape(0))) for d in call.arg(1)], call)


def _transpose(call: Call) -> OpRule:
    count = len(call.shape(0))
    order = list(range(count))
    a, b = wrap(call.arg(1), count), wrap(call.arg(2), count)
    order[a], order[b] = order[b], order[a]
    return _permutation(order, call)


def _t(call: Call) -> OpRule:
    return _permutation(list(reversed(range(len(call.shape(0))))), call)


define("permute", _permute)
define("transpose.int", _transpose)
define("t numpy_T", _t)


def _expand(call: Call) -> OpRule:
    """New dims and dims of size one that grow have a factor that only the result has."""
    shape, result = call.shape(0), call.results[0].shape
    new = len(result) - len(shape)
    dims = names(len(result))
    operand = [() if size == 1 else (dims[new + index],) for index, size in enumerate(shape)]
    return _move(call, (operand, dims), local=_SHAPE_OF_RESULT)


define("expand broadcast_to", _expand)


def _unsqueeze(call: Call) -> OpRule:
    dims: list[Sequence[str]] = [(name,) for name in names(len(call.shape(0)))]
    at = wrap(call.arg(1), len(dims) + 1)
    return _move(call, (dims, [*dims[:at], (), *dims[at:]]))


def _gone(call: Call) -> list[bool]:
    """Which dims `squeeze` drops: those of size one and, where dims are given, among them."""
    shape = call.shape(0)
    named = _named(call)
    return [index in named and size == 1 for index, size in enumerate(shape)]


def _named(call: Call) -> tuple[int, ...]:
    given = call.arg(1, "dim")
    return () if given == () else wrap_all(given, len(call.shape(0)))


def _squeeze(call: Call) -> OpRule:
    """A dim that may be dropped because it is of size one on a rank alone is lowered."""
    gone = _gone(call)
    operand = [() if drop else (f"d{index}",) for index, drop in enumerate(gone)]
    result = [dim for dim, drop in zip(operand, gone, strict=True) if not drop]
    kinds = {f"d{index}": "lower" for index in _named(call)}
    return _move(call, (operand, result), kinds)


def _squeeze_named(b: Builder, call: Call) -> Sequence[Ref]:
    dims = tuple(index for index, drop in enumerate(_gone(call)) if drop)
    if not dims:
        return (b("aten.alias.default", call.op.args[0]),)
    return (b("aten.squeeze.dims", call.op.args[0], dims),)


define("unsqueeze", _unsqueeze)
define("squeeze squeeze.dim squeeze.dims", _squeeze, lower=_squeeze_named)


def _repeat(call: Call) -> OpRule:
    """A dim that is repeated is a product: how often, and what."""
    shape, times = call.shape(0), call.arg(1)
    new = len(times) - len(shape)
    operand = [(f"d{new + index}",) for index in range(len(shape))]
    result, local = [], []
    for index, count in enumerate(times):
        inner = operand[index - new] if index >= new else ()
        outer = (f"r{index}",) if count > 1 or not inner else ()
        result.append((*outer, *inner))
        local.append(outer[0] if outer else str(count))
    sizes = {f"r{index}": count for index, count in enumerate(times)}
    return _move(
        call, (operand, result), sizes=sizes, local=[LocalArg(1, "extents", ", ".join(local))]
    )


define("repeat", _repeat)


def whole_dims(place: int) -> Rule:
    """The dims that an argument names are whole, the others pass."""

    def of(call: Call) -> OpRule:
        count = len(call.shape(0))
        whole = wrap_all(call.arg(place), count)
        left = [f"x{i}" if i in whole else f"d{i}" for i in range(count)]
        right = [f"y{i}" if i in whole else f"d{i}" for i in range(count)]
        kinds = {name: "whole" for name in (*left, *right) if name[0] in "xy"}
        return assemble(call, (left, right), kinds, linear=[{0}], priority=0)

    return of


define("flip", whole_dims(1))
define("roll", whole_dims(2))
define("view_as_real", rule("* -> * c!", linear=[{0}], priority=0))
define("view_as_complex", rule("* c! -> *", linear=[{0}], priority=0))


def _view_dtype(call: Call) -> OpRule:
    """Reading the bytes as another dtype: the last dim is whole where the size changes."""
    same = call.shape(0) == call.results[0].shape
    dims = names(len(call.shape(0)))
    last = [] if same or not dims else ["x", "y"]
    left, right = (dims, dims) if same else ([*dims[:-1], "x"], [*dims[:-1], "y"])
    return assemble(call, (left, right), {name: "whole" for name in last}, priority=0)


define("view.dtype", _view_dtype)
