"""The ranks of a job arranged along named axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from distcell.errors import MeshError, did_you_mean

_AXIS_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[0-9]+)?")


@dataclass(frozen=True)
class Mesh:
    """A row-major arrangement of ranks: the last axis varies fastest with the rank.

    Args:
        axes: (name, size) pairs, outer to inner. Names are lower case and distinct; sizes at
            least 1. No axes at all is the mesh of a single rank.

    Raises:
        MeshError: When a name or a size is not of that form, or a name stands twice.

    Example:
        >>> mesh = Mesh((("dp", 2), ("tp", 4)))
        >>> mesh.size, mesh.coords(5), mesh.group_of(5, ("tp",))
        (8, {'dp': 1, 'tp': 1}, (4, 5, 6, 7))
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not _AXIS_NAME.fullmatch(name):
                raise MeshError(f"`{name}` is not an axis name", hint="use lower case, like `dp`")
            if size < 1:
                raise MeshError(f"axis {name} has size {size}", hint="an axis has at least 1 rank")
            if names.count(name) > 1:
                raise MeshError(f"axis {name} stands twice in the mesh {self}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        # the hash that is kept is not that of another process
        return Mesh, (self.axes,)

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes) or "one rank"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that `str(mesh)` printed, commas allowed.

        Raises:
            MeshError: When the text is not a list of `name=size`.

        Example:
            >>> Mesh.parse("dp=2, tp=4").shape
            (2, 4)
        """
        if text.strip() == "one rank":
            return cls()
        axes = []
        for item in text.replace(",", " ").split():
            name, _, size = item.partition("=")
            if not size.isdigit():
                raise MeshError(f"`{item}` is not of the form `name=size`", hint="like dp=2, tp=4")
            axes.append((name, int(size)))
        return cls(tuple(axes))

    @classmethod
    def of_ranks(cls, num_ranks: int) -> Mesh:
        """The mesh that is used where none is named: one axis for each prime factor.

        Example:
            >>> str(Mesh.of_ranks(12))
            'd0=2 d1=2 d2=3'
        """
        return cls(tuple((f"d{i}", p) for i, p in enumerate(prime_factors(num_ranks))))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    def axis_size(self, name: str) -> int:
        """The number of ranks along an axis.

        Raises:
            MeshError: When the mesh has no axis of that name.
        """
        if name not in self._sizes:
            raise MeshError(
                f"the mesh {self} has no axis `{name}`",
                hint=did_you_mean(name, self.names) or f"its axes are {', '.join(self.names)}",
            )
        return self._sizes[name]

    def extent(self, names: Sequence[str]) -> int:
        """The product of the sizes of some axes."""
        return math.prod(self.axis_size(name) for name in names)

    def coords(self, rank: int) -> Mapping[str, int]:
        """Where a rank stands on each axis. Shared: not to be changed."""
        return _coords(self, rank)

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at the given coordinates; axes left out count as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coords.get(name, 0)
        return rank

    def group_of(self, rank: int, names: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along the given axes only.

        They come in row-major order of `names` as listed: the first is the major one.
        """
        here = dict(self.coords(rank))
        members = []
        for index in range(self.extent(names)):
            here.update(self.unravel(index, names))
            members.append(self.rank(here))
        return tuple(members)

    def groups(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along the given axes, ordered by their lowest rank."""
        found = {min(g): g for g in (self.group_of(r, names) for r in range(self.size))}
        return tuple(found[low] for low in sorted(found))

    def unravel(self, index: int, names: Sequence[str]) -> dict[str, int]:
        """The coordinates of member `index` of a group along `names`, major first."""
        coords: dict[str, int] = {}
        for name in reversed(names):
            index, coords[name] = divmod(index, self.axis_size(name))
        return {name: coords[name] for name in names}

    def refine(self, name: str, factors: Sequence[int]) -> Mesh:
        """This mesh with one axis cut into sub-axes `name.0`, `name.1`, ... (major to minor).

        Raises:
            MeshError: When the product of the factors is not the axis's size.

        Example:
            >>> str(Mesh((("dp", 2), ("tp", 4))).refine("tp", (2, 2)))
            'dp=2 tp.0=2 tp.1=2'
        """
        if math.prod(factors) != self.axis_size(name):
            raise MeshError(f"axis {name}={self.axis_size(name)} is not the product of {factors}")
        axes: list[tuple[str, int]] = []
        for axis, size in self.axes:
            if axis == name and len(factors) > 1:
                axes.extend((f"{name}.{i}", factor) for i, factor in enumerate(factors))
            else:
                axes.append((axis, size))
        return Mesh(tuple(axes))

    def resolve(self, name: str) -> tuple[str, ...]:
        """The axes that a name stands for: itself, or its sub-axes after `refine`.

        Raises:
            MeshError: When the mesh has neither.
        """
        if name in self._sizes:
            return (name,)
        parts = tuple(axis for axis in self.names if axis.startswith(f"{name}."))
        if not parts:
            self.axis_size(name)
        return parts


@lru_cache(maxsize=65536)
def _coords(mesh: Mesh, rank: int) -> Mapping[str, int]:
    if not 0 <= rank < mesh.size:
        raise MeshError(f"rank {rank} is not in the mesh {mesh} of {mesh.size} ranks")
    return mesh.unravel(rank, mesh.names)


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of a number, smallest first; none for 1."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor = divisor + 1 if divisor * divisor <= number else max(number, divisor + 1)
    return tuple(factors)
