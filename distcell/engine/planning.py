"""From a network and what it is called with to a plan and its program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from distcell.context import auto_parallel_context
from distcell.graph import Graph
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.partition.emit import Reshard
from distcell.partition.partition import partition
from distcell.passes.comm_fusion import fuse_gradients
from distcell.program import Program
from distcell.sharding.plan import Plan
from distcell.sharding.planner import Annotations, make_plan
from distcell.strategy import CellRule, Strategy, resolve_cells, resolve_inputs


@dataclass(frozen=True)
class Planned:
    """What was decided for one graph.

    Args:
        plan: Layouts with their reasons.
        program: What the ranks run, gradients fused.
        reshards: The changes of layout in it.
    """

    plan: Plan
    program: Program
    reshards: tuple[Reshard, ...]


def plan_graph(
    graph: Graph,
    module: torch.nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    *,
    tied: Iterable[Sequence[str]] = (),
    fixed: Mapping[str, Layout] | None = None,
) -> Planned:
    """The plan and the program of a captured graph.

    Args:
        graph: The captured graph.
        module: The network: its cell paths and parameter paths are what patterns match.
        strategy: What the user asks for, `Cell.shard` calls among its rules.
        mesh: The mesh.
        tied: Groups of paths that are one parameter.
        fixed: The layouts of parameters that are split already.

    Raises:
        StrategyError: When the strategy does not fit the network.
        PlanError: When the plan breaks a rule that the strategy sets.
    """
    notes = annotations_of(graph, module, strategy, tied=tied, fixed=fixed or {})
    plan = make_plan(graph, mesh, notes)
    parted = partition(plan)
    return Planned(plan, _fused(parted.program), parted.reshards)


def _fused(program: Program) -> Program:
    """The program with its gradients exchanged together, as the context has it."""
    size = auto_parallel_context().fused_bytes
    if size == 0:
        return program
    return fuse_gradients(program) if size is None else fuse_gradients(program, size)


def annotations_of(
    graph: Graph,
    module: torch.nn.Module,
    strategy: Strategy,
    *,
    tied: Iterable[Sequence[str]],
    fixed: Mapping[str, Layout],
) -> Annotations:
    """The strategy as it applies to one captured graph."""
    groups = [tuple(group) for group in tied]
    params = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    found = resolve_cells(
        strategy, [path for path, _ in module.named_modules()], params, graph=graph, tied=groups
    )
    paths = [item.path for item in graph.inputs if item.kind == "input"]
    # a tensor inside of an argument (`batch.ids`) goes by its own path or by the argument's name
    by_name = resolve_inputs(
        strategy, dict.fromkeys(n for p in paths for n in (p.split(".")[0], p))
    )
    inputs = {p: by_name.get(p, by_name.get(p.split(".")[0])) for p in paths}
    named = {pattern for pattern, _ in strategy.inputs}
    for item in graph.inputs:  # `*` means all that have dims
        if item.kind == "input" and not graph.values[item.value].shape and item.path not in named:
            inputs[item.path] = None
    return Annotations(
        params=found.params,
        inputs={path: spec for path, spec in inputs.items() if spec is not None},
        cells=found.cells,
        fixed=fixed,
        uneven=strategy.uneven,
        strict=strategy.strict,
        data=strategy.data,
        source=strategy.source,
        digest=strategy.digest,
    )


def with_rules(strategy: Strategy, rules: Sequence[CellRule]) -> Strategy:
    """The strategy with the rules that `Cell.shard` calls declare after its own."""
    return replace(strategy, cells=(*strategy.cells, *rules)) if rules else strategy
