"""A program as generated Python: as fast as eager, every value freed after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from distcell import compat
from distcell.dtype import DTYPES
from distcell.errors import InternalError
from distcell.graph import Op
from distcell.program import Program
from distcell.runtime.collectives import Collectives
from distcell.runtime.generator import Generator, label_of, note
from distcell.runtime.local_ops import place
from distcell.runtime.source import call


class RankExchange:
    """Writes collectives as calls of a `Collectives`."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def lent(self, generator: Generator, op: Op) -> list[torch.Tensor]:
        """Where the operands of a fused reduction are best computed: the buffer that it sums in."""
        program, rank = generator.program, generator.ranks[0]
        values = program.graph.tensors(op)
        shapes = [program.local_shape(value.name, rank) for value in values]
        one = torch.empty((), dtype=DTYPES[values[0].dtype], device=generator.device)
        like = [one.expand(shape) for shape in shapes]  # no memory of their own
        return self._collectives.lend_many(like, *op.args[1:], label=_label(op))

    def write(self, generator: Generator, op: Op, inplace: bool) -> None:
        """Adds the line that runs a collective."""
        generator.declare(op, [()])
        kind = op.target.removeprefix("distcell.")
        method = getattr(self._collectives, kind)
        rank = generator.ranks[0]
        args, kwargs = place(op, generator.program.mesh, rank, generator.device)
        texts = {key: generator.argument(arg, 0) for key, arg in kwargs.items()}
        if inplace:
            texts["inplace"] = "True"
        texts["label"] = repr(_label(op))
        line = call(
            generator.source.constant(method, kind),
            tuple(generator.argument(arg, 0) for arg in args),
            texts,
        )
        left = generator.results(op, 0)
        generator.source.add(f"{left} = {line}" if left else line, note(op))


def _label(op: Op) -> str:
    # the results of a fused reduction lie in a buffer that stays, and that is found by the label
    return f"{op.outputs[0]} {label_of(op)}".strip() if op.many else label_of(op)


class LoadedProgram:
    """A program that is ready to run on one rank.

    Called with one list of the graph's inputs, which it empties, so that each is freed after its
    last use. It returns the outputs in the graph's order; the new value of an input (a parameter,
    a buffer, a state) is that input, overwritten.
    """

    def __init__(
        self, program: Program, function: Callable[[list[Any]], list[Any]], source: str
    ) -> None:
        self.program = program
        self.source = source
        self._function = function
        self._count = len(program.graph.inputs)

    def __call__(self, boxed: list[Any]) -> list[Any]:
        """The outputs of the program.

        Raises:
            InternalError: When the list has not one item for each input.
        """
        if len(boxed) != self._count:
            raise InternalError(f"the program has {self._count} inputs, {len(boxed)} were given")
        with torch.no_grad(), compat.below_autograd():
            return self._function(boxed)


def load(
    program: Program,
    rank: int,
    collectives: Collectives,
    *,
    donated: Iterable[str] = (),
    device: torch.device | str = "cpu",
) -> LoadedProgram:
    """The program as one rank runs it.

    Args:
        program: The program of all ranks.
        rank: The rank.
        collectives: What exchanges tensors with the other ranks.
        donated: Names of inputs that may be overwritten as soon as nothing needs them any more,
            even when the program then fails.
        device: The device of the rank.

    Example:
        >>> from distcell.graph import Graph, Input, Output, Ref, Value
        >>> from distcell.layout import Layout
        >>> from distcell.mesh import Mesh
        >>> values = {name: Value(name, (2,), "f32") for name in "xy"}
        >>> graph = Graph((Input("x", "input", "x"),),
        ...               (Op("aten.neg.default", (Ref("x"),), outputs=("y",)),),
        ...               (Output("y", "output", "0"),), values)
        >>> layouts = {name: Layout.of((2,)) for name in "xy"}
        >>> run = load(Program(Mesh(), graph, layouts), 0, None)
        >>> run([torch.ones(2)])
        [tensor([-1., -1.])]
    """
    generator = Generator(
        program, (rank,), RankExchange(collectives), donated=donated, device=device
    )
    title = f"distcell program {program.digest[:8]} rank {rank}"
    function = generator.run(title)
    return LoadedProgram(program, function, generator.source.text("program", "boxed"))
