"""The ops of a program under construction: values, layouts, and the collectives of reshards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from distcell.graph import Arg, Extent, MemberExtents, Offset, Op, Ref, Value
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.partition.reshard import Step, reshard_steps
from distcell.rules.factors import extent


@dataclass(frozen=True)
class Reshard:
    """One change of layout that the program makes, for the report.

    Args:
        value: The value of the graph.
        source: Its layout before, as printed.
        target: Its layout after, as printed.
        kinds: The collectives, in order.
        consumer: The op, and its cell, that wanted it.
    """

    value: str
    source: str
    target: str
    kinds: tuple[str, ...]
    consumer: str


@dataclass
class Emitter:
    """Collects the ops of a program and the layout of each of its values."""

    mesh: Mesh
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    reshards: list[Reshard] = field(default_factory=list)
    _copies: dict[tuple[str, Layout], str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def add_value(self, value: Value, layout: Layout | None) -> None:
        self.values[value.name] = value
        if layout is not None:
            self.layouts[value.name] = layout

    def fresh(self, name: str) -> str:
        """A name that no value has yet: `name~1`, `name~2`, ..."""
        base = name.split("~", maxsplit=1)[0]
        self._numbers[base] = self._numbers.get(base, 0) + 1
        return f"{base}~{self._numbers[base]}"

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def copy_of(self, name: str, layout: Layout) -> str | None:
        """The name of a value in another layout, if the program has that already."""
        return name if self.layouts[name] == layout else self._copies.get((name, layout))

    def note_copy(self, name: str, layout: Layout, copy: str) -> None:
        """Remembers that `copy` is a value in another layout."""
        self._copies[name, layout] = copy

    def reshard(self, name: str, target: Layout, consumer: Op) -> str:
        """The name of a value in another layout; ops are added unless that exists already."""
        source = self.layouts[name]
        known = self.copy_of(name, target)
        if known is not None:
            return known
        steps = reshard_steps(source, target, self.mesh)
        current = name
        for step in steps:
            current = self._step(current, step, consumer)
        self._copies[name, target] = current
        kinds = tuple(step.kind for step in steps if step.kind not in ("reshape", "slice"))
        if kinds:
            who = f"{consumer.target} in {consumer.cell or 'the net'}"
            self.reshards.append(Reshard(name, str(source), str(target), kinds, who))
        return current

    def _step(self, name: str, step: Step, consumer: Op) -> str:
        target, args = _STEPS[step.kind](step)
        value = self.values[name]
        result = replace(value, name=self.fresh(name), shape=step.after.shape)
        self.add_value(result, step.after)
        self.add(
            replace(
                consumer,
                target=target,
                args=(Ref(name), *args),
                kwargs=(),
                outputs=(result.name,),
                many=False,
            )
        )
        return result.name


def _reshape(step: Step) -> tuple[str, tuple[Arg, ...]]:
    return "distcell.reshape", (tuple(extent(dim) for dim in step.after.dims),)


def _all_reduce(step: Step) -> tuple[str, tuple[Arg, ...]]:
    return "distcell.all_reduce", (step.axes, step.before.reduction)


def _reduce_scatter(step: Step) -> tuple[str, tuple[Arg, ...]]:
    sizes = MemberExtents(step.after.dims[step.dim][0], step.axes)
    return "distcell.reduce_scatter", (step.axes, step.dim, sizes, step.before.reduction)


def _all_gather(step: Step) -> tuple[str, tuple[Arg, ...]]:
    sizes = MemberExtents(step.before.dims[step.dim][0], step.axes)
    return "distcell.all_gather", (step.axes, step.dim, sizes)


def _all_to_all(step: Step) -> tuple[str, tuple[Arg, ...]]:
    split_sizes = MemberExtents(step.after.dims[step.dim][0], step.axes)
    joined_sizes = MemberExtents(step.before.dims[step.other][0], step.axes)
    return "distcell.all_to_all", (step.axes, step.dim, step.other, split_sizes, joined_sizes)


def _slice(step: Step) -> tuple[str, tuple[Arg, ...]]:
    part = step.after.dims[step.dim][0]
    base = len(step.before.dims[step.dim][0].axes)
    return "distcell.narrow", (step.dim, Offset(part, base), Extent((part,)))


_STEPS: dict[str, Callable[[Step], tuple[str, tuple[Arg, ...]]]] = {
    "reshape": _reshape,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "slice": _slice,
}
