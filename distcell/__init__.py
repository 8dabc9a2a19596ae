"""Train a single-device PyTorch model on many ranks under a strategy file."""

from __future__ import annotations

from importlib import import_module
from sys import modules as _modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distcell import nn as nn
from distcell import ops as ops
from distcell.cell import Cell as Cell
from distcell.cell_graph import read_graph as read_graph
from distcell.cell_hooks import HookHandle as HookHandle
from distcell.context import GRAPH_MODE as GRAPH_MODE
from distcell.context import PYNATIVE_MODE as PYNATIVE_MODE
from distcell.context import ParallelMode as ParallelMode
from distcell.context import auto_parallel_context as auto_parallel_context
from distcell.context import get_auto_parallel_context as get_auto_parallel_context
from distcell.context import get_context as get_context
from distcell.context import get_ps_context as get_ps_context
from distcell.context import reset_auto_parallel_context as reset_auto_parallel_context
from distcell.context import reset_ps_context as reset_ps_context
from distcell.context import set_auto_parallel_context as set_auto_parallel_context
from distcell.context import set_context as set_context
from distcell.context import set_ps_context as set_ps_context
from distcell.dtype import bfloat16 as bfloat16
from distcell.dtype import float16 as float16
from distcell.dtype import float32 as float32
from distcell.dtype import float64 as float64
from distcell.dtype import int32 as int32
from distcell.dtype import int64 as int64
from distcell.errors import DistcellError as DistcellError
from distcell.errors import did_you_mean as _did_you_mean
from distcell.lazy import lazy_init as lazy_init
from distcell.model import Model as Model
from distcell.parallel import parallelize as parallelize
from distcell.parameter import Parameter as Parameter
from distcell.parameter import global_shape as global_shape
from distcell.parameter import layout as layout
from distcell.tensor import Tensor as Tensor

__version__ = "0.1.0"

if TYPE_CHECKING:
    from distcell.engine import clip_grad_norm_ as clip_grad_norm_
    from distcell.engine import compile_step as compile_step
    from distcell.engine import local_state_dict as local_state_dict
    from distcell.engine import whole_tensor as whole_tensor
    from distcell.testing import plan as plan
    from distcell.testing import simulate as simulate

# The engine is heavy: who only defines a model does not wait for it.
_LATE = {
    "clip_grad_norm_": "distcell.engine",
    "compile_step": "distcell.engine",
    "local_state_dict": "distcell.engine",
    "plan": "distcell.testing",
    "simulate": "distcell.testing",
    "whole_tensor": "distcell.engine",
}


__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Cell",
    "DistcellError",
    "HookHandle",
    "Model",
    "ParallelMode",
    "Parameter",
    "Tensor",
    "auto_parallel_context",
    "bfloat16",
    "clip_grad_norm_",
    "compile_step",
    "float16",
    "float32",
    "float64",
    "get_auto_parallel_context",
    "get_context",
    "get_ps_context",
    "global_shape",
    "int32",
    "int64",
    "layout",
    "lazy_init",
    "local_state_dict",
    "nn",
    "ops",
    "parallelize",
    "plan",
    "read_graph",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "set_auto_parallel_context",
    "set_context",
    "set_ps_context",
    "simulate",
    "whole_tensor",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    known = [*_LATE, *(each for each in globals() if not each.startswith("_"))]
    raise AttributeError(f"distcell has no `{name}`; {_did_you_mean(name, known)}")


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # The import system would put the subpackage `simulate` over the function of that name.
        if not (name in _LATE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


_modules[__name__].__class__ = _Package
