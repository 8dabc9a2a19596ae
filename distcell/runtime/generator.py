"""Writes the source of a program for one rank, or for several at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from distcell.dtype import DTYPES
from distcell.graph import Arg, Op, Ref
from distcell.layout import Layout, neutral_element
from distcell.program import COLLECTIVES, Program
from distcell.rules import table
from distcell.runtime.checks import check_replicas, report_misfit
from distcell.runtime.local_ops import is_place_dependent, kernel, place, return_count
from distcell.runtime.source import Source, call
from distcell.runtime.storage import Storage, plan_storage

Key = tuple[Any, ...]


class Exchange(Protocol):
    """How a collective is written; the generator asks it for every one."""

    def lent(self, generator: Generator, op: Op) -> list[torch.Tensor]:
        """Where the operands of a fused reduction are best computed; nothing when anywhere is."""
        ...

    def write(self, generator: Generator, op: Op, inplace: bool) -> None:
        """Adds the lines that run a collective and declares its results."""
        ...


class Generator:
    """Writes the source of a program for one rank, or for several at once.

    Ranks that hold the same tensor of a value form a *class* of the value; each class has one
    variable. For a single rank every value has one class. For all ranks of a mesh an op is written
    once for each distinct choice of its operands' classes and its arguments, so that what is
    replicated is computed once.

    Args:
        program: The program.
        ranks: The ranks, in ascending order.
        exchange: How collectives are written.
        donated: As in `plan_storage`.
        device: The device on which tensors are made.
        checked: Whether each tensor's shape and dtype are compared with what the layout says.
    """

    def __init__(
        self,
        program: Program,
        ranks: Sequence[int],
        exchange: Exchange,
        *,
        donated: Iterable[str] = (),
        device: torch.device | str = "cpu",
        checked: bool = False,
    ) -> None:
        self.program = program
        self.ranks = tuple(ranks)
        self.source = Source()
        self.storage: Storage = plan_storage(program, donated)
        self.device = torch.device(device)
        self.classes: dict[str, tuple[int, ...]] = {}
        self.variables: dict[str, list[str]] = {}
        self._checked = checked
        self._exchange = exchange
        self._shapes: dict[Layout, list[tuple[int, ...]]] = {}
        self._into: dict[str, torch.Tensor] = {}

    def run(self, title: str) -> Callable[[list[Any]], list[Any]]:
        """The compiled function: one list of all classes of all inputs in, and one of outputs out.

        Args:
            title: What tracebacks show in place of a file.
        """
        graph = self.program.graph
        self._borrow()
        self._write_inputs()
        dying = self._dying()
        self._delete(dying.get(-1, ()))
        for index, op in enumerate(graph.ops):
            if op.target in COLLECTIVES:
                self._exchange.write(self, op, index in self.storage.inplace)
                self._merge_replicas(op)
            else:
                self._write_local(op, self.storage.inplace.get(index))
            if self._checked:
                self._write_checks(op)
            for output in self.storage.writes.get(index, ()):
                self._write_copy(output)
            self._delete(dying.get(index, ()))
        self._write_outputs()
        return self.source.compile("program", "boxed", title)

    def _borrow(self) -> None:
        """Finds the values that can be computed right where a fused reduction sums them."""
        graph = self.program.graph
        uses = Counter(name for op in graph.ops for name in op.inputs)
        uses.update(output.value for output in graph.outputs)
        able = {
            op.outputs[0]
            for op in graph.ops
            if _target_into(op) is not None and uses[op.outputs[0]] == 1
        }
        for op in graph.ops:
            if op.target == "distcell.all_reduce_many" and able.intersection(op.inputs):
                views = self._exchange.lent(self, op)
                pairs = zip(op.args[0], views, strict=False)
                self._into.update({ref.name: view for ref, view in pairs if ref.name in able})

    def declare(self, op: Op, keys: Sequence[Key], names: Sequence[str] | None = None) -> list[Key]:
        """Makes the variables of an op's results; returns the distinct keys, in order of ranks.

        Args:
            op: The op.
            keys: For each rank what its results depend on: equal keys, equal results.
            names: The results; all by default.
        """
        distinct = list(dict.fromkeys(keys))
        number = {key: index for index, key in enumerate(distinct)}
        classes = tuple(number[key] for key in keys)
        for name in op.outputs if names is None else names:
            self._declare_value(name, classes, len(distinct))
        return distinct

    def variable_of(self, name: str, position: int) -> str:
        """The variable in which a value lies for the rank at a position of `ranks`."""
        return self.variables[name][self.classes[name][position]]

    def results(self, op: Op, position: int) -> str:
        """The left side of the assignment of an op's results."""
        names = [self.variable_of(name, position) for name in op.outputs]
        return f"{', '.join(names)}," if op.many else ", ".join(names)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """The local shapes of a value on the ranks."""
        layout = self.program.layouts[name]
        if layout not in self._shapes:
            mesh = self.program.mesh
            self._shapes[layout] = [layout.local_shape(mesh, rank) for rank in self.ranks]
        return self._shapes[layout]

    def _declare_value(self, name: str, classes: tuple[int, ...], count: int) -> None:
        self.classes[name] = classes
        suffix = [""] if count == 1 else [f"_{index}" for index in range(count)]
        self.variables[name] = [self.source.variable(name + text) for text in suffix]

    def _write_inputs(self) -> None:
        every: list[str] = []
        for item in self.program.graph.inputs:
            keys = self._replica_keys(item.value)
            numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
            self._declare_value(item.value, tuple(numbers[k] for k in keys), len(numbers))
            every += self.variables[item.value]
        self.source.add(f"[{', '.join(every)}] = boxed")
        self.source.add("boxed.clear()")

    def _replica_keys(self, name: str) -> list[Key]:
        if not self.program.graph.values[name].is_tensor or len(self.ranks) == 1:
            return [()] * len(self.ranks)
        return self._coords_on(self.program.layouts[name].axes)

    def _coords_on(self, axes: frozenset[str]) -> list[Key]:
        mesh, ordered = self.program.mesh, sorted(axes)
        return [tuple(mesh.coords(rank)[axis] for axis in ordered) for rank in self.ranks]

    def _write_local(self, op: Op, inplace: str | None) -> None:
        keys = self._local_keys(op)
        distinct = self.declare(op, [key for key, _ in keys])
        first = {key: position for position, (key, _) in reversed(list(enumerate(keys)))}
        target = inplace if inplace and self._is_injective(op) else op.target
        same = None if is_place_dependent(op) else self._place(op, 0)
        for key in distinct:
            position = first[key]
            skip = keys[position][1]
            line = self._neutral(op, position) if skip else self._call(op, target, position, same)
            left = self.results(op, position)
            self.source.add(f"{left} = {line}" if left else line, note(op))
        self._merge_replicas(op)

    def _local_keys(self, op: Op) -> list[tuple[Key, bool]]:
        """For each rank what the op's results depend on, and whether the op is skipped there."""
        operands = tuple(dict.fromkeys(op.inputs))
        skipped = self._skipped(op)
        depends = is_place_dependent(op)
        keys = []
        for position in range(len(self.ranks)):
            key: Key = tuple(self.classes[name][position] for name in operands)
            if skipped[position]:
                key = ("skip", *self._result_shapes(op, position))
            elif depends:
                args, kwargs = self._place(op, position)
                key = (key, args, tuple(kwargs.items()))
            keys.append((key, skipped[position]))
        return keys

    def _result_shapes(self, op: Op, position: int) -> list[tuple[int, ...]]:
        results = self.program.graph.results(op)
        return [self.shapes(value.name)[position] for value in results if value.is_tensor]

    def _skipped(self, op: Op) -> list[bool]:
        """On which ranks the op is skipped: an operand is empty there, and nothing hangs on it.

        Kernels crash, raise or give NaN on empty operands. What comes out is empty, or a term of a
        reduction to which the rank has nothing to add. A term that a whole operand carries along
        (the base of a scatter) is kept: then the kernel runs.
        """
        graph = self.program.graph
        never = [False] * len(self.ranks)
        tensors, results = graph.tensors(op), graph.results(op)
        if not results or not all(v.is_tensor or v.dtype == "none" for v in results):
            return never
        if not any(self._may_be_empty(value.name) for value in tensors):
            return never
        return [self._is_skipped(op, position) for position in range(len(self.ranks))]

    def _is_skipped(self, op: Op, position: int) -> bool:
        graph = self.program.graph
        results = [value for value in graph.results(op) if value.is_tensor]
        empty = {v.name: 0 in self.shapes(v.name)[position] for v in (*graph.tensors(op), *results)}
        if not any(empty[value.name] and 0 not in value.shape for value in graph.tensors(op)):
            return False
        if all(empty[value.name] for value in results):
            return True
        carried = any(
            self.program.layouts[value.name].partial and not empty[value.name]
            for value in graph.tensors(op)
        )
        partial = all(empty[v.name] or self.program.layouts[v.name].partial for v in results)
        return partial and not carried

    def _may_be_empty(self, name: str) -> bool:
        return 0 not in self.program.graph.values[name].shape and any(
            0 in shape for shape in self.shapes(name)
        )

    def _neutral(self, op: Op, position: int) -> str:
        parts = []
        for name in op.outputs:
            if not self.program.graph.values[name].is_tensor:
                parts.append("None")
                continue
            dtype = DTYPES[self.program.graph.values[name].dtype]
            value = neutral_element(self.program.layouts[name].reduction, dtype)
            args = (self.literal(self.shapes(name)[position]), self.literal(value))
            kwargs = {"dtype": self.literal(dtype), "device": self.literal(self.device)}
            parts.append(call(self.source.constant(torch.full, "full"), args, kwargs))
        return f"{', '.join(parts)}," if op.many else ", ".join(parts)

    def _place(self, op: Op, position: int) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        return place(op, self.program.mesh, self.ranks[position], self.device)

    def _call(
        self,
        op: Op,
        target: str,
        position: int,
        placed: tuple[tuple[Arg, ...], dict[str, Arg]] | None,
    ) -> str:
        into = self._into.get(op.outputs[0]) if op.outputs else None
        if into is not None:
            target = _target_into(op) or target
        function = self.source.constant(kernel(target), target.removeprefix("aten."))
        args, kwargs = placed or self._place(op, position)
        texts = tuple(self.argument(arg, position) for arg in args)
        options = {k: self.argument(a, position) for k, a in kwargs.items()}
        if into is not None:
            options["out"] = self.source.constant(into, f"buffer_{op.outputs[0]}")
        line = call(function, texts, options)
        if op.many and return_count(target) != len(op.outputs):
            # Results that an op was asked not to make are no values of the program.
            mask = self.literal(table.output_mask(op))
            return f"{self.source.constant(table.asked_for, 'asked_for')}({line}, {mask})"
        return line

    def argument(self, arg: Arg, position: int) -> str:
        """The text of an argument on the rank at a position."""
        if isinstance(arg, Ref):
            return self.variable_of(arg.name, position)
        if isinstance(arg, tuple):
            items = [self.argument(item, position) for item in arg]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        return self.literal(arg)

    def literal(self, value: Any) -> str:
        """The text of an argument that holds no value of the program."""
        return self.source.literal(value)

    def _is_injective(self, op: Op) -> bool:
        """Whether no tensor of operand 0 is used for two tensors of the result."""
        pairs = set(zip(self.classes[op.args[0].name], self.classes[op.outputs[0]], strict=True))
        return len(pairs) == len({old for old, _ in pairs})

    def _merge_replicas(self, op: Op) -> None:
        """Compares results that the layout calls replicas but that were computed apart."""
        if len(self.ranks) == 1:
            return
        for name in op.outputs:
            if not self.program.graph.values[name].is_tensor:
                continue
            replicas: dict[Key, dict[int, None]] = {}
            keys = self._replica_keys(name)
            for key, number in zip(keys, self.classes[name], strict=True):
                replicas.setdefault(key, {})[number] = None
            if all(len(numbers) == 1 for numbers in replicas.values()):
                continue
            self._write_merge(op, name, keys, [list(numbers) for numbers in replicas.values()])

    def _write_merge(
        self, op: Op, name: str, keys: Sequence[Key], groups: Sequence[Sequence[int]]
    ) -> None:
        check = self.source.constant(check_replicas, "check_replicas")
        old = self.variables[name]
        label = self.literal(f"{self.program.describe(name)} = {op}  {note(op)}")
        for numbers in groups:
            members = ", ".join(old[number] for number in numbers)
            self.source.add(f"{check}({label}, ({members},))")
        position = {key: index for index, key in reversed(list(enumerate(keys)))}
        kept = [old[self.classes[name][position[key]]] for key in dict.fromkeys(keys)]
        numbers_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self.classes[name] = tuple(numbers_of[key] for key in keys)
        self.variables[name] = kept
        if gone := sorted(set(old) - set(kept)):
            self.source.add(f"del {', '.join(gone)}")

    def _write_checks(self, op: Op) -> None:
        report = self.source.constant(report_misfit, "report_misfit")
        for value in self.program.graph.results(op):
            if not value.is_tensor:
                continue
            dtype, shapes = self.literal(DTYPES[value.dtype]), self.shapes(value.name)
            wanted = {self.variable_of(value.name, i): shape for i, shape in enumerate(shapes)}
            found = ", ".join(f"{variable}.shape" for variable in wanted)
            sizes = self.source.constant(tuple(wanted.values()), f"shapes_of_{value.name}")
            first = next(iter(wanted))
            self.source.add(f"if ({found},) != {sizes} or {first}.dtype is not {dtype}:")
            label = self.literal(f"{self.program.describe(value.name)} = {op}  {note(op)}")
            self.source.add(f"    {report}({label}, ({', '.join(wanted)},), {sizes})")

    def _dying(self) -> Mapping[int, list[str]]:
        dying: dict[int, list[str]] = {}
        for name, last in self.storage.last_use.items():
            dying.setdefault(last, []).append(name)
        return dying

    def _delete(self, names: Iterable[str]) -> None:
        gone = [variable for name in names for variable in self.variables[name]]
        if gone:
            self.source.add(f"del {', '.join(gone)}")

    def _write_copy(self, index: int) -> None:
        """Copies a new value into the storage of its input."""
        output = self.program.graph.outputs[index]
        old = self.storage.targets[index]
        pairs = dict.fromkeys(
            (self.variable_of(old, i), self.variable_of(output.value, i))
            for i in range(len(self.ranks))
        )
        for into, value in pairs:
            self.source.add(f"{into}.copy_({value})", f"{output.kind} {output.path}")

    def _write_outputs(self) -> None:
        graph, storage = self.program.graph, self.storage
        copies = self._write_clones()
        for index in storage.writes.get(-1, ()):
            self._write_late_copy(index, copies.get(index))
        left = []
        for index, output in enumerate(graph.outputs):
            if index in storage.targets:
                left += self.variables[storage.targets[index]]
            else:
                left += copies.get(index) or self.variables[output.value]
        self.source.add(f"return [{', '.join(left)}]")

    def _write_clones(self) -> dict[int, list[str]]:
        copies: dict[int, list[str]] = {}
        for index in sorted(self.storage.cloned):
            output = self.program.graph.outputs[index]
            copies[index] = []
            for variable in self.variables[output.value]:
                copy = self.source.variable(f"{variable}_copy")
                self.source.add(f"{copy} = {variable}.clone()", f"{output.kind} {output.path}")
                copies[index].append(copy)
        return copies

    def _write_late_copy(self, index: int, copies: list[str] | None) -> None:
        if copies is None:
            self._write_copy(index)
            return
        output, old = self.program.graph.outputs[index], self.storage.targets[index]
        classes = self.classes[output.value]
        pairs = dict.fromkeys(
            (self.variable_of(old, i), copies[classes[i]]) for i in range(len(self.ranks))
        )
        for into, value in pairs:
            self.source.add(f"{into}.copy_({value})", f"{output.kind} {output.path}")

    @cached_property
    def output_classes(self) -> list[tuple[int, ...]]:
        """For each output, for each rank, which of its variables the rank holds."""
        storage = self.storage
        return [
            self.classes[storage.targets.get(index, output.value)]
            for index, output in enumerate(self.program.graph.outputs)
        ]


def _target_into(op: Op) -> str | None:
    definition = table.find(op.target)
    return definition.into if definition is not None else None


def label_of(op: Op) -> str:
    """Where a collective comes from, as the log shows it."""
    return " ".join(part for part in (op.cell, op.source) if part)


def note(op: Op) -> str:
    """What stands beside a line: the op, the cell path and the user's line."""
    return "  ".join(part for part in (op.target, op.cell, op.source) if part)
