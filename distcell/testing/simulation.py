"""The values of all ranks of a plan, computed in this process."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distcell.dtype import DTYPES
from distcell.errors import DataError, NotFoundError, did_you_mean
from distcell.graph import GRADIENTS, Input, Output
from distcell.program import Program
from distcell.random import RandomState, current_state
from distcell.report.explain import tied_paths
from distcell.runtime.collectives import CollectiveLog
from distcell.simulate.reductions import ReductionOrder
from distcell.simulate.values import SimulatedRanks, gather, scatter
from distcell.testing.network_plan import Inputs, NetworkPlan, arguments_of, leaves_of


@dataclass(frozen=True)
class Simulation:
    """The values of all ranks after one or more runs of a plan's program.

    Args:
        plan: The plan.
        outputs: What the network returned in the last run, global.
        gradients: The gradients of the last run, global, by path of the parameter or input.
        weights: The parameters after the last step, global, by path.
        buffers: The buffers after the last run, global, by path.
        losses: Of each run the sum of what gradients were taken of.
        logs: For each rank the collectives that it issued in all runs.
        pieces: For each value of the program what the ranks held in the last run.

    >>> from distcell.testing import plan
    >>> values = simulate(plan(torch.nn.Linear(4, 6), torch.ones(4, 4), "data", ranks=2))
    >>> list(values.gradients), [list(piece.shape) for piece in values.gradient_on_ranks("weight")]
    (['weight', 'bias'], [[6, 4], [6, 4]])
    """

    plan: NetworkPlan
    outputs: Any
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    losses: tuple[float, ...]
    logs: tuple[CollectiveLog, ...]
    pieces: Mapping[str, Sequence[Any]] = field(repr=False)

    def on_ranks(self, path: str) -> list[Tensor]:
        """What each rank held, before the last step, of a parameter, an input or a value.

        Args:
            path: A dotted path, the name of an argument, or the name of a value of the program.

        Raises:
            NotFoundError: There is nothing of that name.
        """
        return list(self._held(path, self.plan.program.graph.inputs))

    def gradient_on_ranks(self, path: str) -> list[Tensor]:
        """What each rank held of the gradient of a parameter or input.

        Args:
            path: Its path.

        Raises:
            NotFoundError: There is no gradient of that.
        """
        outputs = [item for item in self.plan.program.graph.outputs if item.kind in GRADIENTS]
        return list(self._held(path, outputs))

    def totals(self, rank: int = 0) -> Mapping[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """The collectives that a rank issued: by kind and axes their number and bytes."""
        return self.logs[rank].totals

    def bytes_by_axes(self, rank: int = 0) -> dict[str, int]:
        """What a rank put into exchanges, by the names of the axes with commas."""
        found: dict[str, int] = {}
        for (_, axes), (_, size) in self.totals(rank).items():
            name = ",".join(axes)
            found[name] = found.get(name, 0) + size
        return found

    def _held(self, path: str, items: Sequence[Input | Output]) -> Sequence[Any]:
        path = tied_paths(self.plan.net).get(path, path)
        names = [item.value for item in items if item.path == path]
        if not names and path in self.pieces:
            names = [path]
        if not names:
            known = [*(item.path for item in items), *self.pieces]
            raise NotFoundError(f"no rank holds a `{path}`", hint=did_you_mean(path, known))
        return self.pieces[names[0]]


def gradient_name(kind: str, path: str, parameters: Container[str]) -> str:
    """What a gradient goes by: its path; for an input whose path a parameter has, `input path`."""
    return f"input {path}" if kind == "grad_input" and path in parameters else path


def simulate(
    plan: NetworkPlan,
    inputs: Inputs | None = None,
    order: ReductionOrder = "rank",
    *,
    steps: int = 1,
    learning_rate: float = 0.0,
) -> Simulation:
    """Runs forward and backward of a plan for all its ranks in this process, by value.

    The gradients are those of the sum of all outputs that have one: of the loss, where the network
    returns it. The network is not changed.

    Args:
        plan: What `plan` returned.
        inputs: What the network is called with, of the shapes that were planned for; those that it
            was planned with when left out.
        order: The order in which reductions combine the ranks: `rank`, `ring` or `tree`.
        steps: How many times to run; after each run the weights go down their gradients.
        learning_rate: How far.

    Raises:
        DataError: The inputs have not the planned shapes.

    >>> from distcell.testing import plan
    >>> net = torch.nn.Linear(4, 6)
    >>> result = simulate(plan(net, torch.ones(4, 4), "data", ranks=2))
    >>> [tuple(piece.shape) for piece in result.on_ranks("input")], result.bytes_by_axes()
    ([(2, 4), (2, 4)], {'dp': 168})
    """
    given = leaves_of(
        plan.net, *((plan.args, plan.kwargs) if inputs is None else arguments_of(inputs))
    )
    _check_shapes(plan, given)
    return _Runs(plan, given, order).run(steps, learning_rate)


class _Runs:
    """Runs of one program, with every value of it among its outputs."""

    def __init__(
        self, plan: NetworkPlan, given: Mapping[str, Tensor], order: ReductionOrder
    ) -> None:
        self.plan, self.given = plan, given
        self.program = _with_all_values(plan.program)
        self.ranks = SimulatedRanks(self.program, order=order)
        net = plan.net
        self.weights = {p: t.detach().clone() for p, t in net.named_parameters()}
        self.buffers = {p: t.detach().clone() for p, t in net.named_buffers()}

    def run(self, steps: int, learning_rate: float) -> Simulation:
        state = RandomState(seed=current_state().seed)
        losses: list[float] = []
        outputs, gradients, pieces = self._once(state.next_key(training=self.plan.net.training))
        for step in range(steps):
            if step:
                state.optimizer_stepped()
                key = state.next_key(training=self.plan.net.training)
                outputs, gradients, pieces = self._once(key)
            losses.append(sum(float(outputs[i].sum()) for i in self.plan.captured.differentiable))
            for path in self.weights.keys() & gradients.keys():
                self.weights[path] = self.weights[path] - learning_rate * gradients[path]
        result = self.plan.captured.result(outputs)
        logs = tuple(self.ranks.logs)
        return Simulation(
            self.plan, result, gradients, self.weights, self.buffers, tuple(losses), logs, pieces
        )

    def _once(
        self, key: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Sequence[Any]]]:
        graph = self.program.graph
        entered = [self._enter(item, key) for item in graph.inputs]
        pieces: dict[str, Sequence[Any]] = {
            item.value: list(held) for item, held in zip(graph.inputs, entered, strict=True)
        }
        made = self.ranks.run(entered)
        outputs, gradients = [], {}
        for output, held in zip(graph.outputs, made, strict=True):
            pieces[output.value] = held
            if output.kind == "value":
                continue
            whole = gather(self.program, output.value, held)
            if output.kind == "output":
                outputs.append(whole)
            elif output.kind in GRADIENTS:
                gradients[gradient_name(output.kind, output.path, self.weights)] = whole
            else:
                self.buffers[output.path] = whole
        return outputs, gradients, pieces

    def _enter(self, item: Input, key: Tensor) -> list[Any]:
        value = self.program.graph.values[item.value]
        if item.kind == "tangent":
            outputs = [o for o in self.program.graph.outputs if o.kind == "output"]
            like = self.program.graph.values[outputs[int(item.path)].value]
            whole = torch.ones(like.shape, dtype=self._dtype(item))
        elif item.kind == "random":
            whole = key
        elif item.kind == "constant":
            whole = self.plan.captured.constants[item.path]
        else:
            held = {"param": self.weights, "buffer": self.buffers}.get(item.kind, self.given)
            whole = held[item.path]
        return scatter(self.program, value.name, whole.detach())

    def _dtype(self, item: Input) -> torch.dtype:
        return DTYPES[self.program.graph.values[item.value].dtype]


def _with_all_values(program: Program) -> Program:
    graph = program.graph
    leave = {output.value for output in graph.outputs}
    made = [n for op in graph.ops for n in op.outputs if graph.values[n].is_tensor]
    more = tuple(Output(name, "value", name) for name in made if name not in leave)
    return replace(program, graph=replace(graph, outputs=(*graph.outputs, *more)))


def _check_shapes(plan: NetworkPlan, given: Mapping[str, Tensor]) -> None:
    planned = {
        item.path: plan.program.graph.values[item.value].shape
        for item in plan.program.graph.inputs
        if item.kind == "input"
    }
    wrong = [
        f"{path}: planned for {list(shape)}, given {_shape_of(given.get(path))}"
        for path, shape in planned.items()
        if path not in given or tuple(given[path].shape) != shape
    ]
    if wrong:
        raise DataError(
            "the inputs are not those of the plan", where=wrong, hint="make a plan for these inputs"
        )


def _shape_of(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))
