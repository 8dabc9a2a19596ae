"""From a captured graph and what the user asked for to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distcell.errors import PlanError
from distcell.graph import Graph
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.sharding.axes import AxisReader
from distcell.sharding.constrain import constrain_borders
from distcell.sharding.plan import Note, Plan
from distcell.sharding.propagate import Seed, propagate
from distcell.strategy.resolve import CellSpec
from distcell.strategy.spec import TensorSpec


@dataclass(frozen=True)
class Annotations:
    """What the user asked for, by path: strategy file and `Cell.shard` together.

    Args:
        params: Specs of parameters.
        inputs: Specs of the tensors that the network is called with, by argument name.
        cells: Specs of what crosses the borders of cells.
        fixed: Layouts of parameters that are split already, from an earlier plan.
        uneven: Whether a dim may be split over ranks that do not divide it.
        strict: Whether an op without a rule is an error.
        data: `full` or `local`, see `Plan`.
        source: What the strategy is called.
        digest: A hash of the strategy.
    """

    params: Mapping[str, TensorSpec] = field(default_factory=dict)
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    cells: Mapping[str, CellSpec] = field(default_factory=dict)
    fixed: Mapping[str, Layout] = field(default_factory=dict)
    uneven: bool = True
    strict: bool = False
    data: str = "full"
    source: str = ""
    digest: str = ""


def make_plan(graph: Graph, mesh: Mesh, annotations: Annotations) -> Plan:
    """The plan of a graph on a mesh.

    Raises:
        StrategyError: When an annotation does not fit its tensor or the mesh.
        PlanError: When an axis of the mesh splits nothing, a dim would be split unevenly under
            `uneven: false`, or an op has no rule under `strict: true`.
    """
    graph, border_specs = constrain_borders(graph, annotations.cells)
    reader = AxisReader(mesh)
    seeds = _seeds(graph, annotations, border_specs, reader)
    sharding = propagate(graph, reader.mesh, seeds)
    plan = Plan(
        graph,
        reader.mesh,
        sharding.layouts,
        sharding.reasons,
        (*reader.notes, *sharding.notes, *_uneven_notes(graph, sharding.layouts, reader.mesh)),
        annotations.digest,
        annotations.data,
    )
    _check(plan, annotations)
    return plan


def _seeds(
    graph: Graph,
    annotations: Annotations,
    border_specs: Mapping[str, TensorSpec],
    reader: AxisReader,
) -> dict[str, Seed]:
    read: dict[str, tuple[Layout, tuple[bool, ...], str]] = {}
    for item in graph.inputs:
        value = graph.values[item.value]
        if not value.is_tensor:
            continue
        spec = {"param": annotations.params, "input": annotations.inputs}.get(item.kind, {}).get(
            item.path
        )
        if item.path in annotations.fixed and item.kind == "param":
            read[item.value] = (annotations.fixed[item.path], (True,) * len(value.shape), "fixed")
        elif spec is not None:
            read[item.value] = _read(spec, value.shape, f"{item.kind} `{item.path}`", reader)
        elif item.kind in ("buffer", "constant", "random"):
            read[item.value] = (Layout.of(value.shape), (True,) * len(value.shape), "whole")
    for name, spec in border_specs.items():
        what = f"a value at the border of `{graph.producers[name].cell or 'the net'}`"
        read[name] = _read(spec, graph.values[name].shape, what, reader)
    return {
        name: Seed(layout if source == "fixed" else reader.final(layout), closed, source)
        for name, (layout, closed, source) in read.items()
    }


def _read(
    spec: TensorSpec, shape: tuple[int, ...], what: str, reader: AxisReader
) -> tuple[Layout, tuple[bool, ...], str]:
    layout = reader.read(spec, shape, what)
    dims = spec.padded(len(shape)).dims
    return layout, tuple(not dim.open for dim in dims), spec.source


def _uneven_notes(graph: Graph, layouts: Mapping[str, Layout], mesh: Mesh) -> list[Note]:
    notes = []
    for item in graph.inputs:
        layout = layouts.get(item.value)
        if layout is not None and not layout.is_even(mesh):
            sizes = [list(layout.local_shape(mesh, rank)) for rank in range(min(mesh.size, 8))]
            text = f"{item.kind} `{item.path}` {layout} is split unevenly: {sizes}"
            notes.append(Note("uneven", item.path, text))
    return notes


def _check(plan: Plan, annotations: Annotations) -> None:
    where = [f"mesh  {plan.mesh}"]
    if annotations.source:
        where[0] += f"     strategy  {annotations.source}"
    used = {axis for layout in plan.layouts.values() for axis in layout.axes}
    if idle := [n for n, size in plan.mesh.axes if size > 1 and n not in used]:
        raise PlanError(
            f"axis {', '.join(idle)} splits nothing",
            where=where,
            hint="annotate a parameter, an input or a cell with it, or take it out of the mesh",
        )
    if annotations.strict and (missing := [n for n in plan.notes if n.kind == "no rule"]):
        raise PlanError(
            f"{len(missing)} ops have no rule, and the strategy says `strict: true`",
            where=[*where, *[note.text for note in missing[:8]]],
            hint="register a rule with distcell.rules.table.register, or remove `strict: true`",
        )
    if not annotations.uneven:
        _check_even(plan, where)


def _check_even(plan: Plan, where: list[str]) -> None:
    paths = {item.value: item.path for item in plan.graph.inputs}
    for name, layout in plan.layouts.items():
        for dim, parts in enumerate(layout.dims):
            for part in parts:
                ways = plan.mesh.extent(part.axes)
                if part.size % ways == 0:
                    continue
                divisors = [f"{n}={s}" for n, s in plan.mesh.axes if part.size % s == 0 and s > 1]
                fits = f"{divisors[0]} divides {part.size}; or " if divisors else ""
                reason = next((r for r in plan.reasons.get(name, ()) if r.dim == dim), None)
                raise PlanError(
                    f"dim {dim} of `{paths.get(name, name)}` cannot be split over "
                    f"{', '.join(part.axes)}",
                    where=[
                        f"{plan.describe(name)}        {part.size} is not a multiple of {ways}",
                        *where,
                        *([f"why  {reason.kind} {reason.source}"] if reason else []),
                    ],
                    hint=f"{fits}remove `uneven: false`",
                )
