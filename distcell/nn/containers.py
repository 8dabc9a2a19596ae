"""Cells made of a list of cells."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch

from distcell.cell import Cell


class SequentialCell(torch.nn.Sequential, Cell):
    """Cells called one after the other.

    Args:
        cells: the cells, or one list or `OrderedDict` of them.

    >>> SequentialCell(torch.nn.Linear(2, 3), torch.nn.ReLU())(torch.zeros(1, 2)).shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        *cells: torch.nn.Module | Iterable[torch.nn.Module] | OrderedDict[str, torch.nn.Module],
    ) -> None:
        if len(cells) == 1 and isinstance(cells[0], OrderedDict):
            super().__init__(cells[0])
        elif len(cells) == 1 and not isinstance(cells[0], torch.nn.Module):
            super().__init__(*cells[0])
        else:
            super().__init__(*cells)  # type: ignore[arg-type]  # torch checks that they are modules


class CellList(torch.nn.ModuleList, Cell):
    """A list of cells; it has no call of its own.

    Args:
        cells: the cells, or one list of them.

    >>> len(CellList([torch.nn.ReLU(), torch.nn.ReLU()]))
    2
    """

    def __init__(self, *cells: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
        if len(cells) == 1 and not isinstance(cells[0], torch.nn.Module):
            super().__init__(cells[0])
        else:
            super().__init__(cells)  # type: ignore[arg-type]  # torch checks that they are modules


class CellDict(torch.nn.ModuleDict, Cell):
    """Cells by name; it has no call of its own.

    Args:
        cells: a mapping, or pairs.

    >>> list(CellDict({"relu": torch.nn.ReLU()}))
    ['relu']
    """

    def __init__(
        self,
        cells: Mapping[str, torch.nn.Module] | Iterable[tuple[str, torch.nn.Module]] = (),
    ) -> None:
        super().__init__(dict(cells))
