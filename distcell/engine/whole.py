"""Global values of what the ranks hold in pieces, and norms of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distcell import compat
from distcell.dtype import name_of
from distcell.engine.backend import RankBackend, Run, cut
from distcell.errors import LayoutError, UserTypeError
from distcell.graph import Graph, Input, Op, Output, Value
from distcell.layout import Layout
from distcell.mesh import Mesh
from distcell.parameter import layout
from distcell.partition.emit import Emitter
from distcell.piece import is_guarded, plain
from distcell.program import Program
from distcell.runtime.collectives import ReduceKind

_backends: Any = WeakTensorKeyDictionary()
"""For each parameter that is cut, what exchanges its pieces."""


_known: list[RankBackend] = []
"""The backends of this process, one for each mesh of a network."""


def note_cut(parameter: Tensor, backend: RankBackend) -> None:
    """Remembers which ranks hold the other pieces of a parameter."""
    _backends[parameter] = backend
    if backend not in _known:
        _known.append(backend)


def is_cut(parameter: Tensor) -> bool:
    """Whether this rank holds a piece of the parameter, not all of it."""
    return backend_of(parameter) is not None


def backend_of(parameter: Tensor) -> RankBackend | None:
    """What exchanges the pieces of a parameter; a copy of one is cut like it.

    Raises:
        LayoutError: When it is a piece in another shape than that of its parameter.
    """
    found: RankBackend | None = _backends.get(parameter)
    place = layout(parameter)
    if found is not None or not place.axes:
        return found
    for backend in reversed(_known):
        if place.axes <= set(backend.mesh.names):
            rank = backend.collectives.rank
            if tuple(parameter.shape) == place.local_shape(backend.mesh, rank):
                return backend
    if is_guarded(parameter) and tuple(parameter.shape) != tuple(place.shape):
        raise LayoutError(
            "a piece of a parameter that was reshaped has no whole",
            where=[f"global  {place}     here  {list(parameter.shape)}"],
            hint="take `dc.whole_tensor(parameter)` first, and reshape that",
        )
    return None


def whole_tensor(parameter: Tensor, piece: Tensor | None = None) -> Tensor:
    """The global value of a parameter, or of something that is cut like it. All ranks must call.

    Where gradients are recorded, those of the whole go back to the piece: a penalty on a weight may
    be added to the loss. Every rank must compute the same with it.

    Args:
        parameter: A parameter, its `.grad`, or what was made of one element by element.
        piece: A tensor of the parameter's local shape; omitted: the parameter's own value.

    Raises:
        LayoutError: When the parameter is a piece that was reshaped.

    Example:
        >>> whole_tensor(torch.ones(2))
        tensor([1., 1.])
    """
    if piece is None and parameter.requires_grad and torch.is_grad_enabled():
        return torch.as_tensor(_Whole.apply(parameter))  # type: ignore[no-untyped-call]
    return value_of(parameter, piece)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return value_of(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return piece_of(ctx.parameter, gradient)


def value_of(parameter: Tensor, piece: Tensor | None = None) -> Tensor:
    """The same as `whole_tensor`, without gradients."""
    value = plain(parameter if piece is None else piece)
    backend = backend_of(parameter)
    if backend is None:
        return value
    gather = _gather_program(backend.mesh, layout(parameter), name_of(value.dtype))
    run = _loaded(backend, gather)
    (found,) = run([value.contiguous()])
    return torch.as_tensor(found)


def piece_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's piece of something global that is cut like a parameter.

    Example:
        >>> piece_of(torch.ones(2), torch.zeros(2))
        tensor([0., 0.])
    """
    backend = backend_of(parameter)
    if backend is None:
        return whole
    return cut(layout(parameter), whole, backend.mesh, backend.collectives.rank)


@lru_cache(maxsize=1024)
def _gather_program(mesh: Mesh, source: Layout, dtype: str) -> Program:
    """The program that gathers a tensor on all ranks."""
    emitter = Emitter(mesh)
    value = Value("x", source.shape, dtype)
    emitter.add_value(value, source)
    name = emitter.reshard("x", Layout.of(source.shape), Op("gather", cell="state_dict"))
    outputs = (Output(name, "output", "0"),)
    graph = Graph((Input("x", "input", "x"),), tuple(emitter.ops), outputs, emitter.values)
    return Program(mesh, graph, emitter.layouts)


_runs: WeakKeyDictionary[RankBackend, dict[str, Run]] = WeakKeyDictionary()


def _loaded(backend: RankBackend, program: Program) -> Run:
    runs = _runs.setdefault(backend, {})
    if program.digest not in runs:
        runs[program.digest] = backend.load(program)
    return runs[program.digest]


def clip_grad_norm_(
    parameters: torch.nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The norm of all gradients together, each distinct piece counted once; clips them in place.

    Args:
        parameters: A module, or its parameters.
        max_norm: What the norm may be at most.
        norm_type: The p of the norm; `inf` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is no finite number is an error.

    Raises:
        UserTypeError: When `parameters` is none of these.
        RuntimeError: When the norm is not finite and `error_if_nonfinite`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad.norm().round(decimals=4)
        (tensor(5.), tensor(1.))
    """
    given: list[Tensor]
    if isinstance(parameters, torch.nn.Module):
        given = list(parameters.parameters())
    elif isinstance(parameters, Tensor):
        given = [parameters]
    else:
        given = list(parameters)
    if not all(isinstance(each, Tensor) for each in given):
        raise UserTypeError("clip_grad_norm_ takes a module or parameters")
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)


def _total_norm(
    gradients: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Torch's total norm, but of the global gradients: for torch's own clipping functions."""
    found = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    with compat.without_overrides():
        return _norm_of(found, norm_type, error_if_nonfinite, foreach)


def _norm_of(
    found: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    # parameters of a class of the user's have gradients that do not say what they are
    owners = {id(p.grad): p for p in _backends if not is_guarded(p) and p.grad is not None}
    cut_ones = [(owners.get(id(g), g), g) for g in found if is_guarded(g) or id(g) in owners]
    cut_ones = [(owner, g) for owner, g in cut_ones if is_cut(owner)]
    if not cut_ones:
        return compat.plain_total_norm(found, norm_type, error_if_nonfinite, foreach)
    norm_type = float(norm_type)
    pieces = {id(g) for _, g in cut_ones}
    powers = [_power([g for g in found if id(g) not in pieces], norm_type, cut_ones[0][1])]
    groups: dict[tuple[str, ...], list[tuple[Tensor, Tensor]]] = {}
    for parameter, gradient in cut_ones:
        axes = tuple(sorted(layout(parameter).split_axes))
        groups.setdefault(axes, []).append((parameter, gradient))
    for axes, members in sorted(groups.items()):
        backend = backend_of(members[0][0])
        assert backend is not None  # those that are cut have one
        collectives = backend.collectives
        local = _power([g for _, g in members], norm_type, members[0][1])
        kind: ReduceKind = "max" if math.isinf(norm_type) else "sum"
        powers.append(collectives.all_reduce(local, axes, kind, label="clip_grad_norm_"))
    stacked = torch.stack(powers)
    total = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}")
    return total


def _power(gradients: list[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """The sum of the p-th powers of all elements (the largest magnitude for `inf`)."""
    if not gradients:
        return torch.zeros((), dtype=like.dtype, device=like.device)
    norms = [
        torch.linalg.vector_norm(g, norm_type) if g.numel() else g.new_zeros(()) for g in gradients
    ]
    stacked = torch.stack(norms).to(like.dtype)
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


compat.replace_total_norm(_total_norm)
