"""Strategy files as frozen values: what the user asks for, and where each wish was written."""

from distcell.strategy.glob import matches
from distcell.strategy.library import list_strategies, load_strategy
from distcell.strategy.resolve import CellSpec, Resolution, resolve_cells, resolve_inputs
from distcell.strategy.spec import UNSPLIT, DimSpec, DimValue, TensorSpec, parse_dim
from distcell.strategy.strategy import CellRule, Strategy

__all__ = [
    "UNSPLIT",
    "CellRule",
    "CellSpec",
    "DimSpec",
    "DimValue",
    "Resolution",
    "Strategy",
    "TensorSpec",
    "list_strategies",
    "load_strategy",
    "matches",
    "parse_dim",
    "resolve_cells",
    "resolve_inputs",
]
