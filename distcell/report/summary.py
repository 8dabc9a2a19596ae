"""What a plan comes to: parameters, exchanges, bytes and operations of each rank, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from distcell.engine.planning import Planned
from distcell.mesh import Mesh
from distcell.partition.emit import Reshard
from distcell.report.figures import (
    Collective,
    CollectiveGroup,
    RankFigures,
    Spread,
    bytes_by_axes,
    group_collectives,
    on_one_device,
)
from distcell.report.memory import memory_of
from distcell.report.optimizer import OptimizerState
from distcell.sharding.plan import Note


@dataclass(frozen=True)
class ParameterLine:
    """A parameter: its type with its layout, and its bytes on each rank."""

    path: str
    type: str
    bytes: Spread


@dataclass(frozen=True)
class Summary:
    """What a plan comes to.

    Args:
        mesh: The mesh, as printed.
        ranks: The number of ranks.
        strategy: The strategy's file.
        parameters: The parameters in their order.
        collectives: All exchanges of data, in their order.
        groups: The same by phase, kind and axes.
        bytes_by_axes: What each rank puts into exchanges, by the axes with commas.
        memory: By the names of `distcell.report.memory.Memory` the bytes of each rank.
        optimizer: Where the bytes of the optimizer's state are known from.
        flops: The floating-point operations of each rank.
        reshards: The changes of layout that exchange data.
        notes: Ops without a rule, uneven dims, how numbers of slices were read, ...
        program: The digest of the program.
    """

    mesh: str
    ranks: int
    strategy: str
    parameters: tuple[ParameterLine, ...]
    collectives: tuple[Collective, ...]
    groups: tuple[CollectiveGroup, ...]
    bytes_by_axes: Mapping[str, Spread]
    memory: Mapping[str, Spread]
    optimizer: str
    flops: Spread
    reshards: tuple[Reshard, ...]
    notes: tuple[Note, ...]
    program: str

    def to_json(self) -> dict[str, object]:
        """The summary as JSON values."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: _json(item) for name, item in content.items()}


def summarise(planned: Planned, state: OptimizerState, strategy: str = "") -> Summary:
    """What a plan comes to.

    Args:
        planned: The plan and its program.
        state: What the optimizer will hold.
        strategy: What the strategy is called.
    """
    program, plan = planned.program, planned.plan
    figures, alone = RankFigures(program), RankFigures(on_one_device(plan.graph))
    collectives = figures.collectives()
    return Summary(
        mesh=str(program.mesh),
        ranks=program.mesh.size,
        strategy=strategy,
        parameters=tuple(_parameters(figures, alone)),
        collectives=collectives,
        groups=group_collectives(collectives, figures.size),
        bytes_by_axes=bytes_by_axes(collectives, figures.size),
        memory=_memory(figures, alone, state),
        optimizer=state.text,
        flops=Spread.of(figures.flops(), int(alone.flops()[0])),
        reshards=planned.reshards,
        notes=plan.notes,
        program=program.digest,
    )


def _parameters(figures: RankFigures, alone: RankFigures) -> list[ParameterLine]:
    program = figures.program
    return [
        ParameterLine(
            item.path,
            program.describe(item.value),
            Spread.of(figures.nbytes(item.value), int(alone.nbytes(item.value)[0])),
        )
        for item in program.graph.inputs
        if item.kind == "param"
    ]


def _memory(figures: RankFigures, alone: RankFigures, state: OptimizerState) -> dict[str, Spread]:
    here, there = (memory_of(each.program, state.bytes) for each in (figures, alone))
    return {
        f.name: Spread.of(getattr(here, f.name), int(getattr(there, f.name)[0]))
        for f in fields(here)
    }


def _json(item: object) -> object:
    if isinstance(item, tuple):
        return [_json(each) for each in item]
    if isinstance(item, Mapping):
        return {key: _json(each) for key, each in item.items()}
    if isinstance(item, (str, int)) or item is None:
        return item
    if isinstance(item, Mesh):
        return str(item)
    return asdict(item)  # type: ignore[call-overload]  # the rest are frozen dataclasses of ours
