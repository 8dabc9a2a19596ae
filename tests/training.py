"""Trainings that tests compare: the same model on one device, on simulated ranks, on real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

import distcell as dc
import distcell.random
from distcell.context import LaunchOptions, launch, reset_auto_parallel_context, set_launch
from distcell.dtype import name_of
from distcell.engine.state import state_of
from distcell.piece import plain
from distcell.runtime import world
from distcell.runtime.collectives import CollectiveLog
from tests.models import CASES

Batch = tuple[Tensor, ...]

STRATEGIES = ("data", "tensor", "data-tensor", "sequence")

ADAM = {"lr": 3e-3, "eps": 1e-5}
"""A large eps: the first steps of Adam divide noise by noise where a gradient is truly zero."""


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Args:
        dtype: Of weights and data.
        dropout: Whether there is any. Without, the reference is plain torch.
    """

    dtype: torch.dtype
    dropout: bool

    def __str__(self) -> str:
        return f"{name_of(self.dtype)}-{'dropout' if self.dropout else 'plain'}"


VARIANTS = tuple(Variant(t, d) for t in (torch.float64, torch.float32) for d in (True, False))


@dataclass(frozen=True)
class History:
    """What a training went through, all tensors global.

    Args:
        losses: The loss of each step.
        gradients: By parameter, of each step.
        weights: Parameters and buffers after each step.
        totals: What each rank that this process plays has exchanged.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    totals: list[dict[tuple[str, tuple[str, ...]], tuple[int, int]]] = field(default_factory=list)


def simulated(ranks: int, strategy: str) -> LaunchOptions:
    """How a job is started that simulates its ranks."""
    return LaunchOptions(mode="simulate", ranks=ranks, strategy=strategy)


def on_ranks(strategy: str) -> LaunchOptions:
    """How a job is started of which this process is one rank."""
    return LaunchOptions(mode="ranks", ranks=world.init().size, strategy=strategy)


@contextmanager
def launched(options: LaunchOptions) -> Iterator[None]:
    """A context in which calls run as a job started so."""
    before = launch()
    set_launch(options)
    try:
        yield
    finally:
        set_launch(before)
        reset_auto_parallel_context()


def train(
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    options: LaunchOptions | None = None,
    *,
    optimizer: str = "adam",
    plain: bool = False,
) -> History:
    """Trains a model on batches and records what happened.

    Args:
        build: Makes the model, whose call returns the loss; seeded alike for every training.
        batches: The arguments of each step's call.
        options: How the job is started; one device as it stands by default.
        optimizer: `adam` or `sgd`.
        plain: Without distcell at all, by an ordinary loop.
    """
    history = History()
    for collectives in world.collectives_in_use():
        collectives.log.clear()  # of real ranks: one for each mesh, whatever network uses it
    with launched(options or LaunchOptions()):
        torch.manual_seed(0)
        distcell.random.seed(0)
        model = build()
        if not plain:
            model = dc.parallelize(model)
        parameters = model.parameters()
        step = (
            torch.optim.AdamW(parameters, **ADAM)
            if optimizer == "adam"
            else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        )
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            history.losses.append(loss.detach().clone())
            history.gradients.append(_whole(model, "gradients"))
            step.step()
            step.zero_grad()
            history.weights.append(_whole(model, "weights"))
        history.totals.extend(totals(log) for log in logs_of(model))
    return history


def train_case(
    name: str,
    variant: Variant,
    steps: int,
    options: LaunchOptions | None = None,
    *,
    plain: bool = False,
) -> History:
    """Trains one of the four models."""
    case, dtype = CASES[name], variant.dtype
    # What stands before a batch norm has no gradient but noise, which Adam makes steps of.
    optimizer = "sgd" if name == "cnn" and dtype == torch.float32 else "adam"
    return train(
        lambda: case.build(dropout=0.1 if variant.dropout else 0.0, dtype=dtype),
        case.batches(steps, dtype),
        options,
        optimizer=optimizer,
        plain=plain,
    )


@cache
def reference(name: str, variant: Variant, steps: int) -> History:
    """The training on one device: with dropout uncaptured, without it by torch alone."""
    return train_case(name, variant, steps, plain=not variant.dropout)


def totals(log: CollectiveLog) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """The count and the bytes of a rank's collectives by kind and axes."""
    return dict(log.totals)


def logs_of(model: nn.Module) -> list[CollectiveLog]:
    """The logs of the ranks that this process plays; none on one device."""
    if launch().mode == "eager":
        return []
    backend = state_of(model, launch()).backend
    return [] if backend is None else backend.logs()


def _whole(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """The global gradients, or the global parameters and buffers."""
    if kind == "gradients":
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    else:
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    pieces = {name: plain(tensor).clone() for name, tensor in found.items()}
    if launch().mode != "ranks":
        return pieces
    state = state_of(model, launch())
    return {
        name: state.layouts[name].gather(_from_all_ranks(piece), state.mesh)
        if name in state.layouts
        else piece
        for name, piece in pieces.items()
    }


def _from_all_ranks(piece: Tensor) -> list[Tensor]:
    from mpi4py import MPI

    return [torch.from_numpy(part) for part in MPI.COMM_WORLD.allgather(piece.numpy())]


def distance(
    found: Sequence[Mapping[str, Tensor]], wanted: Sequence[Mapping[str, Tensor]]
) -> float:
    """The largest difference over all tensors, relative to the largest magnitude among them.

    Never per element: a key's bias has a true gradient of zero, and any noise there is all of it.
    """
    assert [set(step) for step in found] == [set(step) for step in wanted]
    pairs = [(a[n], b[n]) for a, b in zip(found, wanted, strict=True) for n in b]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    pairs = [(a, b) for a, b in pairs if b.numel() and b.is_floating_point()]
    # torch's max gives NaN when one of the numbers is; Python's may not
    scale = torch.stack([b.abs().max().double() for _, b in pairs]).max().item()
    worst = torch.stack([(a - b).abs().max().double() for a, b in pairs]).max().item()
    assert scale > 0, "nothing to compare with: all is zero"
    assert math.isfinite(worst), "NaN"
    return worst / scale


def distances(
    found: History, wanted: History, *, first_gradients: bool = False
) -> dict[str, float]:
    """How far a training is from another one, for losses, gradients and weights."""
    steps = 1 if first_gradients else None
    return {
        "losses": distance(
            [{"loss": loss} for loss in found.losses], [{"loss": loss} for loss in wanted.losses]
        ),
        "gradients": distance(found.gradients[:steps], wanted.gradients[:steps]),
        "weights": distance(found.weights, wanted.weights),
    }


def assert_equal(found: History, wanted: History, dtype: torch.dtype) -> None:
    """Fails when a training is not another one to rounding."""
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    far = distances(found, wanted, first_gradients=dtype != torch.float64)
    assert {kind: size for kind, size in far.items() if size > limit} == {}
