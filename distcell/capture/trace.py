"""Runs a function without values and records its ops: as an FX graph, with a note on each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from distcell import compat
from distcell.capture.rewrites import batch_norm_writes, pure_batch_norm
from distcell.capture.source import sparse_error, torch_caller, user_line, value_error
from distcell.capture.tree import leaf_values
from distcell.scope import current_cell


@dataclass(frozen=True)
class Note:
    """Where an op comes from."""

    cell: str = ""
    source: str = ""
    phase: str = "forward"


@dataclass
class Call:
    """One call of a cell: the nodes (or, untraced, the tensors) that enter and leave."""

    cell: str
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Traced:
    """What a trace gives.

    Args:
        module: The ops, as FX nodes; its attributes are constants.
        outputs: The nodes (numbers, None) of what the function returned.
        notes: Where each node comes from.
        calls: The calls of cells that ended.
        marks: Nodes that stand for inputs which came into being during the trace.
        written: The new values of those inputs that were written into, by index.
    """

    module: fx.GraphModule
    outputs: tuple[Any, ...]
    notes: Mapping[fx.Node, Note]
    calls: tuple[Call, ...]
    marks: Mapping[fx.Node, tuple[str, str]]
    written: Mapping[int, fx.Node]


class Recorder(compat.TorchDispatchMode):
    """Notes for each op the cell, the user's line and the phase.

    Backward ops take cell and line of the forward op that made their autograd node.
    """

    def __init__(self, phase: str = "forward") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = phase
        self.notes: dict[fx.Node, Note] = {}
        self.calls: list[Call] = []
        self.marks: dict[fx.Node, tuple[str, str]] = {}
        self.replayed: Note | None = None
        self._running: list[Call] = []
        self._by_number: dict[int, Note] = {}
        self._last: fx.Node | None = None
        self._note = Note()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        note = self._where()
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            if compat.needs_value(error):
                where = note.cell, note.source
                raise value_error(str(func), *where, torch_caller()) from error
            raise
        if isinstance(result, Tensor) and result.layout is not torch.strided:
            raise sparse_error(note.cell, note.source)
        self._annotate(note)
        return result

    def _where(self) -> Note:
        """The note for what is called now."""
        if self.replayed is not None:
            return self.replayed
        if self.phase != "backward":
            note = Note(current_cell(), user_line(), self.phase)
            self._by_number.setdefault(compat.forward_number(), note)
            self._note = note
            return note
        number = compat.backward_number()
        found = None if number is None else self._by_number.get(number)
        if found is not None:
            self._note = found
        return Note(self._note.cell, self._note.source, "backward")

    def _annotate(self, note: Note) -> None:
        """Puts a note on all nodes made since the last time."""
        graph = compat.traced_graph()
        if graph is None:
            return
        last = node = next(reversed(graph.nodes))
        while node is not self._last and node.op != "root" and node not in self.notes:
            self.notes[node] = note
            node = node.prev
        self._last = last

    def mark(self, tensor: Tensor, kind: str, path: str) -> None:
        """Makes the op that made this tensor an input of the graph."""
        node = compat.traced_node(tensor)
        if node is None:
            raise ValueError(f"the tensor for {kind} {path} is not traced")
        self.marks[node] = (kind, path)

    def enter(self, cell: str, args: tuple[Any, ...]) -> None:
        """Notes the values that enter a cell."""
        self._running.append(Call(cell, _border(args)))

    def leave(self, cell: str, kwargs: Mapping[str, Any], result: Any) -> None:
        """Notes the values that leave a cell."""
        while self._running:  # calls above this one have failed, and somebody went on
            call = self._running.pop()
            if call.cell == cell:
                call.inputs += _border(kwargs)
                call.outputs = _border(result)
                self.calls.append(call)
                return


def _border(item: Any) -> list[Any]:
    """For each tensor in an item the node that made it, or the tensor where nothing traced it."""
    tensors = [leaf for leaf in leaf_values(item) if isinstance(leaf, Tensor)]
    return [compat.traced_node(tensor) or tensor for tensor in tensors]


def run_trace(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Tensor], recorder: Recorder
) -> Traced:
    """The ops of a function that returns a sequence of tensors; in-place ops are still in place."""
    module = compat.trace(function, inputs)
    outputs = _outputs(module)
    return Traced(module, outputs, recorder.notes, tuple(recorder.calls), dict(recorder.marks), {})


def functional(traced: Traced, inputs: Sequence[Tensor]) -> Traced:
    """The same ops without any that writes into a tensor; what was written becomes an output."""
    recorder = Recorder()
    replay = _Replay(traced, recorder)
    written: list[int] = []

    def pure(*args: Tensor) -> list[Any]:
        with compat.Functional() as functional, recorder:
            wrapped = [functional.wrap(arg) for arg in args]
            results = replay.replay(functional, wrapped)
            plain = [functional.unwrap(result) for result in results]
            for index, (arg, item) in enumerate(zip(args, wrapped, strict=True)):
                new = functional.unwrap(item)
                if new is not arg:
                    written.append(index)
                    plain.append(new)
            return plain

    with torch.no_grad():
        module = compat.trace(pure, [tensor.detach() for tensor in inputs])
    outputs = _outputs(module)
    count = len(outputs) - len(written)
    calls = tuple(
        Call(call.cell, replay.renew(call.inputs), replay.renew(call.outputs))
        for call in traced.calls
    )
    new_values = dict(zip(written, outputs[count:], strict=True))
    return Traced(module, outputs[:count], recorder.notes, calls, recorder.marks, new_values)


class _Replay(fx.Interpreter):
    """Runs a traced graph again, telling the recorder of each node's note.

    It keeps the nodes of the new trace that stand for old ones where a border or an input is.
    """

    def __init__(self, traced: Traced, recorder: Recorder) -> None:
        super().__init__(traced.module)
        self.traced, self.recorder = traced, recorder
        self.wanted = {n for call in traced.calls for n in (*call.inputs, *call.outputs)
                       if isinstance(n, fx.Node)}  # fmt: skip
        self.new: dict[fx.Node, fx.Node] = {}

    def replay(self, functional: compat.Functional, wrapped: Sequence[Any]) -> Sequence[Any]:
        """The outputs for wrapped inputs."""
        self.functional = functional
        results: Sequence[Any] = self.run(*wrapped, enable_io_processing=False)
        return results

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if batch_norm_writes(target, args):
            return pure_batch_norm(args)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.functional.wrap(super().get_attr(target, args, kwargs))

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.replayed = self.traced.notes.get(n, Note())
        result = super().run_node(n)
        if isinstance(result, Tensor) and (n in self.wanted or n in self.traced.marks):
            plain = self.functional.unwrap(result)
            node = compat.traced_node(plain)
            if node is not None:
                self.new[n] = node
            if n in self.traced.marks:
                self.recorder.mark(plain, *self.traced.marks[n])
        return result

    def renew(self, border: list[Any]) -> list[Any]:
        """The nodes of the new trace for those of the old one."""
        return [self.new.get(item, item) if isinstance(item, fx.Node) else item for item in border]


def _outputs(module: fx.GraphModule) -> tuple[Any, ...]:
    """What the traced function returned, as nodes."""
    returned = next(reversed(module.graph.nodes)).args[0]
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)
