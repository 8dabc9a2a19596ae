"""Train a single-device PyTorch model on many ranks under a strategy file."""

from __future__ import annotations

from typing import Any

from distcell import nn as nn
from distcell import ops as ops
from distcell.cell import Cell as Cell
from distcell.context import auto_parallel_context as auto_parallel_context
from distcell.context import get_auto_parallel_context as get_auto_parallel_context
from distcell.context import reset_auto_parallel_context as reset_auto_parallel_context
from distcell.context import set_auto_parallel_context as set_auto_parallel_context
from distcell.errors import DistcellError as DistcellError
from distcell.errors import did_you_mean as _did_you_mean
from distcell.lazy import lazy_init as lazy_init
from distcell.model import Model as Model
from distcell.parallel import parallelize as parallelize
from distcell.parameter import Parameter as Parameter
from distcell.parameter import global_shape as global_shape
from distcell.parameter import layout as layout

__version__ = "0.1.0"

_LATE = {
    "clip_grad_norm_": "distcell.engine",
    "compile_step": "distcell.engine",
    "local_state_dict": "distcell.engine",
    "plan": "distcell.testing",
    "simulate": "distcell.testing",
}


def __getattr__(name: str) -> Any:
    # The engine is heavy; who only defines a model does not wait for it.
    if name not in _LATE:
        hint = _did_you_mean(name, [*_LATE, *(n for n in globals() if not n.startswith("_"))])
        raise AttributeError(f"distcell has no `{name}`; {hint}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)
