"""Fewer and larger messages: the reductions of gradients, many in one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distcell.dtype import itemsize
from distcell.errors import UserValueError
from distcell.graph import Op, verify
from distcell.program import COLLECTIVES, Program

DEFAULT_BYTES = 25 << 20
"""What one message holds at most: large enough that its latency does not count."""

Bucket = tuple[int, ...]
"""The indices of the ops that become one."""


def fuse_gradients(program: Program, max_bytes: int = DEFAULT_BYTES) -> Program:
    """The program with the reductions of gradients fused into messages of limited size.

    Fused are all-reduces of backward and optimizer that no further work of the network waits for:
    what follows leads to gradients, and through the optimizer to parameters. Each element is
    summed as before, in the same order. A message is sent when the last of its tensors is ready;
    what uses the first ones moves after it.

    Args:
        program: The program.
        max_bytes: The most that a message may hold of one rank's tensors. A tensor that is larger
            goes alone.

    Raises:
        UserValueError: When `max_bytes` is not positive.

    Example:
        >>> from distcell.graph import Graph, Input, Output, Ref, Value
        >>> from distcell.layout import Layout
        >>> from distcell.mesh import Mesh
        >>> ops = tuple(Op("distcell.all_reduce", (Ref(n), ("dp",), "sum"), outputs=(n + "r",),
        ...                phase="backward") for n in "ab")
        >>> values = {n: Value(n, (2,), "f32") for n in ("a", "b", "ar", "br")}
        >>> graph = Graph(tuple(Input(n, "tangent", n) for n in "ab"), ops,
        ...               tuple(Output(n + "r", "grad", n) for n in "ab"), values)
        >>> layouts = {n: Layout.of((2,), partial=() if "r" in n else ("dp",)) for n in values}
        >>> program = fuse_gradients(Program(Mesh.parse("dp=2"), graph, layouts))
        >>> print(program.graph.ops[0])
        %ar, %br = distcell.all_reduce_many((%a, %b), ('dp',), 'sum')
    """
    if max_bytes < 1:
        raise UserValueError(
            f"a message of at most {max_bytes} bytes holds nothing", hint="allow at least 1 byte"
        )
    buckets = _buckets(program, max_bytes)
    if not buckets:
        return program
    ops = _merged(program.graph.ops, buckets)
    graph = replace(program.graph, ops=ops)
    verify(graph)
    return replace(program, graph=graph)


@dataclass(frozen=True)
class _Downstream:
    """What comes after a value: how many collectives in a row, and whether the network waits."""

    depth: int = 0
    works: bool = False


def _downstream(program: Program) -> Mapping[str, _Downstream]:
    """For each value what uses it, directly or not."""
    after: dict[str, _Downstream] = {}
    for op in reversed(program.graph.ops):
        below = [after.get(name, _Downstream()) for name in op.outputs]
        depth = max((item.depth for item in below), default=0)
        works = any(item.works for item in below)
        if op.target in COLLECTIVES:
            depth += 1
            works = works or not _is_light(program, op)
        for name in op.inputs:
            old = after.get(name, _Downstream())
            after[name] = _Downstream(max(old.depth, depth), old.works or works)
    return after


def _is_light(program: Program, op: Op) -> bool:
    """Whether a collective belongs to the update of parameters, such as a norm's reduction."""
    numbers = all(math.prod(value.shape) == 1 for value in program.graph.tensors(op))
    return op.phase == "optimizer" or numbers


def _buckets(program: Program, max_bytes: int) -> list[Bucket]:
    """The all-reduces that become one.

    Two that have equally many collectives after them do not depend on each other.
    """
    after = _downstream(program)
    done: list[Bucket] = []
    filling: dict[tuple[object, ...], tuple[list[int], int]] = {}
    for index, op in enumerate(program.graph.ops):
        if op.target != "distcell.all_reduce" or op.phase == "forward":
            continue
        below = after.get(op.outputs[0], _Downstream())
        if below.works:
            continue
        value = program.graph.values[op.inputs[0]]
        size = math.prod(program.local_shape(value.name, 0)) * itemsize(value.dtype)
        key = (value.dtype, op.args[1:], below.depth)
        members, held = filling.get(key, ([], 0))
        if members and held + size > max_bytes:
            done.append(tuple(members))
            members, held = [], 0
        filling[key] = ([*members, index], held + size)
    done += [tuple(members) for members, _ in filling.values()]
    return [bucket for bucket in done if len(bucket) > 1]


def _merged(ops: Sequence[Op], buckets: Sequence[Bucket]) -> tuple[Op, ...]:
    """The ops with each bucket as one, in the old order as far as what they use allows it."""
    fused = {index for bucket in buckets for index in bucket}
    items = [(index, op) for index, op in enumerate(ops) if index not in fused]
    items += [(bucket[-1], _fused([ops[index] for index in bucket])) for bucket in buckets]
    maker = {name: number for number, (_, op) in enumerate(items) for name in op.outputs}
    needs = [{maker[name] for name in op.inputs if name in maker} for _, op in items]
    users: dict[int, list[int]] = {}
    for number, makers in enumerate(needs):
        for made in makers:
            users.setdefault(made, []).append(number)
    waiting = [len(makers) for makers in needs]
    ready = [(place, number) for number, (place, _) in enumerate(items) if not waiting[number]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(items[number][1])
        for user in users.get(number, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (items[user][0], user))
    assert len(order) == len(items), "fused ops depend on each other"
    return tuple(order)


def _fused(ops: Sequence[Op]) -> Op:
    first, last = ops[0], ops[-1]
    cells = list(dict.fromkeys(op.cell for op in (first, last) if op.cell))
    return replace(
        last,
        target="distcell.all_reduce_many",
        args=(tuple(op.args[0] for op in ops), *first.args[1:]),
        outputs=tuple(op.outputs[0] for op in ops),
        many=True,
        cell=" .. ".join(cells),
    )
