"""Which values of a program share storage, when each is used last, what may be overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distcell.errors import InternalError
from distcell.graph import Op, Ref
from distcell.layout import canonical
from distcell.passes.aliases import RESHAPES, may_alias
from distcell.program import COLLECTIVES, Program
from distcell.rules import table

WRITTEN_KINDS = ("param", "buffer", "state")
"""Kinds of outputs that are the new values of inputs of the same kind and path."""

FOREVER = 1 << 60
"""The last use of what leaves the program."""


@dataclass(frozen=True)
class Storage:
    """How the values of a program are stored.

    Args:
        inplace: For the index of an op the target that writes its result into operand 0; for an
            all-reduce its own.
        last_use: For each value the index of the op that uses it last: its own when there is none.
        targets: For the index of an output that is the new value of an input, that input.
        writes: For the index of an op the indices of the outputs that are copied into their input
            right after it; under -1 those that are copied at the end.
        cloned: Indices of outputs that must be copied before they leave or are written.
    """

    inplace: Mapping[int, str]
    last_use: Mapping[str, int]
    targets: Mapping[int, str]
    writes: Mapping[int, tuple[int, ...]]
    cloned: frozenset[int]


def plan_storage(program: Program, donated: Iterable[str] = ()) -> Storage:
    """How the values of a program are stored, the same on every rank.

    Args:
        program: The program.
        donated: Names of inputs that may be overwritten before the program has come to its end.

    Raises:
        InternalError: When the new value of an input has not its shape, dtype and layout.

    Example:
        >>> from distcell.graph import Graph, Input, Output, Value
        >>> values = {n: Value(n, (2,), "f32") for n in "xyz"}
        >>> ops = (Op("aten.exp.default", (Ref("x"),), outputs=("y",)),
        ...        Op("aten.t.default", (Ref("y"),), outputs=("z",)))
        >>> graph = Graph((Input("x", "input", "x"),), ops, (Output("z", "output", "0"),), values)
        >>> from distcell.layout import Layout
        >>> from distcell.mesh import Mesh
        >>> layouts = {n: Layout.of((2,)) for n in "xyz"}
        >>> storage = plan_storage(Program(Mesh(), graph, layouts))
        >>> storage.last_use["x"], storage.last_use["y"]
        (0, 1)
    """
    return _Planner(program, frozenset(donated)).plan()


@dataclass
class _Planner:
    """Walks the ops once.

    `share` holds for each value all values that may share storage with it; `home` the input or
    the fresh result whose whole storage it is, in-place writes and reshapes followed.
    """

    program: Program
    donated: frozenset[str]
    share: dict[str, set[str]] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    lent: set[str] = field(default_factory=set)

    def plan(self) -> Storage:
        graph = self.program.graph
        inplace: dict[int, str] = {}
        for item in graph.inputs:
            self.share[item.value] = {item.value}
            self.home[item.value] = item.value
        for index, op in enumerate(graph.ops):
            self._add_results(op)
            target = self._inplace_target(index, op)
            if target is not None:
                inplace[index] = target
                self._join(op.outputs[0], op.args[0].name)
                self.home[op.outputs[0]] = self.home[op.args[0].name]
        return self._finish(inplace)

    def _finish(self, inplace: Mapping[int, str]) -> Storage:
        outputs = self.program.graph.outputs
        targets = self.targets
        copied = {i: p for i, p in targets.items() if self.home.get(outputs[i].value) != p}
        cloned = self._cloned(copied)
        writes: dict[int, tuple[int, ...]] = {}
        last_use = dict(self.last_use) | dict.fromkeys(targets.values(), FOREVER)
        for index, old in copied.items():
            after, new = self._write_after(index, old, cloned), outputs[index].value
            writes[after] = (*writes.get(after, ()), index)
            last_use[new] = max(last_use[new], FOREVER if after < 0 else after)
        return Storage(inplace, last_use, targets, writes, cloned)

    @cached_property
    def inputs(self) -> frozenset[str]:
        return frozenset(item.value for item in self.program.graph.inputs)

    @cached_property
    def left(self) -> frozenset[str]:
        """The values that leave the program, or are copied into an input when it ends."""
        return frozenset(output.value for output in self.program.graph.outputs)

    @cached_property
    def last_use(self) -> Mapping[str, int]:
        """The last uses by ops, and by outputs that leave as they are."""
        last = {item.value: -1 for item in self.program.graph.inputs}
        for index, op in enumerate(self.program.graph.ops):
            last.update(dict.fromkeys((*op.inputs, *op.outputs), index))
        for index, output in enumerate(self.program.graph.outputs):
            if index not in self.targets:
                last[output.value] = FOREVER
        return last

    @cached_property
    def targets(self) -> Mapping[int, str]:
        """For each output that is the new value of an input tensor, the input."""
        graph = self.program.graph
        tensors = [item for item in graph.inputs if graph.values[item.value].is_tensor]
        inputs = {(item.kind, item.path): item.value for item in tensors}
        found = {}
        for index, output in enumerate(graph.outputs):
            old = inputs.get((output.kind, output.path))
            if output.kind not in WRITTEN_KINDS or old is None:
                continue
            if not self._fits(old, output.value, partial=True):
                names = (old, output.value)
                raise InternalError(
                    f"the new value of {output.kind} `{output.path}` does not fit it",
                    where=[f"{name}: {self.program.describe(name)}" for name in names],
                )
            found[index] = old
        return found

    def _add_results(self, op: Op) -> None:
        for name in op.outputs:
            self.share[name] = {name}
        if op.target == "distcell.all_reduce_many":
            self.lent.update(op.outputs)  # they lie in a buffer that stays
        elif op.target in COLLECTIVES or not may_alias(op.target):
            self.home.update((name, name) for name in op.outputs)
        else:
            for name in op.outputs:
                for operand in op.inputs:
                    self._join(name, operand)
            self._follow_reshape(op)

    def _follow_reshape(self, op: Op) -> None:
        """All of a fresh result, in another shape, may be overwritten as the result itself may.

        Not so an input: a reshape that had to copy would leave it as it was.
        """
        if op.target in RESHAPES and isinstance(op.args[0], Ref):
            home = self.home.get(op.args[0].name)
            if home is not None and home not in self.inputs:
                self.home[op.outputs[0]] = home

    def _join(self, a: str, b: str) -> None:
        small, large = sorted((self.share[a], self.share[b]), key=len)
        if small is not large:
            large |= small
            for name in small:
                self.share[name] = large

    def _inplace_target(self, index: int, op: Op) -> str | None:
        if op.many or len(op.outputs) != 1 or not op.args or not isinstance(op.args[0], Ref):
            return None
        operand, target = op.args[0].name, _target_in_place(op.target)
        if target is None or not self._fits(operand, op.outputs[0], partial=False):
            return None
        home = self.home.get(operand)
        if home is None or (home in self.inputs and home not in self.donated):
            return None
        members = self.share[operand]
        if sum(name in members for name in op.inputs) != 1:
            return None
        kept = self.inputs - self.donated
        free = all(
            self.last_use[name] <= index and name not in self.left and name not in kept
            for name in members
        )
        return target if free else None

    def _fits(self, old: str, new: str, *, partial: bool) -> bool:
        """Whether two values have the same local shapes and dtype; with `partial` the layout."""
        a, b = self.program.graph.values[old], self.program.graph.values[new]
        if not (a.is_tensor and b.is_tensor) or a.dtype != b.dtype:
            return False
        mesh = self.program.mesh
        left, right = (canonical(self.program.layouts[name], mesh) for name in (old, new))
        return left == right if partial else left.dims == right.dims

    def _cloned(self, copied: Mapping[int, str]) -> frozenset[int]:
        """Outputs whose storage is about to be overwritten, or is only lent."""
        outputs = self.program.graph.outputs
        written = {old for i, old in self.targets.items() if outputs[i].value != old}
        cloned = set()
        for index, output in enumerate(outputs):
            members = self.share[output.value]
            if index in copied:
                clone = bool(members & written)
            else:
                clone = index not in self.targets and bool(members & (written | self.lent))
            if clone:
                cloned.add(index)
        return frozenset(cloned)

    def _write_after(self, index: int, old: str, cloned: frozenset[int]) -> int:
        """The op after which a new value may be copied into its input; -1 for the end."""
        new = self.program.graph.outputs[index].value
        others = [o.value for i, o in enumerate(self.program.graph.outputs) if i != index]
        if old not in self.donated or index in cloned or self.share[old].intersection(others):
            return -1
        if new not in self.made_at:
            return -1
        return max(self.made_at[new], *(self.last_use[name] for name in self.share[old]))

    @cached_property
    def made_at(self) -> Mapping[str, int]:
        ops = self.program.graph.ops
        return {name: index for index, op in enumerate(ops) for name in op.outputs}


def _target_in_place(target: str) -> str | None:
    if target == "distcell.all_reduce":
        return target
    definition = table.find(target)
    return definition.inplace if definition is not None else None
