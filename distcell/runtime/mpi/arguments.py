"""The tensors that torch passes to a process group, in its several forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distcell.errors import BackendError


def listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    """Returns the tensors as a list, where one alone may come without."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def single(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the one tensor of a list: a rank has one device here."""
    found = listed(tensors)  # type: ignore[arg-type]
    if len(found) != 1:
        raise BackendError(f"{len(found)} tensors where a rank has one")
    return found[0]


def single_list(tensors: Sequence[Any]) -> list[Tensor]:
    """Returns the one list of a list of lists."""
    if all(isinstance(x, Tensor) for x in tensors):
        return list(tensors)
    if len(tensors) != 1:
        raise BackendError(f"{len(tensors)} lists of tensors where a rank has one")
    return list(tensors[0])


def expect(what: str, got: int, want: int) -> None:
    """Raises `BackendError` unless a tensor has as many elements as it should."""
    if got != want:
        raise BackendError(f"{what} got a tensor of {got} elements where {want} belong")


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in lists of one dtype each."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return list(found.values())


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fills contiguous tensors from one in which they lie one after the other."""
    start = 0
    for x in tensors:
        x.view(-1).copy_(flat[start : start + x.numel()])
        start += x.numel()
