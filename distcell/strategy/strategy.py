"""What the user asks for: the mesh, and how inputs, parameters and cells are split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from distcell.errors import StrategyError
from distcell.mesh import Mesh
from distcell.strategy.glob import matches
from distcell.strategy.spec import TensorSpec


@dataclass(frozen=True)
class CellRule:
    """What one pattern on cell paths asks for; fields left out are not touched.

    Args:
        pattern: a glob on cell paths.
        params: by name of a parameter, relative to the cell.
        inputs: one spec per input; None leaves that input to propagation.
        outputs: one spec per output; None leaves that output to propagation.
        optional: whether the pattern may match nothing.
        source: where it was written. Not part of equality.

    >>> CellRule("**.up", {"weight": TensorSpec.of(("tp", None))}).pattern
    '**.up'
    """

    pattern: str
    params: Mapping[str, TensorSpec] = field(default_factory=dict, hash=False)
    inputs: tuple[TensorSpec | None, ...] | None = None
    outputs: tuple[TensorSpec | None, ...] | None = None
    optional: bool = False
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Strategy:
    r"""A whole strategy, as a file or as code gives it.

    Args:
        mesh: axes with sizes, outer to inner, at most one of them -1: the rest of the ranks.
            None: the prime factors of the number of ranks.
        data: `full` when every rank passes the global batch, `local` when each passes its part.
        uneven: whether a dim may be split over more ranks than divide it.
        strict: whether an op without a rule is an error.
        random: `counter` for masks by hash of the position, `torch` for torch's own stream.
        inputs: glob on argument names of `construct`, and how that input is split.
        cells: the rules on cells, the last match wins field by field.
        source: the file. Not part of equality.

    >>> Strategy.from_text("distcell: 1\nmesh: {dp: -1, tp: 2}").mesh_for(8)
    (('dp', 4), ('tp', 2))
    """

    mesh: tuple[tuple[str, int], ...] | None = None
    data: Literal["full", "local"] = "full"
    uneven: bool = True
    strict: bool = False
    random: Literal["counter", "torch"] = "counter"
    inputs: tuple[tuple[str, TensorSpec], ...] = ()
    cells: tuple[CellRule, ...] = ()
    source: str = field(default="", compare=False)

    @classmethod
    def from_text(cls, text: str, *, source: str = "<text>") -> Strategy:
        r"""Returns the strategy that YAML text describes.

        Args:
            text: the content of a strategy file.
            source: what the file is called in errors.

        Raises:
            StrategyError: anything in it is not understood; all mistakes are listed.

        >>> Strategy.from_text('distcell: 1\nmesh: {dp: -1}\ninputs: {"*": [dp]}').data
        'full'
        """
        from distcell.strategy.schema import parse  # schema builds this class

        return parse(text, source=source)

    @cached_property
    def digest(self) -> str:
        """A hash of all that matters: equal strategies have equal digests, wherever they lie."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Returns the text of a strategy file that reads back as this strategy.

        >>> print(Strategy(mesh=(("dp", -1),)).to_yaml())
        distcell: 1
        mesh: {dp: -1}
        <BLANKLINE>
        """
        from distcell.strategy.write import write

        return write(self)

    def input_spec(self, name: str) -> TensorSpec | None:
        """Returns how the input of that name is split, None when the strategy does not say.

        Args:
            name: the name of construct's argument.

        >>> str(Strategy(inputs=(("*", TensorSpec.of(("dp",))),)).input_spec("tokens"))
        '[dp]'
        """
        found = [spec for pattern, spec in self.inputs if matches(pattern, name)]
        return found[-1] if found else None

    def mesh_for(self, num_ranks: int) -> tuple[tuple[str, int], ...]:
        """Returns the axes with their sizes for a number of ranks.

        Args:
            num_ranks: how many ranks the job has.

        Raises:
            StrategyError: the product of the sizes is not the number of ranks.

        >>> Strategy(mesh=(("dp", 2), ("tp", -1))).mesh_for(8)
        (('dp', 2), ('tp', 4))
        """
        if num_ranks < 1:
            raise StrategyError(f"a job has at least one rank, not {num_ranks}")
        if self.mesh is None:
            return Mesh.of_ranks(num_ranks).axes
        fixed = math.prod(size for _, size in self.mesh if size != -1)
        is_free = any(size == -1 for _, size in self.mesh)
        if num_ranks % fixed if is_free else num_ranks != fixed:
            raise self._mesh_error(num_ranks, fixed, is_free=is_free)
        rest = num_ranks // fixed
        return tuple((name, rest if size == -1 else size) for name, size in self.mesh)

    def _mesh_error(self, num_ranks: int, fixed: int, *, is_free: bool) -> StrategyError:
        axes = " ".join(f"{name}={size}" for name, size in self.mesh or ())
        written = f"mesh  {axes}" + (f"     strategy  {self.source}" if self.source else "")
        ranks = f"{num_ranks} rank" + ("s" if num_ranks != 1 else "")
        if is_free:
            below = num_ranks // fixed * fixed
            counts = [str(count) for count in (below, below + fixed) if count]
            message = f"the mesh needs a multiple of {fixed} ranks, the job has {num_ranks}"
            facts = f"{num_ranks} is not a multiple of {fixed}"
        else:
            counts = [str(fixed)]
            message = f"the mesh has {fixed} ranks, the job has {num_ranks}"
            facts = f"{' × '.join(str(size) for _, size in self.mesh or ())} = {fixed}, not {ranks}"
        hint = f"start {' or '.join(counts)} ranks, or change `mesh`"
        if not is_free and self.mesh:
            hint += f"; `{self.mesh[0][0]}: -1` takes whatever number there is"
        return StrategyError(message, where=[written, facts], hint=hint)
