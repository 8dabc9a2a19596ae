"""The ops of a program that partitioning adds beside torch's: on one rank, nothing exchanged."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcell import compat
from distcell.dtype import DTYPES
from distcell.errors import InternalError
from distcell.graph import Arg, DeviceArg, DtypeArg, Op, RankArg
from distcell.layout import neutral_element
from distcell.mesh import Mesh
from distcell.passes.aliases import RESHAPES
from distcell.rules import table


def narrow(x: Tensor, dim: int, offset: int, extent: int) -> Tensor:
    """A contiguous slice of a tensor.

    Example:
        >>> narrow(torch.arange(6).view(2, 3), 1, 1, 2).tolist()
        [[1, 2], [4, 5]]
    """
    return x.narrow(dim, offset, extent).contiguous()


def neutral_unless_first(x: Tensor, first: bool, reduction: str) -> Tensor:
    """The tensor itself on the first member of a group, the neutral element on the others.

    Args:
        x: A replicated tensor, which becomes a partial one.
        first: Whether this rank has the coordinate 0 on all axes of the group.
        reduction: `sum`, `max` or `min`.
    """
    return x if first else torch.full_like(x, neutral_element(reduction, x.dtype))


@dataclass(frozen=True)
class LocalOp:
    """What runs an op that partitioning adds, and how its arguments depend on the rank."""

    run: Callable[..., Any]
    place: Callable[[tuple[Arg, ...], Mapping[str, int]], tuple[Arg, ...]] | None = None


def _first_of_group(args: tuple[Arg, ...], coords: Mapping[str, int]) -> tuple[Arg, ...]:
    x, axes, *rest = args
    return (x, not any(coords[axis] for axis in axes), *(rest or ["sum"]))


LOCAL_OPS: Mapping[str, LocalOp] = {
    "distcell.narrow": LocalOp(narrow),
    "distcell.neutral_unless_first": LocalOp(neutral_unless_first, _first_of_group),
    # Local strides may differ from those of the whole tensor: a view must be allowed to copy.
    **dict.fromkeys(RESHAPES, LocalOp(torch.reshape)),
}


def kernel(target: str) -> Callable[..., Any]:
    """What executes an op that exchanges nothing, on local tensors and numbers of the host.

    Raises:
        InternalError: When nothing of that name is known.
    """
    if target in LOCAL_OPS:
        return LOCAL_OPS[target].run
    definition = table.find(target)
    if definition is not None and definition.run is not None:
        return definition.run
    if target.startswith("py."):
        return _host_function(target)
    try:
        function: Callable[..., Any] = compat.operator_function(table.torch_operator(target))
    except KeyError as error:
        raise InternalError(f"nothing executes the op {target}") from error
    return function


def return_count(target: str) -> int | None:
    """How many results an op returns, where that is known."""
    definition = table.find(target)
    if target in LOCAL_OPS or (definition is not None and definition.run is not None):
        return None
    return compat.return_count(table.torch_operator(target))


def is_place_dependent(op: Op) -> bool:
    """Whether the arguments of an op differ from rank to rank."""
    local = LOCAL_OPS.get(op.target)
    if local is not None and local.place is not None:
        return True
    return _has_rank_arg((op.args, tuple(arg for _, arg in op.kwargs)))


def place(
    op: Op, mesh: Mesh, rank: int, device: torch.device
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """The arguments of an op on one rank: uses of values stay, all else is what torch takes."""
    coords = mesh.coords(rank)
    args = op.args
    local = LOCAL_OPS.get(op.target)
    if local is not None and local.place is not None:
        args = local.place(args, coords)
    here = _Here(mesh, coords, device)
    return tuple(map(here.value, args)), {key: here.value(arg) for key, arg in op.kwargs}


@dataclass(frozen=True)
class _Here:
    mesh: Mesh
    coords: Mapping[str, int]
    device: torch.device

    def value(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(self.value, arg))
        if isinstance(arg, RankArg):
            return arg.at(self.mesh, self.coords)
        if isinstance(arg, DtypeArg):
            return DTYPES[arg.name]
        return self.device if isinstance(arg, DeviceArg) else arg


def _has_rank_arg(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(map(_has_rank_arg, arg))
    return isinstance(arg, RankArg)


def _host_function(target: str) -> Callable[..., Any]:
    name = target.removeprefix("py.")
    for module in (operator, math, builtins):
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise InternalError(f"nothing executes the op {target}")
