"""What distcell would do with a network: decided, not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcell.capture import Captured, capture_call, flatten
from distcell.capture.arguments import argument_names
from distcell.cell import declared_rules, inside_engine
from distcell.engine.planning import Planned, plan_graph, with_rules
from distcell.errors import NotFoundError, UserTypeError, did_you_mean
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.parameter import global_shape
from distcell.partition.emit import Reshard
from distcell.program import Program
from distcell.report.explain import explain, tied_paths
from distcell.report.figures import Collective, Spread
from distcell.report.optimizer import state_of_optimizers
from distcell.report.plan_text import blocks_of
from distcell.report.summary import Summary, summarise
from distcell.report.table import render
from distcell.sharding.plan import Note, Reason
from distcell.strategy import Strategy, load_strategy

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a network is called with: a tensor, positional arguments, or keyword arguments."""


@dataclass(frozen=True)
class NetworkPlan:
    """What distcell would do with a network on some ranks. Printing it shows the report.

    Args:
        net: The network.
        args: The positional arguments that it was planned for.
        kwargs: The keyword arguments.
        captured: The captured call.
        planned: The layouts and the program.
        strategy: What was asked for.

    >>> found = plan(torch.nn.Linear(4, 6), torch.ones(4, 4), "data", ranks=2)
    >>> print(found.mesh, found.layout("input"), [one.kind for one in found.collectives])
    dp=2 [4@dp, 4] ['all_gather', 'all_reduce']
    """

    net: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    captured: Captured
    planned: Planned
    strategy: Strategy

    def __str__(self) -> str:
        return render(blocks_of(self.summary))

    @property
    def mesh(self) -> Mesh:
        """The ranks, arranged along the axes of the strategy."""
        return self.planned.plan.mesh

    @property
    def program(self) -> Program:
        """What each rank runs: forward and backward."""
        return self.planned.program

    @property
    def reasons(self) -> Mapping[str, tuple[Reason, ...]]:
        """For each value why its axes are there."""
        return self.planned.plan.reasons

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """The changes of layout that exchange data."""
        return self.planned.reshards

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the plan reports: ops without a rule, uneven dims, how slices were read."""
        return self.planned.plan.notes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All exchanges of data of forward and backward, in their order."""
        return self.summary.collectives

    @property
    def bytes_by_axes(self) -> Mapping[str, Spread]:
        """What each rank puts into exchanges, by the names of the axes with commas."""
        return self.summary.bytes_by_axes

    @property
    def memory(self) -> Mapping[str, Spread]:
        """The bytes that each rank holds: `parameters`, `gradients`, `optimizer`, `peak`, ..."""
        return self.summary.memory

    @cached_property
    def summary(self) -> Summary:
        """Everything that the report shows, as data."""
        state = state_of_optimizers(self.net)
        return summarise(self.planned, state, self.strategy.source)

    def layout(self, path: str) -> Layout:
        """The layout of a parameter, a buffer, an input, the output of a cell, or a value.

        Args:
            path: A dotted path, the name of an argument, or the name of a value of the graph.

        Raises:
            NotFoundError: There is nothing of that name, or the cell has several outputs.
        """
        graph, layouts = self.planned.plan.graph, self.planned.plan.layouts
        name = tied_paths(self.net).get(path, path)
        kinds = ("param", "buffer", "input")  # the path of an incoming gradient is a number
        found = [i.value for i in graph.inputs if i.path == name and i.kind in kinds]
        found = (
            found
            or [n for n in self._border(path)[1] if n in layouts]
            or [n for n in (path,) if n in layouts]
        )
        if len(found) == 1:
            return layouts[found[0]]
        known = [*(i.path for i in graph.inputs), *(b.cell for b in graph.borders)]
        hint = "use `output_layouts`" if found else did_you_mean(path, filter(None, known))
        what = f"`{path}` has {len(found)} outputs" if found else f"the plan has no `{path}`"
        raise NotFoundError(what, hint=hint)

    def input_layouts(self, cell: str) -> tuple[Layout | None, ...]:
        """The layouts of the tensors that enter the first call of a cell, None for unused ones."""
        return tuple(map(self.planned.plan.layouts.get, self._border(cell)[0]))

    def output_layouts(self, cell: str) -> tuple[Layout | None, ...]:
        """The layouts of the tensors that leave the first call of a cell, None for unused ones."""
        return tuple(map(self.planned.plan.layouts.get, self._border(cell)[1]))

    def explain(self, path: str) -> str:
        """Why something has its layout: each axis with the way back to its annotation.

        Args:
            path: As for `layout`, or a cell for all that crosses its border.

        Raises:
            NotFoundError: There is nothing of that name.
        """
        return explain(self.planned, path, tied=tied_paths(self.net))

    def _border(self, cell: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for border in self.planned.plan.graph.borders:
            if border.cell == cell:
                return border.inputs, border.outputs
        return (), ()


def plan(
    net: torch.nn.Module, inputs: Inputs, strategy: str | Path | Strategy, ranks: int
) -> NetworkPlan:
    r"""What distcell would do with a call of a network and its backward.

    Args:
        net: A Cell or any torch module; nothing is done to it.
        inputs: What it is called with: a tensor, a sequence of positional arguments, or a mapping
            of keyword arguments.
        strategy: A name of the library, the path of a file, the text of one, or a `Strategy`.
        ranks: The number of ranks.

    Raises:
        UserTypeError: An argument has another type.
        StrategyError: The strategy does not fit the network or the number of ranks.
        CaptureError: The call cannot be captured.
        PlanError: The plan breaks a rule that the strategy sets.

    >>> net = torch.nn.Linear(4, 6)
    >>> text = 'distcell: 1\nmesh: {tp: 2}\ncells: {"": {params: {weight: [tp, _]}}}'
    >>> found = plan(net, torch.ones(3, 4), text, ranks=2)
    >>> print(found.layout("weight"), found.layout("bias"), found.layout(""))
    [6@tp, 4] [6@tp] [3, 6@tp]
    """
    if not isinstance(net, torch.nn.Module):
        raise UserTypeError(f"a {type(net).__name__} cannot be planned", hint="pass a module")
    args, kwargs = arguments_of(inputs)
    wanted = with_rules(strategy_of(strategy), declared_rules(net))
    states = (*net.named_parameters(), *net.named_buffers())
    shapes = {path: tuple(global_shape(tensor)) for path, tensor in states}
    with inside_engine():
        captured = capture_call(net, args, kwargs, shapes=shapes)
    groups: dict[str, list[str]] = {}
    for other, first in captured.tied.items():
        groups.setdefault(first, [first]).append(other)
    mesh = Mesh(wanted.mesh_for(ranks))
    planned = plan_graph(captured.graph, net, wanted, mesh, tied=groups.values())
    return NetworkPlan(net, args, kwargs, captured, planned, wanted)


def arguments_of(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of a call."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    raise UserTypeError(
        f"`inputs` is a {type(inputs).__name__}",
        hint="pass a tensor, a tuple of positional arguments or a dict of keyword arguments",
    )


def leaves_of(
    net: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    """The tensors that a network is called with, by path."""
    given = {**dict(zip(argument_names(net, len(args)), args, strict=True)), **kwargs}
    return flatten(given)[1]


def strategy_of(strategy: str | Path | Strategy) -> Strategy:
    """The strategy of a name, a path or a text."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, (str, Path)):
        raise UserTypeError(
            f"`strategy` is a {type(strategy).__name__}",
            hint="pass the name of a strategy, the path or the text of a file, or a Strategy",
        )
    if isinstance(strategy, str) and ("\n" in strategy or strategy.startswith("distcell:")):
        return Strategy.from_text(strategy)
    return load_strategy(strategy)
