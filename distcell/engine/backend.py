"""Where a program runs: on this rank among real ones, or for all ranks in this process.

Both speak of *pieces*: on a real rank the piece of a value is the local tensor, in the simulation
it is the list of what each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.program import Program
from distcell.runtime.codegen import load
from distcell.runtime.collectives import CollectiveLog
from distcell.runtime.world import collectives_for
from distcell.simulate.values import SimulatedRanks, gather, scatter

Piece = Any
Run = Callable[[list[Piece]], list[Piece]]


class Backend(Protocol):
    """What the engine needs of a place where programs run."""

    mesh: Mesh
    holds_pieces: bool
    """Whether parameters hold this rank's piece only; else they stay global."""

    def load(self, program: Program, donated: Iterable[str] = ()) -> Run:
        """The program, ready to run."""
        ...

    def enter(self, program: Program, name: str, tensor: Any) -> Piece:
        """The piece of a value that is given whole."""
        ...

    def enter_held(self, program: Program, name: str, held: torch.Tensor) -> Piece:
        """The piece of a parameter or state, as it is held: the program may overwrite it."""
        ...

    def enter_tangent(self, program: Program, name: str, tensor: torch.Tensor) -> Piece:
        """The piece of the gradient of an output."""
        ...

    def leave(self, program: Program, name: str, piece: Piece) -> Any:
        """A piece as the user sees it: the local tensor, or the global one of the simulation."""
        ...

    def write(self, program: Program, name: str, piece: Piece, held: torch.Tensor) -> None:
        """Writes a new value into the parameter, buffer or state that it is the new value of."""
        ...

    def logs(self) -> list[CollectiveLog]:
        """What was exchanged: one log for each rank that this process plays."""
        ...


class RankBackend:
    """This process is one rank."""

    holds_pieces = True

    def __init__(
        self, mesh: Mesh, device: torch.device | str = "cpu", *, local_data: bool = False
    ) -> None:
        self.mesh, self.device, self.local_data = mesh, device, local_data
        self.collectives = collectives_for(mesh)

    def load(self, program: Program, donated: Iterable[str] = ()) -> Run:
        rank = self.collectives.rank
        return load(program, rank, self.collectives, donated=donated, device=self.device)

    def enter(self, program: Program, name: str, tensor: Any) -> Piece:
        if not program.graph.values[name].is_tensor:
            return tensor
        rank = self.collectives.rank
        if self.local_data and tuple(tensor.shape) == program.local_shape(name, rank):
            return tensor
        return cut(program.layouts[name], tensor, self.mesh, rank)

    def enter_held(self, program: Program, name: str, held: torch.Tensor) -> Piece:
        return held

    def enter_tangent(self, program: Program, name: str, tensor: torch.Tensor) -> Piece:
        if not self.local_data:
            return self.enter(program, name, tensor)
        # the loss is the mean over the parts, each rank's own is the mean over its part
        parts = self.mesh.extent(program.layouts[name].split_axes)
        return tensor / parts if parts > 1 else tensor

    def leave(self, program: Program, name: str, piece: Piece) -> Any:
        return piece

    def write(self, program: Program, name: str, piece: Piece, held: torch.Tensor) -> None:
        if piece is not held:
            with torch.no_grad():
                held.copy_(piece)

    def logs(self) -> list[CollectiveLog]:
        return [self.collectives.log]


class SimulatedBackend:
    """This process plays all ranks."""

    holds_pieces = False

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.mesh, self.device = mesh, device
        # one for all programs, which are forgotten when nobody calls them any more
        self._logs = [CollectiveLog() for _ in range(mesh.size)]

    def load(self, program: Program, donated: Iterable[str] = ()) -> Run:
        ranks = SimulatedRanks(program, donated=donated, device=self.device, logs=self._logs)
        return ranks.run

    def enter(self, program: Program, name: str, tensor: Any) -> Piece:
        return scatter(program, name, tensor)

    def enter_held(self, program: Program, name: str, held: torch.Tensor) -> Piece:
        return scatter(program, name, held, shared=held.is_contiguous())

    def enter_tangent(self, program: Program, name: str, tensor: torch.Tensor) -> Piece:
        return self.enter(program, name, tensor)

    def leave(self, program: Program, name: str, piece: Piece) -> Any:
        return gather(program, name, piece)

    def write(self, program: Program, name: str, piece: Piece, held: torch.Tensor) -> None:
        with torch.no_grad():
            if held.is_contiguous():
                gather(program, name, piece, into=held)
            else:
                held.copy_(gather(program, name, piece))

    def logs(self) -> list[CollectiveLog]:
        return self._logs


def cut(layout: Layout, tensor: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
    """The piece of a global tensor that a rank holds; the tensor itself when that is all of it."""
    return layout.shard(tensor, mesh, rank) if layout.axes else tensor
