"""Lookups and writes by index: embeddings, gather, scatter, index_select and the like.

A dim that is indexed may be split: each rank looks up what lies in its share, the others' rows are
zeros and the sum is right. What is added by index is first added to zeros, and then once to the
base, which would otherwise be counted on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from distcell.graph import Ref
from distcell.rules import kernels
from distcell.rules.families.common import assemble, broadcast, define, names, wrap
from distcell.rules.notation import Builder, Call, LocalArg, OpRule, Rule, rule
from distcell.rules.table import unknown_rule

# --- the ops of our own ---------------------------------------------------------------------------


def _take(call: Call, *, backward: bool, kind: str) -> OpRule:
    """`take` (table, dim, index) and `add_take` (values, dim, index, size)."""
    dim = wrap(call.arg(1), len((call.results[0] if backward else call.operands[0]).shape))
    table = names(len((call.results[0] if backward else call.operands[0]).shape))
    index = names(len(call.shape(1)), "i")
    rows = [*table[:dim], *index, *table[dim + 1 :]]
    v = table[dim]
    if backward:
        local = [LocalArg(3, "extent", v), LocalArg(4, "offset", v)]
        kinds = dict.fromkeys(index, "sum")
        return assemble(call, (rows, index, table), kinds, linear=[{0}], local=local)
    local = [LocalArg(3, "offset", v)] if kind == "sum" else []
    return assemble(call, (table, index, rows), {v: kind}, linear=[{0}], local=local)


def _pick(call: Call, *, backward: bool, kind: str) -> OpRule:
    """`pick` and `gather` (x, dim, index) and `add_pick` (values, dim, index, size)."""
    full = (call.results[0] if backward else call.operands[0]).shape
    index = call.shape(1)
    dim = wrap(call.arg(1), len(full))
    table, at = names(len(full)), names(len(full))
    kinds: dict[str, str] = {}
    for i, (a, b) in enumerate(zip(full, index, strict=True)):
        if i == dim:
            at[i] = "t"
        elif a != b:
            table[i], at[i] = f"x{i}", f"y{i}"
            kinds |= {table[i]: "whole", at[i]: "whole"}
    v = table[dim] if table else ""
    if not table:
        return assemble(call, ([], [], []), {}, linear=[{0}])
    if backward:
        local = [LocalArg(3, "extent", v), LocalArg(4, "offset", v)]
        return assemble(call, (at, at, table), kinds | {"t": "sum"}, linear=[{0}], local=local)
    local = [LocalArg(3, "offset", v)] if kind == "sum" else []
    return assemble(call, (table, at, at), kinds | {v: kind}, linear=[{0}], local=local)


def _select(call: Call) -> OpRule:
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1), len(dims))
    return assemble(
        call,
        (dims, [*dims[:at], *dims[at + 1 :]]),
        {dims[at]: "sum"},
        linear=[{0}],
        local=[LocalArg(3, "offset", dims[at])],
        priority=0,
    )


def _unselect(call: Call) -> OpRule:
    dims = names(len(call.results[0].shape))
    at = wrap(call.arg(1), len(dims))
    local = [LocalArg(3, "extent", dims[at]), LocalArg(4, "offset", dims[at])]
    return assemble(
        call, ([*dims[:at], *dims[at + 1 :]], dims), {}, linear=[{0}], local=local, priority=0
    )


define(
    "distcell.take.default", lambda call: _take(call, backward=False, kind="sum"), run=kernels.take
)
define(
    "distcell.add_take.default",
    lambda call: _take(call, backward=True, kind=""),
    run=kernels.add_take,
)
define(
    "distcell.pick.default", lambda call: _pick(call, backward=False, kind="sum"), run=kernels.pick
)
define(
    "distcell.add_pick.default",
    lambda call: _pick(call, backward=True, kind=""),
    run=kernels.add_pick,
)
define("distcell.select.default", _select, run=kernels.select)
define("distcell.unselect.default", _unselect, run=kernels.unselect)

_TRIANGLE = (LocalArg(2, "offset", "m"), LocalArg(3, "offset", "n"))
_TRIANGLE_RULE = rule("* m n -> * m n", linear=[{0}], local=_TRIANGLE, priority=0)
define("distcell.tril.default", _TRIANGLE_RULE, run=kernels.tril)
define("distcell.triu.default", _TRIANGLE_RULE, run=kernels.triu)


def _triangle(b: Builder, call: Call) -> Sequence[Ref]:
    kind = call.op.target.split(".")[1]
    diagonal = call.arg(1, "diagonal", 0)
    return (b(f"distcell.{kind}.default", call.op.args[0], diagonal, 0, 0),)


define("tril triu", rule("* m% n% -> * m n", linear=[{0}], priority=0), lower=_triangle)

# --- lookups --------------------------------------------------------------------------------------


def _look_up(b: Builder, call: Call) -> Sequence[Ref]:
    return (b("distcell.take.default", call.op.args[0], 0, call.op.args[1]),)


define("embedding", rule("v% d, * -> * d", linear=[{0}]), lower=_look_up)


def _embedding_backward(call: Call) -> OpRule:
    """With `scale_grad_by_freq` a rank would have to know how often the others use a row."""
    index = names(len(call.shape(1)), "i")
    kinds = dict.fromkeys(index, "whole" if call.arg(4) else "sum")
    kinds["v"] = "whole" if call.arg(4) else "lower"
    return assemble(call, ([*index, "d"], index, ["v", "d"]), kinds, linear=[{0}])


def _add_rows(b: Builder, call: Call) -> Sequence[Ref]:
    grad, index, size, padding = call.op.args[:4]
    if padding >= 0:
        index = b("aten.masked_fill.Scalar", index, b("aten.eq.Scalar", index, padding), -1)
    return (b("distcell.add_take.default", grad, 0, index, size),)


define("embedding_dense_backward", _embedding_backward, lower=_add_rows)


def _index_select(call: Call) -> OpRule:
    if not call.shape(0) or not call.shape(1):
        return unknown_rule(call)
    return _take(call, backward=False, kind="lower")


def _take_of(b: Builder, call: Call) -> Sequence[Ref]:
    dim = wrap(call.arg(1), len(call.shape(0)))
    return (b("distcell.take.default", call.op.args[0], dim, call.op.args[2]),)


define("index_select", _index_select, lower=_take_of)


def _pick_of(b: Builder, call: Call) -> Sequence[Ref]:
    dim = wrap(call.arg(1), len(call.shape(0)))
    return (b("distcell.pick.default", call.op.args[0], dim, call.op.args[2]),)


define("gather", lambda call: _pick(call, backward=False, kind="lower"), lower=_pick_of)


def _places(call: Call) -> list[int]:
    """The dims that the index tensors of `index` or `index_put` stand for."""
    return [dim for dim, index in enumerate(call.arg(1)) if index is not None]


def _indexed(call: Call, shape: Sequence[int]) -> Any:
    """Factors of a tensor indexed by several index tensors: of it, of each, and of the result."""
    places = _places(call)
    indices = [v.shape for v in call.operands[1 : 1 + len(places)]]
    spread: tuple[int, ...] = ()
    for index in indices:
        pairs = zip_longest(reversed(spread), reversed(index), fillvalue=1)
        spread = tuple(reversed([b if a == 1 else a for a, b in pairs]))
    dims = names(len(shape))
    front = names(len(spread), "i")
    rest = [dim for i, dim in enumerate(dims) if i not in places]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if adjacent else 0
    made = [*rest[:at], *front, *rest[at:]]
    return places, dims, [broadcast(index, spread, "i") for index in indices], made, spread


def _masks(call: Call) -> bool:
    return any(v.dtype in ("bool", "u8") for v in call.operands[1:])


def _index(call: Call) -> OpRule:
    if _masks(call):
        return unknown_rule(call)
    places, dims, indices, made, _ = _indexed(call, call.shape(0))
    kinds = {dims[i]: "lower" if len(places) == 1 else "whole" for i in places}
    sizes = {f"i{i}": 1 for i in range(8)}
    return assemble(call, (dims, *indices, made), kinds, sizes=sizes, linear=[{0}])


def _wrapped(b: Builder, index: Any, size: int) -> Ref:
    """An index that may count from the end, counted from the front."""
    made = b("aten.remainder.Scalar", index, size)
    assert isinstance(made, Ref)
    return made


def _index_by_take(b: Builder, call: Call) -> Sequence[Ref]:
    (dim,) = _places(call)
    index = _wrapped(b, call.arg(1)[dim], call.shape(0)[dim])
    return (b("distcell.take.default", call.op.args[0], dim, index),)


define("index.Tensor", _index, lower=_index_by_take)

# --- writes ---------------------------------------------------------------------------------------


def _index_put(call: Call) -> OpRule:
    """Adding by one index is lowered when it is split; other writes are whole where they index."""
    if _masks(call) or not _places(call):
        return unknown_rule(call)
    places, dims, indices, made, spread = _indexed(call, call.shape(0))
    adds = bool(call.arg(3, "accumulate", False)) and len(places) == 1
    kinds = {dims[i]: "lower" if adds else "whole" for i in places}
    kinds |= dict.fromkeys(names(len(spread), "i"), "lower" if adds else "whole")
    shape = dict(zip(dims, call.shape(0), strict=True)) | dict(
        zip(names(len(spread), "i"), spread, strict=True)
    )
    given = call.operands[-1].shape
    values = [
        () if size == 1 and shape[name] != 1 else (name,)
        for name, size in zip(made[len(made) - len(given) :], given, strict=True)
    ]
    return assemble(
        call,
        (dims, *indices, values, dims),
        kinds,
        sizes=shape,
        linear=[{0, len(call.operands) - 1}],
    )


def _put_by_add(b: Builder, call: Call) -> Sequence[Ref]:
    (dim,) = _places(call)
    base, values = call.op.args[0], call.op.args[2]
    shape, index = call.shape(0), call.operands[1].shape
    rows = (*shape[:dim], *index, *shape[dim + 1 :])
    if call.operands[-1].shape != rows:
        values = b("aten.expand.default", values, rows)
    at = _wrapped(b, call.arg(1)[dim], shape[dim])
    made = b("distcell.add_take.default", values, dim, at, shape[dim])
    return (b("aten.add.Tensor", base, made),)


define("index_put _unsafe_index_put", _index_put, lower=_put_by_add)


def _index_add(call: Call) -> OpRule:
    if not call.shape(0) or not call.shape(1):
        return unknown_rule(call)
    dims = names(len(call.shape(0)))
    at = wrap(call.arg(1), len(dims))
    source = [*dims[:at], "i", *dims[at + 1 :]]
    kinds = {dims[at]: "lower", "i": "lower"}
    return assemble(call, (dims, ["i"], source, dims), kinds, linear=[{0, 2}])


def _add_by_index(b: Builder, call: Call) -> Sequence[Ref]:
    base, dim, index, source = call.op.args[:4]
    dim = wrap(dim, len(call.shape(0)))
    made = b("distcell.add_take.default", source, dim, index, call.shape(0)[dim])
    return (b("aten.add.Tensor", base, made, alpha=dict(call.op.kwargs).get("alpha", 1)),)


define("index_add", _index_add, lower=_add_by_index)


def _scatter(kind: str) -> Rule:
    """Writes along a dim. Other dims pass where base, index and source have the same size."""

    def of(call: Call) -> OpRule:
        shapes = [value.shape for value in call.operands]
        count = len(shapes[0])
        if not count:
            return unknown_rule(call)
        dim = wrap(call.arg(1), count)
        tensors = [names(count) for _ in shapes]
        same = all(shape == shapes[1] for shape in shapes[1:])
        kinds = {f"d{dim}": kind if same else "whole"}
        for index in range(1, len(shapes)):
            tensors[index][dim] = "t" if same else f"t{index}"
            kinds[tensors[index][dim]] = kinds[f"d{dim}"]
        for i in range(count):
            if i != dim and len({shape[i] for shape in shapes}) > 1:
                for index, entry in enumerate(tensors):
                    entry[i] = f"x{index}_{i}"
                    kinds[entry[i]] = "whole"
        linear = [{0, 2}] if kind == "lower" and len(shapes) == 3 else []
        return assemble(call, (*tensors, tensors[0]), kinds, linear=linear)

    return of


def _scatter_add(b: Builder, call: Call) -> Sequence[Ref]:
    base, dim, index, source = call.op.args[:4]
    dim = wrap(dim, len(call.shape(0)))
    made = b("distcell.add_pick.default", source, dim, index, call.shape(0)[dim])
    return (b("aten.add.Tensor", base, made),)


def _scatter_value(b: Builder, call: Call) -> Sequence[Ref]:
    """Counts how often each place is written, and fills those that are."""
    base, dim, index, value = call.op.args[:4]
    dim = wrap(dim, len(call.shape(0)))
    ones = b("aten.ones_like.default", index)
    times = b("distcell.add_pick.default", ones, dim, index, call.shape(0)[dim])
    return (b("aten.masked_fill.Scalar", base, b("aten.gt.Scalar", times, 0), value),)


define("scatter_add", _scatter("lower"), lower=_scatter_add)
define("scatter.value", _scatter("lower"), lower=_scatter_value)
define("scatter.src scatter_reduce.two", _scatter("whole"))

define("bucketize.Tensor", rule("*, k! -> *"))
